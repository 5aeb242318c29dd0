"""Floating-point precision of the forward and backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision(NamedTuple):
    """A resolved precision: its name, `autocast()`, and a GradScaler that is enabled for fp16 only."""

    name: str
    autocast: Callable[[], AbstractContextManager]
    scaler: torch.amp.GradScaler


def precision(name: str, device: torch.device) -> Precision:
    """Resolves one of `PRECISIONS`, or "auto": fp32 on a CPU; on a GPU bf16 if it supports that, else fp16."""
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    dtype = PRECISIONS[name]
    scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
    return Precision(name, lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype is not None), scaler)
