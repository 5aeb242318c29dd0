"""LocalMIM: a slow derivation cell by cell, its heads, taps and losses, and the names of the release."""

import pytest
import torch
from torch.testing import assert_close

from encoders.load import load_encoder
from frameworks.models_localmim_pr import LocalMIMViT, localmim_vit_base_patch16, localmim_vit_large_patch16
from models_vit import VisionTransformer
from tests import slow_mae
from tests.frameworks.test_hog import slow_hog, tie_free
from tests.test_models_mae_pr import assert_same_weights, orders, perturbed, segments

ENCODER = dict(img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3)
SIZES = dict(**ENCODER, taps=(0, 1, 2, 3), decoder_embed_dim=16, decoder_num_heads=2)
CELLS = (2, 4, 8, 16)  # sides in pixels


def slow_results(model, imgs, ids, thrown_count):
    """Returns (four losses of a batch, {(image, level, row, column): prediction}), computed cell by cell.

    thrown_count: how many of the thrown tokens are reconstructed.
    """
    w = dict(model.named_parameters())
    sums = [0.0] * 4
    weights = [0.0] * 4
    predictions = {}
    for b, img in enumerate(imgs):
        visible, retained, thrown = segments(ids[b], model.counts)
        reconstructed = thrown[:thrown_count]
        supervised = {*retained, *reconstructed}
        for level, latent in enumerate(slow_latents(w, img, visible)):
            tokens = slow_decoder(w, f"decoder.{level}", latent, retained, reconstructed)
            bias = (0.0, 0.0)
            if model.hog_bias is not None:
                bias = model.hog_bias[level].tolist()
            targets = slow_hog(img, CELLS[level], model.num_bins, bias)
            of_cells = slow_head(w, f"decoder.{level}.pred", level, tokens)
            for (row, column), pred in of_cells.items():
                predictions[b, level, row, column] = pred
                cell = tokens_of_cell(level, row, column)
                weight = len(cell & supervised) / len(cell)
                difference = pred - pred.new_tensor(targets[row, column])
                sums[level] += weight * difference.square().mean().item()
                weights[level] += weight
    losses = [total / weight for total, weight in zip(sums, weights, strict=True)]
    return losses, predictions


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
    positions = w["pos_embed"][0]
    tokens = {"cls": w["cls_token"][0, 0] + positions[0]}
    for t in visible:
        tokens[t] = slow_mae.embed(img, t, 8, w) + positions[1 + t]
    for level in range(4):
        tokens = slow_mae.block(tokens, w, f"blocks.{level}", heads=3)
        yield normed(tokens, w, f"norm.{level}")


def normed(tokens, w, name):
    return {t: slow_mae.norm(x, w, name) for t, x in tokens.items()}


def slow_decoder(w, name, latent, retained, thrown):
    """Returns {token: features} of the kept tokens, and of the given thrown tokens by a 3 x 3 kernel."""
    positions = w[f"{name}.pos_embed"][0]
    tokens = {}
    for t, x in latent.items():
        row = 0 if t == "cls" else 1 + t
        tokens[t] = slow_mae.linear(x, w, f"{name}.embed") + positions[row]
    mask_token = w[f"{name}.mask_token"][0, 0]
    for t in retained:
        tokens[t] = mask_token + positions[1 + t]
    tokens = slow_mae.transformer(tokens, w, f"{name}.blocks", heads=2)
    del tokens["cls"]
    operator = f"{name}.aggregation.operator"
    filled = {}
    for t in thrown:
        kernel = {"weight": w[f"{operator}.weight"], "bias": w[f"{operator}.bias"]}
        filled[t] = slow_mae.aggregate(tokens, t, 4, kernel)
    return normed(tokens | filled, w, f"{name}.norm")


def slow_head(w, name, level, tokens):
    """Returns {(row, column) of a cell: prediction}."""

    def point(x, index):
        kernel = w[f"{name}.{index}.weight"]
        return kernel[:, :, 0, 0] @ x + w[f"{name}.{index}.bias"]

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
                    cell = (4 * row + 2 * i + k, 4 * column + 2 * j + m)
                    cells[cell] = point(z, 4)
        elif level == 1:
            for (i, j), y in up(x, 0).items():
                cells[2 * row + i, 2 * column + j] = point(y, 1)
        else:
            cells[row, column] = point(x, 0)
    return cells


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        dict(throw_ratio=0.0),
        dict(throw_ratio=0.5, progressive=False),
        dict(throw_ratio=0.5),
        dict(throw_ratio=0.5, num_bins=18, hog_bias=True),  # as ViT-L
    ],
)
def test_losses_and_predictions_against_the_slow_derivation(options):
    torch.manual_seed(0)
    model = perturbed(LocalMIMViT(**SIZES, **options, kernel_size=3))
    imgs = tie_free((32, 32))
    ids = orders(model, 2)
    num_reconstructed = model.counts.num_thrown
    if not model.method.progressive:
        num_reconstructed = 0
    expected, predictions = slow_results(model, imgs, ids, num_reconstructed)
    losses = model(imgs, ids)
    assert list(losses) == ["hog2", "hog4", "hog8", "hog16"]
    found = torch.stack(list(losses.values()))
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    preds, _ = model.reconstruct(imgs, ids)
    for (b, level, row, column), value in predictions.items():
        cells_per_side = 32 // CELLS[level]
        found = preds[level][b, row * cells_per_side + column]
        assert_close(found, value, rtol=1e-9, atol=1e-9)


def test_views_have_the_errors_of_each_token():
    model = LocalMIMViT(**SIZES, throw_ratio=0.5)
    imgs = tie_free((32, 32)).float()
    ids = orders(model, 2)
    preds, _ = model.reconstruct(imgs, ids)
    views = model.views(imgs, ids, None)
    assert [view.title for view in views] == [f"predicted, {cell} px" for cell in CELLS]
    assert [view.truth_title for view in views] == [f"HOG, {cell} px" for cell in CELLS]
    targets = model.target(imgs)[2].flatten(2)  # of 8 px: a token is a cell
    squares = (preds[2] - targets.mT).square()
    assert_close(views[2].errors, squares.mean(dim=-1))


def test_the_release_s_parameters():
    """The release has 248 tensors, four of which are gradient filters of 18 numbers, and trains 89,916,140 parameters.

    The taps are blocks 1, 3, 9 and 11 of ViT-B, and 1, 3, 21 and 23 of ViT-L.
    """
    with torch.device("meta"):
        base = localmim_vit_base_patch16(throw_ratio=0.0)
        large = localmim_vit_large_patch16(throw_ratio=0.0)
    weights = base.state_dict()
    assert len(weights) == 248 - 4
    num_values = sum(value.numel() for value in weights.values())
    assert num_values == 90_269_236 - 4 * 18
    num_trained = 0
    for parameter in base.parameters():
        if parameter.requires_grad:
            num_trained += parameter.numel()
    assert num_trained == 89_916_140
    assert base.taps == (1, 3, 9, 11)
    assert large.taps == (1, 3, 21, 23)
    assert base.cells == (4, 8, 16, 32)
    assert base.hog_bias is None
    assert large.hog_bias.shape == (4, 2)
    assert large.num_bins == 18


def released(model, bias=False):
    weights = {}
    for name, value in model.state_dict().items():
        if "aggregation" not in name and name != "hog_bias":
            weights[name] = value
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
    assert source.hog_bias.abs().max() <= 1 / 3
    assert source.hog_bias.unique().numel() == 8
    source.load_official(released(source, bias=True))
    tenths = torch.arange(4) / 10
    assert_close(source.hog_bias, torch.stack([tenths, -tenths], dim=1))
    source.load_official(released(source))
    assert not source.hog_bias.any()
    without_bias = LocalMIMViT(**SIZES, num_bins=18)
    with pytest.raises(ValueError, match="build the model with hog_bias=True"):
        without_bias.load_official(released(source, bias=True))


def test_the_release_s_file_is_fine_tuned_and_probed(tmp_path):
    """The last level's norm becomes the encoder's norm. Fine-tuning with mean pooling does not use it."""
    source = perturbed(LocalMIMViT(**SIZES)).float()
    torch.save({"model": released(source)}, tmp_path / "release.pth")
    imgs = torch.randn(2, 3, 32, 32)
    probe = VisionTransformer(num_classes=3, global_pool="token", **ENCODER)
    report = load_encoder(probe, tmp_path / "release.pth")
    assert report.missing == ["head.weight", "head.bias"]
    assert_close(probe.forward_features(imgs), source.forward_features(imgs))
    tuned = VisionTransformer(num_classes=3, **ENCODER)
    report = load_encoder(tuned, tmp_path / "release.pth")
    assert report.missing == ["fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"]
