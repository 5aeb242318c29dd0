import pytest
import torch

from main_pretrain import MODELS
from tests.warm import ROOT, Python
from tools.collectives import COLUMNS, KINDS, LARGE, MODES, RANKS, SMALL
from util.tables import read_csv

KEYS = ("model", "mode", "ranks")
MEASURED = [name for name in MODELS if "_micro_" in name]


def rows_of(path):
    rows = read_csv(path, COLUMNS, ("model", "mode", "torch"))
    return {tuple(row[key] for key in KEYS): row for row in rows}


@pytest.fixture(scope="module")
def table():
    return rows_of(ROOT / "docs" / "collectives.csv")


@pytest.fixture(scope="module")
def measured(table, tmp_path_factory):
    """All frameworks at 64 ranks."""
    (then,) = {row["torch"] for row in table.values()}
    if then.split(".")[:2] != torch.__version__.split(".")[:2]:
        pytest.skip(f"the table was measured with torch {then}")
    path = tmp_path_factory.mktemp("collectives") / "now.csv"
    program = Python(ROOT / "tools" / "collectives.py", *MEASURED, "--ranks", 64, "--csv", path)
    out, _ = program.communicate(timeout=500)
    assert program.returncode == 0, out[-2000:]
    return rows_of(path)


def test_the_table_holds_all_frameworks_and_published_sizes(table):
    assert set(table) == set(SMALL + LARGE)
    assert {mode for _, mode, _ in table} == set(MODES) and {ranks for *_, ranks in table} == set(RANKS)


def test_ddp_all_reduces_the_gradients_once_whatever_the_number_of_ranks(table):
    for (name, mode, ranks), row in table.items():
        if mode == "ddp":
            total = sum(row[f"{kind}_mb"] for kind in KINDS.values())
            assert total == row["all_reduce_mb"] == (row["trained_mb"] if ranks > 1 else 0)
            assert row["all_reduce_calls"] == (table[name, "ddp", 8]["all_reduce_calls"] if ranks > 1 else 0)


def test_a_sharded_step_moves_at_most_a_tenth_more_than_the_ideal(table):
    for (name, mode, ranks), row in table.items():
        if mode == "shard" and ranks > 1:
            assert row["times_ideal"] < (1.1 if "_micro_" in name else 1.03)


def test_a_sharded_step_moves_as_much_at_1024_ranks_as_at_64(table):
    for name, mode, ranks in table:
        if (mode, ranks) == ("shard", 1024) and (name, mode, 64) in table:
            costs = ({k: v for k, v in table[name, mode, n].items() if k != "ranks"} for n in (64, 1024))
            assert next(costs) == next(costs)


def test_the_table_is_of_today_s_code(table, measured):
    assert len(measured) == len(MEASURED) * len(MODES)
    for key, row in measured.items():
        assert row == {**table[key], "torch": row["torch"]}
