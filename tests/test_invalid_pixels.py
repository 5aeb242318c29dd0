"""Invalid pixels in pre-training: they have no part in targets, losses and gradients, and are thrown first."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from framework import PixelFramework
from frameworks import registry
from frameworks.hooks.reconstruction import crops, measure, reconstruction_picture
from frameworks.views import views_of
from models_mae_pr import MaskedAutoencoderViT
from prmim import SAMPLING, TokenCounts, TokenOrder, TokenOrderSampler, addressed_noise
from scripts import visualize
from tests import runs
from tests.orders import draw_order
from tests.runs import reports
from tests.slow_mae import pixels_of
from tests.test_framework_contract import CLASSES, build
from tests.test_models_mae_pr import perturbed, segments
from tests.util.data.test_invalid_pixels import clouds
from util.data.datasets import AddressedDataset
from util.data.invalid_pixels import InvalidPixels
from util.data.open import open_images
from util.data.pixel_format import PixelFormat
from util.data.statistics import normalizer
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop
from util.pictures import INVALID_COLOR

PIXEL_CLASSES = [name for name, kind in CLASSES.items() if issubclass(kind, PixelFramework)]
SIDE = 32

pretrain = runs.pretrain


@pytest.fixture(scope="module")
def imgs(photos):
    """Four normalised photographs, float32 [4, 3, 32, 32], with a third of their pixels NaN.

    One channel has a cloud of its own, as where a detector is dead.
    """
    dataset = AddressedDataset(open_images("folder", photos), ResizeCenterCrop(SIDE))
    photographs = [dataset[0, 5 * i][0] for i in range(4)]
    whole = Normalize()(torch.stack(photographs))
    for i in range(4):
        mask = clouds(seed=i, size=(SIDE, SIDE))
        whole[i, :, mask[:, :, 0]] = torch.nan
    whole[1, 2, :9] = torch.nan
    assert 0.25 < whole.isnan().float().mean() < 0.5
    return whole


def batch_of(model, imgs, sampling="furthest"):
    """Returns the images and token orders of a batch of the model's collator."""
    samples = [(img, 0, (0, i)) for i, img in enumerate(imgs)]
    batch, _, *orders = model.collator(sampling, 0)(samples)
    assert torch.equal(batch.isnan(), imgs.isnan())
    return batch, *orders


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


# ------------------------------------------------------------------------------------------------------------- the loss


def slow_targets(values, valid, norm_pix_loss):
    """Returns the targets of one token, from its values and which of them are valid, value by value."""
    if not norm_pix_loss:
        return list(values)
    chosen = []
    for x, is_valid in zip(values, valid, strict=True):
        if is_valid:
            chosen.append(x)
    mean = statistics.fmean(chosen)
    deviation = math.sqrt(statistics.variance(chosen) + 1e-6)
    return [(x - mean) / deviation for x in values]


def slow_loss(model, pred, imgs, ids_shuffle):
    """Returns the sum of losses of valid values in tokens that count, over the number of all supervised values.

    pred: [B, n, P] in token order, visible tokens included.
    """
    side = model.token_side
    columns = SIDE // side
    total = 0.0
    number = 0
    for b, img in enumerate(imgs):
        for place in range(model.counts.num_visible, pred.shape[1]):
            row, column = divmod(int(ids_shuffle[b, place]), columns)
            top = row * side
            left = column * side
            token = img[:, top : top + side, left : left + side]
            values = token.permute(1, 2, 0).flatten().tolist()
            valid = [not math.isnan(x) for x in values]
            number += len(values)
            if 4 * sum(valid) < len(values):
                continue
            targets = slow_targets(values, valid, model.norm_pix_loss)
            for k, is_valid in enumerate(valid):
                if not is_valid:
                    continue
                error = pred[b, place, k] - targets[k]
                if "SimMIM" in type(model).__name__:
                    total = total + abs(error)
                else:
                    total = total + error * error
    return total / number


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize("name", PIXEL_CLASSES)
def test_loss_and_gradients_equal_a_slow_derivation(name, norm_pix_loss, imgs):
    """The slow one sees images with 0 at invalid pixels, and a model that knows of none."""
    imgs = imgs[:2].double()
    model = perturbed(build(name, has_invalid=True, norm_pix_loss=norm_pix_loss, shallow=True))
    twin = build(name, norm_pix_loss=norm_pix_loss, shallow=True).double()
    twin.load_state_dict(model.state_dict())
    batch, ids_shuffle, *_ = batch_of(model, imgs)
    (loss,) = model(batch, ids_shuffle).values()
    loss.backward()

    filled = batch.clone()
    filled[batch != batch] = 0
    order = TokenOrder(ids_shuffle, twin.counts)
    latent = twin.forward_encoder(twin.token_pixels(filled), order)
    pred = twin.forward_decoder(latent, order, all_tokens=True)
    expected = slow_loss(model, pred, batch, ids_shuffle)
    expected.backward()
    assert_close(loss, expected, rtol=1e-10, atol=0)
    found = gradients(model)
    assert found.keys() == gradients(twin).keys()
    assert found
    for parameter, gradient in gradients(twin).items():
        assert_close(found[parameter], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize("throws", [True, False])
@pytest.mark.parametrize("name", PIXEL_CLASSES)
def test_without_invalid_pixels_nothing_changes(name, throws, norm_pix_loss, imgs):
    """Orders, losses and gradients are those of a model that knows of no invalid pixels, bit for bit."""
    whole = imgs.nan_to_num(0.05)
    results = []
    throw_ratio = None if throws else 0.0
    for has_invalid in (False, True):
        model = build(
            name,
            throw_ratio=throw_ratio,
            has_invalid=has_invalid,
            norm_pix_loss=norm_pix_loss,
            shallow=True,
        )
        batch, *orders = batch_of(model, whole)
        (loss,) = model(batch, *orders).values()
        loss.backward()
        results.append([loss, *orders, *gradients(model).values()])
    assert len(results[0]) == len(results[1]) > 5
    for plain, declared in zip(*results, strict=True):
        assert torch.equal(plain, declared)


def test_loss_and_gradients_are_finite_where_nothing_is_valid(imgs):
    model = build("MaskedAutoencoderViT", has_invalid=True)
    batch = imgs.clone()
    batch[0] = torch.nan
    losses = model(*batch_of(model, batch))
    losses["pixel"].backward()
    assert losses["pixel"] > 0
    for gradient in gradients(model).values():
        assert gradient.isfinite().all()
    batch[:] = torch.nan
    nothing = model(*batch_of(model, batch))
    assert nothing["pixel"] == 0


@pytest.mark.parametrize(("num_valid", "counts"), [(11, False), (12, True)])
def test_a_token_counts_if_a_quarter_of_its_values_are_valid(num_valid, counts):
    """Tokens of 4 x 4 pixels and three channels have 48 values."""
    model = MaskedAutoencoderViT(
        32,
        1,
        img_size=8,
        patch_size=4,
        embed_dim=32,
        depth=1,
        num_heads=2,
        has_invalid=True,
    )
    imgs = torch.full((1, 3, 8, 8), torch.nan)
    token = torch.full((48,), torch.nan)
    token[:num_valid] = torch.rand(num_valid)
    imgs[0, :, :4, :4] = token.view(4, 4, 3).permute(2, 0, 1)
    ids_shuffle = torch.tensor([[3, 0, 1, 2]])
    assert (model(imgs, ids_shuffle)["pixel"] > 0) == counts
    collator = model.collator("furthest", 0)
    (counted,) = collator.find_counted(imgs)
    assert counted.tolist() == [counts, False, False, False]


@pytest.mark.parametrize("name", PIXEL_CLASSES)
def test_no_value_decides_a_shape(name, imgs):
    """On the meta device, where tensors have no values, nothing can be read back."""
    model = build(name, has_invalid=True).to("meta")
    on_meta = [tensor.to("meta") for tensor in batch_of(model, imgs)]
    losses = model(*on_meta)
    sum(losses.values()).backward()


# ------------------------------------------------------------------------------------------------------------- throwing


def slow_order(sampler, noise, counted):
    """Returns the segments of one image: MAE's visible tokens, then those that count and are furthest apart."""
    counts = sampler.counts
    cells = sampler.coords.astype(int)
    shuffled = noise.argsort().tolist()
    visible = shuffled[: counts.num_visible]
    masked = shuffled[counts.num_visible :]
    candidates = [t for t in masked if counted[t]]
    others = [t for t in masked if not counted[t]]
    if len(candidates) <= counts.num_retained:
        retained = candidates + others[: counts.num_retained - len(candidates)]
    else:
        retained = [candidates[0]]
        while len(retained) < counts.num_retained:
            largest = 0
            for t in candidates:
                differences = cells[retained] - cells[t]
                distance = (differences**2).sum(axis=1).min()
                if distance > largest:
                    largest = distance
                    best = t
            retained.append(best)
    thrown = set(masked) - set(retained)
    return sorted(visible), sorted(retained), sorted(thrown)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.2, 0.0])
def test_tokens_that_do_not_count_are_thrown_first(share):
    counts = TokenCounts.from_ratios(64, 0.75, 0.5)
    sampler = TokenOrderSampler(8, counts)
    noise = addressed_noise(0, 0, np.arange(20), 64)
    counted = addressed_noise(1, 0, np.arange(20), 64) < share
    counted[3] = True
    ids_shuffle = draw_order(sampler, noise, counted=counted)
    for b in range(20):
        found = segments(torch.from_numpy(ids_shuffle[b]), counts)
        assert found == slow_order(sampler, noise[b], counted[b])
        alone = draw_order(sampler, noise[[b]], counted=counted[[b]])  # a function of the image alone
        assert np.array_equal(alone[0], ids_shuffle[b])
    assert np.array_equal(ids_shuffle[3], sampler(noise)[3])


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("mask_unit", [1, 2])
def test_every_sampling_throws_them_first(sampling, mask_unit):
    counts = TokenCounts.from_ratios(64, 0.75, 0.5)
    sampler = TokenOrderSampler(8, counts, sampling, mask_unit)
    noise = addressed_noise(0, 0, np.arange(16), 64)
    counted = addressed_noise(1, 0, np.arange(16), 64) < 0.6
    weights = addressed_noise(2, 0, np.arange(16), 64)
    if sampling != "attention":
        weights = None
    ids_shuffle = draw_order(sampler, noise, weights, counted)
    plain = draw_order(sampler, noise, weights)
    assert np.array_equal(ids_shuffle[:, :16], plain[:, :16])  # what is visible does not depend on it
    for b in range(16):
        assert sorted(ids_shuffle[b]) == list(range(64))
        _, retained, thrown = segments(torch.from_numpy(ids_shuffle[b]), counts)
        assert counted[b][retained].all() or not counted[b][thrown].any()
    counted[:] = True
    assert np.array_equal(draw_order(sampler, noise, weights, counted), plain)


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def scans(photos, tmp_path_factory):
    """`photos` as PNGs whose alpha is 0 where they are invalid, and the same as floats with NaN."""
    root = tmp_path_factory.mktemp("scans")
    source = open_images("folder", photos)
    for i in range(len(source)):
        array, label = source.load(i)
        mask = clouds(seed=i, size=array.shape[:2])
        for kind in ("alpha", "nan"):
            folder = root / kind / "train" / source.classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            if kind == "alpha":
                band = np.where(mask, 0, 255).astype(np.uint8)
                values = np.concatenate([array, band], axis=2)
            else:
                values = np.where(mask, np.nan, array.astype(np.float32))
            np.save(folder / f"{i}.npy", values)
    return root


ALPHA = ["--mask_band", 3]
NAN = ["--nodata", "nan"]


def test_the_loss_of_a_run_is_that_of_its_model_on_images_with_nan(scans, tmp_path):
    """One step on all images, with a learning rate of 0."""
    freeze = ["--lr", 0, "--min_lr", 0, "--weight_decay", 0, "--max_steps", 1, "--batch_size", 24]
    pretrain(scans / "alpha", tmp_path / "run", *ALPHA, *freeze)
    model, settings = registry.load_run(tmp_path / "run")
    images = open_images("folder", scans / "alpha", invalid=InvalidPixels.from_settings(settings))
    dataset = AddressedDataset(images, RandomResizedCropFlip(SIDE, settings["seed"]))
    collate = model.collator("furthest", settings["seed"])
    batch, _, ids_shuffle = collate([dataset[0, i] for i in range(24)])
    normalized = normalizer(settings, images.pixel_format)(batch, fill=False)
    expected = model(normalized, ids_shuffle)["pixel"].item()
    filled = model(normalized.nan_to_num(0), ids_shuffle)["pixel"].item()
    (report,) = [report for report in reports(tmp_path / "run") if "loss" in report]
    assert report["loss"] == pytest.approx(expected, rel=1e-5)
    assert expected < 0.95 * filled


def test_other_marks_and_frameworks_are_refused(scans, tmp_path, capsys):
    pretrain(scans / "nan", tmp_path / "run", *NAN, "--max_steps", 1)
    assert "nodata" in pretrain.refused(capsys, scans / "nan", tmp_path / "run", "--nodata", 0)
    pretrain(scans / "nan", tmp_path / "run", *NAN, "--max_steps", 2)  # NaN equals NaN here
    assert "--bands" in pretrain.refused(capsys, scans / "nan", tmp_path / "new", "--bands", 0, 3)
    for model in ("localmim_vit_micro_patch4", "tec_vit_micro_patch4"):
        assert model in pretrain.refused(capsys, scans / "alpha", tmp_path / "new", "--model", model, *ALPHA)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_and_errors_of_a_run(scans, tmp_path, capsys):
    """Invalid pixels have one colour in all columns, and no part in the errors."""
    pretrain(scans / "alpha", tmp_path / "run", *ALPHA, "--max_steps", 2, "--picture_every", 1)
    visualize.main([str(tmp_path / "run"), "--out", str(tmp_path / "p.png"), "--rows", "2"])
    assert "masked MSE" in capsys.readouterr().out
    model, settings = registry.load_run(tmp_path / "run")
    assert model.has_invalid
    images = open_images("folder", scans / "alpha", invalid=InvalidPixels.from_settings(settings))
    normalize = normalizer(settings, images.pixel_format)
    ((imgs, ids_shuffle),) = crops(model, settings, images, range(2))
    picture = reconstruction_picture(model, normalize, imgs, ids_shuffle)
    shown = (picture == INVALID_COLOR).all(axis=-1).sum()
    invalid = imgs.isnan().any(dim=1).sum()
    assert shown == 4 * 4 * 4 * invalid  # four columns, pixels of 4 x 4

    normalized = normalize(imgs, fill=False)
    (view,) = views_of(model, normalized, ids_shuffle, normalize.undo)
    errors = (imgs / 255 - view.prediction) ** 2
    expected = {}
    for kind, number in (("retained", 1), ("thrown", 2)):
        means = []
        for b in range(2):
            for token in segments(ids_shuffle[b], model.counts)[number]:
                squares = pixels_of(errors[b], token, 4)
                squares = squares[~squares.isnan()]
                if 4 * len(squares) >= 48:
                    means.append(squares.mean().item())
        expected[kind] = np.mean(means)
    found = measure(model, settings, images, range(2))["masked MSE"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_views_undo_the_target_normalisation_of_valid_pixels(imgs):
    model = build("MaskedAutoencoderViT", has_invalid=True)
    valid = model.valid_pixels(imgs)
    targets = model.token_pixels(imgs).double()
    for b in range(len(imgs)):
        for t in range(64):
            if valid[b, t].sum() > 1:
                values = targets[b, t].tolist()
                targets[b, t] = torch.tensor(slow_targets(values, valid[b, t].tolist(), True))
    model.reconstruct = lambda imgs, ids: (targets.float(), None)
    (view,) = views_of(model, imgs, None, lambda imgs: imgs)
    whole = ~imgs.isnan()
    assert_close(view.prediction[whole], imgs[whole], rtol=1e-4, atol=1e-4)
    assert view.errors.max() < 1e-6
    assert PixelFormat(3, "uint8", has_invalid=True).batch_dtype == "float32"
