"""CrossMAE against a derivation token by token in float64, its release's names, its costs, and PR-MIM on it."""

import json
import math

import pytest
import torch

from encoders.load import load_encoder
from frameworks import models_crossmae_pr, registry
from frameworks.models_crossmae_pr import CrossMaskedAutoencoderViT, mix_levels
from models_vit import VisionTransformer
from prmim import TokenOrder
from tests import slow_mae
from tests.gmac import of_depths
from tests.runs import assert_same_state, finetune, pretrain
from tests.test_models_mae_pr import orders, perturbed, segments
from util.costs import count_gmac, saved_bytes
from util.run.shard import recompute_blocks

SIZES = dict(img_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3)
SIZES |= dict(decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)
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
    state = model.state_dict().items()
    return {release_name(name): value.clone() for name, value in state if ".aggregation." not in name}


# ---------------------------------------------------------------------------------------------- the slow derivation


def pixels_of(img, token, patch):
    row, column = divmod(token, img.shape[2] // patch)
    return img[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]


def slow_levels(w, img, visible, patch, heads, depth, used=None):
    """Returns a list of levels, {token: features}: the input, then the outputs of the blocks in `used`."""
    tokens = {"cls": w["cls_token"][0, 0] + w["pos_embed"][0, 0]}
    for t in visible:
        convolved = (w["patch_embed.proj.weight"] * pixels_of(img, t, patch)).sum(dim=(1, 2, 3))
        tokens[t] = convolved + w["patch_embed.proj.bias"] + w["pos_embed"][0, 1 + t]
    levels = [tokens]
    for layer in range(depth):
        tokens = slow_mae.block(tokens, w, f"blocks.{layer}", heads)
        if used is None or layer in used:
            levels.append(tokens)
    return levels


def slow_block(query, context, w, name, heads):
    """Returns one updated query. It attends to a context {token: features} with an explicit softmax."""
    dim = len(query)
    width = dim // heads
    q = slow_mae.linear(slow_mae.norm(query, w, f"{name}.norm1"), w, f"{name}.cross_attn.q")
    kv = [slow_mae.linear(x, w, f"{name}.cross_attn.kv") for x in context.values()]
    read = []
    for head in range(heads):
        span = slice(head * width, (head + 1) * width)
        scores = [(q[span] @ x[:dim][span] / math.sqrt(width)).exp() for x in kv]
        read.append(sum(s / sum(scores) * x[dim:][span] for s, x in zip(scores, kv, strict=True)))
    query = query + slow_mae.linear(torch.cat(read), w, f"{name}.cross_attn.proj")
    hidden = slow_mae.linear(slow_mae.norm(query, w, f"{name}.norm2"), w, f"{name}.mlp.fc1")
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    return query + slow_mae.linear(hidden, w, f"{name}.mlp.fc2")


def slow_visible(a, levels):
    """Returns {visible token: features at the decoder's width} by the weights of the aggregation, `a`."""
    features = {}
    for t in levels[0]:
        if t != "cls":
            mixture = sum(weight * level[t] for weight, level in zip(a["visible_weights"], levels, strict=True))
            features[t] = slow_mae.linear(slow_mae.norm(mixture, a, "visible_norm"), a, "visible_embed")
    return features


def slow_predictions(w, levels, retained, thrown, heads, a=None, source=None):
    """Returns {token: prediction}. `a` holds the weights of the aggregation. Without them, no thrown token has one."""
    positions = w["decoder_pos_embed"][0]
    queries = {t: w["mask_token"][0, 0] + positions[1 + t] for t in retained}
    if source == "blocks":
        queries |= {t: x + positions[1 + t] for t, x in slow_visible(a, levels).items()}
    for j, weights in enumerate(w["wfm.linear.weight"]):
        context = {}
        for t in levels[0]:
            mixture = sum(weight * level[t] for weight, level in zip(weights, levels, strict=True))
            context[t] = slow_mae.norm(mixture, w, f"dec_norms.{j}")
        queries = {t: slow_block(x, context, w, f"decoder_blocks.{j}", heads) for t, x in queries.items()}
    cells = dict(queries)
    if source == "embed":
        cells |= slow_visible(a, levels)
    features = {t: queries[t] for t in retained}
    if a is not None:
        kernel, side = a["operator.weight"], math.isqrt(len(positions) - 1)
        for t in thrown:
            features[t] = a["operator.bias"]
            for other, x in cells.items():
                i, j = (
                    other // side - t // side + kernel.shape[2] // 2,
                    other % side - t % side + kernel.shape[3] // 2,
                )
                if 0 <= i < kernel.shape[2] and 0 <= j < kernel.shape[3]:
                    features[t] = features[t] + kernel[:, 0, i, j] * x
    return {t: slow_mae.linear(slow_mae.norm(x, w, "decoder_norm"), w, "decoder_pred") for t, x in features.items()}


def slow_error(pred, img, token, patch):
    """Returns the mean squared error of a token's normalised pixels, channel fastest."""
    pixels = pixels_of(img, token, patch)
    target = torch.stack([pixels[c, i, j] for i in range(patch) for j in range(patch) for c in range(len(img))])
    mean = target.sum() / len(target)
    variance = ((target - mean) ** 2).sum() / (len(target) - 1)
    return ((pred - (target - mean) / (variance + 1e-6) ** 0.5) ** 2).sum() / len(target)


@pytest.mark.parametrize("arm", ARMS, ids=["throw 0", "plain", *SOURCES])
def test_predictions_loss_and_gradients_against_the_slow_derivation(arm):
    model = build(**arm)
    imgs, ids = a_batch(model)
    trained = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    w = {release_name(name): value for name, value in trained.items() if ".aggregation." not in name}
    prefix = "decoder.aggregation."
    a = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)} or None
    pred, mask = model.reconstruct(imgs, ids)
    errors = []
    for b in range(2):
        visible, retained, thrown = segments(ids[b], model.counts)
        levels = slow_levels(w, imgs[b], visible, patch=4, heads=3, depth=3)
        slow = slow_predictions(w, levels, retained, thrown, heads=2, a=a, source=arm.get("visible_source"))
        assert mask[b].nonzero().flatten().tolist() == sorted(slow)
        for t, value in slow.items():
            torch.testing.assert_close(pred[b, t], value.detach(), rtol=1e-9, atol=1e-9)
            errors.append(slow_error(value, imgs[b], t, patch=4))
        assert pred[b, ~mask[b]].abs().max() == 0
    expected = sum(errors) / len(errors)
    loss = model(imgs, ids)["pixel"]
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, trained[name].grad, rtol=1e-7, atol=1e-11, msg=name)


# --------------------------------------------------------------------------------------------------- what is special


def test_a_query_does_not_depend_on_which_others_there_are():
    """Predictions of the retained tokens, with half of the tokens thrown and with none."""
    plain, full = build(throw_ratio=0.5, progressive=False), build(throw_ratio=0.0)
    imgs, ids = a_batch(plain)
    full.load_state_dict(plain.state_dict())
    few, retained = plain.reconstruct(imgs, ids)
    every, masked = full.reconstruct(imgs, ids)
    assert retained.sum() == 2 * plain.counts.num_retained < masked.sum()
    torch.testing.assert_close(every[retained], few[retained], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("levels", "use_input"), [(None, True), (None, False), ((0, 2), True), ((2,), False)])
def test_levels_are_the_input_and_then_the_blocks_in_order(levels, use_input):
    model = build(levels=levels, use_input=use_input)
    imgs, ids = a_batch(model)
    expected, outputs = [], []
    model.blocks[0].register_forward_pre_hook(lambda _, args: expected.append(args[0]))
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: outputs.append(output))
    found = model.forward_encoder(model.patchify(imgs), TokenOrder(ids, model.counts))
    expected = [*(expected if use_input else []), *(outputs[i] for i in levels or range(3))]
    assert len(found) == len(expected) == model.decoder.level_weights.shape[1]
    assert all(torch.equal(level, tokens) for level, tokens in zip(found, expected, strict=True))
    assert found.shape[2] == 1 + model.counts.num_visible


def test_a_mixture_is_a_sum_over_the_levels():
    weights, levels = torch.randn(2, 3), torch.randn(3, 4, 5, 6)
    expected = torch.stack([sum(weights[j, i] * levels[i] for i in range(3)) for j in range(2)])
    torch.testing.assert_close(mix_levels(weights, levels), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mix_levels(weights, levels), mix_levels(weights, levels).float())
        assert mix_levels(weights, levels).dtype == torch.float32


def test_the_gradient_of_a_mixture_is_that_of_one_product():
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (3, 4, 5, 6))]
    assert torch.autograd.gradcheck(mix_levels, inputs)


def test_the_decoder_reads_the_class_token():
    model = build(throw_ratio=0.0)
    imgs, ids = a_batch(model)
    order = TokenOrder(ids, model.counts)
    levels = model.forward_encoder(model.patchify(imgs), order).detach()
    before = model.decoder(levels, order)
    levels[:, :, 0] += 1.0
    assert (model.decoder(levels, order) - before).abs().amax(dim=-1).min() > 0


@pytest.mark.parametrize("source", SOURCES)
def test_gradients_reach_every_level_and_the_convolution(source):
    model = build(visible_source=source)
    model(*a_batch(model))["pixel"].backward()
    assert (model.decoder.level_weights.grad != 0).all()
    aggregation = model.decoder.aggregation
    assert (aggregation.operator.weight.grad.flatten(1) != 0).any(dim=1).all()
    if source == "zeros":
        assert [name for name, _ in aggregation.named_parameters()] == ["operator.weight", "operator.bias"]
    else:
        assert (aggregation.visible_weights.grad != 0).all()
        assert (aggregation.visible_embed.weight.grad != 0).all()


def test_with_zeros_only_retained_features_reach_a_thrown_token():
    """The decoder's blocks are replaced by the identity, so that retained tokens depend on no image."""
    for source, depends in (("zeros", False), ("embed", True)):
        model = build(visible_source=source)
        for block in model.decoder.blocks:
            block.forward = lambda x, context: x
        imgs, ids = a_batch(model)
        before, mask = model.reconstruct(imgs, ids)
        after, _ = model.reconstruct(imgs.flip(0) + 1, ids)
        thrown = TokenOrder(ids, model.counts).thrown
        assert torch.equal(before[mask & ~thrown], after[mask & ~thrown])
        assert torch.equal(before[thrown], after[thrown]) != depends


def test_first_weights():
    """Mixtures are Xavier-uniform. The visible features are those of the last block at first."""
    with torch.device("meta"):
        base = models_crossmae_pr.crossmae_vit_base_patch16(throw_ratio=0.5)
    assert base.decoder.level_weights.shape == (12, 13)
    torch.manual_seed(0)
    model = CrossMaskedAutoencoderViT(**SIZES | dict(depth=40, decoder_depth=30), throw_ratio=0.5)
    weights, bound = model.decoder.level_weights, (6 / (41 + 30)) ** 0.5
    assert 0.98 * bound < weights.abs().max() <= bound and abs(weights.std() / bound - 3**-0.5) < 0.02
    assert model.decoder.aggregation.visible_weights.tolist() == [0.0] * 40 + [1.0]
    assert 0.015 < model.decoder.mask_token.std() < 0.03 and model.decoder.blocks[0].cross_attn.kv.bias.abs().max() == 0


def test_own_arguments_that_cannot_be():
    for levels in ((), (0, 1), (2, 0), (-1, 2), (0, 0, 2), (0, 3)):
        with pytest.raises(ValueError, match="levels must increase from 0 or more to the last block 2"):
            CrossMaskedAutoencoderViT(**SIZES, levels=levels)
    with pytest.raises(ValueError, match="unknown visible_source 'zero', choose from embed, zeros, blocks"):
        CrossMaskedAutoencoderViT(**SIZES, visible_source="zero")
    with pytest.raises(ValueError, match="width 16 does not divide into 3 heads"):
        CrossMaskedAutoencoderViT(**SIZES | dict(decoder_num_heads=3))


def test_recomputed_blocks_keep_only_their_inputs():
    model = models_crossmae_pr.crossmae_vit_micro_patch4().double()
    batch = a_batch(model)
    kept, loss = saved_bytes(lambda: model(*batch)["pixel"]), model(*batch)["pixel"]
    recompute_blocks(model)
    assert saved_bytes(lambda: model(*batch)["pixel"]) < 0.5 * kept
    assert torch.equal(model(*batch)["pixel"], loss)


# ------------------------------------------------------------------------------------------------ names of the release


def release_shapes(patch, num_tokens, embed_dim, depth, decoder_embed_dim, decoder_depth):
    """Returns {name: shape} of the release's pre-training files."""
    D, d = embed_dim, decoder_embed_dim
    shapes = {"cls_token": (1, 1, D), "pos_embed": (1, 1 + num_tokens, D), "patch_embed.proj.bias": (D,)}
    shapes |= {"mask_token": (1, 1, d), "decoder_pos_embed": (1, 1 + num_tokens, d)}
    shapes |= {"patch_embed.proj.weight": (D, 3, patch, patch), "wfm.linear.weight": (decoder_depth, depth + 1)}
    linears, norms = {"decoder_pred": (3 * patch**2, d)}, {"decoder_norm": d}
    for i in range(depth):
        linears |= {f"blocks.{i}.attn.qkv": (3 * D, D), f"blocks.{i}.attn.proj": (D, D)}
        linears |= {f"blocks.{i}.mlp.fc1": (4 * D, D), f"blocks.{i}.mlp.fc2": (D, 4 * D)}
        norms |= {f"blocks.{i}.norm1": D, f"blocks.{i}.norm2": D}
    for j in range(decoder_depth):
        name = f"decoder_blocks.{j}"
        linears |= {f"{name}.cross_attn.q": (d, d), f"{name}.cross_attn.kv": (2 * d, D)}
        linears |= {f"{name}.cross_attn.proj": (d, d), f"{name}.mlp.fc1": (4 * d, d), f"{name}.mlp.fc2": (d, 4 * d)}
        norms |= {f"{name}.norm1": d, f"{name}.norm2": d, f"dec_norms.{j}": D}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def test_names_and_shapes_of_vit_base_are_the_release_s():
    with torch.device("meta"):
        model = models_crossmae_pr.crossmae_vit_base_patch16(throw_ratio=0.0)
    found = {name: tuple(value.shape) for name, value in released(model).items()}
    assert found == release_shapes(16, 196, 768, 12, 512, 12)
    assert not any(name.startswith(("norm.", "decoder_embed.", "decoder.embed.")) for name in model.state_dict())
    decoder = sum(p.numel() for p in model.decoder.parameters() if p.requires_grad)
    assert decoder == pytest.approx(41.4e6, abs=5e4)


@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
def test_a_file_of_the_release_loads_and_predicts_as_the_slow_derivation(throw_ratio):
    generator = torch.Generator().manual_seed(3)
    shapes = release_shapes(4, 16, 24, 3, 16, 2)
    w = {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    model = CrossMaskedAutoencoderViT(**SIZES, throw_ratio=throw_ratio).double()
    model.load_official({"model": w, "epoch": 799, "scaler": {}})
    imgs, ids = a_batch(model)
    pred, _ = model.reconstruct(imgs, ids)
    visible, retained, thrown = segments(ids[0], model.counts)
    slow = slow_predictions(w, slow_levels(w, imgs[0], visible, 4, 3, 3), retained, thrown, heads=2)
    for t, value in slow.items():
        torch.testing.assert_close(pred[0, t], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["release", "ours"])
def test_a_classifier_on_the_class_token_starts_its_norm_at_the_identity(tmp_path, layout):
    source = build(throw_ratio=0.5).float()
    torch.save({"model": released(source) if layout == "release" else source.state_dict()}, tmp_path / "w.pth")
    sizes = {name: SIZES[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
    model = VisionTransformer(num_classes=3, global_pool="token", **sizes)
    torch.nn.init.normal_(model.norm.weight)
    report = load_encoder(model, tmp_path / "w.pth")
    assert set(report.missing) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert "the file, of CrossMAE, holds no final norm: norm starts with weight 1 and bias 0" in str(report)
    assert model.norm.weight.unique().tolist() == [1.0] and model.norm.bias.unique().tolist() == [0.0]
    imgs = torch.randn(2, 3, 16, 16)
    expected = torch.nn.functional.layer_norm(source.forward_features(imgs), (24,), eps=1e-6)
    torch.testing.assert_close(model.forward_features(imgs), expected)
    pooled = VisionTransformer(num_classes=3, global_pool="avg", **sizes)
    assert "final norm" not in str(load_encoder(pooled, tmp_path / "w.pth"))
    torch.testing.assert_close(pooled.forward_features(imgs), source.forward_features(imgs))


def test_other_encoders_without_a_norm_are_still_refused(tmp_path):
    weights = VisionTransformer(global_pool="token", depth=2, embed_dim=24, num_heads=3, img_size=32).state_dict()
    torch.save({name: value for name, value in weights.items() if not name.startswith("norm.")}, tmp_path / "w.pth")
    model = VisionTransformer(global_pool="token", depth=2, embed_dim=24, num_heads=3, img_size=32)
    with pytest.raises(ValueError, match="missing: norm.weight, norm.bias"):
        load_encoder(model, tmp_path / "w.pth")


# -------------------------------------------------------------------------------------------------------- what it costs

# Multiply-adds of one forward pass in 10^9, counted by hand: {(size, arm): {throw ratio: number}}. Patches are embedded
# where they are visible.
COST = {
    ("base_patch16", "plain"): {0.0: 9.572, 0.25: 7.981, 0.5: 6.390, 0.65: 5.449},
    ("base_patch16", "embed"): {0.25: 8.025, 0.5: 6.454, 0.65: 5.523},
    ("base_patch16", "zeros"): {0.25: 8.005, 0.5: 6.434, 0.65: 5.504},
    ("base_patch16", "blocks"): {0.25: 9.596, 0.5: 8.025, 0.65: 7.094},
    ("small_patch16", "embed"): {0.0: 2.450, 0.25: 2.057, 0.5: 1.657},
    ("large_patch16", "embed"): {0.0: 20.678, 0.25: 19.138, 0.5: 17.567},
    ("huge_patch14", "embed"): {0.0: 48.595, 0.25: 46.582, 0.5: 44.517},
}
COSTS = [(*key, throw_ratio, gmac) for key, row in COST.items() for throw_ratio, gmac in row.items()]


@pytest.mark.parametrize(("size", "arm", "throw_ratio", "gmac"), COSTS)
def test_cost(size, arm, throw_ratio, gmac):
    options = dict(progressive=False) if arm == "plain" else dict(visible_source=arm)
    build = getattr(models_crossmae_pr, f"crossmae_vit_{size}")

    def count(depth, decoder_depth):
        with torch.device("meta"):
            model = build(throw_ratio=throw_ratio, depth=depth, decoder_depth=decoder_depth, **options)
            imgs = torch.empty(1, 3, *model.img_size)
            ids_shuffle = torch.empty(1, model.counts.num_tokens, dtype=torch.int64)
        return count_gmac(lambda: model(imgs, ids_shuffle))

    assert of_depths(count, build.keywords["depth"], decoder_depth=12) == pytest.approx(gmac, abs=1e-3)
    if (size, arm, throw_ratio) == ("base_patch16", "blocks", 0.5):
        assert count(12, 12) == pytest.approx(gmac, abs=1e-3)


# ------------------------------------------------------------------------------------------ from start to a classifier


def test_pretraining_resumes_and_its_encoder_is_fine_tuned_and_probed(labelled, tmp_path, capsys):
    flags = ["--model", "crossmae_vit_micro_patch4", "--visible_source", "blocks"]
    whole = pretrain(labelled, tmp_path / "whole", *flags)
    pretrain(labelled, tmp_path / "parts", *flags, "--max_steps", 2)
    assert_same_state(pretrain(labelled, tmp_path / "parts", *flags), whole)
    assert json.loads((tmp_path / "whole" / "settings.json").read_text())["visible_source"] == "blocks"
    model, _ = registry.load_run(tmp_path / "whole")
    assert model.visible_source == "blocks"

    capsys.readouterr()
    flags = ["--finetune", tmp_path / "whole", "--epochs", 1]
    tuned = finetune(labelled, tmp_path / "tuned", *flags)["model"]
    assert "final norm" not in capsys.readouterr().out
    probe = finetune(labelled, tmp_path / "probe", *flags, "--trainable_blocks", 0)["model"]
    assert "norm starts with weight 1 and bias 0" in capsys.readouterr().out
    assert torch.equal(probe["norm.weight"], torch.ones(96)) and torch.equal(probe["norm.bias"], torch.zeros(96))
    last = "blocks.3.mlp.fc2.weight"
    assert torch.equal(probe[last], whole["model"][last]) and not torch.equal(tuned[last], whole["model"][last])
