"""The `monkeypatch` of the tests. It patches names of this project, and of nothing that other code of the process uses.

A patched `subprocess.Popen` would also be that of matplotlib, which starts a program where it finds no cache of fonts.
"""

import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {"datasets.config"}  # settings that are read from the environment once, at the import


def refuse_foreign(module):
    file = Path(getattr(module, "__file__", None) or "/")
    is_ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts
    assert is_ours or module.__name__ in ALLOWED, f"{module} is patched for the whole process: use `replace_in`"


class StandIn:
    """`library` with other attributes. The library itself stays as it is."""

    def __init__(self, library, **attributes):
        vars(self).update(attributes, _library=library)

    def __getattr__(self, name):
        return getattr(self._library, name)


class MonkeyPatch(pytest.MonkeyPatch):
    def setattr(self, target, *arguments, **options):
        """AssertionError if the target is a module or a class of another package."""
        owner = target
        if isinstance(target, str):
            owner = pkgutil.resolve_name(target.rpartition(".")[0])
        if isinstance(owner, type):
            refuse_foreign(sys.modules[owner.__module__])
        elif isinstance(owner, ModuleType):
            refuse_foreign(owner)
        super().setattr(target, *arguments, **options)

    def replace_in(self, module, path, value):
        """Replaces for example "os.replace" for the code of `module` alone, a module of this project."""
        name, *inner = path.split(".")
        self.setattr(module, name, _replaced(getattr(module, name), inner, value))


def _replaced(library, names, value):
    if not names:
        return value
    return StandIn(library, **{names[0]: _replaced(getattr(library, names[0]), names[1:], value)})
