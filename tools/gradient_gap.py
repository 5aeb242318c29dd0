"""How far the encoder's gradient with thrown tokens is from MAE's: the paper's figure of gradient differences.

    python tools/gradient_gap.py output/mae --images IMAGENET/train --out docs/figures/gradient_gap.svg
    python tools/gradient_gap.py mae_pretrain_vit_base_full.pth --model mae_vit_base_patch16 --images IMAGENET/train
    python tools/gradient_gap.py --from_csv docs/gradient_gap.csv --out docs/figures/gradient_gap.svg

Equal weights, images and visible tokens; then the gradient of each method's own loss with respect to all encoder
parameters, as one float32 vector, and its difference to the gradient of MAE's loss. Two kinds of weights:

    a run with throw_ratio 0    its encoder and decoder for every throw ratio; the convolution alone is trained first
                                (protocol "mae": isolates the estimator)
    a run that throws           its encoder, decoder and convolution at its own throw ratio and sampling ("own")

For every batch the throwing is drawn several times, which splits the expected squared difference into three parts:
squared bias (of the mean over batches, corrected for their number), variance over batches, variance over draws.
The CSV (beside --out) holds them as roots, relative to the norm of MAE's gradient.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_pretrain
from main_pretrain import MODELS, build_model, make_augmentation
from models_mae_pr import MaskedAutoencoderViT
from prmim import TokenCounts, TokenOrderSampler, addressed_noise
from scripts.visualize import load_run
from util.data.datasets import AddressedDataset, available_cores, open_images, permutation, stack
from util.data.datasets import batches as load_batches
from util.data.transforms import Normalize
from util.plots import pyplot
from util.run import checkpoint
from util.run.cli import Parser, run_program, user_errors, why_not_writable
from util.tables import read_csv, write_csv

METHODS = ("plain", "prmim")
COLUMNS = [
    *("weights", "protocol", "method", "sampling", "throw_ratio", "difference", "difference_se", "cosine", "bias"),
    *("sd_batches", "sd_draws", "mae_norm", "batch_size", "batches", "draws", "conv_steps", "conv_loss"),
]
TEXT = ("weights", "protocol", "method", "sampling")


def encoder_gradient(model, imgs, ids_shuffle):
    """The gradient of the model's loss, float32 [P], with respect to what is not the decoder's."""
    parameters = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("decoder.")]
    loss = sum(model(imgs, ids_shuffle).values())
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)])


class Gap:
    """Running sums of the differences to MAE's gradient; with them the means over batches."""

    def __init__(self):
        self.distances, self.cosines, self.norms = [], [], []
        self.total = 0.0  # [P], the sum over batches of the mean over draws
        self.squared_means, self.within = [], []

    def add(self, gradients, reference):
        """The gradients [P] of each draw, one after the other, and MAE's [P], of one batch."""
        reference = reference.double()  # float32 sums over 10^8 numbers lose digits
        mean, squares, cosines = 0.0, [], []
        for gradient in gradients:
            gradient = gradient.double()
            cosines.append(torch.cosine_similarity(gradient, reference, dim=0).item())
            mean = mean + (gradient - reference)
            squares.append((gradient - reference).square().sum().item())
        n = len(squares)
        mean = mean / n
        squared_mean = mean.square().sum().item()
        self.total = self.total + mean.float()  # kept for every method and throw ratio, so half the size counts
        self.distances.append(statistics.fmean(square**0.5 for square in squares))
        self.cosines.append(statistics.fmean(cosines))
        self.norms.append(reference.norm().item())
        self.squared_means.append(squared_mean)
        if n > 1:
            self.within.append(max(sum(squares) - n * squared_mean, 0.0) / (n - 1))

    def row(self, draws):
        """Everything relative to MAE's norm; None for what needs more batches or draws."""
        n, norm = len(self.distances), statistics.fmean(self.norms)
        row = {"difference": statistics.fmean(self.distances) / norm, "cosine": statistics.fmean(self.cosines), "mae_norm": norm}
        row |= dict.fromkeys(("difference_se", "bias", "sd_batches", "sd_draws"))
        if n > 1:
            row["difference_se"] = statistics.stdev(self.distances) / n**0.5 / norm
            # The mean over pairs of two different batches: their noise is independent, so it does not add to the bias.
            bias2 = (self.total.double().square().sum().item() - sum(self.squared_means)) / (n * (n - 1))
            row["bias"] = max(bias2, 0.0) ** 0.5 / norm
        if self.within:
            within = statistics.fmean(self.within)
            row["sd_draws"] = within**0.5 / norm
            if n > 1:
                row["sd_batches"] = max(statistics.fmean(self.squared_means) - bias2 - within / draws, 0.0) ** 0.5 / norm
        return row


class Batches:
    """Addressed batches of crops as the run's: batch b has the same images, crops and visible tokens for every method.

    Images are drawn in a random order, pass by pass: folders lie class by class, and a batch of one class is no batch of
    training.
    """

    def __init__(self, images, model, settings, batch_size, seed, device, num_workers=0):
        crop = argparse.Namespace(**settings | dict(seed=seed, input_size=model.img_size))
        self.dataset, self.orders = AddressedDataset(images, make_augmentation(crop)), {}
        self.grid_size, self.batch_size, self.seed, self.device = model.grid_size, batch_size, seed, device
        self.normalize, self.num_workers = Normalize().to(device), num_workers

    def address(self, b):
        first, length = b * self.batch_size, len(self.dataset)
        places = [divmod(first + i, length) for i in range(self.batch_size)]
        for epoch, _ in places:
            if epoch not in self.orders:
                self.orders[epoch] = permutation(self.seed, epoch, length)
        return [(epoch, int(self.orders[epoch][place])) for epoch, place in places]  # (epoch, index)

    def load(self, first, count):
        """Yields (b, imgs [B, 3, H, W], normalised) from batch `first` on."""
        numbers = range(first, first + count)
        loaded = load_batches(self.dataset, [self.address(b) for b in numbers], stack, self.num_workers, pin_memory=False)
        for b, (imgs, _) in zip(numbers, loaded, strict=True):
            yield b, self.normalize(imgs.to(self.device))

    def token_order(self, b, counts, sampling, draw):
        """ids_shuffle [B, N]: the visible tokens are those of batch b; which others are thrown depends on the draw, too."""
        epochs, indices = zip(*self.address(b), strict=True)
        noise = [addressed_noise(seed, epochs, indices, counts.num_tokens) for seed in (self.seed, self.seed + 1 + draw)]
        sampler = TokenOrderSampler(self.grid_size, counts, sampling)
        return torch.from_numpy(sampler(noise[1], visible=sampler.visible_tokens(noise[0]))).to(self.device)


def variant(settings, weights, throw_ratio, progressive, device, shared=None):
    """A model with `weights` that throws so much; its convolution is new where they have none.

    shared: a model whose parameters it uses wherever it has them, too, so that a model more is a convolution more.
    """
    torch.manual_seed(0)
    model = build_model(settings | dict(throw_ratio=throw_ratio, progressive=progressive))
    own = model.state_dict()
    weights = {k: v for k, v in weights.items() if k in own or not k.startswith("decoder.aggregation.")}
    checkpoint.load_strict(model, weights, "the checkpoint's weights", optional="aggregation.")
    for name, parameter in shared.named_parameters() if shared is not None else ():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, parameter)
    return model.to(device).eval()


class Convolution:
    """The aggregation of one model in training; everything else stands still."""

    def __init__(self, model, sampling, steps):
        self.model, self.sampling, self.losses = model, sampling, []
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("decoder.aggregation."))
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def step(self, imgs, ids_shuffle):
        loss = sum(self.model(imgs, ids_shuffle).values())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.detach())

    def finish(self):
        """Frees the other parameters again; -> the mean loss of the last tenth."""
        for name, p in self.model.named_parameters():
            p.requires_grad_(not name.endswith("pos_embed"))
        return torch.stack(self.losses[-max(1, len(self.losses) // 10) :]).mean().item()


def train_convolutions(models, batches, steps, first_batch):
    """Trains the convolutions of [(model, sampling)] in one pass over batches that are not measured; -> their losses."""
    training = [Convolution(model, sampling, steps) for model, sampling in models]
    for b, imgs in batches.load(first_batch, steps):
        for t in training:
            t.step(imgs, batches.token_order(b, t.model.counts, t.sampling, draw=0))
        if (b + 1 - first_batch) % max(1, steps // 10) == 0:
            print(f"{len(training)} convolutions: step {b + 1 - first_batch} of {steps}", flush=True)
    return [t.finish() for t in training]


def arms(settings, weights, args, device, mae):
    """-> [(row so far, model)] of everything that is compared with MAE at these weights."""
    own = settings["throw_ratio"] > 0
    found = []
    for throw_ratio in [settings["throw_ratio"]] if own else args.throw_ratios:
        for sampling in [settings["sampling"]] if own else args.sampling:
            for method in METHODS:
                row = {"protocol": "own" if own else "mae", "method": method, "sampling": sampling, "throw_ratio": throw_ratio}
                found.append((row, variant(settings, weights, throw_ratio, method == "prmim", device, shared=mae)))
    return found


def measure(settings, weights, label, images, args, device):
    """-> the rows of one checkpoint."""
    mae = variant(settings, weights, 0.0, True, device)
    batches = Batches(images, mae, settings, args.batch_size, args.seed, device, args.num_workers)
    compared = [(row, model, Gap()) for row, model in arms(settings, weights, args, device, mae)]
    untrained = [(row, model) for row, model, _ in compared if row["protocol"] == "mae" and model.decoder.aggregation is not None]
    if untrained:
        models = [(model, row["sampling"]) for row, model in untrained]
        losses = train_convolutions(models, batches, args.conv_steps, first_batch=args.batches)
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


def plot(rows, path):
    """Difference, bias and spread over draws against throw ratio."""
    plt = pyplot("gradient_gap")
    several = len({row["weights"] for row in rows}) > 1
    panels = {
        "difference": "‖difference to MAE‖ / ‖MAE‖",
        "bias": "bias (over batches and draws)",
        "sd_draws": "standard deviation over draws",
    }
    styles = {"plain": ("#aa3377", "plain"), "prmim": ("#4477aa", "progressive")}
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6), layout="constrained")
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        for key in dict.fromkeys((row["weights"], row["protocol"], row["method"], row["sampling"]) for row in rows):
            weights, protocol, method, sampling = key
            line = [r for r in rows if (r["weights"], r["protocol"], r["method"], r["sampling"]) == key and r[column] is not None]
            line.sort(key=lambda r: r["throw_ratio"])
            color, name = styles[method]
            errors = [r["difference_se"] or 0 for r in line] if column == "difference" else None
            marker = {"mae": "o", "own": "D"}[protocol]
            ax.errorbar(
                [r["throw_ratio"] for r in line], [r[column] for r in line], errors, color=color, marker=marker, ms=4, lw=1.4,
                ls="-" if sampling == "furthest" else "--", capsize=2, label=f"{weights}: " * several + f"{name}, {sampling}",
            )  # fmt: skip
        ax.set(xlabel="throw ratio ρ_d", title=title)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[0].legend(unique.values(), unique.keys(), frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    plt.close(figure)


def get_args_parser():
    parser = Parser("gradient_gap.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("runs", nargs="*", metavar="RUN", help="checkpoints or folders of main_pretrain.py, as PATH or LABEL=PATH")
    flag("--model", choices=MODELS, help="the RUNs are full MAE releases (encoder and decoder) of this model")
    flag("--images", help="class folders or a flat folder of JPEGs")
    flag("--throw_ratios", type=float, nargs="+", default=[0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7])
    flag("--sampling", nargs="+", default=["random", "furthest"], choices=("random", "furthest"))
    flag("--batch_size", type=int, default=256)
    flag("--batches", type=int, default=64)
    flag("--draws", type=int, default=4, help="of the thrown tokens, for each batch")
    flag("--conv_steps", type=int, default=2000, help="steps of training the convolution on MAE's weights")
    flag("--seed", type=int, default=0)
    flag("--num_workers", type=int, default=min(16, available_cores() - 1))
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    flag("--out", type=Path, default=Path("gradient_gap.svg"), help="the plot, .svg or .png; the CSV lies beside it")
    flag("--csv", type=Path, help="default: --out with .csv")
    flag("--from_csv", type=Path, help="draw these numbers again; measure nothing")
    return parser


def defaults(*flags):
    return vars(main_pretrain.get_args_parser().parse_args(flags))


def load(path, args):
    """-> (settings, weights) of a run of main_pretrain, or of a full MAE release with --model."""
    if args.model is None:
        model, settings = load_run(path)
        settings = defaults() | settings  # of an older run some flags are not there: it was made with what is the default
    else:
        settings = defaults("--model", args.model, "--throw_ratio", "0")
        model = build_model(settings)
    if not isinstance(model, MaskedAutoencoderViT):
        raise ValueError(f"gradients are compared for MAE and MFF, not for {settings['model']}")
    if args.model is not None:
        model.load_official(checkpoint.read_checkpoint(path))
    if settings["throw_ratio"] and not settings["progressive"]:
        raise ValueError(f"{path!r} is plain partial reconstruction: it has no convolution; give an MAE or a PR-MIM run")
    if not settings["throw_ratio"]:
        for throw_ratio in args.throw_ratios:
            TokenCounts.from_ratios(model.num_tokens, settings["mask_ratio"], throw_ratio)
    return settings, model.state_dict()


def check(args):
    """ValueError for what cannot be measured; -> [(label, settings, weights)], images."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but there is no CUDA device")
    if not args.runs or not args.images:
        raise ValueError("give one or more RUNs and --images, or --from_csv")
    for name in ("batch_size", "batches", "draws", "conv_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    pyplot("gradient_gap")
    loaded = []
    for run in args.runs:
        label, _, path = run.rpartition("=")
        loaded.append((label or Path(path).stem, *load(path, args)))
    return loaded, open_images("folder", args.images)


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    with user_errors(parser):
        if args.out.suffix not in (".svg", ".png"):
            raise ValueError(f"--out must end in .svg or .png, got {str(args.out)!r}")
        args.csv = args.csv or args.out.with_suffix(".csv")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        for path in (args.out, args.csv):
            if reason := why_not_writable(path):
                raise ValueError(f"{str(path)!r} cannot be written: {reason}")
        if args.from_csv:
            plot(read_csv(args.from_csv, COLUMNS, TEXT), args.out)
            return
        loaded, images = check(args)
        rows = measure_all(loaded, images, args)
        plot(rows, args.out)
    print_rows(rows)
    print(f"{args.csv}, {args.out}")


def measure_all(loaded: list[tuple], images: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """-> the rows of all checkpoints, which are in the CSV as soon as they are measured."""
    device, rows = torch.device(args.device), []
    for label, settings, weights in loaded:
        try:
            rows += measure(settings, weights, label, images, args, device)
        except torch.cuda.OutOfMemoryError as error:
            reason = f"the device's memory does not hold a batch of {args.batch_size}; give a smaller --batch_size"
            raise ValueError(reason) from error
        write_csv(args.csv, COLUMNS, rows)  # what is measured is kept
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The rows as a table in Markdown."""
    columns = ("difference", "cosine", "bias", "sd_draws")
    print("| weights | method | sampling | ρ_d | difference | cosine | bias | sd over draws |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for r in rows:
        cells = ["–" if r[name] is None else f"{r[name]:.3f}" for name in columns]
        print(f"| {r['weights']} | {r['method']} | {r['sampling']} | {r['throw_ratio']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run_program(main, "gradient_gap.py")
