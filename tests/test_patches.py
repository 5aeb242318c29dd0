"""Tests leave Python's library and other packages as they are: threads and libraries of the process use them, too."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch

from util import atomic

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests").rglob("*.py"))
OURS = {p.stem for p in ROOT.iterdir() if p.suffix in ("", ".py")}
# Assignments in processes that run nothing else: those of these files, and those below.
PROGRAMS = {"warm.py", "programs.py", "faulty.py", "fake_accelerator.py", "cuda_autocast.py"}
IN_A_CHILD = {
    "datasets.config.HF_DATASETS_CACHE",
    "datasets.DatasetBuilder._download_and_prepare",
    "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
}


@pytest.mark.parametrize(
    "target",
    [
        (os, "replace"),
        (atomic.os, "replace"),
        ("os.replace",),
        ("util.atomic.os.replace",),
        (torch.nn.Module, "compile"),
    ],
)
def test_a_patch_of_a_library_is_refused(monkeypatch, target):
    replace = os.replace
    with pytest.raises(AssertionError, match="patched for the whole process"):
        monkeypatch.setattr(*target, None)
    assert os.replace is replace


def test_a_name_is_replaced_for_one_module_alone(monkeypatch):
    replace = os.replace
    monkeypatch.replace_in(atomic, "os.replace", "ours")
    monkeypatch.replace_in(atomic, "os.path.exists", "ours, too")
    assert (atomic.os.replace, atomic.os.path.exists) == ("ours", "ours, too")
    assert atomic.os.fsync is os.fsync and atomic.os.path.join is os.path.join and os.replace is replace
    monkeypatch.undo()
    assert atomic.os is os


def other_patches(source):
    """Returns what `source` patches by other means than the fixture `monkeypatch`."""
    nodes, libraries = [*ast.walk(ast.parse(source))], set()
    for node in nodes:
        if isinstance(node, ast.Import):
            libraries |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] not in OURS:
            libraries |= {alias.asname or alias.name for alias in node.names}
    assigned = [ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]
    found = re.findall(r"pytest\.MonkeyPatch|mock\.patch\b(?!\.dict)|patch\.object|\.delattr", source)
    return {*found, *(name for name in assigned if name.split(".")[0] in libraries - OURS)}


def test_other_patches_are_found():
    source = "import os.path\nfrom torch import nn as n\nfrom util import atomic\natomic.os = x.os = os.environ\n"
    assert other_patches(source) == set()
    source += "os.replace, n.Module.compile = 1, 2\nmock.patch('os.replace')\nmock.patch.dict(os.environ)\n"
    assert other_patches(source) == {"mock.patch", "os.replace", "n.Module.compile"}


def test_libraries_are_patched_by_the_fixture_alone():
    found = {path.name: other_patches(path.read_text()) - IN_A_CHILD for path in FILES}
    assert not [name for name in found.keys() - {*PROGRAMS, "patches.py", "test_patches.py"} if found[name]]
