import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay

from encoders.load import load_encoder
from encoders.models_swin import (
    SwinEncoder,
    SwinTransformer,
    cut_windows,
    join_windows,
    shifted_mask,
    swin_base_patch4_window7,
    swin_large_patch4_window14,
)

SIZES = dict(img_size=64, patch_size=4, embed_dim=16, depths=(2, 2, 3), num_heads=(2, 4, 8), window_size=4)


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


@pytest.mark.parametrize("changes", [{}, dict(img_size=32), dict(img_size=(64, 96), window_size=2)])
def test_equals_timm_on_the_same_weights(changes):
    torch.manual_seed(0)
    options = SIZES | changes | dict(num_classes=7)
    ours = SwinTransformer(**options).double().eval()
    theirs = timm.models.SwinTransformer(**options).double().eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    # timm also merges (row, column) neighbours in the order 00, 10, 01, 11. Its buffers are computed.
    missing = theirs.load_state_dict(timm_names(ours.state_dict()), strict=False)
    assert not missing.unexpected_keys and all("index" in key or "attn_mask" in key for key in missing.missing_keys)
    imgs = torch.randn(2, 3, *ours.img_size, dtype=torch.float64)
    torch.testing.assert_close(ours(imgs), theirs(imgs), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("grid", "window", "shift"), [((8, 8), 4, 2), ((6, 12), 3, 1), ((14, 14), 7, 3)])
def test_shifted_attention_is_confined_to_true_windows(grid, window, shift):
    """Two tokens attend to each other if floor((c - shift + w) / w) is equal on both axes."""
    rows, columns = grid
    ids = torch.arange(rows * columns).view(1, rows, columns, 1)
    rolled = cut_windows(ids.roll((-shift, -shift), dims=(1, 2)), window)[0, :, :, 0].tolist()
    seen = {
        (q, k)
        for tokens, mask in zip(rolled, shifted_mask(grid, window, shift).tolist(), strict=True)
        for q, row in zip(tokens, mask, strict=True)
        for k, value in zip(tokens, row, strict=True)
        if value == 0
    }

    def home(token):
        return tuple((c - shift + window) // window for c in divmod(token, columns))

    every = range(rows * columns)
    assert seen == {(q, k) for q in every for k in every if home(q) == home(k)}


def test_windows_are_cut_and_joined():
    x = torch.arange(2 * 6 * 4).view(2, 6, 4, 1)
    windows = cut_windows(x, 2)
    assert windows.shape == (2, 6, 4, 1) and windows[0, 3, :, 0].tolist() == [10, 11, 14, 15]
    assert torch.equal(join_windows(windows, 2, (6, 4)), x)


def test_published_sizes():
    with torch.device("meta"):
        base, large = swin_base_patch4_window7(), swin_large_patch4_window14()
    assert sum(p.numel() for p in base.parameters()) == 87_768_224
    assert sum(p.numel() for p in large.parameters()) == 196_794_556
    tables = [stage.blocks[1].attn.relative_position_bias_table.shape[0] for stage in large.layers]
    assert tables == [729, 729, 729, 169]
    assert [stage.blocks[1].shift for stage in large.layers] == [7, 7, 0, 0]


def test_layer_ids_and_decay():
    model = SwinTransformer(**SIZES, num_classes=3)
    groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    ids = {"patch_embed.proj.weight": 0, "layers.0.blocks.0.mlp.fc1.weight": 1, "layers.0.blocks.1.mlp.fc1.weight": 2}
    ids |= {
        "layers.0.downsample.reduction.weight": 2,
        "layers.1.blocks.0.attn.qkv.weight": 3,
        "layers.1.downsample.norm.weight": 4,
    }
    ids |= {"layers.2.blocks.2.attn.proj.weight": 7, "layers.2.blocks.2.attn.relative_position_bias_table": 7}
    ids |= {"norm.weight": 8, "head.weight": 8, "head.bias": 8}
    for name, number in ids.items():
        spared = name.endswith(("norm.weight", "bias", "table"))
        assert found[id(model.get_parameter(name))] == pytest.approx((0.5 ** (8 - number), 0 if spared else 0.05)), name


def test_other_windows_and_images_take_over_the_weights(tmp_path):
    torch.manual_seed(0)
    source = SwinEncoder(**SIZES | dict(img_size=48, window_size=3))
    released = {f"encoder.{k}": v for k, v in source.state_dict().items()}
    released["encoder.mask_token"] = torch.zeros(1, 1, 16)
    released["decoder.0.weight"] = torch.zeros(3, 64, 1, 1)
    released["encoder.layers.0.blocks.1.attn_mask"] = torch.zeros(16, 9, 9)
    released["encoder.layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(9, 9)
    torch.save({"model": released}, tmp_path / "released.pth")
    tuned = SwinTransformer(**SIZES, num_classes=3)
    report = load_encoder(tuned, tmp_path / "released.pth")
    assert set(report.missing) == {"head.weight", "head.bias"} and set(report.unexpected) == {"mask_token"}
    assert len(report.resized) == 7 and torch.equal(tuned.norm.weight, source.norm.weight)
    ours, theirs = (m.layers[0].blocks[0].attn.relative_position_bias_table for m in (tuned, source))
    torch.testing.assert_close(ours.view(7, 7, 2)[3, 3], theirs.view(5, 5, 2)[2, 2])  # offset zero


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(img_size=40), "img_size 40 x 40 must be a multiple of 16 px"),
        (dict(img_size=48), "windows of 4 do not divide the stage's 6 x 6 tokens"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        SwinEncoder(**SIZES | changes)
