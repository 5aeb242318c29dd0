"""Evaluates a frozen encoder by k nearest neighbours, linear probes and attentive probes.

    torchrun --nproc_per_node 8 downstream/probe/main_probe.py output/prmim50_base --data_path IMAGENET
    python downstream/probe/main_probe.py mae_pretrain_vit_base.pth --data_path IMAGENET --probes knn --blocks 9 12
    python downstream/probe/main_probe.py --timm vit_small_patch16_dinov3.lvd1689m --data_path IMAGENET --probes knn

kNN: DINO's protocol on the whole training set. Probes: the heads of CAPI's grid, all trained at the same time. A tenth
of the training images is held out and selects learning rate and weight decay. The chosen heads are scored on val/ once.
The results of kNN and those of the heads are each saved once they are there. The same command continues after them; the
training of the heads starts anew after a stop.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from downstream.probe.models import AttentiveHead, FrozenEncoder, HeadGrid, LinearHead, open_encoder, open_timm_model
from util import collectives
from util.accuracy import accuracies
from util.data.datasets import AddressedDataset, StepBatchSampler, batches, permutation, stack
from util.data.images import Images, check_splits
from util.data.open import open_everywhere
from util.data.statistics import complete_settings, normalizer
from util.data.transforms import RandomResizedCropFlip, ResizeCenterCrop
from util.features import Features, extract_features, knn_accuracy, moments_of_all
from util.run import flags
from util.run.cli import Parser, run_program
from util.run.distributed import PRECISIONS, Precision, precision
from util.run.evaluation import ResultsFile, Session, evaluation_batches, evaluation_session
from util.run.flags import add_data_flags, num_workers, split_batch
from util.run.folder import refuse_output_inside_data
from util.run.supervise import StopSignal
from util.tables import markdown_table
from util.text import count_of

PROGRAM, RESULTS = "main_probe.py", "probe.json"
PROBES = ("knn", "linear", "attentive")
NEIGHBOURS = (10, 20, 100, 200)
LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # for 256 images
WEIGHT_DECAYS = (5e-4, 1e-3, 5e-2)
GRID = tuple((lr, weight_decay) for lr in LEARNING_RATES for weight_decay in WEIGHT_DECAYS)
HELD_OUT, HELD_OUT_SEED = 0.1, 42
WARMUP = 0.1  # share of the steps


def get_args_parser() -> Parser:
    """Returns the parser of all flags."""
    parser = Parser(PROGRAM, description=__doc__)
    flag = parser.add_argument
    flag("encoder", nargs="?", help="a run's folder, or a checkpoint of this project, MAE or timm")
    flag("--timm", metavar="NAME", help="a model of timm, with its pre-trained weights or those of the file given")
    flag("--input_size", type=int, at_least=1, help="image side in pixels (default: the encoder's)")

    protocol = parser.add_argument_group("protocol").add_argument
    protocol("--probes", nargs="+", default=PROBES, choices=PROBES, help="what is evaluated")
    protocol("--blocks", type=int, nargs="+", help="blocks whose outputs are evaluated, from 1 (default: the last)")
    protocol("--steps", type=int, default=12_500, at_least=1, help="optimizer steps of the heads")
    protocol("--total_batch_size", type=int, default=1024, at_least=1, help="images per step over all processes")
    protocol("--seed", type=int, default=0, at_least=0, help="seed of first weights, shuffling and augmentation")
    add_data_flags(parser.add_argument_group("data"))

    run = parser.add_argument_group("run").add_argument
    run("--output_dir", changes="nothing", default="output/probe", help=f"folder for {RESULTS}")
    run(
        "--batch_size",
        changes="split",
        type=int,
        at_least=1,
        help="images per process and micro-batch (default: at most 128)",
    )
    run(
        "--device",
        changes="rounding",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    run("--precision", default="auto", choices=("auto", *PRECISIONS), help="of the encoder; heads have float32")
    parser.set_defaults(crop_scale=(0.08, 1.0))
    return parser


def parse_args(argv: Sequence[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Returns (parser, flags)."""
    parser = get_args_parser()
    return parser, parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """ValueError if a flag, or a pair of flags, is out of range."""
    flags.check_flags(args)
    if args.encoder is None and args.timm is None:
        raise ValueError("nothing to evaluate: give a checkpoint, a run's folder, or --timm NAME")
    refuse_output_inside_data(args)


def make_encoder(args: argparse.Namespace) -> FrozenEncoder:
    """Loads the encoder that the flags name, and chooses its blocks."""
    if args.timm is not None:
        encoder = open_timm_model(args.timm, args.encoder, args.input_size)
    else:
        encoder = open_encoder(args.encoder, args.input_size)
    if args.blocks:
        encoder.read_blocks(args.blocks)
    return encoder


def open_data(args: argparse.Namespace, in_chans: int) -> tuple[Images, Images]:
    """Opens train/ and val/. in_chans: of the encoder. ValueError unless both have the same classes and format."""
    images = open_everywhere(args, "train", True, args.max_bad_fraction, in_chans)
    val_images = open_everywhere(args, "val", True, in_chans=in_chans)
    check_splits(images, val_images)
    return images, val_images


def protocol_of(
    args: argparse.Namespace, encoder: FrozenEncoder, images: Images, val_images: Images, precision_name: str
) -> dict[str, Any]:
    """Returns everything that the results depend on, beside the weights."""
    protocol: dict[str, Any] = {
        "probes": [name for name in PROBES if name in args.probes],
        "blocks": encoder.blocks,
        "input_size": list(encoder.img_size),
        "in_chans": encoder.in_chans,
        "mean": encoder.pixel_settings["mean"],
        "std": encoder.pixel_settings["std"],
        "precision": precision_name,
        "loader": args.loader,
        "train": [len(images), images.fingerprint()],
        "val": [len(val_images), val_images.fingerprint()],
    }
    if set(args.probes) - {"knn"}:
        names = ("steps", "total_batch_size", "seed", "crop_scale")
        protocol |= {name: getattr(args, name) for name in names} | {"grid": GRID, "held_out": HELD_OUT}
    return protocol


class ImageSubset:
    """Some of the images, renumbered from 0."""

    def __init__(self, images: Images, indices: np.ndarray) -> None:
        self.images, self.indices, self.pixel_format = images, indices, images.pixel_format

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, i: int) -> tuple[np.ndarray, int]:
        """Returns ([H, W, C], label)."""
        return self.images.load(int(self.indices[i]))

    def load_sample(self, i: int) -> tuple[np.ndarray, int]:
        """Returns what `load` does."""
        return self.load(i)


def split_held_out(num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (images to train on, images that select the head), both ascending: nine tenths and one tenth."""
    order = permutation(HELD_OUT_SEED, 0, num_images)
    number = max(1, int(num_images * HELD_OUT))
    return np.sort(order[number:]), np.sort(order[:number])


class Probes(nn.Module):
    """The grids of heads of all features, by their names: "<block> <feature> <probe>"."""

    def __init__(self, encoder: FrozenEncoder, probes: Sequence[str], num_classes: int) -> None:
        super().__init__()
        self.grids = nn.ModuleDict()
        for block in encoder.blocks:
            if "linear" in probes:
                for feature in ("mean", "cls") if encoder.num_cls else ("mean",):
                    self.grids[f"{block} {feature} linear"] = HeadGrid(LinearHead, encoder.dim, num_classes, GRID)
            if "attentive" in probes:
                self.grids[f"{block} patches attentive"] = HeadGrid(AttentiveHead, encoder.dim, num_classes, GRID)

    def forward(self, tokens: Mapping[int, Any]) -> dict[str, torch.Tensor]:
        """Returns {name: logits [G, B, C]} of what the encoder returns."""
        logits = {}
        for name, grid in self.grids.items():
            block, feature, _ = name.split()
            cls, patches = tokens[int(block)]
            logits[name] = grid({"mean": patches.mean(dim=1), "cls": cls, "patches": patches}[feature])
        return logits


def rate_at(step: int, num_steps: int) -> float:
    """Returns the factor on the learning rates: linear warm-up over a tenth of the steps, then half a cosine to 0."""
    warmup = WARMUP * num_steps
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup)))


class Probing:
    """One encoder with the data and the resources to evaluate it."""

    def __init__(
        self,
        args: argparse.Namespace,
        session: Session,
        encoder: FrozenEncoder,
        images: Images,
        val_images: Images,
        numbers: Precision,
    ) -> None:
        process = session.process
        self.args, self.process, self.images, self.val_images = args, process, images, val_images
        self.print = session.print
        self.encoder, self.autocast = encoder.to(process.device), numbers.autocast
        self.normalize = normalizer(encoder.pixel_settings, images.pixel_format).to(process.device)
        self.batch_size, self.accum_iter, _ = split_batch(
            args.batch_size, None, args.total_batch_size, process.world_size, 128
        )
        self.training, self.held_out = split_held_out(len(images))
        if set(args.probes) - {"knn"} and len(self.training) < args.total_batch_size:
            raise ValueError(
                f"nine tenths of the training set are {count_of(len(self.training), 'image')}, fewer than one batch of "
                f"{args.total_batch_size}: lower --total_batch_size"
            )
        self.num_workers, self.reference = num_workers(args, process), args.loader == "reference"
        self.view = ResizeCenterCrop(encoder.img_size, reference=self.reference)
        self.replace = args.max_bad_fraction > 0  # training images that cannot be read

    def knn(self) -> list[dict[str, Any]]:
        """Returns the accuracies of all blocks, features, scalings and numbers of neighbours."""
        rows = []
        neighbours = sorted({min(k, len(self.images)) for k in NEIGHBOURS})
        bank, queries = (self.extract(images) for images in (self.images, self.val_images))
        for name, features in bank.values.items():
            block, feature = name.split()
            for scaling, moments in (("raw", None), ("z", moments_of_all(features))):
                found = knn_accuracy(bank, queries, name, len(self.images.classes), neighbours, moments)
                where = {"probe": "knn", "block": int(block), "feature": feature, "scaling": scaling}
                rows += [{**where, "k": k, **accuracy} for k, accuracy in found.items()]
        return rows

    def extract(self, images: Images) -> Features:
        """Encodes this rank's share of the images. FloatingPointError on all ranks if a feature is not finite."""
        dataset = AddressedDataset(images, self.view, replace=self.replace and images is self.images)
        how = self.encoder, self.normalize, self.autocast, self.batch_size, self.num_workers
        found = extract_features(self.encoder.vectors, dataset, np.arange(len(images)), *how)
        for name, x in found.values.items():
            bad = collectives.all_reduce_sum((~x.norm(dim=1).isfinite()).sum()).item()  # overflows count, too
            if bad:
                block, feature = name.split()
                raise FloatingPointError(
                    f"the encoder's features ({feature}, block {block}) of {bad} of {len(images)} images are not "
                    "finite: try --precision fp32"
                )
        return found

    def train_heads(self, probes: Probes, stop: StopSignal) -> bool:
        """Trains all heads at once on the same augmented images. Returns False if a signal stopped it.

        A head that diverges does not disturb the others: no step is skipped. So this is no `Run`.
        """
        args, process, img_size = self.args, self.process, self.encoder.img_size
        model = DistributedDataParallel(probes) if process.world_size > 1 else probes
        groups = [g for grid in probes.grids.values() for g in grid.parameter_groups(args.total_batch_size / 256)]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        crop = RandomResizedCropFlip(img_size, args.seed, args.crop_scale, reference=self.reference)
        split = self.batch_size, self.accum_iter, process.rank, process.world_size
        training: Any = ImageSubset(self.images, self.training)
        stream = batches(
            AddressedDataset(training, crop, replace=self.replace),
            StepBatchSampler(len(training), *split, args.seed, 0, args.steps),
            stack,
            self.num_workers,
            process.device.type == "cuda",
            batch_bytes=self.images.pixel_format.pixel_bytes * math.prod(img_size) * self.batch_size,
        )
        begin = time.monotonic()
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate_at(step, args.steps)
            loss = self.update(model, optimizer, stream)
            if (step + 1) % max(1, args.steps // 20) == 0:
                seconds = time.monotonic() - begin
                self.print(f"step {step + 1}/{args.steps}: mean loss of all heads {loss.item():.4f}, {seconds:.0f} s")
            if stop.agreed() and step + 1 < args.steps:
                break
        stream.close()
        return step + 1 == args.steps

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, stream: Iterator[Any]) -> torch.Tensor:
        """Makes an optimizer step of all heads. Returns their mean loss in its last micro-batch."""
        for micro in range(self.accum_iter):
            tokens, labels = self.encode(next(stream))
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro == self.accum_iter - 1
            logits = model(tokens).values()
            losses = torch.stack([F.cross_entropy(x.flatten(0, 1), labels.repeat(len(x))) for x in logits])
            (losses.sum() / self.accum_iter).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses.detach().mean()

    def encode(self, batch: Sequence[torch.Tensor]) -> tuple[dict[int, Any], torch.Tensor]:
        """Returns (the encoder's tokens by block, labels) of images as they are stored, and labels."""
        imgs, labels = (x.to(self.process.device, non_blocking=True) for x in batch)
        with self.autocast():
            return self.encoder(self.normalize(imgs)), labels

    @torch.no_grad()
    def score_heads(self, probes: Probes, images: Images, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Returns {name: top-1 and top-5 of each head in percent [G, 2]} of these images in the evaluation view.

        An image counts as an error of the heads whose logits of it are not finite. FloatingPointError on all ranks if
        there is such an image for each head of a grid.
        """
        device = self.process.device
        hits = {
            name: torch.zeros(len(g.grid), 3, dtype=torch.float64, device=device) for name, g in probes.grids.items()
        }
        dataset = AddressedDataset(images, self.view, replace=self.replace and images is self.images)
        how = self.encoder, self.encoder, self.autocast, device, self.batch_size, self.num_workers
        for batch in evaluation_batches(dataset, indices, *how):
            tokens, labels = self.encode(batch)
            for name, logits in probes(tokens).items():
                finite = logits.isfinite().all(dim=2)  # [G, B]
                best = (logits.topk(min(5, logits.shape[2])).indices == labels[:, None]) & finite[..., None]
                found = best[..., 0], best.any(dim=2), ~finite
                hits[name] += torch.stack([x.sum(dim=1) for x in found], dim=1)
        for name, x in hits.items():
            if collectives.all_reduce_sum(x)[:, 2].all():
                raise FloatingPointError(
                    f"the logits of all heads ({name}) are not finite: the encoder's features may not be finite, try "
                    "--precision fp32"
                )
        return {name: 100 * x[:, :2] / len(indices) for name, x in hits.items()}

    def heads(self) -> dict[str, list[dict[str, Any]]] | None:
        """Trains the grids of heads. Returns the chosen ones on val/, and all of them on the held-out images.

        None if a signal stopped the training. After Ctrl-C it raises KeyboardInterrupt.
        """
        torch.manual_seed(self.args.seed)
        kinds = [name for name in self.args.probes if name != "knn"]
        probes = Probes(self.encoder, kinds, len(self.images.classes)).to(self.process.device)
        with StopSignal(self.process.device) as stop:
            finished = self.train_heads(probes, stop)
            stop.settle()
        if stop.name == signal.SIGINT.name:
            raise KeyboardInterrupt
        if not finished:
            self.print(f"stopped by {stop.name or 'a signal to another process'}; the same command trains them anew")
            return None
        selection = self.score_heads(probes, self.images, self.held_out)
        scores = self.score_heads(probes, self.val_images, range(len(self.val_images)))
        num_classes = len(self.images.classes)
        chosen, everything = [], []
        for name, grid in probes.grids.items():
            block, feature, probe = name.split()
            where = {"probe": probe, "block": int(block), "feature": feature}
            rows = [
                {**where, "lr": lr, "weight_decay": weight_decay, "held_out_top1": score}
                for (lr, weight_decay), score in zip(grid.grid, selection[name][:, 0].tolist(), strict=True)
            ]
            best = max(range(len(rows)), key=lambda i: rows[i]["held_out_top1"])
            top1, top5 = scores[name][best].tolist()
            chosen.append(rows[best] | accuracies(top1, top5, num_classes))
            everything += rows
        return {"chosen": chosen, "held_out": everything}


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as a table."""
    measures = {"top1": "top-1, %", "top5": "top-5, %"}
    if "top5" not in rows[0]:  # few classes
        del measures["top5"]
    cells = []
    for row in rows:
        if row["probe"] == "knn":
            setting = f"k {row['k']}, {row['scaling']}"
        else:
            setting = f"lr {row['lr']:g}, wd {row['weight_decay']:g}"
        block = row["block"] or "last"
        cells.append([row["probe"], block, row["feature"], setting, *(f"{row[name]:.2f}" for name in measures)])
    titles = ["probe", "block", "feature", "setting", *measures.values()]
    return markdown_table(titles, cells, left=4, pad=True)


def results_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the parts say together: the chosen rows, and all heads on the held-out images."""
    heads = parts.get("heads", {"chosen": [], "held_out": []})
    return {"results": [*parts.get("knn", []), *heads["chosen"]], "held_out": heads["held_out"]}


def main(argv: Sequence[str] | None = None) -> bool:
    """Evaluates the encoder that the flags name. Returns False if a signal stopped it before its end."""
    parser, args = parse_args(argv)
    with evaluation_session(parser, args, args.output_dir, check=check_flags) as session:
        encoder = collectives.run_everywhere(lambda: make_encoder(args))
        images, val_images = open_data(args, encoder.in_chans)
        encoder.pixel_settings, remarks = complete_settings(encoder.pixel_settings, images)
        numbers = precision(args.precision, session.process.device)
        settings = protocol_of(args, encoder, images, val_images, numbers.name)
        what = {"checkpoint": encoder.name, "sha256": encoder.sha256, "settings": settings}
        results = ResultsFile(Path(args.output_dir) / RESULTS, what, results_of)
        probing = Probing(args, session, encoder, images, val_images, numbers)

        session.print(encoder.name, *encoder.notes, *remarks, *images.notes, *val_images.notes)
        wanted = dict.fromkeys("knn" if name == "knn" else "heads" for name in settings["probes"])
        missing = results.missing(wanted)
        if "knn" in missing:
            results.add("knn", rows := probing.knn())
            session.print(table_of(rows))
        if "heads" in missing:
            heads = probing.heads()
            if heads is None:
                return False
            results.add("heads", heads)
        session.print(f"\n{table_of(results.content['results'])}\n{results.path}")
    return True


if __name__ == "__main__":
    run_program(main, PROGRAM)
