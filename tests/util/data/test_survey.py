"""`--check_data`: the set-up of a run, a report of its images, a picture of some, an end before the first step."""

import re

import numpy as np
import pytest
from PIL import Image

from downstream.pictures import default_colors
from tests.downstream.bands import replace_images
from tests.downstream.dense import detect, segment, write_shapes, write_stripes
from tests.downstream.detection.coco import write_coco
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import finetune, pretrain, refused
from util.data.images import ImageFiles, Reading
from util.data.invalid_pixels import InvalidPixels
from util.data.pictures import PANEL
from util.data.survey import describe_pixels

CHECK = "check.png"
GAP = 6  # between panels
HEAD = 20  # for the title
PROGRAMS = {"pretrain": pretrain, "finetune": finetune, "segment": segment, "detect": detect}


@pytest.fixture(scope="module")
def data(labelled, tmp_path_factory):
    """{name of a program: a sound data set}"""
    root = tmp_path_factory.mktemp("data")
    pairs = write_stripes(root / "pairs")
    shapes = write_shapes(root / "shapes")
    return {"pretrain": labelled, "finetune": labelled, "segment": pairs, "detect": shapes}


def state_of_folder(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", CHECK)]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_check_reports_each_split_that_the_run_opens(name, data, tmp_path, capsys):
    flags = ["--knn_every", 1] if name == "pretrain" else []
    words = PROGRAMS[name].command(data[name], tmp_path / "a" / "out", *flags, "--check_data")
    assert PROGRAMS[name].module.main(words) is True
    out = capsys.readouterr().out
    assert re.findall(r"^(train|val): \d+ images? in ", out, re.MULTILINE) == ["train", "val"]
    assert "trainable parameters" in out or "M parameters" in out  # as a start prints it
    assert "step 1" not in out
    assert {path.name for path in (tmp_path / "a" / "out").iterdir()} == {".lock", CHECK}
    expected = {
        "pretrain": "cat 12 (50.0%), dog 12 (50.0%)",
        "finetune": "cat 4 (57.1%), dog 3 (42.9%)",
        "segment": "0 (class 0)",
        "detect": "13 objects, 13 with a mask",
    }
    assert expected[name] in out


def test_a_run_that_is_checked_stays_as_it_is_and_ends_with_the_error_of_a_start(photos, tmp_path, capsys):
    folder = tmp_path / "run"
    pretrain(photos, folder, "--max_steps", 3)
    message = pretrain.refused(capsys, photos, folder, "--batch_size", 25, "--check_data")
    assert message == pretrain.refused(capsys, photos, folder, "--batch_size", 25)
    (folder / ".checkpoint-9.pth.tmp-1").touch()  # of a killed process; a start would remove it
    before = state_of_folder(folder)
    pretrain.module.main(pretrain.command(photos, folder, "--check_data"))
    assert state_of_folder(folder) == before


def test_a_changed_setting_is_found_before_the_run_is_resumed(photos, tmp_path, capsys):
    pretrain(photos, tmp_path, "--max_steps", 3)
    before = state_of_folder(tmp_path)
    assert "--mask_ratio" in pretrain.refused(capsys, photos, tmp_path, "--mask_ratio", 0.8, "--check_data")
    assert state_of_folder(tmp_path) == before


def check_picture(program, data, out, *flags):
    """The panels of `--check_data`, [n, side, side, 3]."""
    program.module.main(program.command(data, out, *flags, "--no-hflip", "--check_data"))
    picture = np.array(Image.open(out / CHECK))[HEAD:, GAP:]
    step = PANEL + GAP
    rows = len(picture) // step
    columns = picture.shape[1] // step
    assert picture.shape == (rows * step, columns * step, 3)
    panels = picture.reshape(rows, step, columns, step, 3).swapaxes(1, 2).reshape(-1, step, step, 3)
    return panels[:, :PANEL, :PANEL].astype(int)


def test_boxes_and_masks_are_drawn_where_they_are(tmp_path):
    def edit(content):
        del content["annotations"][1:]
        content["annotations"][0] |= {"bbox": [12, 6, 24, 12], "segmentation": [[12, 6, 36, 6, 36, 18, 12, 18]]}

    root = tmp_path / "data"
    for split, number in (("train", 4), ("val", 1)):
        write_coco(root, split, number, size=(48, 48), edit=edit)
    flags = "--input_size 48 --scale_range 1 1 --total_batch_size 1"
    panel, *_ = check_picture(detect, root, tmp_path / "out", *flags.split())
    color = default_colors(2)[1]  # of "bar", the second category by its id
    assert (panel[47:49, 200:280] == color).all(axis=2).any(axis=0).all()  # 8 pixels for one
    assert (panel[60:140, 287:289] == color).all(axis=2).any(axis=1).all()
    img = np.array(Image.open(root / "train2017" / "000.png")).astype(int)
    assert np.abs(panel[84, 244] - (0.6 * img[10, 30] + 0.4 * color)).max() <= 2
    assert np.abs(panel[324, 244] - img[40, 30]).max() <= 1


def test_labels_and_invalid_pixels_are_drawn_where_they_are(tmp_path):
    root = tmp_path / "data"
    for split in ("training", "validation"):
        write_pairs(root, 5, split, size=(24, 24), values=(0, 0, 0, 0, 1, 1, 255, 255))
    rng = np.random.default_rng(0)

    def bright_above(number, size):
        values = rng.integers(20_000, 30_000, (24, 24, 13)).astype(np.uint16)
        values[12:] = 0
        return values

    replace_images(root, bright_above)
    flags = "--in_chans 13 --nodata 0 --image_scale 24 24 --input_size 24 --ratio_range 1 1 --cat_max_ratio 1"
    names = tmp_path / "names.txt"
    names.write_text("255 0 0 a\n0 0 255 b\nc\n")
    panels = check_picture(segment, root, tmp_path / "out", *flags.split(), "--class_names", names)
    first = panels[0][120:180:16, 8::16]  # a pixel of each of four rows, 16 pixels for one
    assert (first[:, :12, 0] >= 127).all()
    assert (first[:, :12, 1:] <= 128).all()
    assert (first[:, 12:18, 2] >= 127).all()
    assert (first[:, 12:18, :2] <= 128).all()
    assert np.ptp(first[:, 18:], axis=(0, 1)).min() > 50  # the image itself
    holes = panels[0][192:]
    assert {tuple(color) for color in holes.reshape(-1, 3).tolist()} == {(0, 0, 0), (255, 255, 255)}
    assert 0.4 < holes.mean() / 255 < 0.6


def test_classes_are_written_on_the_samples(data, tmp_path):
    flags = ["--input_size", "8", "--patch_size", "4", "--batch_size", "4", "--mixup", "0", "--cutmix", "0"]
    panels = check_picture(finetune, data["finetune"], tmp_path, *flags)
    pixels = panels[0].reshape(8, PANEL // 8, 8, PANEL // 8, 3)
    is_plain = (pixels == pixels[:, -1:, :, -1:]).all(axis=(1, 3, 4))
    assert not is_plain[0, 0]  # the text
    assert is_plain[1:].all()


def test_an_evaluation_has_no_check(capsys, labelled):
    words = ["--eval", "--resume", "x", "--check_data", "--data_path", labelled]
    assert "--check_data" in refused(capsys, finetune.module.main, *words)


def test_values_sizes_and_invalid_shares_are_those_of_the_images(tmp_path):
    pixels = np.random.default_rng(0).integers(1, 900, (3, 6, 5, 2)).astype(np.uint16)
    pixels[0, :2] = 0
    for i, img in enumerate(pixels):
        np.save(tmp_path / f"{i}.npy", img)
    (tmp_path / "3.npy").write_bytes(b"no array")
    samples = [(f"{i}.npy", 0) for i in range(4)]
    images = ImageFiles(tmp_path, samples, [], reading=Reading(2, invalid=InvalidPixels(nodata=0)))
    images.check(max_bad_fraction=0.5)
    lines = describe_pixels(images)
    assert lines[0].startswith("1 of 4 images cannot be decoded")
    assert "6 to 6 px high, 5 to 5 px wide" in lines
    valid = np.where(pixels == 0, np.nan, pixels)
    means = np.nanmean(valid, axis=(0, 1, 2))
    lowest = np.nanmin(valid, axis=(0, 1, 2))
    highest = np.nanmax(valid, axis=(0, 1, 2))
    numbers = [" ".join(f"{value:.4g}" for value in values) for values in (lowest, means, highest)]
    assert "lowest {}, mean {}, highest {}".format(*numbers) in lines
    assert f"{2 / 18:.1%} of all values are invalid" in lines
