"""The shapes of batches, tried out before the first step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from framework import Framework
from frameworks.hooks.growth import GrowingSize
from util.run.train.training import Training


def room_for_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns tensors as large as the state that the optimizer will make in its first step.

    What else a step takes does not depend on the image size, so the first step shows whether it fits.
    """
    if optimizer.state:
        return []
    room = []
    for group in optimizer.param_groups:
        num_moments = count_moments(optimizer, group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                room += [torch.empty_like(parameter) for _ in range(num_moments)]
    return room


def count_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Returns how many tensors of a parameter's size the optimizer keeps for those of a group: AdamW two, Muon one.

    It makes a step on another matrix.
    """
    matrix = nn.Parameter(torch.zeros(8, 8))
    matrix.grad = torch.zeros_like(matrix)
    twin = type(optimizer)([{**group, "params": [matrix]}])  # type: ignore[call-arg]
    twin.step()
    state = twin.state[matrix].values()
    return sum(torch.is_tensor(value) and value.shape == matrix.shape for value in state)


@dataclass
class FirstShapes:
    """Runs each shape that batches can have once before the first step, instead of in the middle of training.

    Then --compile has compiled it, and a GPU's memory suffices for it. Weights stay as they are.

    compile_shapes: the engine's, which runs a batch. growing: what changes the image size, if it grows.
    """

    training: Training
    model: Framework
    compile_shapes: Callable[..., None]
    growing: GrowingSize | None = None
    have_run: bool = False

    def is_due(self) -> bool:
        """Whether this start has not run them yet."""
        loop = self.training.loop
        is_wanted = self.training.plan.compile or self.growing is not None
        return is_wanted and not self.have_run and loop.step < loop.last_step

    def is_done(self) -> bool:
        """Never: each start runs them."""
        return False

    def perform(self) -> None:
        self.have_run = True
        if self.growing is not None:
            room = room_for_state(self.training.loop.optimizer)
            for img_size in self.growing.sizes_ahead():
                self.run_all(self.examples(img_size))
            del room
            return
        examples = self.examples(self.model.img_size)
        if len(examples) > 1:  # a single shape is that of the first step
            self.run_all(examples)

    def examples(self, img_size: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
        """Returns a micro-batch of black images for each combination of shapes."""
        args = self.training.args
        pixels = self.training.loop.normalize.pixels
        blank = torch.zeros(pixels.channels, *img_size, dtype=getattr(torch, pixels.batch_dtype))
        samples = [(blank, 0, (0, i)) for i in range(self.training.plan.batch_size)]
        return self.model.collator(args.sampling, args.seed).examples(samples)

    def run_all(self, examples: Sequence[Sequence[torch.Tensor]]) -> None:
        for example in examples:
            self.training.loop.stop_if_asked()
            self.compile_shapes(self.training.wrapped, example, self.training.loop)
