"""A step of any optimizer that is kept only if it is finite, without a host-device sync."""

from typing import Any

import torch


@torch.no_grad()
def step_if(is_finite: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Makes a step, and restores weights and state if it was not finite.

    is_finite: bool scalar on the device. The host does not know its value. So the step is made in any case, and copies
    of weights and state are kept meanwhile. Tensors on the host, such as the number of steps that some optimizers
    count there, are not restored.
    """
    before = {place: tensor.clone() for place, tensor in tensors_on(is_finite.device, optimizer).items()}
    optimizer.step()
    for place, tensor in tensors_on(is_finite.device, optimizer).items():
        old = before.get(place)
        if old is None:  # the first step has made this state, which begins with zeros
            old = torch.zeros_like(tensor)
        tensor.copy_(torch.where(is_finite, tensor, old))


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
