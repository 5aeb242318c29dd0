"""Checkpoints to export, and scripts/export.py on them."""

import torch
from torch.nn import functional as F

from downstream.detection.models import build_detector
from downstream.segmentation import main_segmentation
from downstream.segmentation.models import build_segmenter
from encoders import classifiers
from encoders.load import load_encoder
from frameworks import registry
from scripts import export
from tests import runs
from util.run.files.checkpoint import save_checkpoint
from util.run.files.record import CheckpointInfo, DataInfo, RunInfo, StartInfo

CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# Names of a pre-training model, and of the fine-tune model that loads its encoder.
VIT = ("mae_vit_micro_patch4", "vit_micro_patch4")
NORMLESS = ("crossmae_vit_micro_patch4", "vit_micro_patch4")
RELATIVE = ("simmim_vit_micro_patch4", "relative_vit_micro_patch4")
ABSOLUTE = ("amt_simmim_vit_micro_patch4", "absolute_vit_micro_patch4")
SWIN = ("greenmim_swin_micro_patch4_window4", "swin_micro_patch4_window4")
SIMMIM_SWIN = ("simmim_swin_micro_patch4_window4", "swin_micro_patch4_window4")


def shake(model):
    """Changes all biases, norms, tokens and tables, so that a lost one is noticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            plain_name = name.removeprefix("backbone.")
            if value.ndim == 1 or plain_name in ("cls_token", "pos_embed", "head.weight", "head.1.weight"):
                value.add_(0.05 * torch.randn_like(value))
            elif name.endswith("relative_position_bias_table"):
                value.normal_()
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.normal_()
            elif name.endswith("running_var"):
                value.uniform_(0.5, 2)
    return model.eval()


def settings_of(model, name, **more):
    """Settings of a run with this model. Images of other channels than 3 have statistics of their own."""
    settings = {
        "model": name,
        "input_size": list(model.img_size),
        "patch_size": model.patch_size,
        **more,
    }
    if model.in_chans != 3:
        settings["in_chans"] = model.in_chans
        settings["mean"] = [(i + 1) / max(10, model.in_chans) for i in range(model.in_chans)]
        settings["std"] = [0.3] * model.in_chans
    return settings


def pretrained(folder, name, **options):
    """Writes a checkpoint like those of main_pretrain.py. Returns its path."""
    torch.manual_seed(0)
    model = shake(registry.MODELS[name](**options))
    folder.mkdir(exist_ok=True)
    meta = {"settings": settings_of(model, name, mask_ratio=0.75)}
    return save_checkpoint(folder, 3, {"model": model.state_dict()}, meta)


def finetuned(folder, name, crop_pct=None, pixels="uint8", marks=None, **options):
    """Writes a checkpoint like those of main_finetune.py. marks: of invalid pixels. Returns (path, model)."""
    torch.manual_seed(0)
    model = shake(classifiers.MODELS[name](num_classes=5, **options))
    settings = settings_of(model, name, nb_classes=5, crop_pct=crop_pct, **(marks or {}))
    if hasattr(model, "global_pool"):
        settings["global_pool"] = model.global_pool
    meta = {"settings": settings, "classes": list("abcde"), "pixels": pixels}
    return save_checkpoint(folder, "best", {"model": model.state_dict()}, meta), model


def dense_info(program, settings, pixels="uint8", **more):
    """What the checkpoint of a finished run of a dense task says."""
    info = RunInfo(
        program=program,
        step=6,
        epoch=2.0,
        world_size=1,
        data=DataInfo(9, "0" * 64),
        val_data=None,
        torch=torch.__version__,
        optimizer="AdamW",
        origin=StartInfo("abc", program),
        encoder=None,
        files={},
    )
    return CheckpointInfo({"epochs": 2.0, **settings}, pixels, run=info, **more)


def segmentation_run(folder, *flags, pixels="uint8", **more):
    """Writes a checkpoint like those of main_segmentation.py with three classes. more: settings. Returns the model."""
    words = ["--model", "vit_micro_patch4", "--num_classes", "3", "--input_size", "16", "--stride", "10", *flags]
    _, args = main_segmentation.parse_args(words)
    settings = {**vars(args), **more}
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = shake(build_segmenter(settings))
    colors = [[0, 0, 0], [255, 0, 0], [0, 0, 255]]
    info = dense_info("main_segmentation.py", settings, pixels, classes=list("abc"), class_colors=colors)
    save_checkpoint(folder, 6, {"model": model.state_dict()}, info.to_json())
    return model


def detection_run(folder, **more):
    """Writes a checkpoint like those of main_detection.py, whose windows do not divide the map. Returns the model."""
    settings = {
        "model": "vit_mini_patch4",
        "input_size": 48,
        "in_chans": 3,
        "drop_path": 0.0,
        "patch_size": 4,
        "window_size": 5,
        "categories": [[1, "a"], [7, "b"]],
        "masks": True,
        "decoder_channels": 8,
        "num_rois": 8,
        **more,
    }
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = shake(build_detector(settings))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "rel_pos" in name:
                value.normal_()
            if name.startswith(("rpn.head.bbox_pred", "roi_heads.box_predictor")):  # boxes of many sizes
                value.normal_(std=0.5)
    info = dense_info("main_detection.py", settings, classes=["a", "b"])
    save_checkpoint(folder, 6, {"model": model.state_dict()}, info.to_json())
    return model


def run(capsys, source, out, *flags):
    """Runs the script, and returns the lines that it prints."""
    export.main([str(source), "--out", str(out), *flags])
    return capsys.readouterr().out.splitlines()


def refused(capsys, source, out, *flags, code=2):
    """Returns the error message. Nothing is written."""
    existed = out.exists()
    message = runs.refused(capsys, export.main, source, "--out", out, *flags, code=code)
    assert out.exists() == existed
    return message


@torch.no_grad()
def features_by_finetuning(path, name, imgs, **options):
    """Features [B, T, D] by the fine-tune model, which loads the encoder its own way. The last norm is done by hand."""
    if name not in (RELATIVE[1], SWIN[1]):
        options["global_pool"] = "token"
    model = classifiers.MODELS[name](in_chans=imgs.shape[1], **options).eval()
    load_encoder(model, path)
    x = model.forward_features(imgs)
    if name == RELATIVE[1]:
        weights = torch.load(path, weights_only=True)["model"]
        x = F.layer_norm(x, x.shape[-1:], weights["norm.weight"], weights["norm.bias"], 1e-6)
    return x
