"""User errors with all programs: their help, unknown flags; with scripts: wrong files and unwritable places."""

import importlib
import os
import re
from pathlib import Path

import pytest

from tests.documents import parser_of
from tests.runs import finetune, pretrain, refused
from tests.scripts.programs import MAINS, SCRIPTS, run_file
from util.run.cli import FEW


def main_of(program):
    return importlib.import_module(program.removesuffix(".py").replace("/", ".")).main


@pytest.fixture(scope="module")
def runs(labelled, tmp_path_factory):
    """A folder with finished runs of three steps each: pre-trained ones, and one fine-tuned from them."""
    root = tmp_path_factory.mktemp("runs")
    short = ("--epochs", 1, "--warmup_epochs", 0)
    pretrain(labelled, root / "prmim", *short)
    pretrain(labelled, root / "green", *short, "--model", "greenmim_swin_micro_patch4_window4")
    finetune(labelled, root / "tuned", *short, "--finetune", root / "prmim")
    return root


@pytest.mark.parametrize("name", ["scripts/export.py", "downstream/probe/main_probe.py"])
def test_help_of_a_program_that_is_started(name, tmp_path):
    done = run_file(name, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(name).name} ")


@pytest.mark.parametrize("name", [*SCRIPTS, *MAINS])
def test_the_first_help_is_short_and_names_the_rest(name):
    """Flags that only reproduce a paper's recipe are on the list of all."""
    parser = parser_of(name)
    brief = parser.format_help()
    shown = set(re.findall(r"^  --([\w\[\]-]+)", brief, re.MULTILINE))
    flags = set(re.findall(r"^  --([\w\[\]-]+)", parser.format_help_all(), re.MULTILINE))
    if len(flags) <= FEW:
        assert shown == flags
    else:
        assert 15 <= len(shown) <= 40
        assert "--help_all" in brief


@pytest.mark.parametrize("name", [*SCRIPTS, *MAINS])
def test_an_unknown_flag_is_refused(name, capsys):
    assert "error: " in refused(capsys, main_of(name), "--no_such_flag")


@pytest.mark.parametrize(
    ("program", "arguments", "named"),
    [
        ("scripts/visualize.py", "", "run"),
        ("scripts/visualize.py", "{runs}/tuned", "{runs}/tuned"),
        ("scripts/visualize.py", "{runs}", "{runs}/prmim"),
        ("scripts/visualize.py", "{runs}/prmim/checkpoint-3.json", "{runs}/prmim/checkpoint-3.pth"),
        ("scripts/visualize.py", "nowhere", "nowhere"),
        ("scripts/export.py", "{runs}/green --out e.pth", "greenmim_swin_micro_patch4_window4"),
        ("scripts/export.py", "{runs} --out e.pth", "{runs}/prmim"),
        ("scripts/sample_photos.py", "file", "file"),
    ],
)
def test_what_a_script_cannot_use_is_named(program, arguments, named, runs, tmp_path, capsys, monkeypatch):
    if program == "scripts/sample_photos.py":
        pytest.importorskip("skimage")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert named.format(runs=runs) in refused(capsys, main_of(program), *arguments.format(runs=runs).split())
    assert os.listdir(tmp_path) == ["file"]
