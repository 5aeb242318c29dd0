import math

import numpy as np
import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from encoders.load import load_encoder
from encoders.models_relative_vit import (
    RelativeVisionTransformer,
    lookup_bias,
    relative_position_index,
    relative_vit_base_patch16,
)
from frameworks.models_simmim_pr import (
    SimMIMSwin,
    SimMIMViT,
    simmim_swin_base_patch4_window6,
    simmim_swin_large_patch4_window12,
    simmim_vit_base_patch16,
)
from prmim import TokenOrder, TokenOrderSampler, addressed_noise
from tests.test_models_mae_pr import assert_is_slow, assert_same_weights, perturbed
from util.run.checkpoint import save_checkpoint

SIZES = dict(img_size=32, patch_size=4, embed_dim=24, depth=2, num_heads=3)


def orders(model, batch):
    sampler = TokenOrderSampler(model.grid_size, model.counts, "furthest", model.mask_unit)
    return torch.from_numpy(sampler(addressed_noise(0, 0, np.arange(batch), model.counts.num_tokens)))


def table_row(query, key, rows, columns):
    """Returns the row of the bias table for a query and a key, each "cls" or a raster token, as the paper has it."""
    offsets = (2 * rows - 1) * (2 * columns - 1)
    if query == "cls":
        return offsets + 2 if key == "cls" else offsets
    if key == "cls":
        return offsets + 1
    (y, x), (v, u) = divmod(query, columns), divmod(key, columns)
    return (y - v + rows - 1) * (2 * columns - 1) + (x - u + columns - 1)


def slow_norm(x, w, name):
    mean = x.sum() / len(x)
    return (x - mean) / (((x - mean) ** 2).sum() / len(x) + 1e-6) ** 0.5 * w[f"{name}.weight"] + w[f"{name}.bias"]


def slow_simmim(w, img, visible, retained, thrown, grid, patch, heads, kernel_size=None):
    """Returns (loss, {token: prediction [p, p, 3]}) of one image, token by token. No block sees a thrown token.

    Positions are biases of the logits, or are added to the tokens if the weights hold `pos_embed`.
    """
    rows, columns = grid

    def pixels(token):
        r, c = divmod(token, columns)
        return img[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]

    tokens = {"cls": w["cls_token"][0, 0]} | dict.fromkeys(retained, w["mask_token"][0, 0])
    for t in visible:
        tokens[t] = (w["patch_embed.proj.weight"] * pixels(t)).sum(dim=(1, 2, 3)) + w["patch_embed.proj.bias"]
    width = w["cls_token"].shape[2] // heads
    if "pos_embed" in w:
        tokens = {t: x + w["pos_embed"][0, 0 if t == "cls" else 1 + t] for t, x in tokens.items()}
    else:
        table = w["rel_pos_bias.relative_position_bias_table"]
    for layer in range(2):
        p, normed = f"blocks.{layer}", {}
        for t, x in tokens.items():
            q, k, v = (w[f"{p}.attn.qkv.weight"] @ slow_norm(x, w, f"{p}.norm1")).chunk(3)
            normed[t] = (q + w[f"{p}.attn.q_bias"]) * width**-0.5, k, v + w[f"{p}.attn.v_bias"]
        attended = {}
        for t in tokens:
            out = []
            for h in range(heads):
                span = slice(h * width, (h + 1) * width)
                bias = dict.fromkeys(tokens, 0.0)
                if "pos_embed" not in w:
                    bias = {o: table[table_row(t, o, rows, columns), h] for o in tokens}
                logits = {o: normed[t][0][span] @ normed[o][1][span] + bias[o] for o in tokens}
                total = sum(logit.exp() for logit in logits.values())
                out.append(sum(logit.exp() / total * normed[o][2][span] for o, logit in logits.items()))
            attended[t] = w[f"{p}.attn.proj.weight"] @ torch.cat(out) + w[f"{p}.attn.proj.bias"]
        for t, x in tokens.items():
            x = x + w[f"{p}.gamma_1"] * attended[t]
            hidden = w[f"{p}.mlp.fc1.weight"] @ slow_norm(x, w, f"{p}.norm2") + w[f"{p}.mlp.fc1.bias"]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
            tokens[t] = x + w[f"{p}.gamma_2"] * (w[f"{p}.mlp.fc2.weight"] @ hidden + w[f"{p}.mlp.fc2.bias"])
    del tokens["cls"]
    if kernel_size:
        filled = dict(tokens)
        for t in thrown:
            r, c = divmod(t, columns)
            filled[t] = w["aggregation.operator.bias"].clone()
            for o, x in tokens.items():
                i, j = o // columns - r + kernel_size // 2, o % columns - c + kernel_size // 2
                if 0 <= i < kernel_size and 0 <= j < kernel_size:
                    filled[t] = filled[t] + w["aggregation.operator.weight"][:, 0, i, j] * x
        tokens = filled
    absolute, count, predictions = 0.0, 0, {}
    for t in [*retained, *(thrown if kernel_size else [])]:
        prediction = w["pred.weight"] @ slow_norm(tokens[t], w, "norm") + w["pred.bias"]
        predictions[t] = prediction.reshape(patch, patch, 3)
        absolute = absolute + (predictions[t].permute(2, 0, 1) - pixels(t)).abs().sum()
        count += patch * patch
    return absolute / count / 3, predictions


@pytest.mark.parametrize(("throw_ratio", "progressive"), [(0.0, True), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("img_size", [16, (16, 24)])
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive, img_size):
    torch.manual_seed(0)
    model = SimMIMViT(
        **{**SIZES, "img_size": img_size},
        mask_ratio=0.7,
        throw_ratio=throw_ratio,
        progressive=progressive,
        kernel_size=3,
    )
    assert_is_slow_simmim(perturbed(model), orders(model, 2))


def assert_is_slow_simmim(model, ids):
    """Of a model with patches of 4 px, 3 heads and, if any, a kernel of 3 x 3."""
    kernel_size = None
    if model.aggregation is not None:
        kernel_size = 3

    def slow(img, visible, retained, thrown):
        return slow_simmim(model.state_dict(), img, visible, retained, thrown, model.grid_size, 4, 3, kernel_size)

    assert_is_slow(model, ids, slow)


def test_kept_tokens_are_those_of_a_full_run_that_cannot_see_the_thrown():
    """The full run has all 64 tokens in raster order, the whole bias, and a large negative logit for thrown keys."""
    torch.manual_seed(0)
    model = perturbed(SimMIMViT(**SIZES, mask_ratio=0.75, throw_ratio=0.5))
    imgs, ids = torch.randn(3, 3, 32, 32, dtype=torch.float64), orders(model, 3)
    order = TokenOrder(ids, model.counts)
    with torch.no_grad():
        model.rel_pos_bias.relative_position_bias_table.normal_()
        tokens = model.patch_embed(model.patchify(imgs))
        x = torch.where(order.mask.unsqueeze(-1), model.mask_token, tokens)
        x = torch.cat([model.cls_token.expand(3, -1, -1), x], dim=1)
        bias = model.rel_pos_bias() + nn.functional.pad(order.thrown, (1, 0)).view(3, 1, 1, -1) * -1e30
        for block in model.blocks:
            x = block(x, bias)
        expected = order.take_kept(x[:, 1:])
        kept = model.forward_encoder(model.patchify(imgs), order)[:, : model.counts.num_kept]
        torch.testing.assert_close(kept, expected, rtol=1e-9, atol=1e-9)
        # With the biases of the first tokens instead of the kept ones the result is another.
        model.rel_pos_bias.forward = lambda ids: type(model.rel_pos_bias).forward(model.rel_pos_bias)[
            :, :, : ids.shape[1] + 1, : ids.shape[1] + 1
        ]
        wrong = model.forward_encoder(model.patchify(imgs), order)[:, : model.counts.num_kept]
        assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize("grid", [(3, 4), (1, 1), (2, 2)])
def test_index_of_the_bias_table(grid):
    index, tokens = relative_position_index(grid), ["cls", *range(grid[0] * grid[1])]
    assert index.tolist() == [[table_row(q, k, *grid) for k in tokens] for q in tokens]


def test_retained_predictions_do_not_depend_on_the_convolution():
    plain = SimMIMViT(**SIZES, throw_ratio=0.5, mask_ratio=0.75, progressive=False)
    ours = SimMIMViT(**SIZES, throw_ratio=0.5, mask_ratio=0.75)
    ours.load_state_dict(plain.state_dict(), strict=False)
    imgs = torch.randn(2, 3, 32, 32)
    ids = orders(plain, 2)
    pred, _ = ours.reconstruct(imgs, ids)
    expected, retained = plain.reconstruct(imgs, ids)
    assert torch.equal(pred[retained], expected[retained])


@pytest.mark.parametrize(
    ("ratio", "throw", "counts"), [(0.6, 0.3, (76, 62, 58)), (0.6, 0.5, (76, 22, 98)), (0.6, 0.0, (76, 120, 0))]
)
def test_counts_of_vit_b(ratio, throw, counts):
    """30 of 49 units are masked, which are 120 of 196 tokens. The thrown tokens are a share of all tokens."""
    with torch.device("meta"):
        found = simmim_vit_base_patch16(mask_ratio=ratio, throw_ratio=throw, depth=1).counts
        assert (found.num_visible, found.num_retained, found.num_thrown) == counts
        for bad in (0.6, 0.7, -0.1):
            with pytest.raises(ValueError, match=f"got throw_ratio {bad}"):
                simmim_vit_base_patch16(mask_ratio=0.6, throw_ratio=bad, depth=1)


def test_published_sizes_and_drop_path():
    with torch.device("meta"):
        model, tuned = simmim_vit_base_patch16(throw_ratio=0.0), relative_vit_base_patch16()
    assert sum(p.numel() for p in model.parameters()) == 86_256_720
    assert sum(p.numel() for p in tuned.parameters()) == 86_530_984
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for b in model.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])
    assert model.rel_pos_bias.relative_position_bias_table.shape == (732, 12)


def test_initialisation_is_simmim_s():
    torch.manual_seed(0)
    model = SimMIMViT(img_size=32, patch_size=8, embed_dim=192, depth=3, num_heads=3)
    for number, block in enumerate(model.blocks, start=1):
        assert block.attn.qkv.weight.abs().max() <= 0.02  # truncated at one sigma
        for layer in (block.attn.proj, block.mlp.fc2):
            assert layer.weight.abs().max().item() == pytest.approx(0.02 / math.sqrt(2 * number), rel=0.01)
            assert not layer.bias.any()
        assert block.gamma_1.tolist() == block.gamma_2.tolist() == pytest.approx([0.1] * 192)
        assert not block.attn.q_bias.any() and not block.attn.v_bias.any()
    assert not model.rel_pos_bias.relative_position_bias_table.any() and not model.patch_embed.proj.bias.any()
    assert 0.019 < model.mask_token.abs().max() <= 0.02 and 0.019 < model.cls_token.abs().max() <= 0.02
    bound = 192**-0.5  # the head keeps PyTorch's default
    assert 0.95 * bound < model.pred.weight.abs().max() <= bound and model.pred.bias.any()
    tuned = RelativeVisionTransformer(img_size=32, patch_size=8, embed_dim=192, depth=3, num_heads=3)
    weight = tuned.blocks[0].attn.qkv.weight
    assert weight.abs().max() > 0.06 and weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert 0 < tuned.head.weight.abs().max() < 2e-4


def test_fine_tune_model_equals_timm_s_beit():
    torch.manual_seed(0)
    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
    theirs = timm.models.Beit(
        **options, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, global_pool="avg", norm_layer=norm
    ).double()
    ours = RelativeVisionTransformer(**options).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.load_state_dict(theirs.state_dict())  # the same names, all of them
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(imgs), theirs.eval()(imgs), rtol=1e-9, atol=1e-9)


def norm(dim, **kwargs):
    return nn.LayerNorm(dim, eps=1e-6, **kwargs)


def release(model):
    """Returns the model's weights as in SimMIM's files from before fine-tuning."""
    weights = {f"encoder.{k}": v for k, v in model.state_dict().items() if not k.startswith(("pred.", "aggregation."))}
    weights["encoder.rel_pos_bias.relative_position_index"] = torch.zeros(65, 65, dtype=torch.int64)
    p = model.patch_size
    kernel, bias = torch.empty(3 * p * p, model.embed_dim, 1, 1), torch.empty(3 * p * p)
    for colour in range(3):
        for i in range(p):
            for j in range(p):
                kernel[colour * p * p + i * p + j, :, 0, 0] = model.pred.weight[(i * p + j) * 3 + colour]
                bias[colour * p * p + i * p + j] = model.pred.bias[(i * p + j) * 3 + colour]
    return weights | {"decoder.0.weight": kernel, "decoder.0.bias": bias}


def test_load_official():
    torch.manual_seed(0)
    source = perturbed(SimMIMViT(**SIZES, throw_ratio=0.0)).float().requires_grad_(False)
    model = SimMIMViT(**SIZES, throw_ratio=0.5, mask_ratio=0.75)
    model.load_official({"model": release(source), "epoch": 799})
    assert_same_weights(model, source)


@pytest.mark.parametrize("released", [False, True])
def test_encoder_moves_to_fine_tuning_with_a_table_in_each_block(tmp_path, released):
    source = perturbed(SimMIMViT(**SIZES)).float().requires_grad_(False)
    path = tmp_path / "weights.pth"
    torch.save({"model": release(source) if released else source.state_dict()}, path)
    tuned = RelativeVisionTransformer(**SIZES, num_classes=5)
    report = load_encoder(tuned, path)
    assert set(report.missing) == {"fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}
    assert "rel_pos_bias.relative_position_bias_table" not in report.unexpected
    for block in tuned.blocks:
        assert torch.equal(block.attn.relative_position_bias_table, source.rel_pos_bias.relative_position_bias_table)
    tables = {block.attn.relative_position_bias_table.data_ptr() for block in tuned.blocks}
    assert len(tables) == len(tuned.blocks)  # each block has a table of its own
    larger = RelativeVisionTransformer(**SIZES | dict(img_size=48), num_classes=5)
    assert len(load_encoder(larger, path).resized) == 2
    assert larger.blocks[0].attn.relative_position_bias_table.shape == (23 * 23 + 3, 3)


def test_tables_of_rectangles_are_resized_by_the_settings(tmp_path):
    source = SimMIMViT(**SIZES | dict(img_size=(16, 32)))
    meta = {"settings": {"input_size": [16, 32], "patch_size": 4}}
    path = save_checkpoint(tmp_path, 1, {"model": source.state_dict()}, meta)
    tuned = RelativeVisionTransformer(**SIZES)
    load_encoder(tuned, path)
    assert tuned.blocks[0].attn.relative_position_bias_table.shape == (15 * 15 + 3, 3)
    turned = RelativeVisionTransformer(**SIZES | dict(img_size=(32, 16)))  # as many rows, but other offsets
    assert len(load_encoder(turned, path).resized) == 2
    assert load_encoder(RelativeVisionTransformer(**SIZES | dict(img_size=(16, 32))), path).resized == []


def test_layer_ids_and_decay():
    model = RelativeVisionTransformer(**SIZES | dict(depth=4))
    groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    expected = {
        "cls_token": (0.5**5, 0),
        "patch_embed.proj.weight": (0.5**5, 0.05),
        "head.weight": (1, 0.05),
        "fc_norm.weight": (1, 0),
    }
    for i in range(4):
        scale = 0.5 ** (4 - i)
        expected[f"blocks.{i}.attn.relative_position_bias_table"] = (scale, 0.05)
        expected |= {
            f"blocks.{i}.gamma_1": (scale, 0),
            f"blocks.{i}.attn.q_bias": (scale, 0),
            f"blocks.{i}.mlp.fc1.weight": (scale, 0.05),
        }
    for name, value in expected.items():
        assert found[id(model.get_parameter(name))] == pytest.approx(value), name


# --------------------------------------------------------------------------------------------------------------- Swin

SWIN = dict(img_size=32, patch_size=4, embed_dim=16, depths=(1, 2), num_heads=(1, 2), window_size=4)


def test_swin_against_a_plain_run_with_mask_tokens():
    """The steps of the release: embed the whole image, replace masked tokens, 1 x 1 convolution, pixel shuffle, L1."""
    torch.manual_seed(0)
    model = perturbed(SimMIMSwin(**SWIN))
    imgs, ids = torch.randn(3, 3, 32, 32, dtype=torch.float64), orders(model, 3)
    assert (model.counts.num_visible, model.counts.num_masked, model.mask_unit) == (24, 40, 2)  # 10 of 16 units
    mask = TokenOrder(ids, model.counts).mask
    with torch.no_grad():
        patches = nn.functional.conv2d(imgs, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=4)
        tokens = model.patch_embed.norm(patches.flatten(2).transpose(1, 2))
        tokens = torch.where(mask.unsqueeze(-1), model.mask_token, tokens)
        features = model.encode(tokens).transpose(1, 2).reshape(3, 32, 4, 4)
        weights = release_names_back(model)
        kernel, bias = weights["decoder.0.weight"].double(), weights["decoder.0.bias"].double()
        images = nn.functional.conv2d(features, kernel, bias)
        images = nn.functional.pixel_shuffle(images, 8)
        pixels = mask.view(3, 1, 8, 8).double().repeat_interleave(4, 2).repeat_interleave(4, 3)
        loss = ((imgs - images).abs() * pixels).sum() / pixels.sum() / 3
    torch.testing.assert_close(model(imgs, ids)["pixel"], loss, rtol=1e-9, atol=0)
    (view,) = model.views(imgs, ids, lambda imgs: imgs)
    assert torch.equal(model.reconstruct(imgs, ids)[1], mask)
    torch.testing.assert_close(view.prediction * pixels, images * pixels, rtol=1e-9, atol=1e-9)


def release_names_back(model):
    kernel, bias, r = model.pred.weight, model.pred.bias, model.stride
    index = [(i * r + j) * 3 + colour for colour in range(3) for i in range(r) for j in range(r)]
    weights = {f"encoder.{k}": v for k, v in model.state_dict().items() if not k.startswith("pred.")}
    return weights | {
        "decoder.0.weight": kernel[index].detach()[..., None, None],
        "decoder.0.bias": bias[index].detach(),
    }


def test_swin_load_official_and_sizes():
    torch.manual_seed(0)
    source, model = perturbed(SimMIMSwin(**SWIN)).float().requires_grad_(False), SimMIMSwin(**SWIN)
    model.load_official({"model": release_names_back(source)})
    assert_same_weights(model, source)
    with torch.device("meta"):
        base, large = simmim_swin_base_patch4_window6(), simmim_swin_large_patch4_window12()
    assert sum(p.numel() for p in base.parameters()) == 89_874_104
    assert sum(p.numel() for p in large.parameters()) == 199_881_204
    assert (base.counts.num_visible, base.counts.num_masked, base.mask_unit) == (896, 1408, 8)
    with pytest.raises(ValueError, match="SimMIMSwin throws no tokens, got throw_ratio 0.3"):
        SimMIMSwin(**SWIN, throw_ratio=0.3)


def test_the_bias_is_laid_out_for_fused_attention():
    """PyTorch's fused kernels on GPUs need keys that are contiguous, in rows that begin at multiples of 8."""
    model = SimMIMViT(**SIZES, throw_ratio=0.5, mask_ratio=0.75)
    for bias in (model.rel_pos_bias(), model.rel_pos_bias(orders(model, 2)[:, : model.counts.num_kept])):
        assert bias.stride(-1) == 1 and bias.dtype == torch.float32
        assert not any(stride % 8 for stride in bias.stride()[:-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.rel_pos_bias().dtype == torch.bfloat16
        assert lookup_bias(torch.zeros(4, 4, dtype=torch.int64), torch.ones(3, 2)).shape == (2, 4, 4)
