"""Predictions for images without labels, against the evaluations of the runs and loops of their own."""

import csv
import json
import os
import resource
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.segmentation import predict_labels
from encoders.trained import load
from scripts import pack_dataset, predict
from tests.conftest import write_photo
from tests.downstream.bands import bands, write_array, write_bands
from tests.downstream.conftest import detected, encoder, segmented, shapes, striped  # noqa: F401  (fixtures)
from tests.downstream.dense import detect, segment
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import evaluate, finetune, refused
from util.data import decode, pixel_format
from util.data.images import ImageFiles
from util.data.pictures import PANEL
from util.data.transforms import ResizeCenterCrop, to_tensor
from util.evaluate.predictions import RECORD, name_of, open_unlabelled, output_paths
from util.evaluate.predictions import RESULTS as RESULT_LINES
from util.evaluate.results import RESULTS
from util.run.files.json_files import read_json


def run(folder, images, out, *flags):
    """Predicts. Returns the exit code."""
    words = [folder, images, "--output_dir", out, "--device", "cpu", "--num_workers", 0, *flags]
    try:
        predict.main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code
    return 0


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------------- classification


def rows_of(out):
    with open(out / "predictions.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def classified(labelled, tmp_path_factory):
    """The folder of a fine-tuned classifier."""
    folder = tmp_path_factory.mktemp("classifier")
    finetune(labelled, folder, "--epochs", 1)
    return folder


@pytest.fixture(scope="module")
def expected(classified, labelled, tmp_path_factory):
    """The predictions for val/."""
    out = tmp_path_factory.mktemp("predictions")
    run(classified, labelled / "val", out, "--batch_size", 4)
    return rows_of(out)


def test_probabilities_are_those_of_a_loop_and_of_the_evaluation(classified, labelled, expected):
    trained = load(classified)
    settings = trained.settings
    crop = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], False)
    mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("mean", "std"))
    hits = 0
    for row, path in zip(expected, sorted((labelled / "val").rglob("*.png")), strict=True):
        assert row["image"] == str(path)
        img = crop(to_tensor(np.array(Image.open(path).convert("RGB"))))
        with torch.no_grad():
            probabilities = trained.model(((img / 255 - mean) / std)[None]).softmax(dim=1)[0].tolist()
        assert [float(row["cat"]), float(row["dog"])] == pytest.approx(probabilities, abs=1e-4)
        hits += path.parent.name == max("cat", "dog", key=lambda name: float(row[name]))
    assert evaluate(labelled, classified)["top1"] == pytest.approx(100 * hits / len(expected))


def test_a_list_and_packed_shards_give_the_same(classified, labelled, expected, tmp_path):
    pack_dataset.main([str(labelled), str(tmp_path / "packed"), "--workers", "1"])
    paths = [row["image"] for row in expected]
    (tmp_path / "list.txt").write_text("\n".join([*paths[::-1], ""]), encoding="utf-8-sig")
    packed = tmp_path / "packed" / "val"
    assert run(classified, tmp_path / "list.txt", tmp_path / "listed") == 0
    assert run(classified, packed, tmp_path / "unpacked", "--num_workers", 1) == 0
    assert rows_of(tmp_path / "listed") == expected[::-1]
    for row, other in zip(rows_of(tmp_path / "unpacked"), expected, strict=True):
        assert row["image"].endswith("/".join(other["image"].split("/")[-2:]))
        assert (row["cat"], row["dog"]) == (other["cat"], other["dog"])


def test_new_images_and_those_after_an_interruption_are_added(classified, labelled, expected, tmp_path, monkeypatch):
    """What a line of the results holds is not predicted again, and a part of a line is no result."""
    shutil.copytree(labelled / "val", tmp_path / "images")
    first, second, *_ = sorted((tmp_path / "images").rglob("*.png"))
    first.rename(tmp_path / "kept.png")
    run(classified, tmp_path / "images", tmp_path / "out")
    (tmp_path / "kept.png").rename(first)
    path = tmp_path / "out" / RESULT_LINES
    lines = path.read_text().split("\n")
    assert len(lines) == len(expected)  # the first one is empty
    cut = json.dumps([str(first), ["0.1", "0.9"]])[:-1]
    path.write_text("\n".join([json.dumps([str(second), ["done", "before"]]), cut]))
    monkeypatch.chdir(tmp_path)
    run(classified, "images", "out")  # the folder is named in another way
    found = [[row["cat"], row["dog"]] for row in rows_of(tmp_path / "out")]
    wanted = [[row["cat"], row["dog"]] for row in expected]
    assert found == [wanted[0], ["done", "before"], *wanted[2:]]


def test_what_cannot_be_read_is_named_and_the_others_go_on(classified, labelled, expected, tmp_path, capsys):
    shutil.copytree(labelled / "val", tmp_path / "images")
    (tmp_path / "images" / "bird").mkdir()
    (tmp_path / "images" / "bird" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    assert run(classified, tmp_path / "images", tmp_path / "out") == 1
    assert str(tmp_path / "images" / "bird" / "broken.jpg") in capsys.readouterr().err
    assert [row["cat"] for row in rows_of(tmp_path / "out")] == [row["cat"] for row in expected]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_that_are_all_lost_end_it_with_75(classified, labelled, tmp_path, monkeypatch, num_workers):
    """An unmounted disk, say. A single one that is missing is named."""
    shutil.copytree(labelled / "val", tmp_path / "images")
    write_record = predict.write_record

    def lose(*arguments):
        write_record(*arguments)
        shutil.rmtree(tmp_path / "images")

    monkeypatch.setattr(predict, "write_record", lose)
    assert run(classified, tmp_path / "images", tmp_path / "out", "--num_workers", num_workers) == 75


def test_a_batch_may_have_more_images_than_a_process_may_open_files(classified, expected, tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(100):
        shutil.copy(expected[0]["image"], tmp_path / "images" / f"{i:03d}.png")
    limit, no_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, no_limit))
        assert run(classified, tmp_path / "images", tmp_path / "out", "--num_workers", 1, "--batch_size", 100) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, no_limit))
    assert [float(row["cat"]) for row in rows_of(tmp_path / "out")] == pytest.approx([float(expected[0]["cat"])] * 100)


def test_names_need_not_be_unicode(classified, labelled, expected, tmp_path):
    (tmp_path / "images").mkdir()
    name = os.fsdecode(b"caf\xe9.png")
    shutil.copy(expected[0]["image"], tmp_path / "images" / name)
    assert run(classified, tmp_path / "images", tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["image"] == str(tmp_path / "images" / name)


def test_invalid_pixels_are_seen_as_in_the_evaluation(labelled, tmp_path):
    finetune(labelled, tmp_path / "run", "--epochs", 1, "--nodata", 127)
    assert run(tmp_path / "run", labelled / "val", tmp_path / "out") == 0
    assert run(tmp_path / "run", labelled / "val", tmp_path / "valid", "--all_valid") == 0
    found = rows_of(tmp_path / "out")
    assert found != rows_of(tmp_path / "valid")
    hits = sum((float(row["cat"]) > float(row["dog"])) == ("/cat/" in row["image"]) for row in found)
    loss = -sum(np.log(float(row["cat" if "/cat/" in row["image"] else "dog"])) for row in found) / len(found)
    scores = evaluate(labelled, tmp_path / "run")
    assert (scores["top1"], scores["loss"]) == pytest.approx((100 * hits / len(found), loss), abs=1e-4)


# --------------------------------------------------------------------------------------------------------- segmentation


def mean_iou(pairs, num_classes, first=0, ignore=(255,)):
    """Of pairs of label files (truth, predicted), pixel by pixel."""
    hits = [0] * num_classes
    true = [0] * num_classes
    guessed = [0] * num_classes
    for truth, predicted in pairs:
        for t, p in zip(truth.ravel().tolist(), predicted.ravel().tolist(), strict=True):
            if t in ignore:
                continue
            true[t - first] += 1
            guessed[p - first] += 1
            hits[t - first] += t == p
    ious = []
    for hit, t, p in zip(hits, true, guessed, strict=True):
        if t + p:
            ious.append(hit / (t + p - hit))
    return 100 * sum(ious) / len(ious)


def test_label_maps_have_the_score_of_the_run(segmented, striped, tmp_path):  # noqa: F811
    assert run(segmented, striped / "images" / "validation", tmp_path, "--num_pictures", 1) == 0
    truths = striped / "annotations" / "validation"
    names = files_in(truths)
    assert files_in(tmp_path / "labels") == names
    assert files_in(tmp_path / "pictures") == names[:1]
    pairs = []
    for name in names:
        pairs.append((np.array(Image.open(truths / name)), np.array(Image.open(tmp_path / "labels" / name))))
        assert Image.open(tmp_path / "labels" / name).mode == "P"
    last = read_json(segmented / RESULTS)["last"]
    assert mean_iou(pairs, 3) == pytest.approx(last["val_miou"])
    record = read_json(tmp_path / "predict.json")
    assert (record["task"], record["classes"], record["no_class"]) == (
        "segmentation",
        {"0": "0", "1": "1", "2": "2"},
        255,
    )


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """(the run, its data) of images of five bands, in whose label files 0 marks pixels without a class."""
    root = tmp_path_factory.mktemp("scenes")
    for split in ("training", "validation"):
        write_pairs(root, 4, split, values=(0, 1, 2, 3, 255))
    write_bands(root, ".tif")
    flags = "--in_chans 5 --num_classes 3 --reduce_zero_label --num_iters 3"
    folder = tmp_path_factory.mktemp("runs") / "scenes"
    segment(root, folder, *flags.split())
    return folder, root


def read_tiff(path):
    return pytest.importorskip("tifffile").imread(path)


def test_label_maps_of_tiffs_are_tiffs_with_the_values_of_the_label_files(scenes, tmp_path):
    folder, data = scenes
    assert run(folder, data / "images" / "validation", tmp_path) == 0
    truths = data / "annotations" / "validation"
    pairs = []
    for path in sorted(truths.glob("*.png")):
        predicted = read_tiff(tmp_path / "labels" / f"{path.stem}.tif")
        assert predicted.min() >= 1
        pairs.append((np.array(Image.open(path)), predicted))
    last = read_json(folder / RESULTS)["last"]
    assert mean_iou(pairs, 3, first=1, ignore=(0, 255)) == pytest.approx(last["val_miou"])


GEO = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 4.6e6, 0.0), True),
    (34735, "H", 16, (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32633), True),
    (42113, "s", 0, "0", True),
]
LAYOUTS = {
    "plain": dict(planarconfig="contig"),
    "strips": dict(planarconfig="contig", compression="zlib", rowsperstrip=7),
    "tiles": dict(planarconfig="contig", tile=(16, 32), compression="zlib"),
    "planes": dict(planarconfig="separate", tile=(32, 16), compression="zlib"),
    "big_endian": dict(planarconfig="contig", byteorder=">"),
}


def write_layout(path, array, **layout):
    """Writes [H, W, C] as a TIFF of a layout. Without one, each channel is a page."""
    values = array
    if layout.get("planarconfig") != "contig":
        values = np.moveaxis(array, -1, 0)
    pytest.importorskip("tifffile").imwrite(path, values, photometric="minisblack", extratags=GEO, **layout)


def slow_labels(folder, array, side=16, stride=10):
    """The classes of an image [H, W, C] of 16 bits: the mean logits of windows that a loop cuts out, one by one."""
    trained = load(folder)
    mean = torch.tensor(trained.settings["mean"])
    std = torch.tensor(trained.settings["std"])
    img = ((torch.from_numpy(array.astype(np.float32)) / 65535 - mean) / std).permute(2, 0, 1)
    _, height, width = img.shape
    total = torch.zeros(3, height, width)
    count = torch.zeros(height, width)
    for y in sorted({*range(0, height - side, stride), height - side}):
        for x in sorted({*range(0, width - side, stride), width - side}):
            with torch.no_grad():
                logits = trained.model(img[None, :, y : y + side, x : x + side])["decode"]
            total[:, y : y + side, x : x + side] += torch.nn.functional.interpolate(
                logits, (side, side), mode="bilinear", align_corners=False
            )[0]
            count[y : y + side, x : x + side] += 1
    return (total / count).argmax(dim=0).numpy()


@pytest.fixture(params=["whole", "in parts"])
def in_parts(request, monkeypatch):
    """Whether all TIFFs are large, and too large to be read as a whole."""
    if request.param == "in parts":
        pytest.importorskip("rasterio")
        monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
        for module in (decode, pixel_format):
            monkeypatch.setattr(module, "max_pixels", lambda: 1000)
    return request.param == "in parts"


def test_a_scene_in_parts_is_the_scene_as_a_whole(scenes, in_parts, tmp_path):
    """Whatever its layout is. The georeference is kept, and nodata is that of the label map."""
    rasterio = pytest.importorskip("rasterio")
    folder, _ = scenes
    array = bands(9, size=(53, 77))
    (tmp_path / "scenes").mkdir()
    for name, layout in LAYOUTS.items():
        write_layout(tmp_path / "scenes" / f"{name}.tif", array, **layout)
    assert run(folder, tmp_path / "scenes", tmp_path / "out", "--keep_size") == 0
    expected = slow_labels(folder, array) + 1
    record = read_json(tmp_path / "out" / RECORD)
    names = record["classes"]
    colors = record["colors"]
    for name in LAYOUTS:
        with rasterio.open(tmp_path / "out" / "labels" / f"{name}.tif") as file:
            assert (file.read(1) != expected).mean() < 1e-3, name  # rounding
            assert file.profile["tiled"]
            assert file.compression.name == "deflate"
            with rasterio.open(tmp_path / "scenes" / f"{name}.tif") as scene:
                assert file.crs == scene.crs == rasterio.crs.CRS.from_epsg(32633)
                assert file.transform == scene.transform == rasterio.Affine(10, 0, 5e5, 0, -10, 4.6e6)
            assert file.nodata == 255
            assert {value: list(file.colormap(1)[int(value)][:3]) for value in colors} == colors
            assert {value: file.tags()[f"class_{value}"] for value in names} == names
        picture = np.array(Image.open(tmp_path / "out" / "pictures" / f"{name}.png"))
        assert picture.shape == (77, 53, 3)
        assert (picture.max(axis=2) > 0).all()  # no part is left out


def test_scenes_are_shrunk_to_less_than_half_only_by_a_flag(scenes, tmp_path, capsys):
    """--image_scale is 64 24: a shorter side of 49 becomes 24."""
    folder, _ = scenes
    for side in (24, 30, 49):
        (tmp_path / str(side)).mkdir()
        write_array(tmp_path / str(side) / "scene.tif", bands(9, size=(side, 60)))
    for side in (24, 30):
        assert run(folder, tmp_path / str(side), tmp_path / f"out_{side}") == 0
    words = [folder, tmp_path / "49", "--output_dir", tmp_path / "out", "--device", "cpu"]
    assert "--keep_size" in refused(capsys, predict.main, *words)
    assert run(folder, tmp_path / "49", tmp_path / "out", "--no-keep_size", "--num_workers", 0) == 0


def test_weights_of_windows_are_those_of_the_evaluation(scenes, tmp_path):
    folder, data = scenes
    write_pairs(data / "more", 4, "validation", size=(60, 60), values=(0, 1, 2, 3, 255))
    images = write_bands(data / "more", ".tif") / "images" / "validation"
    maps = {}
    for weights in ("equal", "gaussian"):
        flags = ["--window_weights", weights, "--no-keep_size", "--num_workers", "0"]
        run(folder, images, tmp_path / weights, *flags)
        pairs = []
        for path in sorted((data / "more" / "annotations" / "validation").glob("*.png")):
            pairs.append((np.array(Image.open(path)), read_tiff(tmp_path / weights / "labels" / f"{path.stem}.tif")))
        scores = segment.evaluate(data / "more", folder, "--window_weights", weights)
        assert mean_iou(pairs, 3, first=1, ignore=(0, 255)) == pytest.approx(scores["miou"])
        maps[weights] = np.stack([predicted for _, predicted in pairs])
    assert (maps["equal"] != maps["gaussian"]).any()


def write_short(path, array):
    write_layout(path, array, **LAYOUTS["tiles"])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


UNREADABLE = {
    "pages": write_layout,
    "half": lambda path, array: write_layout(path, (array / 65535).astype(np.float16), planarconfig="contig"),
    "other": lambda path, array: write_layout(path, array.astype(np.float32), planarconfig="contig"),
    "bands": lambda path, array: write_layout(path, array[..., :4], planarconfig="contig"),
    "short": write_short,
}


def test_what_of_large_scenes_is_not_read_is_named(scenes, tmp_path, monkeypatch, capsys):
    """Rasterio would read other values of them, or none."""
    pytest.importorskip("rasterio")
    folder, _ = scenes
    (tmp_path / "scenes").mkdir()
    for name, write in {"a": lambda path, array: write_layout(path, array, **LAYOUTS["tiles"]), **UNREADABLE}.items():
        write(tmp_path / "scenes" / f"{name}.tif", bands(9, size=(53, 77)))
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    for module in (decode, pixel_format):
        monkeypatch.setattr(module, "max_pixels", lambda: 1000)
    assert run(folder, tmp_path / "scenes", tmp_path / "out", "--keep_size") == 1
    assert files_in(tmp_path / "out" / "labels") == ["a.tif"]
    err = capsys.readouterr().err
    for name in UNREADABLE:
        assert f"not predicted: '{tmp_path / 'scenes' / name}.tif'" in err


def test_what_cannot_be_read_in_parts_is_read_as_a_whole(segmented, tmp_path, monkeypatch, recwarn):  # noqa: F811
    """A grey file, which becomes RGB, and one with alpha, which is dropped. No warning says that they lie nowhere."""
    array = np.random.default_rng(0).integers(0, 256, (40, 50, 4), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    Image.fromarray(array[..., 0]).save(tmp_path / "images" / "grey.tif")
    Image.fromarray(array).save(tmp_path / "images" / "alpha.tif")
    Image.fromarray(array[..., :3]).save(tmp_path / "images" / "plain.tif")
    run(segmented, tmp_path / "images", tmp_path / "whole", "--keep_size")
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    assert run(segmented, tmp_path / "images", tmp_path / "out", "--keep_size") == 0
    for kind in ("labels", "pictures"):
        for name in files_in(tmp_path / "whole" / kind):
            whole = (tmp_path / "whole" / kind / name).read_bytes()
            assert (tmp_path / "out" / kind / name).read_bytes() == whole, name
    assert "geotransform" not in "".join(str(warning.message) for warning in recwarn)


def write_holes(root):
    """Adds pixels of 0 to the scenes of five bands: in all bands, and elsewhere in one."""
    for path in root.rglob("*.tif"):
        array = read_tiff(path) + 1
        array[3:12, 5:17] = 0
        array[14:, :, 2] = 0
        write_array(path, array)


@pytest.fixture(scope="module")
def with_holes(tmp_path_factory):
    """(the run, its data) of scenes with invalid pixels."""
    root = tmp_path_factory.mktemp("holes")
    for split in ("training", "validation"):
        write_pairs(root, 4, split)
    write_holes(write_bands(root, ".tif"))
    folder = tmp_path_factory.mktemp("runs") / "holes"
    segment(root, folder, *["--in_chans", "5", "--nodata", "0", "--num_iters", "3", "--image_scale", "40", "30"])
    return folder, root


def test_pixels_without_a_valid_channel_are_marked(with_holes, in_parts, tmp_path):
    """They do not count in the score of the run, whose picture shows them black in the predictions of four images."""
    folder, data = with_holes
    is_black = (np.array(Image.open(folder / "predictions.png")) == 0).all(axis=2)
    _, _, in_predictions = np.split(is_black, 3, axis=1)
    assert in_predictions.sum() == pytest.approx(4 * 9 * 12 * (PANEL / 40) ** 2, rel=0.05)
    flags = ["--keep_size"] if in_parts else []  # the run has scaled them into their own size
    assert run(folder, data / "images" / "validation", tmp_path, *flags) == 0
    is_marked = np.zeros((30, 40), bool)
    is_marked[3:12, 5:17] = True
    pairs = []
    for path in sorted((data / "annotations" / "validation").glob("*.png")):
        predicted = read_tiff(tmp_path / "labels" / f"{path.stem}.tif")
        assert np.array_equal(predicted == 255, is_marked)
        truth = np.array(Image.open(path))
        truth[is_marked] = 255
        pairs.append((truth, predicted))
    assert mean_iou(pairs, 3) == pytest.approx(read_json(folder / RESULTS)["last"]["val_miou"])


def test_label_maps_that_exist_are_done(segmented, striped, tmp_path):  # noqa: F811
    images = striped / "images" / "validation"
    run(segmented, images, tmp_path)
    first, second, *_ = sorted((tmp_path / "labels").rglob("*.png"))
    expected = first.read_bytes()
    first.unlink()
    second.write_bytes(b"done before")
    run(segmented, images, tmp_path)
    assert first.read_bytes() == expected
    assert second.read_bytes() == b"done before"


# ------------------------------------------------------------------------------------------------------------ detection


def average_precisions(truth, detections):
    """By faster-coco-eval itself, from the files."""
    from faster_coco_eval import COCO
    from faster_coco_eval import COCOeval_faster as COCOeval

    coco = COCO(str(truth))
    found = []
    for kind in ("bbox", "segm"):
        evaluation = COCOeval(coco, coco.loadRes(str(detections)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        found.append(100 * evaluation.stats[0])
    return found


def test_detections_have_the_scores_of_the_run(detected, shapes, tmp_path):  # noqa: F811
    truth = shapes / "annotations" / "instances_val2017.json"
    assert run(detected, shapes / "val2017", tmp_path, "--image_ids", truth, "--num_pictures", 2) == 0
    box, mask = average_precisions(truth, tmp_path / "detections.json")
    last = read_json(detected / RESULTS)["last"]
    assert box == pytest.approx(last["val_box_ap"])
    if "val_mask_ap" in last:
        assert mask == pytest.approx(last["val_mask_ap"])
    assert len(files_in(tmp_path / "pictures")) == 2
    images = json.loads((tmp_path / "images.json").read_text())
    expected = json.loads(truth.read_text())
    assert images["categories"] == sorted(expected["categories"], key=lambda category: category["id"])
    assert images["images"] == sorted(expected["images"], key=lambda image: image["id"])


def test_objects_are_detected_beside_invalid_pixels(tmp_path):
    pytest.importorskip("faster_coco_eval")
    data = detect.write(tmp_path / "data", 4)
    write_holes(write_bands(data, ".tif"))
    detect(data, tmp_path / "run", *["--in_chans", "5", "--nodata", "0", "--num_iters", "3"])
    truth = data / "annotations" / "instances_val2017.json"
    assert run(tmp_path / "run", data / "val2017", tmp_path / "out", "--image_ids", truth) == 0
    box, _ = average_precisions(truth, tmp_path / "out" / "detections.json")
    assert box == pytest.approx(read_json(tmp_path / "run" / RESULTS)["last"]["val_box_ap"])


def test_objects_of_new_images_are_added(detected, shapes, tmp_path):  # noqa: F811
    """An image that is new gives later ones other ids."""
    shutil.copytree(shapes / "val2017", tmp_path / "images")
    run(detected, tmp_path / "images", tmp_path / "whole")
    (tmp_path / "images" / "001.png").rename(tmp_path / "kept.png")
    run(detected, tmp_path / "images", tmp_path / "out")
    (tmp_path / "kept.png").rename(tmp_path / "images" / "001.png")
    run(detected, tmp_path / "images", tmp_path / "out")
    for name in ("images.json", "detections.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    images = json.loads((tmp_path / "whole" / "images.json").read_text())["images"]
    assert [image["id"] for image in images] == [1, 2, 3, 4, 5]


def test_images_of_one_stem_are_two_images(detected, shapes, tmp_path):  # noqa: F811
    (tmp_path / "images").mkdir()
    img = Image.open(shapes / "val2017" / "000.png").convert("RGB")
    for name in ("a.png", "a.bmp"):
        img.save(tmp_path / "images" / name)
    assert run(detected, tmp_path / "images", tmp_path / "out") == 0
    assert files_in(tmp_path / "out" / "pictures") == ["a.bmp.png", "a.png.png"]
    images = json.loads((tmp_path / "out" / "images.json").read_text())["images"]
    assert [(image["id"], image["file_name"]) for image in images] == [(1, "a.bmp"), (2, "a.png")]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.fixture
def places(classified, segmented, detected, shapes, labelled, tmp_path):  # noqa: F811
    (tmp_path / "labels" / "labels").mkdir(parents=True)  # they are of another program
    (tmp_path / "one_stem").mkdir()
    for name in ("a.png", "a.jpg"):
        write_photo(tmp_path / "one_stem" / name)
    (tmp_path / "no_images.json").write_text(json.dumps({"images": []}))
    folders = {"run": classified, "segmented": segmented, "detected": detected, "tmp": tmp_path}
    return folders | {"data": labelled / "val", "shapes": shapes / "val2017"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("{run} {data}/none --output_dir {tmp}/o", "{data}/none"),
        ("{run} {tmp}/labels --output_dir {tmp}/o", "{tmp}/labels"),
        ("{tmp}/none {data} --output_dir {tmp}/o", "{tmp}/none"),
        ("{run} {data} --output_dir {data}/o", "--output_dir"),
        ("{run} {data} --output_dir {tmp}/o --keep_size", "--keep_size"),
        ("{run} {data} --output_dir {tmp}/o --image_ids x", "--image_ids"),
        ("{detected} {shapes} --output_dir {tmp}/o --image_ids {tmp}/no_images.json", "--image_ids"),
        ("{run} {run}/checkpoint-3.pth --output_dir {tmp}/o", "checkpoint-3.pth"),
        ("{segmented} {data} --output_dir {tmp}/labels", "--output_dir"),
        ("{segmented} {data} --output_dir {segmented}", "--output_dir"),
        ("{segmented} {tmp}/one_stem --output_dir {tmp}/o", "a.png"),
    ],
)
def test_what_cannot_be_predicted_is_refused(places, capsys, words, named):
    arguments = [word.format(**places) for word in words.split()]
    assert named.format(**places) in refused(capsys, predict.main, *arguments, "--device", "cpu")
    assert not (places["tmp"] / "o" / RECORD).exists()


def test_predictions_of_two_models_or_roots_do_not_mix(classified, segmented, labelled, tmp_path, capsys):  # noqa: F811
    """With another root of a list, outputs would have other places."""
    (tmp_path / "list.txt").write_text(f"{labelled}/val/cat/0.png\n")
    words = [tmp_path / "list.txt", "--output_dir", tmp_path / "out", "--device", "cpu"]
    run(classified, tmp_path / "list.txt", tmp_path / "out")
    assert "--output_dir" in refused(capsys, predict.main, segmented, *words)
    (tmp_path / "list.txt").write_text(f"{labelled}/val/cat/0.png\n{labelled}/val/dog/0.png\n")
    assert "--output_dir" in refused(capsys, predict.main, classified, *words)


@pytest.mark.parametrize("name", ["../../victim/photo.jpg", "/etc/photo.jpg", "a/../../photo.jpg"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    """It may come from the index of a tar."""
    images = ImageFiles(tmp_path, [("a/b.jpg", 0), (name, 0)], [])
    with pytest.raises(ValueError, match="photo.jpg"):
        output_paths(tmp_path / "labels", images, lambda _: ".png")


def test_images_without_labels_are_found_in_all_folders(tmp_path):
    for name in ("a.png", "x/b.png", "x/val/c.png", "train/d.png", "x/.hidden/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_photo(tmp_path / name)
    images = open_unlabelled(tmp_path)
    assert [name_of(images, i) for i in range(len(images))] == [
        "a.png",
        "train/d.png",
        "x/b.png",
        "x/val/c.png",
    ]
