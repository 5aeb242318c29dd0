import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import main_pretrain
from scripts import export, sample_photos, visualize
from util.checkpoint import newest_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--model mae_vit_mini_patch4 --batch_size 8 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"


def pretrain(photos, output_dir, *flags):
    main_pretrain.main([*FLAGS.split(), "--data_path", str(photos), "--output_dir", str(output_dir), *flags])


@pytest.mark.parametrize(
    ("flags", "measured"),
    [([], ["retained", "thrown"]), (["--no-progressive"], ["retained"]), (["--throw_ratio", "0"], ["retained"])],
)
def test_visualize_draws_and_measures(photos, tmp_path, capsys, flags, measured):
    pretrain(photos, tmp_path / "run", *flags)
    capsys.readouterr()
    visualize.main([str(tmp_path / "run"), "--out", str(tmp_path / "r.png"), "--patterns", str(tmp_path / "p.png"), "--rows", "5"])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "masked MSE" in line] == measured
    for name in ("r.png", "p.png"):
        picture = np.asarray(Image.open(tmp_path / name))
        assert picture.shape[1] > 300 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


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
    out, expected = capsys.readouterr().out, {"localmim": "HOG error at 8 px", "tec": "feature error", "greenmim": "masked MSE"}
    assert out.count(f": {expected[framework]} ") == 2
    if framework != "greenmim":
        export.main([str(tmp_path / "run"), "--out", str(tmp_path / "encoder.pth")])
        assert "largest difference of timm's features" in capsys.readouterr().out
    if framework == "tec":
        pretrain(photos, tmp_path / "other", "--model", "mae_vit_micro_patch4", "--seed", "1")
        (tmp_path / "teacher").rename(tmp_path / "moved")
        refused = {"": "is neither a file nor the name of a timm model", str(tmp_path / "other"): "has other weights than that of"}
        for teacher, message in refused.items():
            with pytest.raises(SystemExit):
                visualize.main([str(tmp_path / "run"), *(["--teacher", teacher] if teacher else [])])
            assert message in capsys.readouterr().err
        visualize.main([str(tmp_path / "run"), "--teacher", str(tmp_path / "moved"), "--out", str(tmp_path / "r.png")])


def test_masked_errors_against_a_loop(photos, tmp_path):
    pretrain(photos, tmp_path / "run")
    model, settings = visualize.load_run(newest_checkpoint(tmp_path / "run")[0])
    images = visualize.open_images("folder", photos)
    sums, normalize = {"retained": [], "thrown": []}, visualize.Normalize()
    for imgs, ids in visualize.crops(model, settings, images, range(6), batch_size=2):
        for img, row in zip(imgs, ids, strict=True):
            reconstruction, _ = model.reconstruct_image(normalize(img[None]), row[None])
            error = (normalize.undo(reconstruction)[0] - img / 255) ** 2
            for rank, token in enumerate(row.tolist()):
                r, c = divmod(token, 8)
                if rank >= 16:
                    sums["retained" if rank < 32 else "thrown"].append(error[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].mean())
    measured = visualize.measure(model, settings, images, range(6))
    assert measured == {"masked MSE": pytest.approx({name: torch.stack(v).mean().item() for name, v in sums.items()}, rel=1e-4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a checkpoint or a run's folder, or --patterns"),
        (["{tmp}"], "holds no intact checkpoint"),
        (["{tmp}/nowhere.pth"], "no checkpoint at"),
        (["{tmp}/weights.pth"], "does not say which model it holds"),
        (["{tmp}", "--rows", "0"], "must be at least 1, got 0 and 1000"),
        (["--patterns", "{tmp}/nowhere/p.png"], "No such file or directory"),
    ],
)
def test_visualize_names_what_is_wrong(tmp_path, capsys, arguments, message):
    torch.save({"model": {}}, tmp_path / "weights.pth")
    with pytest.raises(SystemExit) as stop:
        visualize.main([argument.format(tmp=tmp_path) for argument in arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_sample_photos_have_labels_and_disjoint_splits(tmp_path, monkeypatch):
    """On a photograph that is black where train/ may look and white where val/ may, no crop mixes the two."""
    data = pytest.importorskip("skimage.data")
    boundary = 300 * 2 // 3
    half = np.where(np.arange(300) < boundary, 0, 255).astype(np.uint8)
    Image.fromarray(np.tile(half[:, None], (200, 1, 3))).save(tmp_path / "half.png")
    monkeypatch.setattr(data, "data_dir", str(tmp_path))
    monkeypatch.setattr(sample_photos, "PHOTOS", ("half.png",))
    sample_photos.write_photos(tmp_path / "out", side=32, num_train=20, num_val=5)
    for split, value, count in (("train", 0, 20), ("val", 255, 5)):
        files = sorted((tmp_path / "out" / split / "half").iterdir())
        assert len(files) == count and all((np.asarray(Image.open(f)) == value).all() for f in files)


def test_sample_photos_exist_in_the_package():
    data = pytest.importorskip("skimage.data")
    assert all((Path(data.data_dir) / name).is_file() for name in sample_photos.PHOTOS)


def test_loss_plot_renders(photos, tmp_path):
    pytest.importorskip("matplotlib")
    pretrain(photos, tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    script = ROOT / "scripts" / "plot_losses.py"
    subprocess.run([sys.executable, script, f"MAE={log}", "--out", tmp_path / "l.svg"], check=True, timeout=120)
    assert "<svg" in (tmp_path / "l.svg").read_text()
