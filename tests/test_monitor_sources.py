"""--knn_every on data sets of Hugging Face and on iNaturalist: rows without a class, no validation images."""

import json

import pytest

import main_pretrain
from tests.util.data.test_datasets import write_inaturalist
from tests.util.data.test_hugging_face import dataset_of, offline, png_columns, save  # noqa: F401

datasets = pytest.importorskip("datasets")

NO_VAL = "note: there is no validation split, so --knn_every classifies training images by the others"


def watch(data_path, output_dir, dataset="hf"):
    """Pre-trains for one step with --knn_every. Returns the evaluation before it."""
    flags = "--model mae_vit_micro_patch4 --batch_size 2 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    flags += f" --dataset {dataset} --max_steps 1 --knn_every 1 --picture_every 0"
    main_pretrain.main([*flags.split(), "--data_path", str(data_path), "--output_dir", str(output_dir)])
    reports = map(json.loads, (output_dir / "log.jsonl").read_text().splitlines())
    return next(report for report in reports if "rankme" in report)


def test_the_monitor_of_rows_without_a_class_computes_rankme_alone(tmp_path, capsys):
    columns = png_columns(12)
    columns["label"][5] = -1
    columns["label"][8] = -1
    evaluation = watch(save(columns, tmp_path / "data"), tmp_path / "out")
    assert "rankme" in evaluation
    assert "knn_top1" not in evaluation
    assert "so --knn_every computes RankMe alone" in capsys.readouterr().out


def test_inaturalist_without_val(tmp_path, capsys):
    write_inaturalist(tmp_path / "data", "train")
    assert "knn_top1" in watch(tmp_path / "data", tmp_path / "out", "inat19")
    assert NO_VAL in capsys.readouterr().out
