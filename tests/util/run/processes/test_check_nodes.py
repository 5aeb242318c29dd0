"""The check of nodes: what it says about tables made by hand, and that it measures in real processes."""

import socket

import pytest
import torch

from tests.runs import assert_same_state, pretrain
from tests.two_processes import run_in_processes
from util.run.processes import check_nodes as module
from util.run.processes.check_nodes import (
    ALL_REDUCE,
    COPIES,
    IN_NODE,
    PRODUCTS,
    REPEATS,
    Measured,
    Sizes,
    describe,
    measure,
    seconds_of_call,
    send_to_next,
)
from util.run.processes.distributed import Process

CPU = torch.device("cpu")


def table(**changed):
    """Two nodes of two ranks. changed: {"rank1": {name: rate}}."""
    ranks = []
    for rank in range(4):
        rates = {PRODUCTS: 700.0, COPIES: 50.0, IN_NODE: 300.0, ALL_REDUCE: 40.0}
        ranks.append(Measured(f"node{rank // 2}", rates | changed.get(f"rank{rank}", {})))
    return ranks


def test_equal_ranks_are_summed_up_in_one_note():
    expected = (
        "check of nodes, medians of 4 processes: products 700 TFLOP/s, copies to the device 50 GB/s, "
        "transfers inside a node 300 GB/s, all-reduce 40 GB/s"
    )
    assert describe(table(), on_gpus=True) == [expected]
    assert describe(table(rank0={PRODUCTS: 560.0}), on_gpus=True) == [expected]  # 80 % is not below 80 %


def test_ranks_below_80_percent_of_the_median_are_named_with_their_hosts():
    _, warning = describe(table(rank3={PRODUCTS: 550.0}, rank0={COPIES: 12.0}), on_gpus=True)
    assert warning == (
        "warning: below 80% of the median: rank 3 on node1 (products 550 TFLOP/s), "
        "rank 0 on node0 (copies to the device 12 GB/s)"
    )


def test_a_node_without_nvlink_is_named_once_on_gpus_alone():
    rates = {IN_NODE: 20.0}
    _, slow, warning = describe(table(rank2=rates, rank3=rates), on_gpus=True)
    assert "rank 2 on node1 (transfers inside a node 20 GB/s), rank 3 on node1" in slow
    assert warning.startswith("warning: NVLink is not used on node1: ")
    _, warning = describe(table(**{f"rank{rank}": rates for rank in range(4)}), on_gpus=True)
    assert warning.startswith("warning: NVLink is not used on node0, node1: ")  # where none is slower than the others
    assert len(describe(table(rank2=rates, rank3=rates), on_gpus=False)) == 2


def test_a_single_process_has_no_transfers():
    measured = measure(Process(CPU), torch.float32, Sizes(8, 64), seconds=0)
    assert measured.rates.keys() == {PRODUCTS, COPIES}
    (note,) = describe([measured], on_gpus=True)
    assert note.startswith("check of nodes, medians of 1 process: products ")


@pytest.mark.gpu
def test_a_gpu_multiplies_and_takes_copies():
    measured = measure(Process(torch.device("cuda", 0)), torch.bfloat16, Sizes(256, 1 << 20), seconds=0)
    assert all(rate > 0 for rate in measured.rates.values())


def _measure(rank):
    """Three ranks on one node. Returns what one has measured, and the rank whose number it has received."""
    state = torch.get_rng_state()
    measured = measure(Process(CPU, rank, 3, 3, rank), torch.bfloat16, Sizes(16, 1 << 12), seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert measured.host == socket.gethostname()
    received = torch.full((2,), -1)
    send_to_next(torch.full((2,), rank), received, [0, 1, 2], rank)

    module.seconds_of_call = lambda *_: 0.5  # in this process alone
    rates = measure(Process(CPU, rank, 3, 3, rank), torch.float32, Sizes(100, 3000), seconds=0).rates
    return measured.rates, received.tolist(), rates


def test_ranks_measure_products_copies_and_transfers():
    for rank, (measured, received, rates) in enumerate(run_in_processes(3, _measure)):
        assert all(rate > 0 for rate in measured.values())
        assert received == [(rank - 1) % 3] * 2
        # 100 x 100 numbers of 100 multiplications and additions each. Of an all-reduce by a ring of three, each rank
        # sends four thirds of its bytes: two of three parts while sums are formed, and two while they are spread.
        assert rates == pytest.approx(
            {PRODUCTS: 100 * 100 * 200 / 0.5 / 1e12, COPIES: 6e-6, IN_NODE: 6e-6, ALL_REDUCE: 8e-6}
        )


def test_calls_are_repeated_until_the_time_is_over(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "seconds_of", lambda work, device: work() or 0.4)
    assert seconds_of_call(lambda: calls.append(1), CPU) == 0.4 / REPEATS
    assert len(calls) == 1 + REPEATS
    calls.clear()
    assert seconds_of_call(lambda: calls.append(1), CPU, seconds=1.0) == pytest.approx(0.4 / REPEATS)
    assert len(calls) == 1 + 3 * REPEATS


def test_the_check_is_in_the_log_and_changes_nothing(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ON_CPU", Sizes(8, 64))
    monkeypatch.setattr(module, "SECONDS", 0.0)
    flags = ("--max_steps", 1, "--picture_every", 0)
    checked = pretrain(photos, tmp_path / "checked", *flags, "--check_nodes")
    assert_same_state(checked, pretrain(photos, tmp_path / "plain", *flags))
    assert "check of nodes, medians of 1 process: products" in (tmp_path / "checked" / "log.txt").read_text()
    assert "check of nodes" not in (tmp_path / "plain" / "log.txt").read_text()
