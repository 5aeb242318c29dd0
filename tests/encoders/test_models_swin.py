"""Swin: timm's function, shifted windows, decays, and weights of other windows."""

import pytest
import timm
import torch
from torch.testing import assert_close

from encoders.load import load_encoder
from encoders.models_swin import (
    SwinEncoder,
    SwinTransformer,
)
from tests.test_models_mae_pr import perturbed
from tests.test_models_vit import scale_and_decay

SIZES = dict(
    img_size=64,
    patch_size=4,
    embed_dim=16,
    depths=(2, 2, 3),
    num_heads=(2, 4, 8),
    window_size=4,
)


def timm_names(state_dict):
    """Renames our keys to timm's, where a stage begins with its downsample and the head is `head.fc`."""
    renamed = {}
    for name, value in state_dict.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] == "downsample":
            parts[1] = str(int(parts[1]) + 1)
        if parts[0] == "head":
            parts.insert(1, "fc")
        renamed[".".join(parts)] = value
    return renamed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(img_size=32),
        dict(img_size=(64, 96), window_size=2),
        dict(img_size=112, window_size=7),
    ],
)
def test_equals_timm_on_the_same_weights(changes):
    torch.manual_seed(0)
    options = SIZES | changes | dict(num_classes=7)
    ours = SwinTransformer(**options).double().eval()
    theirs = timm.models.SwinTransformer(**options).double().eval()
    perturbed(ours)
    # timm also merges (row, column) neighbours in the order 00, 10, 01, 11. Its buffers are computed.
    fit = theirs.load_state_dict(timm_names(ours.state_dict()), strict=False)
    assert not fit.unexpected_keys
    assert all("index" in key or "attn_mask" in key for key in fit.missing_keys)
    imgs = torch.randn(2, 3, *ours.img_size, dtype=torch.float64)
    assert_close(ours(imgs), theirs(imgs), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "layer", "decay"),
    [
        ("patch_embed.proj.weight", 0, 0.05),
        ("layers.0.blocks.1.mlp.fc1.weight", 2, 0.05),
        ("layers.0.downsample.reduction.weight", 2, 0.05),
        ("layers.2.blocks.2.attn.relative_position_bias_table", 7, 0),
        ("head.weight", 8, 0.05),
    ],
)
def test_layer_ids_and_decay(name, layer, decay):
    found = scale_and_decay(SwinTransformer(**SIZES, num_classes=3), 0.5)
    assert found[name] == pytest.approx((0.5 ** (8 - layer), decay))


def test_other_windows_and_images_take_over_the_weights(tmp_path):
    source = SwinEncoder(**SIZES | dict(img_size=48, window_size=3))
    released = {f"encoder.{name}": value for name, value in source.state_dict().items()}
    released["encoder.mask_token"] = torch.zeros(1, 1, 16)
    released["decoder.0.weight"] = torch.zeros(3, 64, 1, 1)
    released["encoder.layers.0.blocks.1.attn_mask"] = torch.zeros(16, 9, 9)
    released["encoder.layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(9, 9)
    torch.save({"model": released}, tmp_path / "released.pth")
    tuned = SwinTransformer(**SIZES, num_classes=3)
    report = load_encoder(tuned, tmp_path / "released.pth")
    assert set(report.missing) == {"head.weight", "head.bias"}
    assert set(report.unexpected) == {"mask_token"}
    assert len(report.resized) == 7  # a table in each block
    assert torch.equal(tuned.norm.weight, source.norm.weight)
    table = tuned.layers[0].blocks[0].attn.relative_position_bias_table.view(7, 7, 2)
    smaller = source.layers[0].blocks[0].attn.relative_position_bias_table.view(5, 5, 2)
    assert_close(table[3, 3], smaller[2, 2])  # offset zero


@pytest.mark.parametrize("img_size", [40, 48])
def test_sizes_that_cannot_be(img_size):
    with pytest.raises(ValueError, match="tokens|px"):
        SwinEncoder(**SIZES | dict(img_size=img_size))
