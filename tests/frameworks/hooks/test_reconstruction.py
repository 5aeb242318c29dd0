"""Errors of reconstructions, and the images that they are measured on."""

import numpy as np
import pytest
import torch

import main_pretrain
from frameworks import registry
from frameworks.hooks import reconstruction
from frameworks.models_simmim_pr import simmim_vit_micro_patch4
from frameworks.views import View, views_of
from models_mae_pr import MaskedAutoencoderViT, mae_vit_micro_patch4
from prmim import TokenOrder
from tests.slow_mae import pixels_of
from tests.test_models_mae_pr import orders, segments
from util.data.open import open_images
from util.data.transforms import Normalize


def test_masked_errors_against_a_loop(photos, tmp_path):
    flags = "--model mae_vit_micro_patch4 --batch_size 8 --epochs 1 --warmup_epochs 0 --num_workers 0 --device cpu"
    main_pretrain.main([*flags.split(), "--data_path", str(photos), "--output_dir", str(tmp_path / "run")])
    model, settings = registry.load_run(tmp_path / "run")
    images = open_images("folder", photos)
    normalize = Normalize()
    errors = {"retained": [], "thrown": []}
    batches = reconstruction.crops(model, settings, images, range(6), batch_size=2)
    for imgs, ids in batches:
        for img, row in zip(imgs, ids, strict=True):
            (view,) = views_of(model, normalize(img[None]), row[None], normalize.undo)
            squares = (view.prediction[0] - img / 255) ** 2
            _, retained, thrown = segments(row, model.counts)
            for kind, tokens in (("retained", retained), ("thrown", thrown)):
                for token in tokens:
                    mean = pixels_of(squares, token, 4).mean()
                    errors[kind].append(mean.item())
    measured = reconstruction.measure(model, settings, images, range(6))
    assert list(measured) == ["masked MSE"]
    expected = {name: np.mean(values) for name, values in errors.items()}
    assert measured["masked MSE"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("progressive", [True, False])
def test_a_picture_shows_truth_where_visible_predictions_where_predicted_and_grey_elsewhere(progressive):
    """4 x 4 tokens of 2 px. Plain partial reconstruction predicts no thrown token."""
    sizes = dict(img_size=8, patch_size=2, embed_dim=32, depth=1, num_heads=2)
    model = MaskedAutoencoderViT(32, 1, **sizes, progressive=progressive)
    ids = orders(model, 3)
    order = TokenOrder(ids, model.counts)
    truth = torch.rand(3, 3, 8, 8)
    prediction = torch.rand(3, 3, 8, 8)
    view = View("reconstruction", None, truth, prediction, "error", torch.zeros(3, 16))
    supervised = model.supervised(order)
    picture = reconstruction.compose(view, ~order.mask, supervised, model)
    for b in range(3):
        of_thrown = prediction[b]
        if not progressive:
            of_thrown = torch.full((3, 8, 8), 0.5)
        expected = (truth[b], prediction[b], of_thrown)
        for tokens, whole in zip(segments(ids[b], model.counts), expected, strict=True):
            for token in tokens:
                shown = pixels_of(picture[b], token, 2)
                assert torch.equal(shown, pixels_of(whole, token, 2))


@pytest.mark.parametrize("make", [mae_vit_micro_patch4, simmim_vit_micro_patch4])
def test_colors_of_features_against_a_singular_value_decomposition(make):
    """Centred tokens of all images are U S V'; colours grow with brightness, from the 1st to the 99th percentile."""
    torch.manual_seed(0)
    model = make().eval()
    height, width = model.img_size
    imgs = torch.randn(4, 3, height, width) + torch.linspace(-2, 2, width)
    colors = reconstruction.feature_colors(model, imgs)
    assert colors.shape == imgs.shape

    rows, columns = model.grid_size
    tokens = patch_tokens(model, imgs)
    u, s, _ = np.linalg.svd(tokens - tokens.mean(axis=0), full_matrices=False)
    cells = imgs.mean(dim=1).unflatten(1, (rows, -1)).unflatten(3, (columns, -1)).mean(dim=(2, 4)).flatten().numpy()
    for k in range(3):
        component = u[:, k] * s[k]
        if np.corrcoef(component, cells)[0, 1] < 0:
            component = -component
        low, high = np.quantile(component, [0.01, 0.99])
        expected = np.clip((component - low) / (high - low), 0, 1)
        found = colors[:, k, :: height // rows, :: width // columns].flatten().numpy()
        assert np.corrcoef(expected, cells)[0, 1] > 0
        np.testing.assert_allclose(found, expected, atol=1e-3)


def patch_tokens(model, imgs):
    """The patch tokens of whole images, one image at a time, float64 [B * N, D]."""
    tokens = []
    with torch.no_grad():
        for img in imgs:
            (x,) = model.forward_features(img[None])
            tokens.append(x[-model.num_tokens :].double().numpy())
    return np.concatenate(tokens)
