import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scripts import export, plot_losses, sample_photos, visualize
from tests import runs
from tests.patches import StandIn
from tests.runs import refused
from util.data.images import FolderImages
from util.plots import pyplot

ROOT = Path(__file__).resolve().parents[2]
pretrain = runs.pretrain.also("--epochs 1 --warmup_epochs 0")


@pytest.mark.parametrize(
    ("flags", "measured"),
    [([], ["retained", "thrown"]), (["--no-progressive"], ["retained"]), (["--throw_ratio", "0"], ["retained"])],
)
def test_visualize_draws_and_measures(photos, tmp_path, capsys, flags, measured):
    pretrain(photos, tmp_path / "run", *flags)
    capsys.readouterr()
    visualize.main(
        [str(tmp_path / "run"), "--out", str(tmp_path / "r.png"), "--patterns", str(tmp_path / "p.png"), "--rows", "5"]
    )
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "masked MSE" in line] == measured
    for name in ("r.png", "p.png"):
        picture = np.asarray(Image.open(tmp_path / name))
        assert picture.shape[1] > 300 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize("flag", ["--out", "--patterns"])
@pytest.mark.parametrize("images", [True, False])
def test_a_picture_does_not_become_data(photos, tmp_path, capsys, flag, images):
    pretrain(photos, tmp_path / "run", "--max_steps", "1")
    picture = photos / "train" / "cat" / "r.png"
    given = ["--images", photos] if images else []
    message = refused(capsys, visualize.main, tmp_path / "run", *given, "--out", tmp_path / "r.png", flag, picture)
    assert f"{flag} {str(picture)!r} lies inside the image folder" in message
    assert not picture.exists() and not (tmp_path / "r.png").exists()


@pytest.mark.parametrize("framework", ["localmim", "tec", "greenmim"])
def test_other_frameworks_are_drawn_measured_and_exported(photos, tmp_path, capsys, framework):
    model = {"greenmim": "greenmim_swin_micro_patch4_window4"}.get(framework, f"{framework}_vit_micro_patch4")
    flags = ["--model", model]
    if framework == "tec":
        pretrain(photos, tmp_path / "teacher", "--model", "mae_vit_micro_patch4")
        flags += ["--teacher", str(tmp_path / "teacher")]
    pretrain(photos, tmp_path / "run", *flags)
    capsys.readouterr()
    visualize.main([str(tmp_path / "run"), "--out", str(tmp_path / "r.png")])
    out, expected = (
        capsys.readouterr().out,
        {"localmim": "HOG error at 8 px", "tec": "feature error", "greenmim": "masked MSE"},
    )
    assert out.count(f": {expected[framework]} ") == 2
    if framework != "greenmim":
        export.main([str(tmp_path / "run"), "--out", str(tmp_path / "encoder.pth")])
        assert "largest difference of timm's features" in capsys.readouterr().out
    if framework == "tec":
        pretrain(photos, tmp_path / "other", "--model", "mae_vit_micro_patch4", "--seed", "1")
        (tmp_path / "teacher").rename(tmp_path / "moved")
        message = refused(capsys, visualize.main, tmp_path / "run")
        assert "is neither a file nor the name of a timm model" in message
        message = refused(capsys, visualize.main, tmp_path / "run", "--teacher", tmp_path / "other")
        assert "has other weights than that of" in message
        visualize.main([str(tmp_path / "run"), "--teacher", str(tmp_path / "moved"), "--out", str(tmp_path / "r.png")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a checkpoint or the folder of a run, or --patterns"),
        (["{tmp}"], "holds no intact checkpoint: give the folder of a run, or a checkpoint"),
        (["{tmp}/nowhere.pth"], "no checkpoint at"),
        (["{tmp}/weights.pth"], "does not hold the settings of its model"),
        (["{tmp}", "--rows", "0"], "--rows must be at least 1, got 0"),
        (["{tmp}/study.pth"], "holds a 'mae_vit_tiny+init_normal', which main_pretrain.py does not know"),
        (["{tmp}/weights.pth", "--out", "/dev/null/r.png"], "r.png' cannot be written: the folder '/dev/null'"),
        (["--patterns", "/dev/null/p.png"], "--patterns '/dev/null/p.png' cannot be written: the folder"),
        (["--patterns", "{tmp}/p.txt"], "'{tmp}/p.txt': the name must end in .png, .jpg or the like"),
        (["--patterns", "{tmp}"], "the name must end in .png, .jpg or the like"),
    ],
)
def test_visualize_names_what_is_wrong(tmp_path, capsys, arguments, message):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "weights.pth")
    meta = '{"settings": {"mask_ratio": 0.75, "model": "mae_vit_tiny+init_normal"}}'
    torch.save({"model": {"w": torch.ones(1)}, "meta": meta}, tmp_path / "study.pth")
    error = refused(capsys, visualize.main, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert message.format(tmp=tmp_path) in error and len(error.splitlines()) == 2


def test_five_bands_are_the_colours_and_the_slopes_of_their_mean():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    bands = sample_photos.five_bands(Image.fromarray(pixels))
    assert bands.dtype == np.uint16 and np.array_equal(bands[:, :, :3], pixels.astype(np.uint16) * 257)
    grey = pixels.sum(axis=2) / 3
    for i, j in ((1, 1), (2, 3)):  # central differences, from black to white: 0 to 65535
        down, along = (grey[i + 1, j] - grey[i - 1, j]) / 2, (grey[i, j + 1] - grey[i, j - 1]) / 2
        assert np.allclose(bands[i, j, 3:], [(slope / 510 + 0.5) * 65535 for slope in (down, along)], atol=0.51)


def test_sample_photos_writes_bands(tmp_path, monkeypatch):
    pytest.importorskip("tifffile")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png",))
    for flag in ([], ["--bands"]):
        sample_photos.main([str(tmp_path / str(len(flag))), "--num_train", "1", "--num_val", "1", *flag])
    images = FolderImages(tmp_path / "1")
    images.in_chans = 5
    images.check()
    pixels, rgb = images.load(0)[0], FolderImages(tmp_path / "0").load(0)[0]
    assert pixels.shape == (96, 96, 5) and pixels.dtype == np.uint16
    assert np.abs(pixels[:, :, :3] / 257 - rgb).mean() < 6  # a JPEG of the same crop


def test_sample_photos_have_labels_and_disjoint_splits(tmp_path, monkeypatch):
    """The photograph is black in the region of train/ and white in that of val/. No crop mixes both."""
    boundary = 300 * 2 // 3
    half = np.where(np.arange(300) < boundary, 0, 255).astype(np.uint8)
    Image.fromarray(np.tile(half[:, None], (200, 1, 3))).save(tmp_path / "half.png")
    monkeypatch.setattr(sample_photos, "photos_folder", lambda: tmp_path)
    monkeypatch.setattr(sample_photos, "PHOTOS", ("half.png",))
    monkeypatch.setattr(sample_photos, "SIDE", 32)
    sample_photos.write_photos(tmp_path / "out", num_train=20, num_val=5)
    for split, value, count in (("train", 0, 20), ("val", 255, 5)):
        files = sorted((tmp_path / "out" / split / "half").iterdir())
        assert len(files) == count and all((np.asarray(Image.open(f)) == value).all() for f in files)


def test_sample_photos_exist_in_the_package():
    data = pytest.importorskip("skimage.data")
    assert all((Path(data.data_dir) / name).is_file() for name in sample_photos.PHOTOS)


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_loss_plot_renders(tmp_path, suffix, begin):
    pytest.importorskip("matplotlib")
    write_log(tmp_path / "log.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
    plot_losses.main([f"MAE={tmp_path}", str(tmp_path), "--out", str(tmp_path / f"l{suffix}")])
    assert (tmp_path / f"l{suffix}").read_bytes().startswith(begin)


def write_log(path, *reports):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(report) + "\n" for report in reports))


def test_curves_of_a_log(tmp_path):
    """Reports without a loss are skipped, a non-finite loss is NaN, and evaluations form their own curve."""
    log = tmp_path / "lr=1e-3" / "log.jsonl"
    evaluation = {"step": 3, "epoch": 0, "val_loss": 1.2, "val_top1": 50.0}
    write_log(log, {"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1}, evaluation, {"step": 4})
    with open(log, "a") as file:
        file.write('{"step": 5, "lo')  # cut off by a kill
    for run, label in ((f"a={log}", "a"), (f"x={log.parent}", "x"), (log.parent, "lr=1e-3"), (log, "lr=1e-3")):
        found, curves = plot_losses.read_run(str(run))
        assert found == label and curves["val_loss"] == [(3, 1.2)] and curves["knn_top1"] == []
        assert [step for step, _ in curves["loss"]] == [1, 2, 3]
        assert [loss for _, loss in curves["loss"]] == pytest.approx([2, float("nan"), 1], nan_ok=True)
    log.rename(tmp_path / "other.jsonl")
    assert plot_losses.read_run(str(tmp_path / "other.jsonl"))[0] == "other"


def test_knn_accuracies_have_a_panel_of_their_own(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    knn = [{"step": step, "knn_top1": value, "rankme": 3.0} for step, value in ((0, 12.5), (2, 25.0))]
    write_log(tmp_path / "a" / "log.jsonl", knn[0], {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, knn[1])
    write_log(tmp_path / "b" / "log.jsonl", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "val_loss": 1.5})
    figures = []
    monkeypatch.setattr(plot_losses, "pyplot", lambda salt: StandIn(pyplot(salt), close=figures.append))
    plot_losses.main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "l.svg")])
    losses, accuracies = figures[0].axes
    assert [line.get_label() for line in losses.lines] == ["a, loss", "b, loss", "b, val_loss"]
    (line,) = accuracies.lines
    assert list(line.get_xdata()) == [0, 2] and list(line.get_ydata()) == [12.5, 25.0]
    assert accuracies.get_ylabel() == "kNN top-1, %" and line.get_color() == losses.lines[0].get_color()


def test_the_table_of_references_is_that_of_the_files():
    """Its figures: the loss at the first report, after 100 and after 300 steps."""
    text = (ROOT / "docs/run.md").read_text()
    rows = re.findall(r"^\| `(quickstart_\w+)` \|[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    names = {path.stem for path in (ROOT / "docs" / "runs").glob("quickstart_*.jsonl")}
    assert names == {name for name, *_ in rows}
    for name, *values in rows:
        losses = dict(plot_losses.read_run(str(ROOT / "docs" / "runs" / f"{name}.jsonl"))[1]["loss"])
        assert [f"{losses[step]:.3f}" for step in (10, 100, 300)] == values


def test_the_default_picture_replaces_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("reconstruction.png").write_text("of yesterday")
    assert "'reconstruction.png' exists already: give --out" in refused(capsys, visualize.main, "run")
    visualize.main(["--patterns", "p.png"])
    assert Path("reconstruction.png").read_text() == "of yesterday"


def test_the_committed_picture_of_patterns_is_today_s(tmp_path):
    visualize.main(["--patterns", str(tmp_path / "p.png")])
    ours, committed = (np.asarray(Image.open(p)) for p in (tmp_path / "p.png", ROOT / "docs/figures/patterns.png"))
    assert ours.shape == committed.shape
    assert (ours != committed).any(axis=2).mean() < 0.02  # letters depend on the version of Pillow


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("losses.txt", "--out 'losses.txt' must end in .svg or .png or .pdf"),
        ("/dev/null/losses.svg", "--out '/dev/null/losses.svg' cannot be written: the folder"),
    ],
)
def test_loss_plots_that_cannot_be_written(tmp_path, monkeypatch, capsys, out, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, plot_losses.main, "nowhere", "--out", out)
