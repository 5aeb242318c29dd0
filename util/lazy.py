"""Alternatives that are imported when one of them is asked for."""

import importlib
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any


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
