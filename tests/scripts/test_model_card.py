import json

import pytest
from huggingface_hub import ModelCard

from scripts.parts.model_card import model_card
from tests.runs import info_of_run
from util.run.checkpoint import CheckpointInfo, DataInfo, EncoderSource, StartInfo

SETTINGS = {
    "model": "mae_vit_micro_patch4",
    "recipe": "quickstart",
    "epochs": 10,
    "total_batch_size": 256,
    "mask_ratio": 0.75,
    "throw_ratio": 0.5,
    "progressive": True,
    "norm_pix_loss": False,
    "decoder_depth": 4,
    "att_tau": None,
    "teacher": "/home/me/teachers/dino.pth",
    "betas": [0.9, 0.95],
    "lr": 1e-3,
    "data_path": "/home/me/photos",
    "output_dir": "/home/me/out",
}
RUN = dict(
    step=20,
    epoch=5.0,
    data=DataInfo(1234, "f1f1f1"),
    origin=StartInfo("commit abc, files def", "main_pretrain.py"),
    torch="2.15.0",
)
PRETRAINED = info_of_run(**RUN, settings=SETTINGS, files={"teacher": "a1a1"})
TUNED = info_of_run(
    **RUN,
    program="main_finetune.py",
    settings={"model": "vit_micro_patch4", "epochs": 10, "total_batch_size": 8, "nb_classes": 2, "mixup": 0.8},
    classes=["cat", "dog"],
    val_data=DataInfo(77, "e2e2e2"),
    encoder=EncoderSource("/home/me/out/checkpoint-9.pth", "c3c3", 9),
)


def card(info, folder):
    is_classifier = info.classes is not None
    text = model_card("My ViT", {"images": "3 channels"}, info, folder, "timm", "import timm", is_classifier)
    assert "/home/me" not in text
    return text


def rows(text, section):
    """The table of a section as {name: value}."""
    lines = text.partition(f"## {section}\n")[2].partition("## ")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    return dict(cells)


def write_log(folder):
    losses = [{"step": step, "loss": 0.0, "epoch_loss": 1 / step} for step in (4, 8, 12, 16, 20, 24)]
    lines = [json.dumps(report) for report in [*losses, {"step": 20, "val_top1": 1.0}]]
    (folder / "log.jsonl").write_text("\n".join([*lines, '{"step": 2']))


def test_what_a_pretrained_encoder_says(tmp_path):
    write_log(tmp_path)
    text = card(PRETRAINED, tmp_path)
    assert ModelCard(text).data.pipeline_tag == "image-feature-extraction"
    assert "# My ViT\n" in text and "```python\nimport timm\n```" in text and "Not stated yet." in text
    assert rows(text, "Model") == {"images": "3 channels"} and "## Evaluation" not in text
    assert rows(text, "Training") == {
        "program": "`main_pretrain.py`",
        "recipe": "`quickstart`",
        "model": "`mae_vit_micro_patch4`",
        "length": "20 steps, 5 of 10 epochs",
        "total batch": "256",
        "data": "1234 images, fingerprint `f1f1f1`",
        "flags": "`--model mae_vit_micro_patch4 --mask_ratio 0.75 --throw_ratio 0.5 --progressive --no-norm_pix_loss "
        "--decoder_depth 4 --total_batch_size 256 --epochs 10 --lr 0.001 --betas 0.9 0.95`",
        "teacher": "`dino.pth`, fingerprint `a1a1`",
        "loss at the end": "0.0500",
        "code": "commit abc, files def",
        "torch": "2.15.0",
    }


def test_what_a_classifier_says(tmp_path):
    text = card(TUNED, tmp_path)
    assert ModelCard(text).data.pipeline_tag == "image-classification"
    training = rows(text, "Training")
    assert training["classes"] == "2" and "--mixup 0.8" in training["flags"] and training["recipe"] == "none"
    assert training["pre-trained encoder"] == "`checkpoint-9.pth`, SHA-256 `c3c3`"
    assert "loss at the end" not in training and "## Evaluation" not in text


@pytest.mark.parametrize(("step", "top1"), [(20, "81.50 %"), (12, "83.00 %"), (16, None)])
def test_scores_are_those_of_the_same_step(tmp_path, step, top1):
    last, best = ({"step": s, "val_top1": v, "val_top5": 95.25} for s, v in ((20, 81.5), (12, 83.0)))
    (tmp_path / "results.json").write_text(json.dumps({"last": last, "best": best}))
    found = rows(card(TUNED.at_step(step, 4), tmp_path), "Evaluation")
    expected = {"top-1": top1, "top-5": "95.25 %", "images": "77, fingerprint `e2e2e2`"}
    assert found == ({} if top1 is None else expected)


def test_scores_in_the_checkpoint_come_first(tmp_path):
    (tmp_path / "results.json").write_text("{")
    found = rows(card(TUNED.at_step(20, 4, {"top1": 70.0, "top5": 90.0}), tmp_path), "Evaluation")
    assert (found["top-1"], found["top-5"]) == ("70.00 %", "90.00 %")
    assert "top-5" not in card(TUNED.at_step(20, 4, {"top1": 70.0}), tmp_path)  # of few classes
    assert "## Evaluation" not in card(TUNED, tmp_path)  # the file of results is damaged


def test_files_of_other_projects(tmp_path):
    assert "The exported file does not say how it was trained." in card(CheckpointInfo(), tmp_path)
