"""Counts the collectives of one optimizer step at up to 1,024 ranks, in one process and without a network.

    python tools/collectives.py --csv docs/collectives.csv
    python tools/collectives.py mae_vit_base_patch16 --modes shard --ranks 8 1024

torch's fake process group makes this process the last of so many ranks. Its collectives move nothing, so numbers of
calls and bytes are exact, and times and losses mean nothing. A step is the third step of the real training loop, with
two micro-batches of one image in float32. (DDP arranges its buckets anew in the second step.)

calls, MB    of each kind; a collective counts the bytes of the whole tensor, before it is split or after it is joined
ideal MB     DDP: one all-reduce of the gradients. --shard: two all-gathers of all parameters in each micro-batch, and
             one reduce-scatter of the gradients in the last
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_pretrain import train_one_epoch
from main_pretrain import MODELS
from util.costs import make_batch
from util.data.transforms import Normalize
from util.run.cli import Parser, run_program
from util.run.distributed import Process, precision
from util.run.logging import RunLog
from util.run.loop import TrainLoop
from util.run.shard import wrap_model
from util.tables import markdown_table, write_csv

MODES = ("ddp", "shard")
RANKS = (1, 8, 64, 1024)
# The table: every framework at its smallest size; published sizes, where the share of padding is another. AMT's models
# are MAE's and SimMIM's.
SMALL = [(name, mode, ranks) for name in MODELS if "_micro_" in name for mode in MODES for ranks in RANKS]
MAE = ["mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14"]
LARGE = [(name, "shard", ranks) for name in MAE for ranks in (8, 1024)]
LARGE += [(name, "shard", 1024) for name in MODELS if "_base_" in name and not name.startswith(("mae_", "amt_"))]
KINDS = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce"}  # by a part of the operator
COLUMNS = ["model", "mode", "ranks", *(f"{kind}_{what}" for kind in KINDS.values() for what in ("calls", "mb"))]
COLUMNS += ["parameters_mb", "trained_mb", "ideal_mb", "times_ideal", "torch"]
ACCUM_ITER, NEVER = 2, 2**62
CPU = torch.device("cpu")


class Collectives(TorchDispatchMode):
    """Within the context, counts calls and bytes by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and counts it if it is a collective."""
        if operator.namespace in ("c10d", "_c10d_functional"):
            name = operator.overloadpacket.__name__
            kind = next((kind for part, kind in KINDS.items() if part in name), name)
            self.calls[kind] += 1
            self.bytes[kind] += max(tensor.nbytes for tensor in tensors_in(args))
        return operator(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


@contextmanager
def fake_ranks(world_size: int) -> Iterator[Process]:
    """Within the context, this process is the last of `world_size` ranks whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield Process(CPU, world_size - 1, world_size)
    finally:
        dist.destroy_process_group()


def all_reduce_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket. The fake group lacks the future that DDP itself would wait for."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure(name: str, mode: str, world_size: int) -> dict[str, Any]:
    """Counts the collectives of a training step of one model."""
    model = MODELS[name](mask_ratio=0.75, throw_ratio=0.5 if MODELS[name].func.throws else 0.0)
    imgs, orders = make_batch(model, {"sampling": "furthest"}, 1)
    batch = [imgs, orders[0], *orders]  # no model reads labels
    sizes = [(p.nbytes, p.requires_grad) for p in model.parameters()]
    parameters, trained = (sum(size for size, is_trained in sizes if is_trained or not only) for only in (False, True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    flags = argparse.Namespace(attention="auto", recompute=False, compile=False, shard=mode == "shard")
    with fake_ranks(world_size) as process:
        wrapped = wrap_model(model, optimizer, flags, "fp32", ACCUM_ITER, process)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(None, all_reduce_bucket)
        loop = TrainLoop(
            parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            precision=precision("fp32", CPU),
            normalize=Normalize(),
            learning_rate=lambda step, lr_scale: 0.0,
            log=RunLog("", 0, 0, enabled=False),
            images_per_step=ACCUM_ITER,
            steps_per_epoch=NEVER,
            last_step=NEVER,
            accum_iter=ACCUM_ITER,
            print_freq=NEVER,
        )
        batches = iter([batch] * (3 * ACCUM_ITER))
        train_one_epoch(wrapped, batches, range(2), loop)
        with Collectives() as found:
            train_one_epoch(wrapped, batches, range(2, 3), loop)
    row: dict[str, Any] = dict(model=name, mode=mode, ranks=world_size, torch=torch.__version__)
    for kind in {*KINDS.values(), *found.calls}:
        row |= {f"{kind}_calls": found.calls[kind], f"{kind}_mb": found.bytes[kind] / 1e6}
    ideal = trained + (2 * ACCUM_ITER * parameters if mode == "shard" else 0)
    row |= {"parameters_mb": parameters / 1e6, "trained_mb": trained / 1e6, "ideal_mb": ideal / 1e6}
    return row | {"times_ideal": found.bytes.total() / ideal}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table: calls / MB of each kind."""
    titles = ["model", "mode", "ranks", "all-gathers", "reduce-scatters", "all-reduces", "× ideal"]
    lines = []
    for row in rows:
        kinds = [f"{row[f'{kind}_calls']} / {row[f'{kind}_mb']:.1f}" for kind in KINDS.values()]
        lines.append([row["model"], row["mode"], row["ranks"], *kinds, f"{row['times_ideal']:.3f}"])
    return markdown_table(titles, lines)


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser("collectives.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models of main_pretrain.py (default: the table)")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, help="how they run (default: both)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--csv", help="also write the rows to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program."""
    args = get_args_parser().parse_args(argv)
    asked = [(name, mode, ranks) for name in args.models for mode in args.modes for ranks in args.ranks]
    rows = [measure(*case) for case in asked or SMALL + LARGE]
    if args.csv:
        write_csv(args.csv, COLUMNS, rows)
    print(markdown(rows))


if __name__ == "__main__":
    run_program(main, "collectives.py")
