import numpy as np
import pytest
import torch
from torch.testing import assert_close

import models_mae_pr
from frameworks.views import views_of
from models_mae_pr import OFFICIAL_NAMES, MaskedAutoencoderViT
from prmim import TokenOrderSampler, addressed_noise
from tests.slow_mae import slow_loss

SIZES = dict(
    img_size=32,
    patch_size=8,
    embed_dim=24,
    depth=2,
    num_heads=3,
    decoder_embed_dim=16,
    decoder_depth=2,
    decoder_num_heads=2,
)


def official_state_dict(model):
    """Returns the model's weights under MAE's names, without the aggregation."""
    official = {}
    for name, value in model.state_dict().items():
        if name.startswith("decoder.aggregation."):
            continue
        for old, new in OFFICIAL_NAMES.items():
            if name.startswith(new):
                name = old + name.removeprefix(new)
                break
        official[name] = value.clone()
    return official


def perturbed(model):
    """Adds noise to all trained weights, so that norms and biases, too, differ from their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double()


def orders(model, batch):
    sampler = TokenOrderSampler(model.grid_size, model.counts, "furthest")
    noise = addressed_noise(0, 0, np.arange(batch), model.counts.num_tokens)
    return torch.from_numpy(sampler(noise))


def segments(row, counts):
    """Returns the lists of visible, retained and thrown tokens."""
    row = row.tolist()
    return row[: counts.num_visible], row[counts.num_visible : counts.num_kept], row[counts.num_kept :]


def assert_is_slow(model, ids, slow):
    """Loss and predictions of two random images equal those of `slow(img, visible, retained, thrown)`.

    It returns (loss, {token: prediction}) of one image.
    """
    imgs = torch.randn(2, 3, *model.img_size, dtype=torch.float64)
    pred, mask = model.reconstruct(imgs, ids)
    losses = []
    for b in range(2):
        loss, predictions = slow(imgs[b], *segments(ids[b], model.counts))
        losses.append(loss)
        assert mask[b].nonzero().flatten().tolist() == sorted(predictions)
        for token, value in predictions.items():
            assert_close(pred[b, token], value.flatten(), rtol=1e-9, atol=1e-9)
    expected = torch.stack(losses).mean()
    assert_close(model(imgs, ids)["pixel"], expected, rtol=1e-10, atol=0)


def assert_is_slow_mae(model, ids, encode=None):
    aggregation = None
    if model.decoder.aggregation is not None:
        aggregation = dict(model.decoder.aggregation.operator.named_parameters())
    weights = official_state_dict(model)

    def slow(img, visible, retained, thrown):
        return slow_loss(
            weights,
            img,
            visible,
            retained,
            thrown,
            patch=model.patch_size,
            heads=model.blocks[0].attn.num_heads,
            decoder_heads=model.decoder_num_heads,
            norm_pix=model.norm_pix_loss,
            aggregation=aggregation,
            encode=encode,
        )

    assert_is_slow(model, ids, slow)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize(
    ("throw_ratio", "progressive"),
    [
        (0.0, True),
        (0.5, False),
        (0.5, True),
    ],
)
@pytest.mark.parametrize("img_size", [32, (16, 40)])
def test_loss_and_predictions_against_the_slow_derivation(throw_ratio, progressive, norm_pix_loss, img_size):
    torch.manual_seed(0)
    model = MaskedAutoencoderViT(
        **{**SIZES, "img_size": img_size},
        throw_ratio=throw_ratio,
        progressive=progressive,
        norm_pix_loss=norm_pix_loss,
        kernel_size=3,
    )
    assert_is_slow_mae(perturbed(model), orders(model, 2))


class WithAnotherLayer(MaskedAutoencoderViT):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.another = torch.nn.Linear(self.embed_dim, 3)


def test_all_arms_of_a_subclass_with_layers_of_its_own_have_the_same_first_weights():
    torch.manual_seed(0)
    expected = WithAnotherLayer(**SIZES, throw_ratio=0.0).state_dict()
    torch.manual_seed(0)
    model = WithAnotherLayer(**SIZES, throw_ratio=0.5)
    assert model.decoder.aggregation is not None
    assert "another.weight" in expected
    for name, value in expected.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_views_undo_the_target_normalisation():
    """A perfect prediction of the normalised target gives back the image."""
    model = MaskedAutoencoderViT(**SIZES, norm_pix_loss=True, throw_ratio=0.5)
    imgs = torch.randn(2, 3, 32, 32)
    ids = orders(model, 2)
    patches = model.patchify(imgs)
    mean = patches.mean(-1, keepdim=True)
    variance = patches.var(-1, keepdim=True)
    target = (patches - mean) / (variance + 1e-6) ** 0.5
    model.reconstruct = lambda imgs, ids: (target, None)
    (view,) = views_of(model, imgs, ids, lambda imgs: imgs)
    assert_close(view.prediction, imgs, rtol=1e-5, atol=1e-5)
    assert torch.equal(view.truth, imgs)
    assert view.errors.max() < 1e-9


@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
def test_load_official(throw_ratio):
    source = perturbed(MaskedAutoencoderViT(**SIZES, throw_ratio=0.0)).float()
    model = MaskedAutoencoderViT(**SIZES, throw_ratio=throw_ratio)
    model.load_official(official_state_dict(source))
    assert_same_weights(model, source)
    model.load_official({"model": official_state_dict(source), "epoch": 799})  # the file as it is


def assert_same_weights(model, source):
    """All weights of `source` are in `model`, which may have an aggregation beside them."""
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_official_names_and_shapes_of_vit_base():
    """Spot checks against the published `mae_pretrain_vit_base_full` layout."""
    with torch.device("meta"):
        model = models_mae_pr.mae_vit_base_patch16(throw_ratio=0.0)
    shapes = {k: tuple(v.shape) for k, v in official_state_dict(model).items()}
    assert shapes["cls_token"] == (1, 1, 768)
    assert shapes["pos_embed"] == (1, 197, 768)
    assert shapes["patch_embed.proj.weight"] == (768, 3, 16, 16)
    assert shapes["blocks.11.attn.qkv.weight"] == (2304, 768)
    assert shapes["blocks.0.mlp.fc1.bias"] == (3072,)
    assert shapes["decoder_embed.weight"] == (512, 768)
    assert shapes["mask_token"] == (1, 1, 512)
    assert shapes["decoder_pos_embed"] == (1, 197, 512)
    assert shapes["decoder_blocks.7.norm2.weight"] == (512,)
    assert shapes["decoder_pred.weight"] == (768, 512)
    assert sum(v.numel() for v in model.state_dict().values()) == 111_907_840  # with both position tables
