"""SimMIM on a ViT and on Swin: slow derivations, the bias of positions, sizes and names of the release."""

import math

import numpy as np
import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.testing import assert_close

from encoders.load import load_encoder
from encoders.models_relative_vit import (
    RelativeVisionTransformer,
)
from frameworks import registry
from frameworks.models_simmim_pr import (
    SimMIMSwin,
    SimMIMViT,
)
from frameworks.views import views_of
from prmim import TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from tests import slow_mae
from tests.test_models_mae_pr import assert_is_slow, assert_same_weights, perturbed
from util.run.files.checkpoint import save_checkpoint

SIZES = dict(img_size=32, patch_size=4, embed_dim=24, depth=2, num_heads=3)
ARMS = [(0.0, True), (0.5, False), (0.5, True)]


def orders(model, batch):
    sampler = TokenOrderSampler(model.grid_size, model.counts, "furthest", model.mask_unit)
    noise = addressed_noise(0, 0, np.arange(batch), model.counts.num_tokens)
    return torch.from_numpy(sampler(noise))


# --------------------------------------------------------------------------------------------------------- slow SimMIM


def table_row(query, key, rows, columns):
    """Returns the row of the bias table for a query and a key, each "cls" or a raster token, as the paper has it."""
    num_offsets = (2 * rows - 1) * (2 * columns - 1)
    if query == key == "cls":
        return num_offsets + 2
    if query == "cls":
        return num_offsets
    if key == "cls":
        return num_offsets + 1
    down = query // columns - key // columns + rows - 1
    across = query % columns - key % columns + columns - 1
    return down * (2 * columns - 1) + across


def slow_simmim(w, img, visible, retained, thrown, grid, aggregates):
    """Returns (loss, {token: prediction}) of one image with patches of 4 px. No block sees a thrown token.

    Positions are biases of the logits, or are added to the tokens if the weights hold `pos_embed`.
    """
    tokens = {"cls": w["cls_token"][0, 0]}
    for t in visible:
        tokens[t] = slow_mae.embed(img, t, 4, w)
    for t in retained:
        tokens[t] = w["mask_token"][0, 0]
    if "pos_embed" in w:
        for t, x in tokens.items():
            row = 0 if t == "cls" else 1 + t
            tokens[t] = x + w["pos_embed"][0, row]
    for layer in range(2):
        tokens = slow_block(tokens, w, f"blocks.{layer}", grid)
    del tokens["cls"]
    supervised = list(retained)
    if aggregates:
        kernel = {"weight": w["aggregation.operator.weight"], "bias": w["aggregation.operator.bias"]}
        filled = {}
        for t in thrown:
            filled[t] = slow_mae.aggregate(tokens, t, grid[1], kernel)
        tokens |= filled
        supervised += thrown
    predictions = {}
    errors = []
    for t in supervised:
        predictions[t] = slow_mae.linear(slow_mae.norm(tokens[t], w, "norm"), w, "pred")
        target = slow_mae.target_of(slow_mae.pixels_of(img, t, 4), norm_pix=False)
        errors.append((predictions[t] - target).abs().mean())
    return sum(errors) / len(errors), predictions


def slow_block(tokens, w, name, grid):
    """A block with 3 heads, biases for queries and values alone, and a scale on each branch."""
    table = w.get("rel_pos_bias.relative_position_bias_table")
    q_bias = w[f"{name}.attn.q_bias"]
    qkv_bias = torch.cat([q_bias, torch.zeros_like(q_bias), w[f"{name}.attn.v_bias"]])
    qkv = {}
    for t, x in tokens.items():
        normed = slow_mae.norm(x, w, f"{name}.norm1")
        qkv[t] = w[f"{name}.attn.qkv.weight"] @ normed + qkv_bias
    result = {}
    for query, x in tokens.items():

        def bias(key, head, query=query):
            if table is None:
                return 0.0
            return table[table_row(query, key, *grid), head]

        attended = slow_mae.attend(query, qkv, 3, bias)
        x = x + w[f"{name}.gamma_1"] * slow_mae.linear(attended, w, f"{name}.attn.proj")
        hidden = slow_mae.mlp(slow_mae.norm(x, w, f"{name}.norm2"), w, f"{name}.mlp")
        result[query] = x + w[f"{name}.gamma_2"] * hidden
    return result


def assert_is_slow_simmim(model, ids):
    def slow(img, visible, retained, thrown):
        aggregates = model.aggregation is not None
        return slow_simmim(model.state_dict(), img, visible, retained, thrown, model.grid_size, aggregates)

    assert_is_slow(model, ids, slow)


@torch.no_grad()
@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
@pytest.mark.parametrize("img_size", [16, (16, 24)])
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive, img_size):
    torch.manual_seed(0)
    options = dict(throw_ratio=throw_ratio, progressive=progressive, img_size=img_size)
    model = perturbed(SimMIMViT(**SIZES | options, mask_ratio=0.7, kernel_size=3))
    assert_is_slow_simmim(model, orders(model, 2))


def test_initialisation_is_simmim_s():
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=192, depth=3, num_heads=3)
    model = SimMIMViT(**sizes)
    for number, block in enumerate(model.blocks, start=1):
        assert block.attn.qkv.weight.abs().max() <= 0.02  # truncated at one sigma
        for layer in (block.attn.proj, block.mlp.fc2):
            assert layer.weight.abs().max().item() == pytest.approx(0.02 / math.sqrt(2 * number), rel=0.01)
            assert not layer.bias.any()
        for scale in (block.gamma_1, block.gamma_2):
            assert scale.tolist() == pytest.approx([0.1] * 192)
        assert not block.attn.q_bias.any()
        assert not block.attn.v_bias.any()
    assert not model.rel_pos_bias.relative_position_bias_table.any()
    assert not model.patch_embed.proj.bias.any()
    for token in (model.mask_token, model.cls_token):
        assert 0.019 < token.abs().max() <= 0.02
    bound = 192**-0.5  # the head keeps PyTorch's default
    assert 0.95 * bound < model.pred.weight.abs().max() <= bound
    assert model.pred.bias.any()

    tuned = RelativeVisionTransformer(**sizes)
    weight = tuned.blocks[0].attn.qkv.weight
    assert weight.abs().max() > 0.06
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert 0 < tuned.head.weight.abs().max() < 2e-4


@torch.no_grad()
def test_fine_tune_model_equals_timm_s_beit():
    def norm(dim, **kwargs):
        return nn.LayerNorm(dim, eps=1e-6, **kwargs)

    torch.manual_seed(0)
    options = dict(
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=3,
        num_classes=7,
    )
    beit = dict(
        use_abs_pos_emb=False,
        use_rel_pos_bias=True,
        init_values=0.1,
        global_pool="avg",
        norm_layer=norm,
    )
    theirs = perturbed(timm.models.Beit(**options, **beit)).eval()
    ours = RelativeVisionTransformer(**options).double().eval()
    ours.load_state_dict(theirs.state_dict())  # the same names, all of them
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_close(ours(imgs), theirs(imgs), rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------ names of the release


def release(model, patch_size):
    """Returns the model's weights as in SimMIM's files: the head is a convolution, with the colours outermost."""
    weights = {}
    for name, value in model.state_dict().items():
        if not name.startswith(("pred.", "aggregation.")):
            weights[f"encoder.{name}"] = value
    weights["encoder.rel_pos_bias.relative_position_index"] = torch.zeros(65, 65, dtype=torch.int64)
    rows = []
    for colour in range(3):
        for pixel in range(patch_size**2):
            rows.append(pixel * 3 + colour)
    weights["decoder.0.weight"] = model.pred.weight.detach()[rows].unflatten(1, (-1, 1, 1))
    weights["decoder.0.bias"] = model.pred.bias.detach()[rows]
    return weights


def test_load_official():
    source = perturbed(SimMIMViT(**SIZES, throw_ratio=0.0)).float()
    model = SimMIMViT(**SIZES, throw_ratio=0.5, mask_ratio=0.75)
    model.load_official({"model": release(source, 4), "epoch": 799})
    assert_same_weights(model, source)


@pytest.mark.parametrize("released", [False, True])
def test_encoder_moves_to_fine_tuning_with_a_table_in_each_block(tmp_path, released):
    source = perturbed(SimMIMViT(**SIZES)).float()
    weights = source.state_dict()
    if released:
        weights = release(source, 4)
    path = tmp_path / "weights.pth"
    torch.save({"model": weights}, path)
    tuned = RelativeVisionTransformer(**SIZES, num_classes=5)
    report = load_encoder(tuned, path)
    assert set(report.missing) == {"fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}
    assert "rel_pos_bias.relative_position_bias_table" not in report.unexpected
    tables = [block.attn.relative_position_bias_table for block in tuned.blocks]
    for table in tables:
        assert torch.equal(table, source.rel_pos_bias.relative_position_bias_table)
    assert tables[0].data_ptr() != tables[1].data_ptr()  # each block has a table of its own

    larger = RelativeVisionTransformer(**SIZES | dict(img_size=48), num_classes=5)
    assert len(load_encoder(larger, path).resized) == 2
    assert larger.blocks[0].attn.relative_position_bias_table.shape == (23 * 23 + 3, 3)


@pytest.mark.parametrize(
    ("img_size", "num_resized"),
    [
        (32, 2),
        ((32, 16), 2),
        ((16, 32), 0),
    ],
)
def test_tables_of_rectangles_are_resized_by_the_settings(tmp_path, img_size, num_resized):
    """(32, 16) needs as many rows as (16, 32), but other offsets."""
    source = SimMIMViT(**SIZES | dict(img_size=(16, 32)))
    meta = {"settings": {"input_size": [16, 32], "patch_size": 4}}
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, meta)
    tuned = RelativeVisionTransformer(**SIZES | dict(img_size=img_size))
    assert len(load_encoder(tuned, path).resized) == num_resized


def test_layer_ids_and_decay():
    model = RelativeVisionTransformer(**SIZES | dict(depth=4))
    groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    found = {}
    for group in groups:
        for parameter in group["params"]:
            found[id(parameter)] = (group["lr_scale"], group["weight_decay"])
    expected = {
        "cls_token": (0.5**5, 0),
        "patch_embed.proj.weight": (0.5**5, 0.05),
        "head.weight": (1, 0.05),
        "fc_norm.weight": (1, 0),
    }
    for i in range(4):
        scale = 0.5 ** (4 - i)
        expected[f"blocks.{i}.attn.relative_position_bias_table"] = (scale, 0.05)
        expected[f"blocks.{i}.gamma_1"] = (scale, 0)
        expected[f"blocks.{i}.attn.q_bias"] = (scale, 0)
        expected[f"blocks.{i}.mlp.fc1.weight"] = (scale, 0.05)
    for name, value in expected.items():
        assert found[id(model.get_parameter(name))] == pytest.approx(value), name


# --------------------------------------------------------------------------------------------------------------- Swin

SWIN = dict(
    img_size=32,
    patch_size=4,
    embed_dim=16,
    depths=(1, 2),
    num_heads=(1, 2),
    window_size=4,
)


@torch.no_grad()
def test_swin_against_a_plain_run_with_mask_tokens():
    """The steps of the release: embed the whole image, replace masked tokens, 1 x 1 convolution, pixel shuffle, L1."""
    torch.manual_seed(0)
    model = perturbed(SimMIMSwin(**SWIN))
    imgs = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    ids = orders(model, 3)
    assert model.mask_unit == 2
    assert model.counts == TokenCounts(24, 40, 0)  # 10 of 16 units are masked
    mask = TokenOrder(ids, model.counts).mask
    patches = nn.functional.conv2d(imgs, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=4)
    tokens = model.patch_embed.norm(patches.flatten(2).transpose(1, 2))
    tokens = torch.where(mask.unsqueeze(-1), model.mask_token, tokens)
    features = model.encode(tokens).transpose(1, 2).reshape(3, 32, 4, 4)
    weights = release(model, 8)
    images = nn.functional.conv2d(features, weights["decoder.0.weight"], weights["decoder.0.bias"])
    images = nn.functional.pixel_shuffle(images, 8)
    pixels = mask.view(3, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    loss = ((imgs - images).abs() * pixels).sum() / pixels.sum() / 3
    assert_close(model(imgs, ids)["pixel"], loss, rtol=1e-9, atol=0)
    assert torch.equal(model.reconstruct(imgs, ids)[1], mask)
    (view,) = views_of(model, imgs, ids, lambda imgs: imgs)
    assert_close(view.prediction * pixels, images * pixels, rtol=1e-9, atol=1e-9)


def test_load_official_of_swin():
    source = perturbed(SimMIMSwin(**SWIN)).float()
    model = SimMIMSwin(**SWIN)
    model.load_official({"model": release(source, 8)})
    assert_same_weights(model, source)


def test_swin_throws_no_tokens():
    with pytest.raises(ValueError, match="SimMIMSwin throws no tokens, got throw_ratio 0.3"):
        SimMIMSwin(**SWIN, throw_ratio=0.3)


@pytest.mark.parametrize("name", ["simmim_vit_base_patch16", "amt_simmim_vit_base_patch16"])
def test_masked_squares_have_32_px_whatever_the_patches(name):
    with torch.device("meta"):
        assert registry.MODELS[name]().mask_unit == 2
        assert registry.MODELS[name](patch_size=8).mask_unit == 4
        with pytest.raises(ValueError, match="squares of 32 px, which --patch_size must divide, got 28"):
            registry.MODELS[name](patch_size=28)
