"""The guide docs/own_images.md, from the first command to the last, on a few small images."""

import importlib
import json
from typing import Any

import pytest
import timm
import torch

from scripts import sample_photos
from tests.documents import ROOT, blocks_of, commands_of, program_of
from util.data.open import open_images
from util.data.transforms import ResizeCenterCrop

GUIDE = ROOT / "docs" / "own_images.md"
CPU = "--num_workers 0 --device cpu"
SHORT = f"--epochs 1 --warmup_epochs 0 --total_batch_size 4 --batch_size 4 {CPU}"
SMALL = {  # what is appended to the commands; later flags win
    "scripts/sample_photos.py": "--num_train 3 --num_val 2",
    "main_pretrain.py": f"--knn_every 1 {SHORT}",
    "scripts/visualize.py": "--rows 2",
    "downstream/probe/main_probe.py": CPU,
    "main_finetune.py": SHORT,
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
    assert (output / "bands.png").exists()
    assert (output / "bands_probe" / "probe.json").exists()
    config = json.loads((tmp_path / "bands_encoder" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [5, 64, 64]
    (snippet,) = blocks_of(GUIDE, "python")
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet, "snippet", "exec"), names)
    logits = names["logits"]
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (1, 2)
    assert logits.isfinite().all()
    image, _ = open_images("folder", "data/bands", "val", in_chans=5).load(0)
    crop = ResizeCenterCrop(64, crop_pct=1.0)(torch.from_numpy(image).permute(2, 0, 1))  # the recipe's view
    assert torch.allclose(names["pixels"], names["normalize"](crop.float() / 65535), atol=2e-3)
