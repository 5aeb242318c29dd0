import re

import pytest
import torch

from encoders.load import load_encoder
from frameworks.models_localmim_pr import SCALES, LocalMIMViT, localmim_vit_base_patch16, localmim_vit_large_patch16
from models_vit import VisionTransformer
from prmim import TokenOrder
from tests import slow_mae
from tests.frameworks.test_hog import slow_hog, tie_free
from tests.test_models_mae_pr import assert_same_weights, orders, perturbed, segments

SIZES = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, taps=(0, 1, 2, 3))
SIZES |= dict(decoder_embed_dim=16, decoder_num_heads=2)
CELLS = (2, 4, 8, 16)  # sides in pixels
ARMS = [(0.0, True), (0.5, False), (0.5, True)]


def slow_losses(w, imgs, splits, throws, progressive, num_bins=9, bias=None):
    """Returns the four losses of a batch, computed image by image, level by level, token by token and cell by cell."""
    w = {name: value.double() for name, value in w.items()}
    if bias is None:
        bias = torch.zeros(4, 2)
    sums = [0.0] * 4
    weights = [0.0] * 4
    for img, (visible, retained, thrown) in zip(imgs, splits, strict=True):
        supervised = set(retained)
        reconstructed = []
        if progressive:
            supervised |= set(thrown)
        if progressive and throws:
            reconstructed = thrown
        for level, latent in enumerate(slow_latents(w, img, visible)):
            tokens = slow_decoder(w, f"decoder.{level}", latent, retained, reconstructed)
            targets = slow_hog(img, CELLS[level], num_bins, bias[level].tolist())
            for (row, column), pred in slow_head(w, f"decoder.{level}.pred", level, tokens).items():
                cell = tokens_of_cell(level, row, column)
                weight = len(cell & supervised) / len(cell)
                errors = [(p - t) ** 2 for p, t in zip(pred.tolist(), targets[row, column], strict=True)]
                sums[level] += weight * sum(errors) / len(errors)
                weights[level] += weight
    return [error / weight for error, weight in zip(sums, weights, strict=True)]


def tokens_of_cell(level, row, column):
    """Returns the tokens of 4 x 4 in which a cell lies: one, or four at level 3."""
    if level == 3:
        return set(group_of(row, column))
    cells_per_side = (4, 2, 1)[level]
    return {4 * (row // cells_per_side) + column // cells_per_side}


def group_of(row, column):
    first = 8 * row + 2 * column
    return [first, first + 1, first + 4, first + 5]


def slow_latents(w, img, visible):
    tokens = {"cls": w["cls_token"][0, 0] + w["pos_embed"][0, 0]}
    for t in visible:
        row, column = divmod(t, 4)
        pixels = img[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        embedded = (w["patch_embed.proj.weight"] * pixels).sum(dim=(1, 2, 3)) + w["patch_embed.proj.bias"]
        tokens[t] = embedded + w["pos_embed"][0, 1 + t]
    for level in range(4):
        tokens = slow_mae.block(tokens, w, f"blocks.{level}", heads=3)
        yield {t: slow_mae.norm(x, w, f"norm.{level}") for t, x in tokens.items()}


def slow_decoder(w, name, latent, retained, thrown):
    """Returns {token: features} of the kept tokens, and of the given thrown tokens by a 3 x 3 kernel."""
    positions = w[f"{name}.pos_embed"][0]
    tokens = {}
    for t, x in latent.items():
        row = 0 if t == "cls" else 1 + t
        tokens[t] = slow_mae.linear(x, w, f"{name}.embed") + positions[row]
    for t in retained:
        tokens[t] = w[f"{name}.mask_token"][0, 0] + positions[1 + t]
    tokens = slow_mae.transformer(tokens, w, f"{name}.blocks", heads=2)
    del tokens["cls"]
    filled = dict(tokens)
    for t in thrown:
        filled[t] = w[f"{name}.aggregation.operator.bias"]
        for other, x in tokens.items():
            i = other // 4 - t // 4 + 1
            j = other % 4 - t % 4 + 1
            if 0 <= i < 3 and 0 <= j < 3:
                filled[t] = filled[t] + w[f"{name}.aggregation.operator.weight"][:, 0, i, j] * x
    return {t: slow_mae.norm(x, w, f"{name}.norm") for t, x in filled.items()}


def slow_head(w, name, level, tokens):
    """Returns {(row, column) of a cell: prediction}."""

    def point(x, index):
        return w[f"{name}.{index}.weight"][:, :, 0, 0] @ x + w[f"{name}.{index}.bias"]

    def up(x, index):
        """Returns {(i, j): value} of the four cells that one becomes."""
        kernel = w[f"{name}.{index}.weight"]
        bias = w[f"{name}.{index}.bias"]
        values = {}
        for i in range(2):
            for j in range(2):
                values[i, j] = kernel[:, :, i, j].T @ x + bias
        return values

    cells = {}
    if level == 3:
        for row in range(2):
            for column in range(2):
                present = [tokens[t] for t in group_of(row, column) if t in tokens]
                if present:
                    cells[row, column] = point(sum(present) / len(present), 1)
        return cells
    for t, x in tokens.items():
        row, column = divmod(t, 4)
        if level == 0:
            for (i, j), y in up(x, 0).items():
                y = slow_mae.norm(y, w, f"{name}.1")
                y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
                for (k, m), z in up(y, 3).items():
                    cells[4 * row + 2 * i + k, 4 * column + 2 * j + m] = point(z, 4)
        elif level == 1:
            for (i, j), y in up(x, 0).items():
                cells[2 * row + i, 2 * column + j] = point(y, 1)
        else:
            cells[row, column] = point(x, 0)
    return cells


@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
def test_losses_and_predictions_against_the_slow_derivation(throw_ratio, progressive):
    torch.manual_seed(0)
    model = perturbed(LocalMIMViT(**SIZES, throw_ratio=throw_ratio, progressive=progressive, kernel_size=3))
    imgs, ids = tie_free((32, 32)), orders(model, 2)
    splits = [segments(row, model.counts) for row in ids]
    expected = slow_losses(model.state_dict(), imgs, splits, throw_ratio > 0, progressive)
    losses = model(imgs, ids)
    assert list(losses) == ["hog2", "hog4", "hog8", "hog16"]
    for loss, value in zip(losses.values(), expected, strict=True):
        assert loss.item() == pytest.approx(value.item() if torch.is_tensor(value) else value, rel=1e-9)
    preds, _ = model.reconstruct(imgs, ids)
    for b, (visible, retained, thrown) in enumerate(splits):
        weights = {name: value.double() for name, value in model.state_dict().items()}
        for k, latent in enumerate(slow_latents(weights, imgs[b], visible)):
            reconstructed = thrown if progressive and throw_ratio else []
            tokens = slow_decoder(weights, f"decoder.{k}", latent, retained, reconstructed)
            columns = (16, 8, 4, 2)[k]
            for (row, column), pred in slow_head(weights, f"decoder.{k}.pred", k, tokens).items():
                torch.testing.assert_close(preds[k][b, row * columns + column], pred, rtol=1e-9, atol=1e-9)


def test_losses_with_the_bias_of_vit_large():
    torch.manual_seed(0)
    model = perturbed(LocalMIMViT(**SIZES, throw_ratio=0.5, kernel_size=3, num_bins=18, hog_bias=True))
    imgs, ids = tie_free((32, 32)), orders(model, 2)
    splits = [segments(row, model.counts) for row in ids]
    expected = slow_losses(model.state_dict(), imgs, splits, True, True, num_bins=18, bias=model.hog_bias)
    losses = [loss.item() for loss in model(imgs, ids).values()]
    assert losses == pytest.approx([float(value) for value in expected], rel=1e-9)


def test_views_show_the_target_and_predictions_where_there_are_any():
    for progressive in (True, False):
        model = LocalMIMViT(**SIZES, throw_ratio=0.5, progressive=progressive)
        imgs, ids = tie_free((32, 32)).float(), orders(model, 2)
        predicted = model.supervised(TokenOrder(ids, model.counts)).view(2, 1, 4, 4)
        predicted = predicted.repeat_interleave(8, 2).repeat_interleave(8, 3).expand(-1, 3, -1, -1)
        preds, _ = model.reconstruct(imgs, ids)
        for cell, pred, view in zip(model.cells, preds, model.views(imgs, ids, None), strict=True):
            assert (view.title, view.truth_title) == (f"predicted, {cell} px", f"HOG, {cell} px")
            assert not torch.equal(view.truth[predicted], view.prediction[predicted])
            if cell == 8:  # a token is a cell
                error = (pred - model.target(imgs)[2].flatten(2).transpose(1, 2)).square().mean(dim=-1)
                torch.testing.assert_close(view.errors, error)


def test_heads_are_the_release_s_convolutions_on_the_grid():
    """PyTorch's convolutions on the whole grid, with the heads' weights, give the same result."""
    model = perturbed(LocalMIMViT(**SIZES, throw_ratio=0.0))
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    grid = x.transpose(1, 2).unflatten(2, (4, 4))
    functional = torch.nn.functional
    for level, decoder in enumerate(model.decoder):
        y = grid
        for module in decoder.pred:
            if isinstance(module, torch.nn.ConvTranspose2d):
                y = functional.conv_transpose2d(y, module.weight, module.bias, stride=2)
            elif isinstance(module, torch.nn.Conv2d):
                y = functional.conv2d(y, module.weight, module.bias)
            elif isinstance(module, (torch.nn.LayerNorm, torch.nn.GELU)):
                y = module(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        cells = max(1, int(SCALES[level]))
        ours = decoder.pred(x).reshape(2, 4, 4, cells, cells, 27).permute(0, 5, 1, 3, 2, 4).reshape(y.shape)
        torch.testing.assert_close(ours, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("throw_ratio", "progressive"), ARMS)
def test_every_masked_token_is_supervised_at_all_scales_or_the_retained_alone(throw_ratio, progressive):
    """A token is supervised if the features that the head reads have a gradient there."""
    model = LocalMIMViT(**SIZES, throw_ratio=throw_ratio, progressive=progressive)
    imgs, ids = torch.randn(3, 3, 32, 32), orders(model, 3)
    order, features = TokenOrder(ids, model.counts), []
    for decoder in model.decoder:  # the output of the aggregation, or of the blocks if there is none
        exact = decoder.features
        decoder.features = lambda *args, exact=exact: features.append(exact(*args)) or features[-1]
    losses = list(model(imgs, ids).values())
    for x in features:
        x.retain_grad()
    sum(losses).backward()
    present = model.counts.num_kept if throw_ratio and not progressive else 16
    supervised = torch.zeros(3, 16, dtype=torch.bool)
    for row, (_, retained, thrown) in zip(supervised, (segments(ids_of, model.counts) for ids_of in ids), strict=True):
        row[[*retained, *(thrown if progressive else [])]] = True
    for k, x in enumerate(features):
        touched = order.restore(x.grad.abs().amax(-1, keepdim=True)).squeeze(-1) > 0
        if k < 3:
            assert torch.equal(touched, supervised)
        else:  # the tokens of a cell share its weight
            groups = supervised.view(3, 2, 2, 2, 2).any(2, keepdim=True).any(4, keepdim=True)
            groups = groups.expand(3, 2, 2, 2, 2).reshape(3, 16)
            assert torch.equal(touched, groups & (order.ids_restore < present))


def test_weights_of_the_coarse_level_are_fractions():
    model = LocalMIMViT(**SIZES, throw_ratio=0.5)
    order = TokenOrder(orders(model, 5), model.counts)
    target = torch.zeros(5, 27, 2, 2, dtype=torch.float64)
    target[:, 0, 0, 0] = 27**0.5  # an error of 1 in the first cell alone, where the prediction is zero
    model.decoder[3].predict_groups = lambda x, order: torch.zeros(5, 4, 27, dtype=torch.float64)
    loss = model.group_loss(torch.zeros(5, 16, 16), target, order)
    first = order.mask.view(5, 4, 4)[:, :2, :2].double().mean(dim=(1, 2))
    assert first.unique().numel() > 1
    torch.testing.assert_close(loss, first.sum() / (5 * 12 / 4))


def test_the_release_s_parameters():
    """The release has 248 tensors, four of which are gradient filters of 18 numbers, and trains 89,916,140 parameters.

    The taps are blocks 1, 3, 9 and 11 of ViT-B, and 1, 3, 21 and 23 of ViT-L.
    """
    with torch.device("meta"):
        base, large = localmim_vit_base_patch16(throw_ratio=0.0), localmim_vit_large_patch16(throw_ratio=0.0)
    assert len(base.state_dict()) == 244 and sum(v.numel() for v in base.state_dict().values()) == 90_269_236 - 72
    assert sum(p.numel() for p in base.parameters() if p.requires_grad) == 89_916_140
    assert (base.taps, large.taps, base.cells) == ((1, 3, 9, 11), (1, 3, 21, 23), (4, 8, 16, 32))
    assert base.hog_bias is None and large.hog_bias.shape == (4, 2) and large.num_bins == 18
    shapes = {k: list(v.shape) for k, v in base.state_dict().items()}
    assert shapes["decoder.0.pred.0.weight"] == [256, 128, 2, 2] and shapes["decoder.0.pred.1.weight"] == [128]
    assert shapes["decoder.0.pred.3.weight"] == [128, 64, 2, 2] and shapes["decoder.0.pred.4.weight"] == [27, 64, 1, 1]
    assert shapes["decoder.1.pred.0.weight"] == [256, 128, 2, 2]
    assert shapes["decoder.1.pred.1.weight"] == [27, 128, 1, 1]
    assert shapes["decoder.2.pred.0.weight"] == [27, 256, 1, 1] == shapes["decoder.3.pred.1.weight"]
    assert shapes["decoder.3.blocks.0.attn.qkv.weight"] == [768, 256]
    assert "norm.3.bias" in shapes and "norm.weight" not in shapes


def test_initialisation():
    """Linear layers are Xavier-uniform, the heads' convolutions keep PyTorch's default, and tokens are normal."""
    torch.manual_seed(0)
    model = LocalMIMViT(**SIZES | dict(decoder_embed_dim=64))
    embed, head = model.decoder[1].embed.weight, model.decoder[1].pred[1]
    assert 0.9 * (6 / 88) ** 0.5 < embed.abs().max() <= (6 / 88) ** 0.5
    # Kaiming-uniform with a = sqrt 5, of 32 channels.
    assert 0.9 < head.weight.abs().max() * 32**0.5 <= 1 and head.bias.any()
    assert 0.01 < model.decoder[3].mask_token.std() < 0.04


def test_gradients_flow_from_each_level_into_the_blocks_before_its_tap_alone():
    model = LocalMIMViT(**SIZES, throw_ratio=0.5)
    losses = list(model(torch.randn(2, 3, 32, 32), orders(model, 2)).values())
    for level, loss in enumerate(losses):
        weights = [block.mlp.fc1.weight for block in model.blocks]
        gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        assert [g is not None and bool(g.any()) for g in gradients] == [i <= level for i in range(4)]


def released(model, bias=False):
    weights = {name: value for name, value in model.state_dict().items() if "aggregation" not in name}
    weights.pop("hog_bias", None)
    for k in range(4):
        weights[f"hog_enc.{k}.conv.weight"] = torch.zeros(2, 1, 3, 3)
        if bias:
            weights[f"hog_enc.{k}.conv.bias"] = torch.tensor([k / 10, -k / 10])
    return weights


def test_load_official():
    source = perturbed(LocalMIMViT(**SIZES, throw_ratio=0.0)).float()
    model = LocalMIMViT(**SIZES, throw_ratio=0.5)
    model.load_official({"model": released(source), "epoch": 3})
    assert_same_weights(model, source)


def test_the_bias_of_the_gradient_filters():
    """With hog_bias it is random until a file sets it. Without hog_bias, a file that has a bias is refused."""
    source = LocalMIMViT(**SIZES, num_bins=18, hog_bias=True)
    assert source.hog_bias.abs().max() <= 1 / 3 and source.hog_bias.unique().numel() == 8
    source.load_official(released(source, bias=True))
    torch.testing.assert_close(source.hog_bias, torch.tensor([[k / 10, -k / 10] for k in range(4)]))
    source.load_official(released(source))
    assert not source.hog_bias.any()
    with pytest.raises(ValueError, match="build the model with hog_bias=True"):
        LocalMIMViT(**SIZES, num_bins=18).load_official(released(source, bias=True))


def test_the_release_s_file_is_fine_tuned_and_probed(tmp_path):
    """The last level's norm becomes the encoder's norm. Fine-tuning with mean pooling does not use it."""
    source = perturbed(LocalMIMViT(**SIZES)).float()
    torch.save({"model": released(source)}, tmp_path / "release.pth")
    sizes = {name: SIZES[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
    imgs = torch.randn(2, 3, 32, 32)
    probe = VisionTransformer(num_classes=3, global_pool="token", **sizes).eval()
    report = load_encoder(probe, tmp_path / "release.pth")
    assert report.missing == ["head.weight", "head.bias"]
    torch.testing.assert_close(probe.forward_features(imgs), source.forward_features(imgs))
    tuned = VisionTransformer(num_classes=3, **sizes)
    assert load_encoder(tuned, tmp_path / "release.pth").missing[0] == "fc_norm.weight"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(taps=None), "taps must increase from 0 or more to the last block 3, got (1, 3, 1, 3)"),
        (dict(taps=(0, 1, 2, 3), depth=5), "to the last block 4, got (0, 1, 2, 3)"),
        (dict(taps=(0, 1, 2)), "got (0, 1, 2)"),
        (dict(taps=(1, 2, 3)), "taps must be four numbers, got (1, 2, 3)"),
        (dict(taps=(0, 1, 2, 4)), "got (0, 1, 2, 4)"),
        (dict(taps=(1, 0, 2, 3)), "got (1, 0, 2, 3)"),
        (dict(patch_size=14, img_size=224), "got patch_size 14 and a grid of 16 x 16"),
        (dict(img_size=40), "got patch_size 8 and a grid of 5 x 5"),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LocalMIMViT(**SIZES | options)
