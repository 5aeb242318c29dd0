"""Images that lack bands, with invalid pixels, in whole runs: pre-training, fine-tuning, probes, export and packing."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from downstream.probe import main_probe
from downstream.probe.models import open_encoder
from scripts import pack_dataset, visualize
from scripts.export import export
from tests import runs
from tests.runs import evaluate, refused, reports, state
from tests.util.data.test_invalid_pixels import clouds
from tests.util.data.test_pixel_format import assert_loads, pixels, write_tiff
from util.data.invalid_pixels import InvalidPixels
from util.data.open import open_images
from util.data.statistics import measure_statistics

pretrain = runs.pretrain
BANDS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 12)
MARKS = ["--nodata", 0, "--bands", *BANDS]
THIRTEEN = ["--in_chans", 13, *MARKS]
DECLARED = InvalidPixels(0.0, bands=(BANDS,))
finetune = runs.finetune.also("--batch_size 4")
SIDE = 32


def reports_of_features(folder):
    return [report for report in reports(folder) if report.get("rankme") is not None]


@pytest.fixture(scope="module")
def satellite(tmp_path_factory):
    """Images of 13 bands, half of them with 10, all with clouds of value 0."""
    root = tmp_path_factory.mktemp("satellite")
    size = (40, 44)
    seed = 0
    for split, count in (("train", 8), ("val", 4)):
        for name in ("crop", "forest"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                seed += 1
                array = pixels(13, "uint16", size, seed).clip(1)
                array *= ~clouds(size=size, seed=seed)
                if i % 2:
                    array = array[:, :, list(BANDS)]
                write_tiff(folder / f"{i}.tif", np.ascontiguousarray(array))
    return root


@pytest.fixture(scope="module")
def encoder(satellite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    pretrain(satellite, folder, *THIRTEEN, "--knn_every", 1)
    return folder


@pytest.fixture(scope="module")
def classifier(satellite, encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    finetune(satellite, folder, *THIRTEEN, "--finetune", encoder, "--mixup", 0.8)
    return folder


def test_thirteen_bands_of_which_some_files_have_ten_in_pre_training(satellite, encoder):
    images = open_images("folder", satellite, in_chans=13, invalid=DECLARED)
    (mean, std), _ = measure_statistics(images)
    settings = state(encoder)["meta"]["settings"]
    assert settings["mean"] == mean
    assert settings["std"] == std
    assert settings["nodata"] == 0.0
    assert settings["mask_band"] is None
    assert settings["bands"] == [list(BANDS)]
    values = []
    for i in range(len(images)):
        array, _ = images.load(i)
        values.append(array[:, :, 12].astype(np.float64))
    assert mean[12] == pytest.approx(np.nanmean(values) / 65535, rel=1e-9)
    found = reports_of_features(encoder)
    assert len(found) == 3
    for report in found:
        assert "knn_top1" in report


def test_a_classifier_of_thirteen_bands_is_evaluated_and_exported(satellite, encoder, classifier, tmp_path):
    results = json.loads((classifier / "results.json").read_text())
    expected = evaluate(satellite, classifier)["loss"]
    assert math.isfinite(expected)
    assert expected == pytest.approx(results["last"]["val_loss"], rel=1e-5)
    export(classifier, tmp_path / "folder")
    export(encoder, tmp_path / "e.safetensors")
    for marks in ([], MARKS):
        results = evaluate(satellite, tmp_path / "folder", *marks)
        assert results["loss"] == pytest.approx(expected, rel=1e-6)
    exported = open_encoder(tmp_path / "e.safetensors")
    assert exported.pixel_settings == open_encoder(encoder).pixel_settings


def words_of_probe(encoder, data, out, *flags):
    words = [encoder, "--data_path", data, "--output_dir", out, "--num_workers", 0, "--device", "cpu", *flags]
    return [str(word) for word in words]


def test_a_probe_reads_the_marks_of_the_run(satellite, encoder, tmp_path):
    flags = ["--probes", "knn", "linear", "--steps", 2, "--total_batch_size", 4]
    main_probe.main(words_of_probe(encoder, satellite, tmp_path, *flags))
    content = json.loads((tmp_path / "probe.json").read_text())
    assert content["settings"]["nodata"] == 0.0
    assert content["settings"]["bands"] == [list(BANDS)]
    of_knn = []
    for row in content["results"]:
        if row.get("scaling") == "z" and row["feature"] == "mean" and "k" in row:
            of_knn.append(row)
    most_neighbours = max(of_knn, key=lambda row: row["k"])
    last = reports_of_features(encoder)[-1]
    assert last["knn_top1"] == most_neighbours["top1"]


def test_packed_shards_hold_the_same_images(satellite, tmp_path):
    words = [satellite, tmp_path / "tars", *THIRTEEN]
    pack_dataset.main([str(word) for word in words])
    folder = open_images("folder", satellite, in_chans=13, invalid=DECLARED)
    tars = open_images("folder", tmp_path / "tars", in_chans=13, invalid=DECLARED)
    assert folder.fingerprint() == tars.fingerprint()
    for i in range(len(folder)):
        expected, _ = folder.load(i)
        assert_loads(tars, i, expected)


def test_a_model_that_has_learnt_with_a_mask_is_evaluated_on_images_without_one(tmp_path, capsys):
    """Pre-training on RGB with alpha, and everything after it on RGB."""
    for kind, channels in (("rgba", 4), ("rgb", 3)):
        for split, count in (("train", 8), ("val", 4)):
            for label in ("a", "b"):
                folder = tmp_path / kind / split / label
                folder.mkdir(parents=True)
                for i in range(count):
                    array = pixels(4, "uint8", size=(36, 36), seed=i)
                    array[:9, :, 3] = 0
                    Image.fromarray(array[:, :, :channels]).save(folder / f"{i}.png")
    masked = tmp_path / "rgba"
    plain = tmp_path / "rgb"
    mask = ("--mask_band", 3)
    pretrain(masked, tmp_path / "run", *mask, "--max_steps", 2)
    finetune(masked, tmp_path / "tuned", *mask, "--finetune", tmp_path / "run", "--max_steps", 2)

    probe = words_of_probe(tmp_path / "run", plain, tmp_path / "probe", "--probes", "knn")
    assert "--mask_band" in refused(capsys, main_probe.main, *probe)
    main_probe.main([*probe, "--all_valid"])
    content = json.loads((tmp_path / "probe" / "probe.json").read_text())
    assert "mask_band" not in content["settings"]
    results = evaluate(plain, tmp_path / "tuned", "--all_valid")
    assert math.isfinite(results["loss"])
    picture = tmp_path / "picture.png"
    words = [tmp_path / "run", "--images", plain / "val", "--out", picture, "--all_valid"]
    visualize.main([str(word) for word in words])
    assert picture.exists()
    assert "--all_valid" in finetune.refused(capsys, masked, tmp_path / "again", "--all_valid")
