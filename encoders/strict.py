"""Loads weights strictly: names, shapes and values are checked."""

from collections.abc import Mapping

import torch

from util.run.errors import CheckpointError
from util.text import shorten


def load_strict(
    model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor], what: str, optional: str | None = None
) -> None:
    """Loads `state_dict` into `model`. Raises CheckpointError if any key is missing, unexpected or of another shape.

    FloatingPointError if a value is not finite.

    what: the weights' name in the error, in the plural. optional: keys of the model that contain this text may be
    missing; they then keep their values.
    """
    of_model = model.state_dict()
    missing = [key for key in of_model if key not in state_dict and not (optional and optional in key)]
    unexpected = [key for key in state_dict if key not in of_model]
    misshaped = list_misshaped(state_dict, of_model)
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    texts = [f"{len(keys)} {kind}: {shorten(keys, most=6)}" for kind, keys in problems.items() if keys]
    if texts:
        raise CheckpointError(f"{what} do not fit this {type(model).__name__}: {'; '.join(texts)}")
    check_values(state_dict, what)
    model.load_state_dict(state_dict, strict=False)


def check_values(weights: Mapping[str, torch.Tensor], what: str) -> None:
    """FloatingPointError if a weight that is about to be loaded is not finite. what: see `load_strict`."""
    bad = [name for name, value in weights.items() if not (value.is_meta or value.isfinite().all())]
    if bad:
        raise FloatingPointError(f"{what} are not finite: {shorten(bad, most=6)}")


def list_misshaped(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns a description of each key of `weights` whose tensor has another shape in the model's state dict `own`."""
    return [
        f"{key} is {list(value.shape)}, the model's {list(own[key].shape)}"
        for key, value in weights.items()
        if key in own and value.shape != own[key].shape
    ]
