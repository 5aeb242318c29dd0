"""--knn_every on data sets of Hugging Face and on iNaturalist: rows without a class, no validation images."""

import json

import pytest

import main_pretrain
from tests.util.data.test_datasets import write_inaturalist
from tests.util.data.test_hugging_face import dataset_of, offline, png_columns, save  # noqa: F401

datasets = pytest.importorskip("datasets")


def watch(data_path, output_dir, dataset="hf"):
    """Pre-trains for one step with --knn_every. Returns the evaluation before it."""
    flags = "--model mae_vit_micro_patch4 --batch_size 2 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    flags += f" --dataset {dataset} --max_steps 1 --knn_every 1 --picture_every 0"
    main_pretrain.main([*flags.split(), "--data_path", str(data_path), "--output_dir", str(output_dir)])
    reports = map(json.loads, (output_dir / "log.jsonl").read_text().splitlines())
    return next(report for report in reports if "rankme" in report)


def test_the_monitor_of_rows_without_a_class_computes_rankme_alone(tmp_path, capsys):
    columns = png_columns(12)
    expected = watch(save(columns, tmp_path / "all"), tmp_path / "a")
    capsys.readouterr()
    for i, label in enumerate((-1, None)):
        columns["label"][5] = columns["label"][8] = label
        path = save(columns, tmp_path / f"some{i}")
        found = watch(path, tmp_path / f"s{i}")
        assert found["rankme"] == expected["rankme"] and "knn_top1" in expected and "knn_top1" not in found
        out = capsys.readouterr().out
        assert "note: 2 of 12 training images have no class, so --knn_every computes RankMe alone" in out


@pytest.mark.parametrize(
    "names", [("",), ("train",), ("train", "unsupervised"), ("train", "validation"), ("train", "test")]
)
def test_the_monitor_classifies_training_images_if_there_is_no_validation_split(tmp_path, capsys, names):
    data = {name: dataset_of(png_columns(12)) for name in names}
    path = tmp_path / "data"
    (data[""] if "" in data else datasets.DatasetDict(data)).save_to_disk(path)
    found = watch(path, tmp_path / "out")
    note = "note: there is no validation split, so --knn_every classifies training images by the others"
    assert (note in capsys.readouterr().out) is not bool({"validation", "test"} & set(names))
    assert 0 <= found["knn_top1"] <= 100


def test_the_monitor_names_its_flag_if_the_validation_split_has_no_classes(tmp_path, capsys):
    split = {"train": dataset_of(png_columns(12)), "validation": dataset_of(png_columns(12) | {"label": [-1] * 12})}
    datasets.DatasetDict(split).save_to_disk(tmp_path / "data")
    with pytest.raises(SystemExit):
        watch(tmp_path / "data", tmp_path / "out")
    message = capsys.readouterr().err
    assert "error: --knn_every: 12 images of" in message and "Without --knn_every, the run reads no" in message


@pytest.mark.parametrize("has_val", [True, False])
def test_inaturalist_with_and_without_val(tmp_path, capsys, has_val):
    for split in ("train", "val")[: 1 + has_val]:
        write_inaturalist(tmp_path / "data", split)
    assert "knn_top1" in watch(tmp_path / "data", tmp_path / "out", "inat19")
    assert ("there is no validation split" in capsys.readouterr().out) is not has_val
