"""Count what a run in this process draws at random, with hooks on the functions that draw."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.layers import DropPath

from encoders.models_swin import SwinEncoder
from encoders.window_groups import WindowGrouper
from util.addressed import AUGMENT
from util.data import transforms

ENOUGH = 5000  # after so many images a run has drawn everything that its recipe can draw


class Draws(Counter):
    """Counts of random draws. The methods `count_*` take a function and return one that also counts."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter = Counter()  # (operation, arguments)
        self.expected_operations: set[str] = set()
        self.plan_shapes: set[tuple] = set()
        self.planner: WindowGrouper | None = None
        self.units = (0, 0)  # all, visible

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the context, draws are counted."""
        hooks = [
            (transforms, "addressed_numbers", self.count_flips),
            (transforms.RandomResizedCropFlip, "box", self.count_boxes),
            (transforms.FinetuneAugment, "__init__", self.count_operations),
            (RandomErasing, "__call__", self.count_erasing),
            (Mixup, "__call__", self.count_mixup),
            (DropPath, "forward", self.count_drop_path),
            (WindowGrouper, "__init__", self.note_planner),
            (WindowGrouper, "__call__", self.count_plans),
        ]
        with ExitStack() as stack:
            for owner, name, hook in hooks:
                stack.enter_context(patch.object(owner, name, hook(getattr(owner, name))))
            yield

    def count_flips(self, numbers: Callable) -> Callable:
        """Count flips. The last number that a crop draws decides on the flip."""

        def counting(stream: int, *address: int) -> list[float]:
            draws = numbers(stream, *address)
            if stream == AUGMENT:
                self["flipped" if draws[-1] < 0.5 else "not flipped"] += 1
            return draws

        return counting

    def count_boxes(self, box: Callable) -> Callable:
        """Count crops that fell back: boxes that are smaller than the image and ignore the draws of their position."""

        def counting(crop: transforms.RandomResizedCropFlip, height: int, width: int, draws: list) -> tuple:
            first, last = (box(crop, height, width, [*draws[:-3], u, u, draws[-1]]) for u in (0.0, 0.999))
            self["fallback" if first == last and first[2:] != (height, width) else "placed"] += 1
            return box(crop, height, width, draws)

        return counting

    def count_operations(self, init: Callable) -> Callable:
        """Count the operations of timm's policy. They are wrapped after the augmentation is built."""

        def recording(name: str, function: Callable) -> Callable:
            def apply(img: Image.Image, *arguments: float, **options: object) -> Image.Image:
                self.operations[name, arguments] += 1
                return function(img, *arguments, **options)

            return apply

        def counting(augment: transforms.FinetuneAugment, *args: object, **options: object) -> None:
            before = Counter(self)
            init(augment, *args, **options)
            self.clear()  # the constructor has augmented a blank image
            self.update(before)
            for op in transforms.augment_ops(augment.augment):
                op.aug_fn = recording(op.name, op.aug_fn)
                if op.prob > 0:
                    self.expected_operations.add(op.name)

        return counting

    def count_erasing(self, erase: Callable) -> Callable:
        """Count erased images, which are those that change."""

        def counting(erasing: RandomErasing, imgs: torch.Tensor) -> torch.Tensor:
            before = imgs.clone()
            erased = erase(erasing, imgs)
            changed = int((erased != before).flatten(1).any(dim=1).sum())
            self["erased"] += changed
            self["not erased"] += len(imgs) - changed
            return erased

        return counting

    def count_mixup(self, mix: Callable) -> Callable:
        """Count mixed batches. With cutmix every pixel is that of one of the two images."""

        def counting(mixup: Mixup, imgs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = imgs.clone()
            mixed, targets = mix(mixup, imgs, labels)
            from_one = bool(((mixed == before) | (mixed == before.flip(0))).all())
            if not torch.equal(mixed, before):
                self["cutmix" if from_one else "mixup"] += 1
            return mixed, targets

        return counting

    def count_drop_path(self, forward: Callable) -> Callable:
        """Count dropped paths, which are zero."""

        def counting(drop_path: DropPath, x: torch.Tensor) -> torch.Tensor:
            out = forward(drop_path, x)
            if drop_path.training and drop_path.drop_prob > 0:
                dropped = int((out.detach().flatten(1) == 0).all(dim=1).sum())
                self["dropped"] += dropped
                self["not dropped"] += len(x) - dropped
            return out

        return counting

    def note_planner(self, init: Callable) -> Callable:
        """Remember the planner and its numbers of units."""

        def noting(planner: WindowGrouper, encoder: SwinEncoder, num_visible: int, **options: object) -> None:
            init(planner, encoder, num_visible, **options)
            self.planner, self.units = planner, (math.prod(encoder.unit_grid), num_visible)

        return noting

    def count_plans(self, plan: Callable) -> Callable:
        """Record the shapes of the plans: the number of groups of each stage."""

        def counting(planner: WindowGrouper, units: torch.Tensor) -> list[torch.Tensor]:
            plans = plan(planner, units)
            self.plan_shapes.add(tuple(len(groups) for groups in plans))
            return plans

        return counting

    def expected_plan_shapes(self, planner: WindowGrouper, masks: int = 500) -> set[tuple]:
        """The shapes of the plans for other random masks."""
        rng, (units, visible) = np.random.default_rng(1), self.units
        drawn = (torch.from_numpy(np.sort(rng.permutation(units)[:visible])) for _ in range(masks))
        return {tuple(len(groups) for groups in planner(ids)) for ids in drawn}

    def summary(self) -> dict[str, int]:
        """The numbers for a table."""
        names = ("flipped", "fallback", "erased", "mixup", "cutmix", "dropped")
        operations = {"operations": len({name for name, _ in self.operations}), "zero_bits": self.zero_bits()}
        return {name: self[name] for name in names} | operations | {"plan_shapes": len(self.plan_shapes - {()})}

    def zero_bits(self) -> int:
        """How often an image was posterized to 0 bits."""
        posterized = [key for key in self.operations if key[0].startswith("Posterize")]
        return sum(self.operations[name, bits] for name, bits in posterized if bits[0] <= 0)

    def missing(self, settings: dict, images: int) -> list[str]:
        """What a run with these settings should have drawn over `images` images, but has not."""
        expected = ["flipped", "not flipped"]
        if settings.get("crop", "resized") == "resized" and not settings.get("clip_crop"):
            expected += ["fallback", "placed"]
        if images < ENOUGH:
            return [name for name in expected if not self[name]]
        if settings.get("reprob"):
            expected += ["erased", "not erased"]
        if settings.get("mixup") and settings.get("cutmix"):
            expected += ["mixup", "cutmix"]
        if settings.get("drop_path") or self["not dropped"]:  # some pre-training models have their own rate
            expected += ["dropped", "not dropped"]
        found = [name for name in expected if not self[name]]
        found += sorted(self.expected_operations - {name for name, _ in self.operations})
        if settings.get("aa") and "PosterizeIncreasing" in self.expected_operations and not self.zero_bits():
            found.append("posterize with 0 bits")
        if self.planner:
            found += [
                f"plans of {shape} groups" for shape in self.expected_plan_shapes(self.planner) - self.plan_shapes
            ]
        return found
