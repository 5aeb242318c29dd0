import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from encoders.load import load_encoder
from encoders.models_swin import SwinEncoder, SwinTransformer, WindowAttention
from encoders.window_groups import WindowGrouper, WindowGroups, group_tokens, group_windows, unit_coords, window_of
from frameworks.models_greenmim_pr import (
    GreenMIMSwin,
    greenmim_swin_base_patch4_window7,
    greenmim_swin_large_patch4_window14,
)
from tests.test_models_mae_pr import assert_same_weights, perturbed, segments
from util.run.checkpoint import save_checkpoint

# 4 x 4 units of 16 px. In the first stage a unit has 4 x 4 tokens, and windows of 2 x 2 must be grouped.
SIZES = dict(img_size=64, patch_size=4, embed_dim=16, depths=(2, 2, 2), num_heads=(2, 2, 4), window_size=2)
DECODER = dict(decoder_embed_dim=16, decoder_num_heads=2, kernel_size=3)


def build(**options):
    torch.manual_seed(0)
    return perturbed(GreenMIMSwin(**SIZES | DECODER | options))


def a_batch(model, size=3, seed=0):
    collated = model.collator("furthest", seed)([(torch.zeros(1), 0, (0, i)) for i in range(size)])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, *model.img_size, dtype=torch.float64, generator=generator), *collated[2:]


# -------------------------------------------------------------------------------------------------- attention in groups


def visible_coords(seed, unit_grid=(5, 5), num_visible=7, side=4):
    units = np.sort(np.random.default_rng(seed).permutation(unit_grid[0] * unit_grid[1])[:num_visible])
    return unit_coords(torch.from_numpy(units), unit_grid[1], side)


def key_masked(attention, x, coords, window, shift, grid):
    """Computes Swin's attention on the whole grid, token by token. Tokens that are not visible are no keys."""
    rows, columns = grid
    visible = torch.zeros(rows, columns, dtype=torch.bool)
    visible[coords[:, 0], coords[:, 1]] = True
    dense = x.new_zeros(len(x), rows, columns, x.shape[-1])
    dense[:, coords[:, 0], coords[:, 1]] = x
    out = torch.zeros_like(dense)
    table = attention.relative_position_bias_table
    for y in range(rows):
        for col in range(columns):
            if not visible[y, col]:
                continue
            q = attention.qkv(dense[:, y, col])[:, : x.shape[-1]].unflatten(-1, (attention.num_heads, -1))
            home = [(c - shift + window) // window for c in (y, col)]
            near = [
                (i, j)
                for i in range(rows)
                for j in range(columns)
                if visible[i, j] and [(c - shift + window) // window for c in (i, j)] == home
            ]
            kv = attention.qkv(torch.stack([dense[:, i, j] for i, j in near], 1)).unflatten(
                -1, (3, attention.num_heads, -1)
            )
            bias = torch.stack([table[(y - i + window - 1) * (2 * window - 1) + col - j + window - 1] for i, j in near])
            logits = torch.einsum("bhd,bkhd->bkh", q, kv[:, :, 1]) * q.shape[-1] ** -0.5 + bias
            out[:, y, col] = attention.proj(torch.einsum("bkh,bkhd->bhd", logits.softmax(1), kv[:, :, 2]).flatten(1))
    return out[:, coords[:, 0], coords[:, 1]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("window", "shift"), [(4, 0), (4, 2), (5, 0), (5, 2), (3, 1)])
@pytest.mark.parametrize("mode", ["grouped", "padded", "masked"])
def test_attention_among_visible_tokens_is_dense_attention_without_the_other_keys(window, shift, seed, mode):
    """Of the 20 x 20 tokens, windows of 3 divide neither grid nor units, windows of 5 do not divide the units."""
    torch.manual_seed(seed)
    coords = visible_coords(seed)
    attention = WindowAttention(8, window, num_heads=2).double()
    nn.init.normal_(attention.relative_position_bias_table)
    grouping = None
    if mode != "masked":
        y, x = window_of(coords, window, shift).T.numpy()
        grouping = torch.from_numpy(group_tokens(100 * y + x, window**2, capacity=40 if mode == "padded" else 0))
    tokens = torch.randn(2, len(coords), 8, dtype=torch.float64)
    ours = attention.among_visible(tokens, WindowGroups(coords, window, shift, grouping))
    torch.testing.assert_close(
        ours, key_masked(attention, tokens, coords, window, shift, (20, 20)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "sizes", [{}, dict(img_size=(64, 96)), dict(window_size=4), dict(embed_dim=8, depths=(1, 2, 1))]
)
def test_with_every_unit_visible_the_encoder_is_the_dense_one(planned, sizes):
    torch.manual_seed(0)
    encoder = perturbed(SwinEncoder(**SIZES | sizes))
    imgs = torch.randn(2, 3, *encoder.img_size, dtype=torch.float64)
    units = torch.arange(encoder.unit_grid[0] * encoder.unit_grid[1])
    grouper = WindowGrouper(encoder.unit_grid, len(units), encoder.grouped_stages(len(units)), samples=2)
    assert grouper.stages
    side = encoder.stride // 4
    tokens = encoder.patch_embed(encoder.patchify(imgs)).unflatten(1, encoder.token_grid)
    tokens = (
        tokens.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3).flatten(1, 2)
    )  # [B, V, side, side, D]
    features = encoder.encode_visible(tokens, units, grouper(units) if planned else ())
    torch.testing.assert_close(features, encoder.forward_features(imgs), rtol=1e-9, atol=1e-9)


def test_plans_of_any_mask_have_one_shape_and_change_nothing():
    model = build()
    shapes = set()
    for seed in range(8):
        imgs, ids, *groupings = a_batch(model, seed=seed)
        assert len(groupings) == len(model.grouper.stages) == 4  # two stages, shifted or not; the third has few tokens
        shapes.add(tuple(grouping.shape for grouping in groupings))
        torch.testing.assert_close(model(imgs, ids, *groupings)["pixel"], model(imgs, ids)["pixel"], rtol=1e-10, atol=0)
    assert len(shapes) == 1


def test_a_mask_that_needs_more_groups_than_planned_gets_the_larger_shape():
    """No mask exceeds the larger shape. So there are two shapes, and a compiled model has two graphs."""
    model = build()
    usual = {tuple(grouping.shape for grouping in a_batch(model, seed=seed)[2:]) for seed in range(4)}
    model.grouper.capacities[1] = 1
    shapes = set()
    for seed in range(20):
        imgs, ids, *groupings = a_batch(model, seed=seed)
        shapes.add(tuple(len(grouping) for grouping in groupings))
        torch.testing.assert_close(model(imgs, ids, *groupings)["pixel"], model(imgs, ids)["pixel"], rtol=1e-10, atol=0)
    assert len(usual) == 1 and shapes == {tuple(model.grouper.ceilings)}


def test_no_mask_exceeds_the_ceiling():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 10, size=rng.integers(1, 40))
        assert len(group_windows(counts, 9)) <= 2 * (counts.sum() // 10) + 1


def test_gradients_are_those_without_groups():
    model = build()
    imgs, ids, *groupings = a_batch(model)
    gradients = []
    for given in (groupings, ()):
        model.zero_grad()
        model(imgs, ids, *given)["pixel"].backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-8, atol=1e-10)


def test_plans_that_are_not_of_this_mask_are_refused():
    model = build()
    imgs, ids, *groupings = a_batch(model)
    with pytest.raises(ValueError, match="4 groupings are needed, or none, got 3"):
        model(imgs, ids, *groupings[1:])
    groupings[0] = groupings[0].clone()
    groupings[0][0] = -1
    with pytest.raises(ValueError, match=r"the grouping holds \d+ tokens, but 64 are visible"):
        model(imgs, ids, *groupings)


def test_which_stages_are_grouped_at_full_size():
    """With window 7 stages 1 and 2, which have 768 and 192 tokens; with window 14 only stage 1."""
    with torch.device("meta"):
        base, large = greenmim_swin_base_patch4_window7(), greenmim_swin_large_patch4_window14()
    assert base.grouped_stages(12) == [(8, 7, 0), (8, 7, 3), (4, 7, 0), (4, 7, 3)]
    assert large.grouped_stages(12) == [(8, 14, 0), (8, 14, 7)]
    assert [(stage.window, stage.shifts) for stage in base.layers] == [(7, [0, 3])] * 3 + [(7, [0])]
    assert [(stage.window, stage.shifts) for stage in large.layers] == [(14, [0, 7])] * 2 + [(14, [0]), (7, [0])]


# ------------------------------------------------------------------------------------------------------------ the model


def slow_encoder(model, img, units):
    """Returns {unit: latent} of one image, computed token by token from torch's basic operators."""
    w = dict(model.named_parameters())
    kernel, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape, w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    tokens = {}
    for unit in units:
        for i in range(4):
            for j in range(4):
                y, x = 4 * (unit // 4) + i, 4 * (unit % 4) + j
                patch = img[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
                tokens[y, x] = norm((kernel * patch).sum(dim=(1, 2, 3)) + bias, "patch_embed.norm")
    for s, heads in enumerate((2, 2, 4)):
        for b in range(2):
            name, shift = f"layers.{s}.blocks.{b}", b
            qkv = {}
            for c, x in tokens.items():
                qkv[c] = F.linear(norm(x, f"{name}.norm1"), w[f"{name}.attn.qkv.weight"], w[f"{name}.attn.qkv.bias"])
            table, new = w[f"{name}.attn.relative_position_bias_table"], {}
            for c, x in tokens.items():
                near = [
                    o
                    for o in tokens
                    if all((a - shift + 2) // 2 == (d - shift + 2) // 2 for a, d in zip(c, o, strict=True))
                ]
                dim = len(x) // heads
                out = []
                for h in range(heads):
                    q, k, v = (slice(n * len(x) + h * dim, n * len(x) + (h + 1) * dim) for n in range(3))
                    bias = torch.stack([table[(c[0] - o[0] + 1) * 3 + c[1] - o[1] + 1, h] for o in near])
                    logits = torch.stack([qkv[c][q] @ qkv[o][k] / dim**0.5 for o in near]) + bias
                    out.append(sum(p * qkv[o][v] for p, o in zip(logits.softmax(0), near, strict=True)))
                x = x + F.linear(torch.cat(out), w[f"{name}.attn.proj.weight"], w[f"{name}.attn.proj.bias"])
                hidden = F.linear(norm(x, f"{name}.norm2"), w[f"{name}.mlp.fc1.weight"], w[f"{name}.mlp.fc1.bias"])
                new[c] = x + F.linear(F.gelu(hidden), w[f"{name}.mlp.fc2.weight"], w[f"{name}.mlp.fc2.bias"])
            tokens = new
        if s < 2:
            cells = sorted({(y // 2, x // 2) for y, x in tokens})
            merged = {}
            for y, x in cells:
                four = torch.cat([tokens[2 * y + i, 2 * x + j] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))])
                merged[y, x] = F.linear(
                    norm(four, f"layers.{s}.downsample.norm"), w[f"layers.{s}.downsample.reduction.weight"]
                )
            tokens = merged
    return {4 * y + x: norm(value, "norm") for (y, x), value in tokens.items()}


def slow_loss(model, img, visible, retained, thrown, places=None):
    """Returns (mean error of the supervised units, {unit: prediction}).

    places: {visible unit: the position at which the decoder places its latent}.
    """
    decoder, w = model.decoder, dict(model.decoder.named_parameters())
    latent = slow_encoder(model, img, sorted(visible))
    tokens = {(places or {}).get(t, t): decoder.embed(x) for t, x in latent.items()}
    tokens |= dict.fromkeys(retained, w["mask_token"][0, 0])
    names = sorted(tokens)
    x = torch.stack([tokens[t] + w["pos_embed"][0, t] for t in names])[None]
    for block in decoder.blocks:
        x = block(x)
    tokens = dict(zip(names, x[0], strict=True))
    filled = dict(tokens)
    if decoder.aggregation is not None:
        for t in thrown:
            filled[t] = w["aggregation.operator.bias"]
            for other, value in tokens.items():
                i, j = other // 4 - t // 4 + 1, other % 4 - t % 4 + 1
                if 0 <= i < 3 and 0 <= j < 3:
                    filled[t] = filled[t] + w["aggregation.operator.weight"][:, 0, i, j] * value
    predictions, errors = {}, []
    for t in [*retained, *(thrown if decoder.aggregation is not None else [])]:
        predictions[t] = decoder.pred(decoder.norm(filled[t]))
        pixels = img[:, 16 * (t // 4) : 16 * (t // 4) + 16, 16 * (t % 4) : 16 * (t % 4) + 16].permute(1, 2, 0).flatten()
        errors.append(((predictions[t] - (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()) ** 2).mean())
    return sum(errors) / len(errors), predictions


@pytest.mark.parametrize("decoder_order", ["true", "reference"])
@pytest.mark.parametrize(("throw_ratio", "progressive"), [(0.0, True), (0.5, False), (0.5, True)])
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive, decoder_order):
    model = build(throw_ratio=throw_ratio, progressive=progressive, decoder_order=decoder_order, norm_pix_loss=True)
    imgs, ids, *groupings = a_batch(model, size=2)
    assert torch.equal(ids[0, :4], ids[1, :4])
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
            torch.testing.assert_close(pred[b, unit], value, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(model(imgs, ids, *groupings)["pixel"], torch.stack(losses).mean(), rtol=1e-9, atol=0)


def test_only_the_reference_order_scrambles_the_visible_units():
    true, reference = build(), build(decoder_order="reference")
    ids = [a_batch(model, size=4)[1][:, :4] for model in (true, reference)]
    assert torch.equal(ids[0], ids[1].sort(dim=1).values) and not torch.equal(ids[0], ids[1])
    assert all((rows == rows[:1]).all() for rows in ids)
    with pytest.raises(ValueError, match="unknown decoder_order 'random', choose from true, reference"):
        build(decoder_order="random")


def test_the_decoder_order_is_recorded():
    assert build().own_settings() == {"decoder_order": "true"}
    assert build(decoder_order="reference").own_settings() == {"decoder_order": "reference"}


def test_counts_at_full_size_are_those_of_the_paper():
    with torch.device("meta"):
        model = greenmim_swin_base_patch4_window7()
    assert (model.counts.num_visible, model.counts.num_retained, model.counts.num_thrown) == (12, 13, 24)
    assert model.grid_size == (7, 7) and model.shared_visible


def test_batches_that_do_not_share_their_visible_units_are_refused():
    model = build()
    imgs, ids, *_ = a_batch(model, size=2)
    ids[1] = ids[1].roll(3)
    with pytest.raises(ValueError, match="all images of a batch must share their visible tokens"):
        model(imgs, ids)


def test_number_of_parameters_of_the_release():
    with torch.device("meta"):
        models = [f(throw_ratio=0.0) for f in (greenmim_swin_base_patch4_window7, greenmim_swin_large_patch4_window14)]
    for model, trained, encoder in zip(models, (91_997_880, 200_774_356), (86_743_224, 195_257_556), strict=True):
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
        assert sum(p.numel() for name, p in model.named_parameters() if not name.startswith("decoder.")) == encoder
    assert {m.eps for m in models[0].modules() if isinstance(m, nn.LayerNorm)} == {1e-6}
    assert models[0].decoder.pos_embed.shape == (1, 49, 512)


def test_initialisation():
    torch.manual_seed(0)
    model = GreenMIMSwin(**SIZES | DECODER | dict(embed_dim=64))
    bound = (6 / (64 + 192)) ** 0.5
    assert model.layers[0].blocks[0].attn.qkv.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert model.patch_embed.proj.weight.abs().max().item() == pytest.approx((6 / (48 + 64)) ** 0.5, rel=0.02)
    assert not model.layers[1].blocks[0].mlp.fc1.bias.any()
    tables = torch.cat([p.flatten() for name, p in model.named_parameters() if "bias_table" in name])
    assert 0.01 < tables.std().item() < 0.03
    assert model.no_weight_decay() == {n for n, _ in model.named_parameters() if "bias_table" in n} | {
        "decoder.mask_token"
    }


def release(model):
    """Returns the model's weights under the release's names."""
    weights = {}
    for name, value in model.state_dict().items():
        if name == "decoder.mask_token":
            weights["mask_token"] = value
        elif name.startswith("decoder."):
            if "aggregation" not in name:
                weights[name.replace("decoder.", "decoder_", 1)] = value
        else:
            weights[f"encoder.{name}"] = value
    return weights | {"encoder.layers.0.blocks.0.attn.relative_position_index": torch.zeros(4, 4)}


def test_load_official():
    source, model = build(throw_ratio=0.0).float(), build(throw_ratio=0.5).float()
    weights = release(source)
    assert {
        "decoder_blocks.0.attn.qkv.weight",
        "decoder_embed.bias",
        "decoder_pos_embed",
        "decoder_norm.weight",
    } <= weights.keys()
    nn.init.zeros_(model.patch_embed.proj.weight)
    model.load_official({"model": weights})
    assert_same_weights(model, source)


def block_keys(name, width):
    shapes = {"norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    shapes |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
    return {f"{name}.{k}.weight": s for k, s in shapes.items()} | {f"{name}.{k}.bias": s[:1] for k, s in shapes.items()}


@pytest.mark.parametrize(
    ("make", "width", "heads", "tables"),
    [
        (greenmim_swin_base_patch4_window7, 128, (4, 8, 16, 32), (169,) * 4),
        (greenmim_swin_large_patch4_window14, 192, (6, 12, 24, 48), (729, 729, 729, 169)),
    ],
)
def test_the_published_keys_of_the_release_are_loaded(make, width, heads, tables):
    keys = {"mask_token": (1, 1, 512), "decoder_pos_embed": (1, 49, 512)}
    keys |= {"encoder.patch_embed.proj.weight": (width, 3, 4, 4), "encoder.patch_embed.proj.bias": (width,)}
    for s, depth in enumerate((2, 2, 18, 2)):
        C = width << s
        for b in range(depth):
            name = f"encoder.layers.{s}.blocks.{b}"
            keys |= block_keys(name, C) | {f"{name}.attn.relative_position_bias_table": (tables[s], heads[s])}
        if s < 3:
            name = f"encoder.layers.{s}.downsample"
            keys |= {
                f"{name}.norm.weight": (4 * C,),
                f"{name}.norm.bias": (4 * C,),
                f"{name}.reduction.weight": (2 * C, 4 * C),
            }
    for name, n in (("encoder.patch_embed.norm", width), ("encoder.norm", 8 * width), ("decoder_norm", 512)):
        keys |= {f"{name}.weight": (n,), f"{name}.bias": (n,)}
    for name, shape in (("decoder_embed", (512, 8 * width)), ("decoder_pred", (3072, 512))):
        keys |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    keys |= block_keys("decoder_blocks.0", 512)
    with torch.device("meta"):
        model = make(throw_ratio=0.5)
        model.load_official({name: torch.empty(shape) for name, shape in keys.items()})


def test_the_order_of_patch_merging_in_the_first_release(tmp_path):
    """Weights of a model that merges 00, 01, 10, 11, re-indexed to Swin's 00, 10, 01, 11, give the same features."""
    source, model = build(throw_ratio=0.0).float(), build(throw_ratio=0.0).float()
    model.load_official(release(source), first_release=True)
    torch.save({"model": release(source)}, tmp_path / "release.pth")
    tuned = SwinTransformer(num_classes=3, **SIZES)
    load_encoder(tuned, tmp_path / "release.pth", first_release_merging=True)
    assert torch.equal(tuned.layers[1].downsample.reduction.weight, model.layers[1].downsample.reduction.weight)
    with pytest.raises(ValueError, match="only Swin's have an order of merging"):
        load_encoder(
            tuned,
            save_checkpoint(tmp_path, 1, {"model": {"norm.weight": torch.zeros(3)}}, {}),
            first_release_merging=True,
        )
    merging, theirs = model.layers[0].downsample, source.layers[0].downsample
    x = torch.randn(2, 4, 4, 16)
    older = torch.cat([x[:, i::2, j::2] for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))], dim=-1)
    torch.testing.assert_close(merging(x), theirs.reduction(theirs.norm(older)))
    assert torch.equal(model.norm.weight, source.norm.weight)


@pytest.mark.parametrize("released", [False, True])
def test_the_encoder_moves_to_dense_fine_tuning(tmp_path, released):
    source = build().float()
    torch.save({"model": release(source) if released else source.state_dict()}, tmp_path / "weights.pth")
    tuned = SwinTransformer(num_classes=3, **SIZES).eval()
    report = load_encoder(tuned, tmp_path / "weights.pth")
    assert report.missing == ["head.weight", "head.bias"] and not report.resized
    assert {m.eps for m in tuned.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    assert torch.equal(tuned.layers[2].blocks[1].attn.qkv.weight, source.layers[2].blocks[1].attn.qkv.weight)
