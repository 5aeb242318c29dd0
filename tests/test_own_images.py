"""The guide docs/own_images.md, from the first command to the last, on a few small images."""

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from scripts import sample_photos
from tests.documents import ROOT, blocks_of, commands_of, program_of

GUIDE = ROOT / "docs" / "own_images.md"
CPU = "--num_workers 0 --device cpu"
SHORT = f"--epochs 1 --warmup_epochs 0 --total_batch_size 4 --batch_size 4 {CPU}"
SMALL = {  # what is appended to the commands; later flags win
    "scripts/sample_photos.py": "--num_train 3 --num_val 2",
    "main_pretrain.py": f"--knn_every 1 {SHORT}",
    "scripts/visualize.py": "--rows 2",
    "downstream/probe/main_probe.py": CPU,
    "main_finetune.py": f"{SHORT} --lr 0.01",  # so that probabilities differ
    "scripts/predict.py": CPU,
    "scripts/export.py": "",
}


def test_the_guide_leads_from_a_folder_to_a_timm_model(tmp_path, monkeypatch):
    pytest.importorskip("tifffile")
    pytest.importorskip("skimage")
    monkeypatch.setattr(sample_photos, "PHOTOS", ("coffee.png", "rocket.jpg"))
    monkeypatch.chdir(tmp_path)
    dino = timm.create_model("vit_small_patch14_dinov2", img_size=224)
    torch.save(dino.state_dict(), "dinov2_vits14_pretrain.pth")
    run = []
    for command in commands_of(GUIDE):
        found = program_of(command)
        if found is None:
            assert command.words[0] in ("pip", "tensorboard")
            continue
        name, argv = found
        importlib.import_module(name.removesuffix(".py").replace("/", ".")).main([*argv, *SMALL[name].split()])
        run.append(name)
    assert set(run) == SMALL.keys()

    output = tmp_path / "output"
    reports = [json.loads(line) for line in (output / "bands" / "log.jsonl").read_text().splitlines()]
    watched = [report for report in reports if "rankme" in report]
    assert [report["step"] for report in watched] == [0, 1]
    assert all("knn_top1" in report for report in watched)
    assert (output / "unseen.png").exists()
    assert (output / "probe" / "probe.json").exists()
    for name, channels in (("photos", 3), ("bands", 5)):
        config = json.loads((tmp_path / f"{name}_encoder" / "config.json").read_text())
        assert config["pretrained_cfg"]["input_size"] == [channels, 64, 64]
    (snippet,) = blocks_of(GUIDE, "python")
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet, "snippet", "exec"), names)
    with open(output / "predicted" / "predictions.csv", newline="") as file:
        rows = {Path(row.pop("image")).name: row for row in csv.DictReader(file) if "coffee" in row["image"]}
    predicted = [float(probability) for probability in rows["000.jpg"].values()]
    assert names["probabilities"][0].tolist() == pytest.approx(predicted, abs=1e-4)
