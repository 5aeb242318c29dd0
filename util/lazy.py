"""Slow libraries and alternatives, imported at their first use."""

import importlib
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any


class LazyModule:
    """Module `name`, imported at its first use: `--help` and refused flags wait for no timm, torchvision or FSDP."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


class ByName(UserDict[str, Any]):
    """Objects by their names. The module that holds one is imported when it is asked for.

    names: {path of a module: names of its objects}.
    """

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        for module, names_in_it in names.items():
            self.data.update(dict.fromkeys(names_in_it, module))

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            found = getattr(importlib.import_module(found), name)
        return found
