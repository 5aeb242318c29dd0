"""A step of any optimizer that is kept only if it is finite, without a host-device sync."""

from collections.abc import Iterator
from typing import Any

import torch

# Classes whose step treats each parameter by itself, so that steps on some of them after another are the step on all.
# Others may read a norm of all gradients, such as LAMB, or count their steps in a group, such as Adan.
SEPARABLE = ("Muon", "Lion")


@torch.no_grad()
def step_if(is_finite: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Makes a step, and restores weights and state if it was not finite.

    is_finite: bool scalar on the device. The host does not know its value. So the step is made in any case. It
    overwrites weights and state, and the factors are numbers of the host, which no flag on the device can change. So
    copies are kept meanwhile: of a few parameters at a time if the optimizer allows it, otherwise of all.
    """
    if type(optimizer).__name__ not in SEPARABLE:
        step_on_all(is_finite, optimizer)
        return
    groups = optimizer.param_groups
    try:
        for part in parts_of(groups):
            optimizer.param_groups = [part]
            step_on_all(is_finite, optimizer)
    finally:
        optimizer.param_groups = groups


def parts_of(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields groups of some parameters each, together no larger than the largest parameter."""
    limit = max(parameter.numel() for group in groups for parameter in group["params"])
    for group in groups:
        part: list[torch.Tensor] = []
        size = 0
        for parameter in group["params"]:
            if size + parameter.numel() > limit:
                yield {**group, "params": part}
                part = []
                size = 0
            part.append(parameter)
            size += parameter.numel()
        yield {**group, "params": part}


def step_on_all(is_finite: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Makes a step on the parameters in the optimizer's groups, with copies of all of them and of their state.

    Tensors on the host, such as the number of steps that some optimizers count there, are not restored.
    """
    before = {place: tensor.clone() for place, tensor in tensors_on(is_finite.device, optimizer).items()}
    optimizer.step()
    for place, tensor in tensors_on(is_finite.device, optimizer).items():
        old = before.get(place)
        if old is None:  # the first step has made this state, which begins with zeros
            old = torch.zeros_like(tensor)
        torch.where(is_finite, tensor, old, out=tensor)


def tensors_on(device: torch.device, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Returns {place: tensor} of the weights that have gradients and of their state. Of sharded tensors: own shards."""
    tensors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            tensors[parameter, ""] = parameter.detach()
            for name, value in optimizer.state[parameter].items():
                if torch.is_tensor(value):
                    tensors[parameter, name] = value
    local = {}
    for place, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.device == device:
            local[place] = tensor
    return local
