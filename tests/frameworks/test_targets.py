"""A target that is no pixels: one method says so to the loss, to pictures and to exports."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from frameworks import registry
from models_mae_pr import MaskedAutoencoderViT
from models_vit import NANO
from scripts import visualize
from tests import runs
from tests.runs import refused
from tests.slow_mae import pixels_of, target_of
from tests.test_framework_contract import a_batch

LAPLACE = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
NAME = "mae_laplacian_patch4"


class LaplacianMAE(MaskedAutoencoderViT):
    """MAE that predicts the Laplacian of the image."""

    def target_tokens(self, imgs, pixels):
        kernel = LAPLACE.to(imgs).expand(self.in_chans, 1, 3, 3)
        return self.patchify(F.conv2d(imgs, kernel, padding=1, groups=self.in_chans))


def slow_laplacian(img):
    """Of [C, H, W], pixel by pixel, with zeros around the image."""
    padded = F.pad(img, (1, 1, 1, 1))
    result = torch.zeros_like(img)
    for row in range(img.shape[1]):
        for column in range(img.shape[2]):
            y = row + 1
            x = column + 1
            around = padded[:, y - 1, x] + padded[:, y + 1, x] + padded[:, y, x - 1] + padded[:, y, x + 1]
            result[:, row, column] = around - 4 * padded[:, y, x]
    return result


@torch.no_grad()
@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize(("progressive", "num_predicted"), [(True, 12), (False, 4)])
def test_the_loss_compares_with_the_target_of_the_subclass(norm_pix_loss, progressive, num_predicted):
    torch.manual_seed(0)
    sizes = dict(
        img_size=16,
        patch_size=4,
        embed_dim=32,
        depth=1,
        num_heads=2,
        decoder_embed_dim=32,
        decoder_depth=1,
    )
    options = dict(throw_ratio=0.5, progressive=progressive, norm_pix_loss=norm_pix_loss)
    model = LaplacianMAE(**sizes, **options).double()
    imgs, ids_shuffle = a_batch(model)
    imgs = imgs.double()
    pred, predicted = model.reconstruct(imgs, ids_shuffle)
    errors = []
    for b, img in enumerate(imgs):
        laplacian = slow_laplacian(img)
        tokens = predicted[b].nonzero().flatten().tolist()
        assert len(tokens) == num_predicted
        for token in tokens:
            target = target_of(pixels_of(laplacian, token, 4), norm_pix_loss)
            errors.append((pred[b, token] - target).square().mean())
    expected = torch.stack(errors).mean()
    torch.testing.assert_close(model(imgs, ids_shuffle)["pixel"], expected, rtol=1e-10, atol=0)


@pytest.fixture
def laplacian(monkeypatch):
    """The program knows the model by a name of MAE's family."""
    monkeypatch.setitem(registry.MODELS, NAME, partial(LaplacianMAE, **NANO, decoder_embed_dim=64, decoder_depth=2))


def test_scripts_refuse_to_take_it_for_pixels(laplacian, photos, tmp_path, capsys):
    run = tmp_path / "run"
    runs.pretrain(photos, run, "--model", NAME, "--throw_ratio", 0, "--epochs", 1, "--picture_every", 0)
    message = refused(capsys, visualize.main, run, "--images", photos, "--out", tmp_path / "picture.png")
    assert "the targets of LaplacianMAE are no pixels" in message
    assert "`views`" in message
    assert not (tmp_path / "picture.png").exists()
