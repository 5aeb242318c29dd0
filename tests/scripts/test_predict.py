"""Predictions for images without labels, against the evaluations of the runs and loops of their own."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.detection import predict_objects
from downstream.segmentation import predict_labels
from downstream.segmentation.predict_labels import LabelMaps
from encoders.trained import load
from scripts import pack_dataset, predict
from scripts.parts import predict_classes
from tests.conftest import write_photo
from tests.downstream.bands import bands, write_array, write_bands
from tests.downstream.conftest import detected, encoder, segmented, shapes, striped  # noqa: F401  (fixtures)
from tests.downstream.dense import detect, segment
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import evaluate, finetune, refused
from util.data import pixel_format
from util.evaluate import predictions
from util.evaluate.predictions import open_unlabelled
from util.evaluate.results import RESULTS
from util.run.files.reports import read_json


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


def interrupt_at(monkeypatch, module, name, number):
    """Has a function raise KeyboardInterrupt at its call of this number, from 0. Returns the list of its calls."""
    function = getattr(module, name)
    calls = []

    def counted(*args, **options):
        calls.append(args)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


# ------------------------------------------------------------------------------------------------------- classification


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def classified(labelled, tmp_path_factory):
    """(the folder of a fine-tuned classifier, the probabilities that its evaluation has written for val/)."""
    folder = tmp_path_factory.mktemp("classifier")
    finetune(labelled, folder / "run", "--epochs", 1)
    evaluate(labelled, folder / "run", "--predictions", folder / "evaluated.csv")
    return folder / "run", rows_of(folder / "evaluated.csv")


def without_class(rows):
    return [{name: value for name, value in row.items() if name != "class"} for row in rows]


def test_probabilities_are_those_of_the_evaluation(classified, labelled, tmp_path):
    folder, expected = classified
    assert run(folder, labelled / "val", tmp_path / "out", "--batch_size", 4) == 0
    assert rows_of(tmp_path / "out" / "predictions.csv") == without_class(expected)


def test_a_list_and_packed_shards_give_the_same(classified, labelled, tmp_path, monkeypatch):
    folder, expected = classified
    pack_dataset.main([str(labelled), str(tmp_path / "packed"), "--workers", "1"])
    paths = [row["image"] for row in expected]
    (tmp_path / "list.txt").write_text("\n".join([*paths[::-1], ""]))
    packed = tmp_path / "packed" / "val"
    assert run(folder, tmp_path / "list.txt", tmp_path / "listed") == 0
    assert run(folder, packed, tmp_path / "unpacked", "--num_workers", 1) == 0
    listed = rows_of(tmp_path / "listed" / "predictions.csv")
    assert listed == without_class(expected)[::-1]
    unpacked = rows_of(tmp_path / "unpacked" / "predictions.csv")
    for row, other in zip(unpacked, expected, strict=True):
        assert row["image"].endswith("/".join(other["image"].split("/")[-2:]))
        assert (row["cat"], row["dog"]) == (other["cat"], other["dog"])


def test_an_interrupted_classification_goes_on(classified, labelled, tmp_path, monkeypatch):
    folder, expected = classified
    monkeypatch.setattr(predictions, "IMAGES_PER_PART", 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, predict_classes, "format_probabilities", 5)
        run(folder, labelled / "val", tmp_path / "out", "--batch_size", 1)
    assert not (tmp_path / "out" / "predictions.csv").exists()
    assert not [name for name in files_in(tmp_path / "out") if ".tmp-" in name]
    calls = interrupt_at(monkeypatch, predict_classes, "format_probabilities", 99)
    run(folder, labelled / "val", tmp_path / "out")
    assert len(calls) == 2  # of seven images
    assert rows_of(tmp_path / "out" / "predictions.csv") == without_class(expected)
    run(folder, labelled / "val", tmp_path / "out")
    assert len(calls) == 2


def test_new_images_are_added(classified, labelled, tmp_path, monkeypatch):
    folder, expected = classified
    shutil.copytree(labelled / "val", tmp_path / "images")
    first = min((tmp_path / "images").rglob("*.png"))
    first.rename(tmp_path / "kept.png")
    run(folder, tmp_path / "images", tmp_path / "out")
    (tmp_path / "kept.png").rename(first)
    calls = interrupt_at(monkeypatch, predict_classes, "format_probabilities", 99)
    monkeypatch.chdir(tmp_path)
    run(folder, "images", "out")
    assert len(calls) == 1  # although the folder is named in another way
    found = rows_of(tmp_path / "out" / "predictions.csv")
    assert [row["cat"] for row in found] == [row["cat"] for row in expected]


def test_what_cannot_be_read_is_named_and_the_others_go_on(classified, labelled, tmp_path, capsys):
    folder, expected = classified
    shutil.copytree(labelled / "val", tmp_path / "images")
    (tmp_path / "images" / "bird").mkdir()
    (tmp_path / "images" / "bird" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    (tmp_path / "images" / "anim.gif").write_bytes(b"GIF89a")
    assert run(folder, tmp_path / "images", tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert f"not predicted: '{tmp_path / 'images' / 'bird' / 'broken.jpg'}'" in err
    assert err.endswith("predict.py: error: 1 image cannot be read\n")
    assert "note: not read: 1 file ending in .gif" in out
    assert "predicted 7 of 8 images" in out
    found = rows_of(tmp_path / "out" / "predictions.csv")
    assert [row["cat"] for row in found] == [row["cat"] for row in expected]


def test_invalid_pixels_are_seen_as_in_the_evaluation(labelled, tmp_path):
    finetune(labelled, tmp_path / "run", "--epochs", 1, "--nodata", 127)
    evaluate(labelled, tmp_path / "run", "--predictions", tmp_path / "evaluated.csv")
    assert run(tmp_path / "run", labelled / "val", tmp_path / "out") == 0
    assert run(tmp_path / "run", labelled / "val", tmp_path / "valid", "--all_valid") == 0
    found = rows_of(tmp_path / "out" / "predictions.csv")
    assert found == without_class(rows_of(tmp_path / "evaluated.csv"))
    assert found != rows_of(tmp_path / "valid" / "predictions.csv")


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


def test_the_record_holds_the_colors_of_the_pictures(scenes, tmp_path):
    """They are half of the image's, of which 0 and 255 are the mean -+ 2 deviations, and half of the class's."""
    folder, _ = scenes
    settings = load(folder).settings
    dark = 255 * (2 - np.array(settings["mean"][:3]) / settings["std"][:3]) / 4
    array = np.zeros((30, 40, 5), np.uint16)
    write_array(tmp_path / "black.tif", array)
    assert run(folder, tmp_path / "black.tif", tmp_path / "out") == 0
    colors = read_json(tmp_path / "out" / "predict.json")["colors"]
    assert set(colors) == {"1", "2", "3"}
    labels = read_tiff(tmp_path / "out" / "labels" / "black.tif")
    of_classes = np.array([colors[str(value)] for value in labels.ravel()]).reshape(30, 40, 3)
    expected = (dark + of_classes) / 2
    picture = np.array(Image.open(tmp_path / "out" / "pictures" / "black.png"))
    assert np.abs(picture - expected).max() <= 1  # rounding


GEO = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 4.6e6, 0.0), True),
    (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, 32633), True),
    (34737, "s", 0, "WGS 84 / UTM zone 33N|", True),
    (42113, "s", 0, "0", True),
]
LAYOUTS = {
    "plain": dict(planarconfig="contig"),
    "strips": dict(planarconfig="contig", compression="zlib", rowsperstrip=7),
    "tiles": dict(planarconfig="contig", tile=(16, 32), compression="zlib"),
    "planes": dict(planarconfig="separate", tile=(32, 16), compression="zlib"),
    "whole_planes": dict(planarconfig="separate"),
    "pages": {},
    "big_endian": dict(planarconfig="contig", byteorder=">"),
}


def write_layouts(folder, array):
    """Writes [H, W, C] as TIFFs of several layouts."""
    tifffile = pytest.importorskip("tifffile")
    folder.mkdir()
    for name, layout in LAYOUTS.items():
        values = array
        if layout.get("planarconfig") != "contig":
            values = np.moveaxis(array, -1, 0)
        tifffile.imwrite(folder / f"{name}.tif", values, photometric="minisblack", extratags=GEO, **layout)


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


@pytest.mark.parametrize(("most", "strip_bytes"), [(2**22, 0), (0, 2**22), (0, 0)])
def test_a_scene_in_parts_is_the_scene_as_a_whole(scenes, tmp_path, monkeypatch, most, strip_bytes):
    """Whatever its layout is. The geo tags are kept, and nodata is that of the label map."""
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", most)
    monkeypatch.setattr(predict_labels, "STRIP_BYTES", strip_bytes)
    if most == 0:
        monkeypatch.setattr(pixel_format, "max_pixels", lambda: 1000)  # no image can be read as a whole
    folder, _ = scenes
    array = bands(9, size=(53, 77))
    write_layouts(tmp_path / "scenes", array)
    assert run(folder, tmp_path / "scenes", tmp_path / "out", "--keep_size") == 0
    expected = slow_labels(folder, array) + 1
    for name in LAYOUTS:
        path = tmp_path / "out" / "labels" / f"{name}.tif"
        found = read_tiff(path)
        assert (found != expected).mean() < 1e-3, name  # rounding
        picture = np.array(Image.open(tmp_path / "out" / "pictures" / f"{name}.png"))
        assert picture.shape == (77, 53, 3)
        assert (picture.max(axis=2) > 0).all()  # no part is left out
    with pytest.importorskip("tifffile").TiffFile(path) as file:
        page = file.pages[0]
        assert page.is_tiled
        assert page.compression == 8
        for code, _, _, value, _ in GEO:
            assert page.tags[code].value == (value if code != 42113 else "255")


def test_one_strip_is_the_whole_bit_for_bit(scenes, tmp_path, monkeypatch):
    folder, _ = scenes
    write_layouts(tmp_path / "scenes", bands(3, size=(90, 41)))
    run(folder, tmp_path / "scenes", tmp_path / "whole", "--keep_size")
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    run(folder, tmp_path / "scenes", tmp_path / "bands", "--keep_size")
    for kind in ("labels", "pictures"):
        for name in files_in(tmp_path / "whole" / kind):
            whole = (tmp_path / "whole" / kind / name).read_bytes()
            assert (tmp_path / "bands" / kind / name).read_bytes() == whole, name


def test_what_of_large_scenes_cannot_be_read_is_named(segmented, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A file that is cut short, and a grey one, which would be made RGB if it were not too large to be read whole."""
    tifffile = pytest.importorskip("tifffile")
    array = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for name in ("a", "b"):
        tifffile.imwrite(tmp_path / "images" / f"{name}.tif", array, photometric="rgb", tile=(16, 16))
    tifffile.imwrite(tmp_path / "images" / "c.tif", array[..., 0], tile=(16, 16))
    whole = (tmp_path / "images" / "b.tif").read_bytes()
    run(segmented, tmp_path / "images", tmp_path / "whole", "--keep_size")
    (tmp_path / "images" / "b.tif").write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    monkeypatch.setattr(predict_labels, "max_pixels", lambda: 1000)
    capsys.readouterr()
    assert run(segmented, tmp_path / "images", tmp_path / "out", "--keep_size") == 1
    assert files_in(tmp_path / "out" / "labels") == ["a.tif"]
    assert np.array_equal(*[read_tiff(tmp_path / kind / "labels" / "a.tif") for kind in ("whole", "out")])
    err = capsys.readouterr().err
    assert re.search("not predicted: '.*b.tif' cannot be decoded", err)
    assert re.search("not predicted: '.*c.tif' has 1 band of uint8, but large images must have 3 channels", err)


def test_what_cannot_be_read_in_parts_is_read_as_a_whole(segmented, tmp_path, monkeypatch):  # noqa: F811
    """Files that Pillow makes RGB, or decodes where tifffile needs a further library."""
    array = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    Image.fromarray(array[..., 0]).save(tmp_path / "images" / "grey.tif")
    Image.fromarray(array).save(tmp_path / "images" / "lzw.tif", compression="tiff_lzw")
    Image.fromarray(array).save(tmp_path / "images" / "plain.tif")
    run(segmented, tmp_path / "images", tmp_path / "whole", "--keep_size")
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    assert run(segmented, tmp_path / "images", tmp_path / "out", "--keep_size") == 0
    for name in ("grey.tif", "lzw.tif", "plain.tif"):
        maps = [read_tiff(tmp_path / kind / "labels" / name) for kind in ("whole", "out")]
        assert np.array_equal(*maps), name


def test_a_scene_that_would_be_scaled_is_refused(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    for module in (predict_labels, pixel_format):
        monkeypatch.setattr(module, "max_pixels", lambda: 1000)
    folder, _ = scenes
    write_layouts(tmp_path / "scenes", bands(9, size=(48, 77)))
    words = [folder, tmp_path / "scenes", "--output_dir", tmp_path / "out", "--device", "cpu"]
    message = refused(capsys, predict.main, *words)
    assert "has 48 x 77 pixels, which --image_scale of the run would make 24 x 39: give --keep_size" in message


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


@pytest.mark.parametrize("most", [0, 2**22])
def test_pixels_without_a_valid_channel_are_marked(with_holes, tmp_path, monkeypatch, most):
    """They do not count in the score of the run."""
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", most)
    monkeypatch.setattr(predict_labels, "STRIP_BYTES", 0)
    folder, data = with_holes
    assert run(folder, data / "images" / "validation", tmp_path) == 0
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


def test_an_interrupted_segmentation_goes_on(segmented, striped, tmp_path, monkeypatch):  # noqa: F811
    images = striped / "images" / "validation"
    run(segmented, images, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, predict_labels, "resize_logits", 3)
        run(segmented, images, tmp_path / "parts")
    assert len(files_in(tmp_path / "parts" / "labels")) == 3
    calls = interrupt_at(monkeypatch, predict_labels, "resize_logits", 99)
    run(segmented, images, tmp_path / "parts")
    assert len(calls) == 3
    for name in files_in(tmp_path / "whole" / "labels"):
        expected = (tmp_path / "whole" / "labels" / name).read_bytes()
        assert (tmp_path / "parts" / "labels" / name).read_bytes() == expected


def test_a_kill_while_a_scene_is_written_leaves_no_half_of_it(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_labels, "MAX_WHOLE", 0)
    folder, _ = scenes
    write_layouts(tmp_path / "scenes", bands(9, size=(53, 77)))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, LabelMaps, "label_values", 10)
        run(folder, tmp_path / "scenes", tmp_path / "out", "--keep_size", "--num_pictures", 0)
    assert len(files_in(tmp_path / "out" / "labels")) == 1


# ------------------------------------------------------------------------------------------------------------ detection


def average_precisions(truth, detections):
    """By faster-coco-eval itself, or by pycocotools if it is there, from the files."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
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


def test_an_interrupted_detection_goes_on(detected, shapes, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(predictions, "IMAGES_PER_PART", 2)
    run(detected, shapes / "val2017", tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, predict_objects, "detect", 3)
        run(detected, shapes / "val2017", tmp_path / "parts")
    calls = interrupt_at(monkeypatch, predict_objects, "detect", 99)
    run(detected, shapes / "val2017", tmp_path / "parts")
    run(detected, shapes / "val2017", tmp_path / "parts")
    assert len(calls) == 2
    for name in ("images.json", "detections.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    images = json.loads((tmp_path / "whole" / "images.json").read_text())["images"]
    assert [image["id"] for image in images] == [1, 2, 3, 4, 5]


def test_a_kill_between_the_two_files_mixes_no_images(detected, shapes, tmp_path, monkeypatch):  # noqa: F811
    """An image that is new gives later ones other ids."""
    shutil.copytree(shapes / "val2017", tmp_path / "images")
    run(detected, tmp_path / "images", tmp_path / "whole")
    (tmp_path / "images" / "001.png").rename(tmp_path / "kept.png")
    run(detected, tmp_path / "images", tmp_path / "out")
    (tmp_path / "kept.png").rename(tmp_path / "images" / "001.png")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(patch, predict_objects, "write_json", 1)
        run(detected, tmp_path / "images", tmp_path / "out")
    run(detected, tmp_path / "images", tmp_path / "out")
    for name in ("images.json", "detections.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "{run} {data}/none --output_dir {tmp}/o",
            "none' does not exist: give a folder of images, a tar, a list of paths",
        ),
        ("{run} {tmp} --output_dir {tmp}-o", "and the folders in it hold no image or tar; read are .jpg"),
        ("{tmp}/none {data} --output_dir {tmp}/o", "RUN '{tmp}/none' does not exist"),
        ("{run} {data} --output_dir {data}/o", "--output_dir '{data}/o' lies inside the images"),
        (
            "{run} {data} --output_dir {tmp}/o --keep_size",
            "--keep_size is for segmentation, and '{run}' is a model of classif",
        ),
        ("{run} {data} --output_dir {tmp}/o --image_ids x", "--image_ids is for detection"),
        (
            "{run} {run}/checkpoint-3.pth --output_dir {tmp}/o",
            "is no image, no tar, and no text file with a path on each line",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(classified, labelled, tmp_path, capsys, words, message):
    places = {"run": classified[0], "data": labelled / "val", "tmp": tmp_path}
    arguments = [word.format(**places) for word in words.split()]
    assert message.format(**places) in refused(capsys, predict.main, *arguments, "--device", "cpu")


def test_predictions_of_two_models_do_not_mix(classified, segmented, labelled, tmp_path, capsys):  # noqa: F811
    run(classified[0], labelled / "val", tmp_path / "out")
    words = [segmented, labelled / "val", "--output_dir", tmp_path / "out", "--device", "cpu"]
    message = refused(capsys, predict.main, *words)
    assert re.search(f"holds predictions by '{classified[0]}/checkpoint-.*' .model was", message)


def test_outputs_of_other_programs_are_refused(segmented, labelled, tmp_path, capsys):  # noqa: F811
    """A label map of the data is no prediction."""
    (tmp_path / "out" / "labels").mkdir(parents=True)
    words = [segmented, labelled / "val", "--output_dir", tmp_path / "out", "--device", "cpu"]
    assert "holds labels of another program: choose another folder" in refused(capsys, predict.main, *words)
    words[words.index("--output_dir") + 1] = segmented
    assert "holds settings.json of another program" in refused(capsys, predict.main, *words)


def test_a_list_under_whose_images_names_change_is_refused(classified, labelled, tmp_path, capsys):
    """Outputs would have other places."""
    (tmp_path / "list.txt").write_text(f"{labelled}/val/cat/0.png\n")
    run(classified[0], tmp_path / "list.txt", tmp_path / "out")
    (tmp_path / "list.txt").write_text(f"{labelled}/val/cat/0.png\n{labelled}/val/dog/0.png\n")
    words = [classified[0], tmp_path / "list.txt", "--output_dir", tmp_path / "out", "--device", "cpu"]
    message = refused(capsys, predict.main, *words)
    assert f"(root was {labelled.resolve()}/val/cat and now is {labelled.resolve()}/val)" in message


def test_two_images_of_one_label_file_are_refused(segmented, tmp_path, capsys):  # noqa: F811
    (tmp_path / "images").mkdir()
    for name in ("a.png", "a.jpg"):
        write_photo(tmp_path / "images" / name)
    words = [segmented, tmp_path / "images", "--output_dir", tmp_path / "out", "--device", "cpu"]
    assert "'a.jpg' and 'a.png' would both be written to" in refused(capsys, predict.main, *words)


def test_images_without_labels_are_found_in_all_folders(tmp_path):
    for name in ("a.png", "x/b.png", "x/val/c.png", "train/d.png", "x/.hidden/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_photo(tmp_path / name)
    images = open_unlabelled(tmp_path)
    assert [predictions.name_of(images, i) for i in range(len(images))] == [
        "a.png",
        "train/d.png",
        "x/b.png",
        "x/val/c.png",
    ]
