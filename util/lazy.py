"""Slow libraries, imported at their first use."""

import importlib
from typing import Any


class LazyModule:
    """Module `name`, imported at its first use: `--help` and refused flags wait for no timm, torchvision or FSDP."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
