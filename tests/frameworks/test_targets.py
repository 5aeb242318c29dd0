"""A target that is no pixels: one method says so to the loss, to pictures and to exports."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from frameworks import registry
from frameworks.reconstruction import reconstruction_picture
from models_mae_pr import MaskedAutoencoderViT
from models_vit import NANO
from scripts import export, visualize
from tests import runs
from tests.runs import refused
from tests.test_framework_contract import a_batch
from util.data.transforms import Normalize

LAPLACE = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
NAME = "mae_laplacian_patch4"


class LaplacianMAE(MaskedAutoencoderViT):
    """MAE that predicts the Laplacian of the image."""

    def target_tokens(self, imgs, pixels):
        kernel = LAPLACE.to(imgs).expand(self.in_chans, 1, 3, 3)
        return self.patchify(F.conv2d(imgs, kernel, padding=1, groups=self.in_chans))


def slow_laplacian(img):
    """Of [C, H, W], pixel by pixel, with zeros around the image."""
    channels, height, width = img.shape
    padded = np.zeros((channels, height + 2, width + 2))
    padded[:, 1:-1, 1:-1] = img
    out = np.zeros_like(img)
    for c, row, column in np.ndindex(*img.shape):
        y, x = row + 1, column + 1
        around = padded[c, y - 1, x] + padded[c, y + 1, x] + padded[c, y, x - 1] + padded[c, y, x + 1]
        out[c, row, column] = around - 4 * padded[c, y, x]
    return out


@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize("arm", [dict(throw_ratio=0.5), dict(throw_ratio=0.5, progressive=False)])
def test_the_loss_compares_with_the_target_of_the_subclass(norm_pix_loss, arm):
    """Patches of 4 x 4 pixels, of which each pixel holds its three channels."""
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2, decoder_embed_dim=32, decoder_depth=1)
    model = LaplacianMAE(norm_pix_loss=norm_pix_loss, **sizes, **arm).double()
    imgs, ids_shuffle = a_batch(model)
    imgs = imgs.double()
    pred, predicted = model.reconstruct(imgs, ids_shuffle)
    errors = []
    for b, img in enumerate(imgs.numpy()):
        laplacian = slow_laplacian(img)
        for token in predicted[b].nonzero()[:, 0].tolist():
            row, column = divmod(token, 4)
            patch = laplacian[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            target = patch.transpose(1, 2, 0).ravel()
            if norm_pix_loss:
                target = (target - target.mean()) / np.sqrt(target.var(ddof=1) + 1e-6)
            errors.append(np.square(pred[b, token].numpy() - target).mean())
    assert len(errors) == 4 * (12 if model.method.progressive else 4)
    assert model(imgs, ids_shuffle)["pixel"].item() == pytest.approx(np.mean(errors), rel=1e-10)


@pytest.fixture
def laplacian(monkeypatch):
    """The program knows the model by a name of MAE's family."""
    monkeypatch.setitem(registry.MODELS, NAME, partial(LaplacianMAE, **NANO, decoder_embed_dim=64, decoder_depth=2))
    monkeypatch.setitem(registry.CLASS_OF, NAME, LaplacianMAE)


def test_a_run_says_that_it_draws_no_pictures(laplacian, photos, tmp_path, capsys):
    runs.pretrain(photos, tmp_path / "run", "--model", NAME, "--throw_ratio", 0, "--epochs", 2, "--picture_every", 1)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("there are no pictures of reconstructions: the targets of LaplacianMAE are no pixels") == 1
    assert not list((tmp_path / "run").rglob("*.png"))


def test_scripts_refuse_to_take_it_for_pixels(laplacian, photos, tmp_path, capsys):
    run = tmp_path / "run"
    runs.pretrain(photos, run, "--model", NAME, "--throw_ratio", 0, "--epochs", 1, "--picture_every", 0)
    message = refused(capsys, visualize.main, run, "--images", photos, "--out", tmp_path / "picture.png")
    assert "the targets of LaplacianMAE are no pixels" in message and "override `views`" in message
    message = refused(capsys, export.main, run, "--out", tmp_path / "mae.pth", "--format", "mae")
    assert "predicts other targets than pixels, and MAE's decoder predicts pixels" in message
    export.main([str(run), "--out", str(tmp_path / "vit"), "--format", "transformers"])
    out = capsys.readouterr().out
    assert "ViTModel;" in out
    assert "the decoder is left out" in out
    assert not (tmp_path / "picture.png").exists() and not (tmp_path / "mae.pth").exists()


def test_a_flag_may_choose_the_target():
    class EitherMAE(LaplacianMAE):
        is_laplacian = False

        def target_tokens(self, imgs, pixels):
            if self.is_laplacian:
                return super().target_tokens(imgs, pixels)
            return pixels

    model = EitherMAE(**NANO, decoder_embed_dim=64, decoder_depth=2)
    assert model.predicts_pixels()
    model.is_laplacian = True
    assert not model.predicts_pixels()


def test_a_drawing_that_fails_leaves_the_model_in_training():
    torch.manual_seed(0)
    model = LaplacianMAE(**NANO, decoder_embed_dim=64, decoder_depth=2)
    imgs, ids_shuffle = a_batch(model)
    with pytest.raises(ValueError, match="are no pixels"):
        reconstruction_picture(model, Normalize(), imgs.byte(), ids_shuffle)
    assert model.training
