"""User errors with the scripts: wrong files, unwritable places, missing packages."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.documents import parser_of
from tests.runs import finetune, pretrain
from tests.runs import refused as refused_main
from tests.scripts.programs import MAINS, SCRIPTS, run_file
from util import pictures
from util.run.cli import FEW

# One of each kind: all programs have the same parser.
KINDS = ("scripts/export.py", "main_finetune.py", "submitit_launch.py", "downstream/probe/main_probe.py")


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Calls a script's main in `tmp_path`, which must end with exit code 2 and one paragraph. Returns the error."""

    def run(name, *arguments):
        main = importlib.import_module(name.removesuffix(".py").replace("/", ".")).main
        message = refused_main(capsys, main, *arguments)
        assert message.startswith(f"{Path(name).name}: error: ")
        assert len(message.splitlines()) <= 2
        return message

    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture(scope="module")
def runs(labelled, tmp_path_factory):
    """A folder with finished runs of three steps each: pre-trained ones, and two fine-tuned from them."""
    root = tmp_path_factory.mktemp("runs")
    short = ("--epochs", 1, "--warmup_epochs", 0)
    pretrain(labelled, root / "prmim", *short)
    pretrain(labelled, root / "green", *short, "--model", "greenmim_swin_micro_patch4_window4")
    finetune(labelled, root / "tuned", *short, "--finetune", root / "prmim")
    finetune(labelled, root / "swin", *short, "--model", "swin_micro_patch4_window4", "--finetune", root / "green")
    return root


# --------------------------------------------------------------------------------------------------- help and flags


@pytest.mark.parametrize("name", KINDS)
def test_help(name, tmp_path):
    done = run_file(name, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(name).name} ")
    assert "show this help message" in done.stdout


def test_every_program_has_help():
    for name in (*SCRIPTS, *MAINS):
        assert parser_of(name).format_help().startswith("usage: "), name


@pytest.mark.parametrize("name", [*SCRIPTS, *MAINS])
def test_the_first_help_is_short_and_names_the_rest(name):
    """Flags that only reproduce a paper's recipe are on the list of all."""
    parser = parser_of(name)
    brief = parser.format_help()
    every = parser.format_help_all()
    shown = set(re.findall(r"^  --([\w\[\]-]+)", brief, re.MULTILINE))
    flags = set(re.findall(r"^  --([\w\[\]-]+)", every, re.MULTILINE))
    for action in parser._actions:
        assert not action.required or (action.option_strings or [action.dest])[-1] in brief
    if len(flags) <= FEW:
        assert shown == flags
        return
    assert 15 <= len(shown) <= 40
    assert not shown & {"crop", "lr_steps", "lr_schedule", "decoder_order", "interpolation", "att_topk", "ratio_range"}
    assert brief.endswith(f"\n`{Path(name).name} --help_all` lists all {len(flags)} flags.\n")


@pytest.mark.parametrize("name", [name for name in MAINS if "main_" in name])
def test_the_groups_of_a_main_s_help_have_the_order_of_a_run(name):
    titles = re.findall(r"^(\S.*):$", parser_of(name).format_help(), re.MULTILINE)
    order = ["options", "data", "augmentation", "model and method", "model", "protocol", "optimisation", "evaluation"]
    order.append("run")
    known = [title for title in titles if title in order]
    assert known == sorted(known, key=order.index)


def test_an_unknown_flag(refused):
    refused("scripts/export.py", "--no_such_flag")


def test_no_arguments(tmp_path, refused):
    refused("scripts/visualize.py")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- plot_losses.py


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("nowhere/log.jsonl", "there is no log at 'nowhere/log.jsonl'"),
        ("MAE=nowhere", "there is no log at 'nowhere'"),
        ("empty.jsonl", "'empty.jsonl' reports no finite loss"),
        ("text.txt", "'text.txt' reports no finite loss"),
        ("MAE=picture.png", "'picture.png' reports no finite loss"),
        ("numbers.json", "'numbers.json' reports no finite loss"),
        ("nan.jsonl", "'nan.jsonl' reports no finite loss"),
    ],
)
def test_plot_losses_names_what_is_wrong(tmp_path, refused, run, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.txt").write_text("hello\nworld\n")
    (tmp_path / "numbers.json").write_text('[1, 2]\n{"step": "one", "loss": 1}\n{"step": 2}\n')
    (tmp_path / "nan.jsonl").write_text('{"step": 1, "loss": null}\n')
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    assert message in refused("scripts/plot_losses.py", run)
    assert not (tmp_path / "losses.svg").exists()


def test_plot_losses_of_fine_tuning(runs, tmp_path):
    pytest.importorskip("matplotlib")
    log = (runs / "tuned" / "log.jsonl").read_text()
    assert any("loss" not in json.loads(line) for line in log.splitlines())  # evaluations
    (tmp_path / "gap.jsonl").write_text(log.replace('"loss": ', '"loss": null, "was": ', 1) + '{"step": 9, "lo')
    done = run_file("scripts/plot_losses.py", runs / "tuned", "x=gap.jsonl", "--out", "l.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<svg" in (tmp_path / "l.svg").read_text()
    assert done.stdout == "losses of 2 runs: l.svg\n"


def test_matplotlib_is_missing(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # makes the import fail
    message = refused("scripts/plot_losses.py", "nowhere")
    assert "the plots need matplotlib: pip install -r requirements-dev.txt" in message
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- sample_photos.py


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("/proc/x", "'/proc/x': No such file or directory"),
        ("file", "'file': File exists"),
        ("file/x", "'file/x': Not a directory"),
    ],
)
def test_sample_photos_to_an_unwritable_place(tmp_path, refused, where, message):
    pytest.importorskip("skimage")
    (tmp_path / "file").touch()
    assert message in refused("scripts/sample_photos.py", where)


def test_sample_photos_without_scikit_image(tmp_path, refused, monkeypatch):
    for name in ("skimage", "skimage.data"):  # skimage.data may have been imported before
        monkeypatch.setitem(sys.modules, name, None)
    message = refused("scripts/sample_photos.py", "photos")
    assert "the photographs are from scikit-image, which is not installed: pip install" in message
    assert not (tmp_path / "photos").exists()


# --------------------------------------------------------------------------------------------------- visualize.py


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("tuned", "is a fine-tuned classifier, which reconstructs no images: give its encoder, '{root}/prmim/"),
        ("tuned/tensorboard", "holds no intact checkpoint: give the folder of a run, or a checkpoint"),
        (".", "holds no intact checkpoint: it holds the runs {root}/green, {root}/prmim, "),
        ("prmim/checkpoint-3.json", "holds no weights: the checkpoint is '{root}/prmim/checkpoint-3.pth'"),
        ("prmim/log.jsonl", "holds no weights: give the folder '{root}/prmim'"),
        ("nowhere", "no checkpoint at '{root}/nowhere'"),
    ],
)
def test_visualize_says_what_to_give(runs, tmp_path, refused, run, message):
    assert message.format(root=runs) in refused("scripts/visualize.py", runs / run)


def test_an_older_picture_stands(tmp_path, monkeypatch):
    def save(path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def fromarray(picture):
        img = Image.fromarray(picture)
        img.save = save
        return img

    (tmp_path / "p.png").write_text("older")
    monkeypatch.replace_in(pictures, "Image.fromarray", fromarray)
    with pytest.raises(OSError, match="No space left on device"):
        pictures.save(np.zeros((2, 2, 3), np.uint8), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_text() == "older"
    assert os.listdir(tmp_path) == ["p.png"]


# --------------------------------------------------------------------------------------------------- export.py


@pytest.mark.parametrize("layout", ["timm", "mae"])
@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("prmim/checkpoint-3.json", "holds no weights: the checkpoint is '{root}/prmim/checkpoint-3.pth'"),
        ("swin", "(made as swin_micro_patch4_window4) holds a Swin Transformer: only plain ViTs can be"),
        ("green", "(made as greenmim_swin_micro_patch4_window4)"),
        (".", "holds no intact checkpoint: it holds the runs {root}/green, {root}/prmim, "),
    ],
)
def test_export_names_what_it_does_not_support(runs, tmp_path, refused, run, message, layout):
    error = refused("scripts/export.py", runs / run, "--format", layout, "--out", "e.pth")
    assert message.format(root=runs) in error
    assert not list(tmp_path.iterdir())
