"""Measure how the encoder's gradient with thrown tokens differs from MAE's: the paper's figure of gradient differences.

    python tools/gradient_gap.py output/mae --images IMAGENET/train --out docs/figures/gradient_gap.svg
    python tools/gradient_gap.py mae_pretrain_vit_base_full.pth --model mae_vit_base_patch16 --images IMAGENET/train

The RUNs are MAE's, with throw_ratio 0. Plain and progressive reconstruction use a run's weights, images and visible
tokens. The gradient of each method's own loss with respect to all encoder parameters is one float32 vector, which is
compared with the gradient of MAE's loss. Only the aggregation is trained before, so the estimator of the gradient is
isolated.

For each batch the thrown tokens are drawn several times. This splits the expected squared difference into three parts:
the squared bias (of the mean over batches, corrected for their number), the variance over batches, and the variance
over draws. The CSV contains their roots, relative to the norm of MAE's gradient. Further readings of the method are
compared by the script of commit 2ccad7f.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_pretrain
from framework import Framework
from main_pretrain import MODELS, build_model, load_run, make_augmentation
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from util.data.datasets import AddressedDataset, available_cores, open_images, permutation, stack
from util.data.datasets import batches as load_batches
from util.data.statistics import normalizer
from util.plots import pyplot
from util.run import checkpoint
from util.run.cli import Parser, check_least, prepare_file, run_program, user_errors
from util.tables import markdown_table, write_csv

COLUMNS = [
    *("weights", "method", "sampling", "throw_ratio", "difference", "difference_se", "cosine", "bias"),
    *("sd_batches", "sd_draws", "mae_norm", "batch_size", "batches", "draws", "conv_steps", "conv_loss"),
]
TEXT = ("weights", "method", "sampling")

Settings = dict[str, Any]
Weights = dict[str, torch.Tensor]
Row = dict[str, Any]


COLORS = {"plain": "#aa3377", "progressive": "#4477aa"}  # of each method in the plot
SAMPLINGS = {"random": "--", "furthest": "-"}  # line styles


def encoder_gradient(model: Framework, imgs: torch.Tensor, ids_shuffle: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the model's loss with respect to the encoder, float32 [P]."""
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("decoder.")]
    loss = sum(model(imgs, ids_shuffle).values())
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])


class Gap:
    """Statistics of the differences to MAE's gradient, accumulated batch by batch."""

    def __init__(self) -> None:
        # One value per batch.
        self.distances: list[float] = []
        self.cosines: list[float] = []
        self.norms: list[float] = []
        self.squared_means: list[float] = []
        self.within: list[float] = []
        self.total: Any = 0.0  # [P], the sum over batches of the mean over draws

    def add(self, gradients: Iterable[torch.Tensor], reference: torch.Tensor) -> None:
        """Adds one batch: the gradient [P] of each draw, and MAE's gradient [P]."""
        reference = reference.double()  # float32 sums over 10^8 numbers lose digits
        mean: Any = 0.0
        squares, cosines = [], []
        for gradient in gradients:
            gradient = gradient.double()
            cosines.append(torch.cosine_similarity(gradient, reference, dim=0).item())
            mean = mean + (gradient - reference)
            squares.append((gradient - reference).square().sum().item())
        n = len(squares)
        mean = mean / n
        squared_mean = mean.square().sum().item()
        self.total = self.total + mean.float()  # float32 to halve the memory: there is one total per method and ratio
        self.distances.append(statistics.fmean(square**0.5 for square in squares))
        self.cosines.append(statistics.fmean(cosines))
        self.norms.append(reference.norm().item())
        self.squared_means.append(squared_mean)
        if n > 1:
            self.within.append(max(sum(squares) - n * squared_mean, 0.0) / (n - 1))

    def row(self, draws: int) -> Row:
        """Returns columns of the table, relative to MAE's norm. A value that needs more batches or draws is None."""
        n, norm = len(self.distances), statistics.fmean(self.norms)
        row: Row = {"difference": statistics.fmean(self.distances) / norm, "mae_norm": norm}
        row |= {"cosine": statistics.fmean(self.cosines)}
        row |= dict.fromkeys(("difference_se", "bias", "sd_batches", "sd_draws"))
        if n > 1:
            row["difference_se"] = statistics.stdev(self.distances) / n**0.5 / norm
            # The mean over pairs of different batches. Their noise is independent, so it adds nothing to the bias.
            bias2 = (self.total.double().square().sum().item() - sum(self.squared_means)) / (n * (n - 1))
            row["bias"] = max(bias2, 0.0) ** 0.5 / norm
        if self.within:
            within = statistics.fmean(self.within)
            row["sd_draws"] = within**0.5 / norm
            if n > 1:
                variance = statistics.fmean(self.squared_means) - bias2 - within / draws
                row["sd_batches"] = max(variance, 0.0) ** 0.5 / norm
        return row


class Batches:
    """Batches with the run's augmentation. Batch b has the same images, crops and visible tokens for every method.

    The images are shuffled: in a class folder neighbours belong to one class.
    """

    def __init__(
        self, images: Any, model: Framework, settings: Settings, args: argparse.Namespace, device: torch.device | str
    ) -> None:
        augmentation = make_augmentation(argparse.Namespace(**settings | {"seed": args.seed}), model.img_size)
        self.dataset = AddressedDataset(images, augmentation)
        self.orders: dict[int, np.ndarray] = {}  # {epoch: permutation of the images}
        self.normalize = normalizer(settings, images.pixel_format).to(device)
        self.grid_size, self.device = model.grid_size, device
        self.batch_size, self.seed, self.num_workers = args.batch_size, args.seed, args.num_workers

    def address(self, b: int) -> list[tuple[int, int]]:
        """Returns the (epoch, index) of each image of batch `b`."""
        first, length = b * self.batch_size, len(self.dataset)
        places = [divmod(first + i, length) for i in range(self.batch_size)]
        for epoch, _ in places:
            if epoch not in self.orders:
                self.orders[epoch] = permutation(self.seed, epoch, length)
        return [(epoch, int(self.orders[epoch][place])) for epoch, place in places]

    def load(self, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (b, normalised imgs [B, 3, H, W]) of `count` batches from batch `first` on."""
        numbers = range(first, first + count)
        addresses = [self.address(b) for b in numbers]
        loaded = load_batches(self.dataset, addresses, stack, self.num_workers, pin_memory=False)
        for b, (imgs, _) in zip(numbers, loaded, strict=True):
            yield b, self.normalize(imgs.to(self.device))

    def token_order(self, b: int, counts: TokenCounts, sampling: str, draw: int) -> torch.Tensor:
        """ids_shuffle [B, N]. The visible tokens depend on the batch `b`; the retained ones depend on the draw, too."""
        epochs, indices = np.transpose(self.address(b))
        seeds = (self.seed, self.seed + 1 + draw)
        noise = [addressed_noise(seed, epochs, indices, counts.num_tokens) for seed in seeds]
        sampler = TokenOrderSampler(self.grid_size, counts, sampling)
        return torch.from_numpy(sampler(noise[1], visible=sampler.visible_tokens(noise[0]))).to(self.device)


def variant(
    settings: Settings, weights: Weights, throw_ratio: float, method: str, shared: Framework | None = None
) -> MaskedAutoencoderViT:
    """Builds a model with `weights`, this throw ratio and this method. Its aggregation is initialised.

    The model uses the parameters of `shared` wherever it has the same ones, which saves memory.
    """
    torch.manual_seed(0)
    model = build_model(settings | dict(progressive=method == "progressive", throw_ratio=throw_ratio))
    assert isinstance(model, MaskedAutoencoderViT)  # `load` refuses others
    checkpoint.load_strict(model, weights, "the checkpoint's weights", optional="aggregation.")
    if shared is not None:
        for name, parameter in shared.named_parameters():
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, parameter)
    return model.eval()


def train_aggregations(
    models: Sequence[tuple[MaskedAutoencoderViT, str]], batches: Batches, steps: int, first_batch: int
) -> list[float]:
    """Trains only the aggregation of each (model, sampling), on the same batches from `first_batch` on.

    The models share all other parameters. So models with equal throw ratio and sampling also share the output of the
    blocks. Returns the mean loss of each model over the last tenth of the steps.
    """
    optimizers, schedules = [], []
    for model, _ in models:
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("decoder.aggregation."))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0))
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[-1], steps))
    losses: list[list[torch.Tensor]] = [[] for _ in models]
    for b, imgs in batches.load(first_batch, steps):
        latent: torch.Tensor | None = None  # of the visible tokens, which are the same for all models
        decoded: dict[tuple[TokenCounts, str], torch.Tensor] = {}
        for i, (model, sampling) in enumerate(models):
            key, patches = (model.counts, sampling), model.patchify(imgs)
            order = TokenOrder(batches.token_order(b, model.counts, sampling, draw=0), model.counts)
            if latent is None:
                latent = model.forward_encoder(patches, order)
            if key not in decoded:
                decoded[key] = model.decoder.decode(latent, order)
            pred = model.decoder.predict(model.decoder.aggregate(decoded[key], order)[:, model.counts.num_visible :])
            loss = model.error(pred, imgs, order).square().mean()
            optimizers[i].zero_grad(set_to_none=True)
            loss.backward()
            optimizers[i].step()
            schedules[i].step()
            losses[i].append(loss.detach())
        if (b + 1 - first_batch) % max(1, steps // 10) == 0:
            print(f"{len(models)} aggregations: step {b + 1 - first_batch} of {steps}", flush=True)
    for model, _ in models:
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith("pos_embed"))
    return [torch.stack(of_model[-max(1, steps // 10) :]).mean().item() for of_model in losses]


def measure(settings: Settings, weights: Weights, label: str, images: Any, args: argparse.Namespace) -> list[Row]:
    mae = variant(settings, weights, 0.0, "plain").to(args.device)
    batches = Batches(images, mae, settings, args, args.device)
    compared: list[tuple[Row, MaskedAutoencoderViT, Gap]] = []
    for throw_ratio, sampling, method in itertools.product(args.throw_ratios, SAMPLINGS, COLORS):
        row = {"method": method, "sampling": sampling, "throw_ratio": throw_ratio}
        compared.append((row, variant(settings, weights, throw_ratio, method, mae).to(args.device), Gap()))
    untrained = [(row, model) for row, model, _ in compared if model.decoder.aggregation is not None]
    if untrained:
        models = [(model, row["sampling"]) for row, model in untrained]
        losses = train_aggregations(models, batches, args.conv_steps, first_batch=args.batches)
        for (row, _), loss in zip(untrained, losses, strict=True):
            row |= {"conv_steps": args.conv_steps, "conv_loss": loss}
    for b, imgs in batches.load(0, args.batches):
        reference = encoder_gradient(mae, imgs, batches.token_order(b, mae.counts, "random", 0))
        for row, model, gap in compared:
            orders = [batches.token_order(b, model.counts, row["sampling"], draw) for draw in range(args.draws)]
            gap.add((encoder_gradient(model, imgs, order) for order in orders), reference)
        print(f"{label}: batch {b + 1} of {args.batches}", flush=True)
    common = {"weights": label, "batch_size": args.batch_size, "batches": args.batches, "draws": args.draws}
    return [common | row | gap.row(args.draws) for row, _, gap in compared]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots difference, bias and standard deviation over draws against the throw ratio, a line for each method."""
    plt = pyplot("gradient_gap")
    panels = {
        "difference": "‖difference to MAE‖ / ‖MAE‖",
        "bias": "bias (over batches and draws)",
        "sd_draws": "standard deviation over draws",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6), layout="constrained")
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        draw_lines(ax, rows, column)
        ax.set(title=title, xlabel="throw ratio ρ_d", ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def draw_lines(ax: Any, rows: Sequence[Row], column: str) -> None:
    """Draws the column against the throw ratio: one line for each method and sampling of each checkpoint."""
    has_several = len({row["weights"] for row in rows}) > 1
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in TEXT), [])
        if row[column] is not None:
            line.append(row)
    for (weights, method, sampling), line in lines.items():
        line.sort(key=lambda row: row["throw_ratio"])
        label = f"{weights}: {method}, {sampling}" if has_several else f"{method}, {sampling}"
        xs, ys = [row["throw_ratio"] for row in line], [row[column] for row in line]
        errors = [row["difference_se"] or 0 for row in line] if column == "difference" else None
        style = dict(color=COLORS[method], ls=SAMPLINGS[sampling], marker="o", ms=4, lw=1.4, capsize=2)
        ax.errorbar(xs, ys, errors, label=label, **style)


def get_args_parser() -> Parser:
    parser = Parser("gradient_gap.py", description=__doc__)
    group = parser.add_argument_group("what is compared").add_argument
    group("runs", nargs="+", metavar="RUN", help="checkpoints or folders of main_pretrain.py, as PATH or LABEL=PATH")
    models = [name for name in MODELS if name.startswith(("mae_", "mff_"))]
    group("--model", choices=models, help="the RUNs are full releases (encoder and decoder) of this model")
    group("--images", required=True, help="class folders, or a flat folder of images")
    ratios = [0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7]
    group("--throw_ratios", type=float, nargs="+", default=ratios, help="what is thrown")
    group = parser.add_argument_group("how").add_argument
    group("--batch_size", type=int, default=256, help="images per batch")
    group("--batches", type=int, default=64, help="number of batches")
    group("--draws", type=int, default=4, help="draws of the thrown tokens per batch")
    group("--conv_steps", type=int, default=2000, help="training steps of the aggregation")
    group("--seed", type=int, default=0, help="of images, crops and tokens")
    group("--num_workers", type=int, default=min(16, available_cores() - 1), help="processes that load images")
    group("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    group = parser.add_argument_group("output").add_argument
    group("--out", type=Path, default=Path("gradient_gap.svg"), help="write the plot to this .svg or .png")
    group("--csv", type=Path, help="write the numbers to this file; without it, beside --out")
    return parser


def load(path: str | Path, args: argparse.Namespace) -> tuple[Settings, Weights]:
    """Loads (settings, weights) of a run of main_pretrain.py, or of a full MAE release with --model."""
    if args.model is None:
        model, settings = load_run(path)
    else:
        settings = vars(main_pretrain.get_args_parser().parse_args(["--model", args.model, "--throw_ratio", "0"]))
        model = build_model(settings)
    if not isinstance(model, MaskedAutoencoderViT):
        raise ValueError(f"gradients are compared for MAE and MFF, not for {settings['model']}")
    if args.model is not None:
        model.load_official(checkpoint.read_checkpoint(path))
    if settings["throw_ratio"]:
        raise ValueError(f"{str(path)!r} throws tokens: give a run with throw_ratio 0")
    for throw_ratio in args.throw_ratios:
        TokenCounts.from_ratios(model.num_tokens, settings["mask_ratio"], throw_ratio)
    return settings, model.state_dict()


def check_and_load(args: argparse.Namespace) -> tuple[list[tuple[str, Settings, Weights]], Any]:
    check_least(args, 1, "batch_size batches draws conv_steps")
    pyplot("gradient_gap")  # a ValueError now instead of after the measurement
    loaded = []
    for run in args.runs:
        label, _, path = run.rpartition("=")
        loaded.append((label or Path(path).stem, *load(path, args)))
    return loaded, open_images("folder", args.images)


def print_rows(rows: Sequence[Row]) -> None:
    numbers = ("difference", "cosine", "bias", "sd_draws")
    names = (*TEXT, "throw_ratio")
    cells = [["–" if row[name] is None else f"{row[name]:.3f}" for name in numbers] for row in rows]
    lines = [[*(row[name] for name in names), *own] for row, own in zip(rows, cells, strict=True)]
    titles = ["weights", "method", "sampling", "ρ_d", "difference", "cosine", "bias", "sd over draws"]
    print(markdown_table(titles, lines, left=3))


def main(argv: Sequence[str] | None = None) -> None:
    parser = get_args_parser()
    args, rows = parser.parse_args(argv), list[Row]()
    with user_errors(parser):
        args.csv = args.csv or args.out.with_suffix(".csv")
        prepare_file("--out", args.out, (".svg", ".png"))
        prepare_file("--csv", args.csv)
        loaded, images = check_and_load(args)
        for label, settings, weights in loaded:
            rows += measure(settings, weights, label, images, args)
            write_csv(args.csv, COLUMNS, rows)  # an interruption keeps the earlier ones
        plot(rows, args.out)
    print_rows(rows)
    print(f"{args.csv}, {args.out}")


if __name__ == "__main__":
    run_program(main, "gradient_gap.py")
