"""CrossMAE against a derivation token by token in float64, its release's names, its costs, and PR-MIM on it."""

import pytest
import torch
from torch.testing import assert_close

from encoders.load import load_encoder
from frameworks.models_crossmae_pr import CrossMaskedAutoencoderViT
from models_vit import VisionTransformer
from tests import slow_mae
from tests.test_models_mae_pr import orders, perturbed, segments

ENCODER = dict(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3)
SIZES = dict(**ENCODER, decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)
SOURCES = ("embed", "zeros", "blocks")
ARMS = [dict(throw_ratio=0.0), dict(throw_ratio=0.5, progressive=False)]
ARMS += [dict(throw_ratio=0.5, visible_source=source) for source in SOURCES]


def build(**options):
    torch.manual_seed(0)
    return perturbed(CrossMaskedAutoencoderViT(**SIZES | dict(norm_pix_loss=True, kernel_size=3) | options))


def a_batch(model, size=2):
    generator = torch.Generator().manual_seed(1)
    imgs = torch.randn(size, 3, *model.img_size, generator=generator, dtype=torch.float64)
    return imgs, orders(model, size)


def release_name(name):
    """Returns the release's name of one of our parameters, by rules that are independent of the tested table."""
    name = name.replace("decoder.level_weights", "wfm.linear.weight").replace("decoder.level_norms.", "dec_norms.")
    return name.replace("decoder.mask_token", "mask_token").replace("decoder.", "decoder_")


def released(model):
    """Returns the model's weights under the release's names, without the aggregation."""
    weights = {}
    for name, value in model.state_dict().items():
        if ".aggregation." not in name:
            weights[release_name(name)] = value.clone()
    return weights


# ---------------------------------------------------------------------------------------------- the slow derivation


def slow_levels(w, img, visible):
    """Returns a list of levels, {token: features}: the input, then the outputs of the three blocks."""
    positions = w["pos_embed"][0]
    tokens = {"cls": w["cls_token"][0, 0] + positions[0]}
    for t in visible:
        tokens[t] = slow_mae.embed(img, t, 4, w) + positions[1 + t]
    levels = [tokens]
    for layer in range(3):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", heads=3)
        levels.append(tokens)
    return levels


def slow_mixture(levels, weights):
    """Returns {token: weighted sum over the levels}."""
    mixture = {}
    for t in levels[0]:
        mixture[t] = 0.0
        for level, weight in zip(levels, weights, strict=True):
            mixture[t] = mixture[t] + weight * level[t]
    return mixture


def slow_block(query, context, w, name):
    """Returns one query after it has read the context {token: features}."""
    normed = slow_mae.norm(query, w, f"{name}.norm1")
    q = slow_mae.linear(normed, w, f"{name}.cross_attn.q")
    qkv = {}
    for t, x in context.items():
        kv = slow_mae.linear(x, w, f"{name}.cross_attn.kv")
        qkv[t] = torch.cat([q, kv])
    read = slow_mae.attend("cls", qkv, heads=2)
    query = query + slow_mae.linear(read, w, f"{name}.cross_attn.proj")
    normed = slow_mae.norm(query, w, f"{name}.norm2")
    return query + slow_mae.mlp(normed, w, f"{name}.mlp")


def slow_visible(a, levels):
    """Returns {visible token: features at the decoder's width} by the weights of the aggregation, `a`."""
    features = {}
    for t, x in slow_mixture(levels, a["visible_weights"]).items():
        if t != "cls":
            normed = slow_mae.norm(x, a, "visible_norm")
            features[t] = slow_mae.linear(normed, a, "visible_embed")
    return features


def slow_predictions(w, levels, retained, thrown, a=None, source=None):
    """Returns {token: prediction}. `a` holds the weights of the aggregation. Without them, no thrown token has one."""
    queries = dict.fromkeys(retained, w["mask_token"][0, 0])
    if source == "blocks":
        queries |= slow_visible(a, levels)
    for t, x in queries.items():
        queries[t] = x + w["decoder_pos_embed"][0, 1 + t]
    for j, weights in enumerate(w["wfm.linear.weight"]):
        context = {}
        for t, x in slow_mixture(levels, weights).items():
            context[t] = slow_mae.norm(x, w, f"dec_norms.{j}")
        for t, x in queries.items():
            queries[t] = slow_block(x, context, w, f"decoder_blocks.{j}")
    features = {t: queries[t] for t in retained}
    if a is not None:
        cells = dict(queries)
        if source == "embed":
            cells |= slow_visible(a, levels)
        kernel = {"weight": a["operator.weight"], "bias": a["operator.bias"]}
        for t in thrown:
            features[t] = slow_mae.aggregate(cells, t, 4, kernel)
    predictions = {}
    for t, x in features.items():
        normed = slow_mae.norm(x, w, "decoder_norm")
        predictions[t] = slow_mae.linear(normed, w, "decoder_pred")
    return predictions


@pytest.mark.parametrize("arm", ARMS, ids=["throw 0", "plain", *SOURCES])
def test_predictions_loss_and_gradients_against_the_slow_derivation(arm):
    model = build(**arm)
    imgs, ids = a_batch(model)
    copies = {}
    w = {}
    a = {}
    for name, value in model.named_parameters():
        copies[name] = value.detach().clone().requires_grad_(value.requires_grad)
        if name.startswith("decoder.aggregation."):
            a[name.removeprefix("decoder.aggregation.")] = copies[name]
        else:
            w[release_name(name)] = copies[name]
    pred, mask = model.reconstruct(imgs, ids)
    errors = []
    for b in range(2):
        visible, retained, thrown = segments(ids[b], model.counts)
        levels = slow_levels(w, imgs[b], visible)
        slow = slow_predictions(w, levels, retained, thrown, a or None, arm.get("visible_source"))
        assert mask[b].nonzero().flatten().tolist() == sorted(slow)
        for t, value in slow.items():
            assert_close(pred[b, t], value.detach(), rtol=1e-9, atol=1e-9)
            pixels = slow_mae.pixels_of(imgs[b], t, 4)
            difference = value - slow_mae.target_of(pixels, norm_pix=True)
            errors.append((difference**2).mean())
        assert not pred[b, ~mask[b]].any()
    expected = sum(errors) / len(errors)
    loss = model(imgs, ids)["pixel"]
    assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name
        if parameter.requires_grad:
            assert_close(
                parameter.grad,
                copies[name].grad,
                rtol=1e-7,
                atol=1e-11,
                msg=name,
            )


# --------------------------------------------------------------------------------------------------- what is special


def test_first_weights():
    """Mixtures are Xavier-uniform. The visible features are those of the last block at first."""
    torch.manual_seed(0)
    model = CrossMaskedAutoencoderViT(**SIZES | dict(depth=40, decoder_depth=30), throw_ratio=0.5)
    weights = model.decoder.level_weights
    bound = (6 / (41 + 30)) ** 0.5
    assert 0.98 * bound < weights.abs().max() <= bound
    assert weights.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert model.decoder.aggregation.visible_weights.tolist() == [0.0] * 40 + [1.0]
    assert 0.015 < model.decoder.mask_token.std() < 0.03
    assert not model.decoder.blocks[0].cross_attn.kv.bias.any()


# ------------------------------------------------------------------------------------------------ names of the release


def release_shapes(patch, num_tokens, embed_dim, depth, decoder_embed_dim, decoder_depth):
    """Returns {name: shape} of the release's pre-training files."""
    wide = embed_dim
    narrow = decoder_embed_dim
    linears = {"decoder_pred": (3 * patch**2, narrow)}
    norms = {"decoder_norm": narrow}
    for i in range(depth):
        block = f"blocks.{i}"
        linears[f"{block}.attn.qkv"] = (3 * wide, wide)
        linears[f"{block}.attn.proj"] = (wide, wide)
        linears[f"{block}.mlp.fc1"] = (4 * wide, wide)
        linears[f"{block}.mlp.fc2"] = (wide, 4 * wide)
        norms[f"{block}.norm1"] = wide
        norms[f"{block}.norm2"] = wide
    for j in range(decoder_depth):
        block = f"decoder_blocks.{j}"
        linears[f"{block}.cross_attn.q"] = (narrow, narrow)
        linears[f"{block}.cross_attn.kv"] = (2 * narrow, wide)
        linears[f"{block}.cross_attn.proj"] = (narrow, narrow)
        linears[f"{block}.mlp.fc1"] = (4 * narrow, narrow)
        linears[f"{block}.mlp.fc2"] = (narrow, 4 * narrow)
        norms[f"{block}.norm1"] = narrow
        norms[f"{block}.norm2"] = narrow
        norms[f"dec_norms.{j}"] = wide
    shapes = {
        "cls_token": (1, 1, wide),
        "pos_embed": (1, 1 + num_tokens, wide),
        "patch_embed.proj.weight": (wide, 3, patch, patch),
        "patch_embed.proj.bias": (wide,),
        "mask_token": (1, 1, narrow),
        "decoder_pos_embed": (1, 1 + num_tokens, narrow),
        "wfm.linear.weight": (decoder_depth, depth + 1),
    }
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    for name, width in norms.items():
        shapes[f"{name}.weight"] = (width,)
        shapes[f"{name}.bias"] = (width,)
    return shapes


@torch.no_grad()
@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
def test_a_file_of_the_release_loads_and_predicts_as_the_slow_derivation(throw_ratio):
    torch.manual_seed(3)
    w = {}
    for name, shape in release_shapes(4, 16, 24, 3, 16, 2).items():
        w[name] = 0.3 * torch.randn(shape, dtype=torch.float64)
    model = CrossMaskedAutoencoderViT(**SIZES, throw_ratio=throw_ratio).double()
    model.load_official({"model": w, "epoch": 799, "scaler": {}})
    imgs, ids = a_batch(model)
    pred, _ = model.reconstruct(imgs, ids)
    visible, retained, thrown = segments(ids[0], model.counts)
    slow = slow_predictions(w, slow_levels(w, imgs[0], visible), retained, thrown)
    for t, value in slow.items():
        assert_close(pred[0, t], value, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["release", "ours"])
def test_a_classifier_on_the_class_token_starts_its_norm_at_the_identity(tmp_path, layout):
    source = build(throw_ratio=0.5).float()
    weights = source.state_dict()
    if layout == "release":
        weights = released(source)
    torch.save({"model": weights}, tmp_path / "w.pth")
    model = VisionTransformer(num_classes=3, global_pool="token", **ENCODER)
    torch.nn.init.normal_(model.norm.weight)
    report = load_encoder(model, tmp_path / "w.pth")
    assert set(report.missing) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert "no final norm: norm starts with weight 1 and bias 0" in str(report)
    imgs = torch.randn(2, 3, 16, 16)
    features = source.forward_features(imgs)
    expected = torch.nn.functional.layer_norm(features, (24,), eps=1e-6)
    assert_close(model.forward_features(imgs), expected)

    pooled = VisionTransformer(num_classes=3, global_pool="avg", **ENCODER)
    assert "final norm" not in str(load_encoder(pooled, tmp_path / "w.pth"))
    assert_close(pooled.forward_features(imgs), features)
