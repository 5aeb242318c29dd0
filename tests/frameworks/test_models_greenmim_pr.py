"""GreenMIM: attention in groups of windows, a slow derivation token by token, and the release's names."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from encoders.load import load_encoder
from encoders.models_swin import SwinEncoder, SwinTransformer, WindowAttention
from encoders.window_groups import WindowGroups, unit_coords, window_of
from frameworks.models_greenmim_pr import (
    GreenMIMSwin,
    greenmim_swin_base_patch4_window7,
    greenmim_swin_large_patch4_window14,
)
from frameworks.window_groups import WindowGrouper, group_tokens, group_windows
from tests import slow_mae
from tests.test_models_mae_pr import assert_same_weights, perturbed, segments

# 4 x 4 units of 16 px. In the first stage a unit has 4 x 4 tokens, and windows of 2 x 2 must be grouped.
SIZES = dict(
    img_size=64,
    patch_size=4,
    embed_dim=16,
    depths=(2, 2, 2),
    num_heads=(2, 2, 4),
    window_size=2,
)
DECODER = dict(decoder_embed_dim=16, decoder_num_heads=2, kernel_size=3)


def build(**options):
    torch.manual_seed(0)
    return perturbed(GreenMIMSwin(**SIZES | DECODER | options))


def a_batch(model, size=3, seed=0):
    """Returns images, token orders, and the list of groupings."""
    samples = [(torch.zeros(1), 0, (0, i)) for i in range(size)]
    _, _, ids, *groupings = model.collator("furthest", seed)(samples)
    generator = torch.Generator().manual_seed(seed)
    imgs = torch.randn(size, 3, *model.img_size, dtype=torch.float64, generator=generator)
    return imgs, ids, groupings


def loss_of(model, imgs, ids, groupings=()):
    return model(imgs, ids, *groupings)["pixel"]


# -------------------------------------------------------------------------------------------------- attention in groups


def window_index(cell, window, shift):
    return [(place - shift + window) // window for place in cell]


def dense_attention(attention, x, coords, window, shift):
    """Computes the logits of all pairs of tokens, and takes those of one window."""
    cells = coords.tolist()
    table = attention.relative_position_bias_table
    bias = x.new_full((attention.num_heads, len(cells), len(cells)), -torch.inf)
    for i, query in enumerate(cells):
        for j, key in enumerate(cells):
            if window_index(query, window, shift) == window_index(key, window, shift):
                down = query[0] - key[0] + window - 1
                across = query[1] - key[1] + window - 1
                bias[:, i, j] = table[down * (2 * window - 1) + across]
    qkv = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    out = logits.softmax(dim=-1) @ v
    return attention.proj(out.transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "shift"),
    [
        (4, 0),
        (4, 2),
        (5, 0),
        (5, 2),
        (3, 1),
    ],
)
@pytest.mark.parametrize("mode", ["grouped", "padded", "masked"])
def test_attention_among_visible_tokens_is_dense_attention_without_the_other_keys(window, shift, mode):
    """Of the 20 x 20 tokens, windows of 3 divide neither grid nor units, windows of 5 do not divide the units."""
    torch.manual_seed(0)
    units = torch.randperm(25)[:7].sort().values
    coords = unit_coords(units, 5, 4)
    attention = WindowAttention(8, window, num_heads=2).double()
    nn.init.normal_(attention.relative_position_bias_table)
    grouping = None
    if mode != "masked":
        y, x = window_of(coords, window, shift).T.numpy()
        capacity = 40 if mode == "padded" else 0
        grouping = torch.from_numpy(group_tokens(100 * y + x, window**2, capacity=capacity))
    tokens = torch.randn(2, len(coords), 8, dtype=torch.float64)
    groups = WindowGroups(coords, window, shift, grouping)
    found = attention.among_visible(tokens, groups)
    expected = dense_attention(attention, tokens, coords, window, shift)
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(img_size=(64, 96)),
        dict(window_size=4),
        dict(embed_dim=8, depths=(1, 2, 1)),
    ],
)
def test_with_every_unit_visible_the_encoder_is_the_dense_one(planned, sizes):
    torch.manual_seed(0)
    encoder = perturbed(SwinEncoder(**SIZES | sizes))
    imgs = torch.randn(2, 3, *encoder.img_size, dtype=torch.float64)
    rows, columns = encoder.unit_grid
    units = torch.arange(rows * columns)
    groupings = ()
    if planned:
        stages = encoder.grouped_stages(len(units))
        assert stages
        groupings = WindowGrouper(encoder.unit_grid, len(units), stages, samples=2)(units)
    side = encoder.stride // 4
    tokens = encoder.patch_embed(encoder.patchify(imgs))
    tokens = tokens.view(2, rows, side, columns, side, -1)
    tokens = tokens.transpose(2, 3).flatten(1, 2)  # [B, V, side, side, D]
    features = encoder.encode_visible(tokens, units, groupings)
    assert_close(features, encoder.forward_features(imgs), rtol=1e-9, atol=1e-9)


def test_plans_of_any_mask_have_one_shape_and_change_nothing():
    model = build()
    shapes = set()
    for seed in range(8):
        imgs, ids, groupings = a_batch(model, seed=seed)
        assert len(groupings) == 4  # two stages, shifted or not; the third has few tokens
        shapes.add(tuple(grouping.shape for grouping in groupings))
        found = loss_of(model, imgs, ids, groupings)
        assert_close(found, loss_of(model, imgs, ids), rtol=1e-10, atol=0)
    assert len(shapes) == 1


def test_a_mask_that_needs_more_groups_than_planned_gets_the_larger_shape():
    """No mask exceeds the larger shape. So there are two shapes, and a compiled model has two graphs."""
    model = build()
    model.grouper.capacities[1] = 1
    for seed in range(8):
        imgs, ids, groupings = a_batch(model, seed=seed)
        assert [len(grouping) for grouping in groupings] == list(model.grouper.ceilings)
        found = loss_of(model, imgs, ids, groupings)
        assert_close(found, loss_of(model, imgs, ids), rtol=1e-10, atol=0)


def test_no_mask_exceeds_the_ceiling():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 10, size=rng.integers(1, 40))
        ceiling = 2 * (counts.sum() // 10) + 1
        assert len(group_windows(counts, 9)) <= ceiling


def test_gradients_are_those_without_groups():
    model = build()
    imgs, ids, groupings = a_batch(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss_of(model, imgs, ids, groupings), trained)
    expected = torch.autograd.grad(loss_of(model, imgs, ids), trained)
    assert_close(found, expected, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------------------ the model


def slow_encoder(model, img, units):
    """Returns {unit: latent} of one image, computed token by token from torch's basic operators."""
    w = dict(model.named_parameters())
    tokens = {}  # by (row, column)
    for unit in units:
        for i in range(4):
            for j in range(4):
                row = 4 * (unit // 4) + i
                column = 4 * (unit % 4) + j
                embedded = slow_mae.embed(img, 16 * row + column, 4, w)
                tokens[row, column] = slow_mae.norm(embedded, w, "patch_embed.norm")
    for stage, heads in enumerate((2, 2, 4)):
        for shift in (0, 1):
            tokens = slow_block(tokens, w, f"layers.{stage}.blocks.{shift}", heads, shift)
        if stage < 2:
            tokens = slow_merging(tokens, w, f"layers.{stage}.downsample")
    latents = {}
    for (row, column), x in tokens.items():
        latents[4 * row + column] = slow_mae.norm(x, w, "norm")
    return latents


def slow_block(tokens, w, name, heads, shift):
    """Each token attends to those of its window of 2 x 2, with a bias by their offset."""
    table = w[f"{name}.attn.relative_position_bias_table"]
    qkv = {}
    for cell, x in tokens.items():
        normed = slow_mae.norm(x, w, f"{name}.norm1")
        qkv[cell] = slow_mae.linear(normed, w, f"{name}.attn.qkv")
    result = {}
    for query, x in tokens.items():
        home = window_index(query, 2, shift)
        near = {}
        for key, value in qkv.items():
            if window_index(key, 2, shift) == home:
                near[key] = value

        def bias(key, head, query=query):
            down = query[0] - key[0] + 1
            across = query[1] - key[1] + 1
            return table[3 * down + across, head]

        attended = slow_mae.attend(query, near, heads, bias)
        x = x + slow_mae.linear(attended, w, f"{name}.attn.proj")
        normed = slow_mae.norm(x, w, f"{name}.norm2")
        result[query] = x + slow_mae.mlp(normed, w, f"{name}.mlp")
    return result


def slow_merging(tokens, w, name):
    merged = {}
    for row, column in tokens:
        if row % 2 or column % 2:
            continue
        four = [
            tokens[row, column],
            tokens[row + 1, column],
            tokens[row, column + 1],
            tokens[row + 1, column + 1],
        ]
        normed = slow_mae.norm(torch.cat(four), w, f"{name}.norm")
        merged[row // 2, column // 2] = w[f"{name}.reduction.weight"] @ normed
    return merged


def slow_loss(model, img, visible, retained, thrown, places):
    """Returns (mean error of the supervised units, {unit: prediction}).

    places: {visible unit: the position at which the decoder places its latent}.
    """
    w = dict(model.decoder.named_parameters())
    tokens = {}
    for unit, latent in slow_encoder(model, img, sorted(visible)).items():
        tokens[places[unit]] = slow_mae.linear(latent, w, "embed")
    for unit in retained:
        tokens[unit] = w["mask_token"][0, 0]
    for unit, x in tokens.items():
        tokens[unit] = x + w["pos_embed"][0, unit]
    decoded = slow_mae.transformer(tokens, w, "blocks", heads=2)
    supervised = list(retained)
    if model.decoder.aggregation is not None:
        kernel = dict(model.decoder.aggregation.operator.named_parameters())
        filled = {}
        for unit in thrown:
            filled[unit] = slow_mae.aggregate(decoded, unit, 4, kernel)
        decoded |= filled
        supervised += thrown
    predictions = {}
    errors = []
    for unit in supervised:
        normed = slow_mae.norm(decoded[unit], w, "norm")
        predictions[unit] = slow_mae.linear(normed, w, "pred")
        pixels = slow_mae.pixels_of(img, unit, 16)
        target = slow_mae.target_of(pixels, norm_pix=True)
        squares = (predictions[unit] - target) ** 2
        errors.append(squares.mean())
    return sum(errors) / len(errors), predictions


@torch.no_grad()
@pytest.mark.parametrize("decoder_order", ["true", "reference"])
@pytest.mark.parametrize(
    ("throw_ratio", "progressive"),
    [
        (0.0, True),
        (0.5, False),
        (0.5, True),
    ],
)
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive, decoder_order):
    model = build(throw_ratio=throw_ratio, progressive=progressive, decoder_order=decoder_order, norm_pix_loss=True)
    imgs, ids, groupings = a_batch(model, size=2)
    pred, mask = model.reconstruct(imgs, ids)
    losses = []
    for b in range(2):
        visible, retained, thrown = segments(ids[b], model.counts)
        # As the release: the r-th visible unit in raster order is placed where the r-th in the noise's order belongs.
        places = dict(zip(sorted(visible), visible, strict=True))
        loss, predictions = slow_loss(model, imgs[b], visible, retained, thrown, places)
        losses.append(loss)
        assert sorted(predictions) == mask[b].nonzero().flatten().tolist()
        for unit, value in predictions.items():
            assert_close(pred[b, unit], value, rtol=1e-8, atol=1e-8)
    expected = torch.stack(losses).mean()
    found = loss_of(model, imgs, ids, groupings)
    assert_close(found, expected, rtol=1e-9, atol=0)


def test_only_the_reference_order_scrambles_the_visible_units():
    visible = {}
    for decoder_order in ("true", "reference"):
        model = build(decoder_order=decoder_order)
        assert model.own_settings() == {"decoder_order": decoder_order}
        _, ids, _ = a_batch(model, size=4)
        assert (ids[:, :4] == ids[:1, :4]).all()  # one mask for the batch
        visible[decoder_order] = ids[0, :4].tolist()
    assert visible["true"] == sorted(visible["reference"])
    assert visible["true"] != visible["reference"]


def test_batches_that_do_not_share_their_visible_units_are_refused():
    model = build()
    imgs, ids, _ = a_batch(model, size=2)
    ids[1] = ids[1].roll(3)
    with pytest.raises(ValueError, match="must share their visible tokens"):
        model(imgs, ids)


def test_initialisation():
    torch.manual_seed(0)
    model = GreenMIMSwin(**SIZES | DECODER | dict(embed_dim=64))
    largest = model.layers[0].blocks[0].attn.qkv.weight.abs().max().item()
    assert largest == pytest.approx((6 / (64 + 192)) ** 0.5, rel=0.01)  # Xavier's
    largest = model.patch_embed.proj.weight.abs().max().item()
    assert largest == pytest.approx((6 / (48 + 64)) ** 0.5, rel=0.02)
    assert not model.layers[1].blocks[0].mlp.fc1.bias.any()
    tables = {}
    for name, parameter in model.named_parameters():
        if "bias_table" in name:
            tables[name] = parameter.flatten()
    assert 0.01 < torch.cat(list(tables.values())).std() < 0.03
    assert model.no_weight_decay() == {*tables, "decoder.mask_token"}


# ------------------------------------------------------------------------------------------------ names of the release


def release(model):
    """Returns the model's weights under the release's names."""
    weights = {"encoder.layers.0.blocks.0.attn.relative_position_index": torch.zeros(4, 4)}
    for name, value in model.state_dict().items():
        if not name.startswith("decoder."):
            weights[f"encoder.{name}"] = value
        elif name == "decoder.mask_token":
            weights["mask_token"] = value
        elif "aggregation" not in name:
            weights[name.replace("decoder.", "decoder_", 1)] = value
    return weights


def test_load_official():
    source = build(throw_ratio=0.0).float()
    model = build(throw_ratio=0.5).float()
    nn.init.zeros_(model.patch_embed.proj.weight)
    model.load_official({"model": release(source)})
    assert_same_weights(model, source)


def linear_shapes(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_shapes(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block_shapes(name, width):
    return {
        **norm_shapes(f"{name}.norm1", width),
        **norm_shapes(f"{name}.norm2", width),
        **linear_shapes(f"{name}.attn.qkv", width, 3 * width),
        **linear_shapes(f"{name}.attn.proj", width, width),
        **linear_shapes(f"{name}.mlp.fc1", width, 4 * width),
        **linear_shapes(f"{name}.mlp.fc2", 4 * width, width),
    }


@pytest.mark.parametrize(
    ("make", "width", "heads", "tables"),
    [
        (greenmim_swin_base_patch4_window7, 128, (4, 8, 16, 32), (169,) * 4),
        (greenmim_swin_large_patch4_window14, 192, (6, 12, 24, 48), (729, 729, 729, 169)),
    ],
)
def test_the_published_keys_of_the_release_are_loaded(make, width, heads, tables):
    shapes = {
        "mask_token": (1, 1, 512),
        "decoder_pos_embed": (1, 49, 512),
        "encoder.patch_embed.proj.weight": (width, 3, 4, 4),
        "encoder.patch_embed.proj.bias": (width,),
        **norm_shapes("encoder.patch_embed.norm", width),
        **norm_shapes("encoder.norm", 8 * width),
        **norm_shapes("decoder_norm", 512),
        **linear_shapes("decoder_embed", 8 * width, 512),
        **linear_shapes("decoder_pred", 512, 3072),
        **block_shapes("decoder_blocks.0", 512),
    }
    for stage, depth in enumerate((2, 2, 18, 2)):
        stage_width = width * 2**stage
        for number in range(depth):
            name = f"encoder.layers.{stage}.blocks.{number}"
            shapes |= block_shapes(name, stage_width)
            shapes[f"{name}.attn.relative_position_bias_table"] = (tables[stage], heads[stage])
        if stage < 3:
            name = f"encoder.layers.{stage}.downsample"
            shapes |= norm_shapes(f"{name}.norm", 4 * stage_width)
            shapes[f"{name}.reduction.weight"] = (2 * stage_width, 4 * stage_width)
    with torch.device("meta"):
        make(throw_ratio=0.5).load_official({name: torch.empty(shape) for name, shape in shapes.items()})


def test_the_order_of_patch_merging_in_the_first_release(tmp_path):
    """Weights of a model that merges 00, 01, 10, 11, re-indexed to Swin's 00, 10, 01, 11, give the same features."""
    source = build(throw_ratio=0.0).float()
    model = build(throw_ratio=0.0).float()
    model.load_official({"state_dict": release(source)}, first_release=True)
    merging = model.layers[0].downsample
    old_merging = source.layers[0].downsample
    x = torch.randn(2, 4, 4, 16)
    in_old_order = torch.cat([x[:, ::2, ::2], x[:, ::2, 1::2], x[:, 1::2, ::2], x[:, 1::2, 1::2]], dim=-1)
    assert_close(merging(x), old_merging.reduction(old_merging.norm(in_old_order)))
    assert torch.equal(model.norm.weight, source.norm.weight)

    torch.save({"model": release(source)}, tmp_path / "release.pth")
    tuned = SwinTransformer(num_classes=3, **SIZES)
    report = load_encoder(tuned, tmp_path / "release.pth", first_release_merging=True)
    assert report.missing == ["head.weight", "head.bias"]
    assert torch.equal(tuned.layers[1].downsample.reduction.weight, model.layers[1].downsample.reduction.weight)
