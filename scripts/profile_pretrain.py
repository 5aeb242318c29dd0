"""What a training step costs: recipes side by side, in turn, in one run.

    python scripts/profile_pretrain.py mae_vit_base_100ep prmim50_vit_base_100ep --batch_size 8
    python scripts/profile_pretrain.py cifar10_mae cifar10 --data_path data/cifar10 --batch_size 128

A step is forward, backward and AdamW on one batch that stays on the device (random, or the first crops of
`--data_path`); loading is not in it. Each round times every recipe once, in rotating order; the table shows medians, and
ratios to the first recipe. GMAC are the multiply-adds of one image's forward pass as torch's counter sees them.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from main_pretrain import build_model, get_args_parser
from prmim import MaskCollator, TokenOrderSampler
from recipes import RECIPES
from util.cli import Parser, parse_with_recipe
from util.datasets import AddressedDataset, open_images
from util.train_engine import PRECISIONS, precision
from util.transforms import Normalize, RandomResizedCropFlip


def forward_gmac(settings):
    """Multiply-adds, in 10^9, of the forward pass of one image, counted on the meta device."""
    with torch.device("meta"):
        model = build_model(settings)
        imgs, ids_shuffle = torch.empty(1, 3, *model.img_size), torch.empty(1, model.counts.num_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(imgs, ids_shuffle)
    return counter.get_total_flops() / 2e9


def a_batch(model, settings, batch_size, images):
    """uint8 crops of `images`, or random bytes, and their token orders."""
    sampler = TokenOrderSampler(model.grid_size, model.counts, settings["sampling"], model.mask_unit)
    collator = MaskCollator(sampler, seed=0, shared_visible=model.shared_visible)
    if images is None:
        generator = torch.Generator().manual_seed(0)
        crops = torch.randint(0, 256, (batch_size, 3, *model.img_size), dtype=torch.uint8, generator=generator)
        imgs, _, ids_shuffle = collator([(crop, 0, (0, i)) for i, crop in enumerate(crops)])
    else:
        dataset = AddressedDataset(images, RandomResizedCropFlip(model.img_size, seed=0))
        imgs, _, ids_shuffle = collator([dataset[(0, i % len(dataset))] for i in range(batch_size)])
    return imgs, ids_shuffle


class Step:
    """One recipe's training step, ready to be timed."""

    def __init__(self, settings, args, device, images):
        self.device = device
        self.model = build_model(settings).to(device).train()
        _, self.autocast, _ = precision(args.precision, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.normalize = Normalize().to(device)
        self.imgs, self.ids_shuffle = (t.to(device) for t in a_batch(self.model, settings, args.batch_size, images))

    def __call__(self):
        """-> seconds of one step."""
        start = time.perf_counter()
        with self.autocast():
            loss = sum(self.model(self.normalize(self.imgs), self.ids_shuffle).values())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def main(argv=None):
    parser = Parser("profile_pretrain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="names from recipes.py")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data_path", help="real images; random ones without it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="auto", choices=("auto", *PRECISIONS))
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    try:
        images = open_images("folder", args.data_path) if args.data_path else None
    except ValueError as error:
        parser.error(str(error))
    settings = [vars(parse_with_recipe(get_args_parser(), RECIPES, ["--recipe", name])) for name in args.recipes]
    gmacs = [forward_gmac(s) for s in settings]
    steps = [Step(s, args, device, images) for s in settings]
    for step in steps:
        step()  # warm-up
    times = [[] for _ in steps]
    for i in range(args.rounds):
        for j in range(len(steps)):  # another recipe first each round: a step feels the memory its predecessor left
            k = (i + j) % len(steps)
            times[k].append(steps[k]())
    medians = [statistics.median(of_step) for of_step in times]
    print(f"batch {args.batch_size}, {args.device}, {args.precision}, {args.rounds} rounds, torch {torch.__version__}\n")
    print("| recipe | GMAC | ratio | ms a step | ratio | images/s | loss after the rounds |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, gmac, median, step in zip(args.recipes, gmacs, medians, steps, strict=True):
        print(
            f"| {name} | {gmac:.3f} | {gmac / gmacs[0]:.3f} | {median * 1e3:.1f} | {median / medians[0]:.3f} "
            f"| {args.batch_size / median:.1f} | {step.loss.item():.3f} |"
        )


if __name__ == "__main__":
    main()
