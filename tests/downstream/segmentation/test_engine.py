"""Losses, slide inference and scores against slow derivations; colours."""

import numpy as np
import pytest
import torch

from downstream.segmentation.data import IGNORE
from downstream.segmentation.engine_segmentation import (
    default_colors,
    draw_predictions,
    read_classes,
    segmentation_losses,
    slide_logits,
    window_starts,
)
from downstream.segmentation.metrics import count_pixels, segmentation_scores
from tests.two_processes import run_in_two_processes
from util.data.images import ImageError

# ----------------------------------------------------------------------------------------------------------- scores


def test_scores_by_hand():
    """Class 2 is never there and never predicted; class 3 is predicted but never there."""
    truth = torch.tensor([[0, 0, 0, 1], [1, 1, IGNORE, IGNORE]])
    predicted = torch.tensor([[0, 0, 1, 1], [1, 3, 0, 2]])
    scores = segmentation_scores(count_pixels(predicted, truth, 4))
    assert scores["iou"] == [pytest.approx(100 * 2 / 3), pytest.approx(100 * 2 / 4), None, 0.0]
    assert scores["acc"] == [pytest.approx(100 * 2 / 3), pytest.approx(100 * 2 / 3), None, None]
    assert scores["miou"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    assert scores["macc"] == pytest.approx(100 * 2 / 3) and scores["aacc"] == pytest.approx(100 * 4 / 6)
    with pytest.raises(ImageError, match="no labelled pixel in the val split: check"):
        segmentation_scores(count_pixels(predicted, torch.full_like(truth, IGNORE), 4))


def test_scores_against_torchmetrics():
    """Over several images. Where all classes occur, there is only one definition."""
    metrics = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 6, (5, 20, 30), generator=generator)
    predicted = torch.where(torch.rand(truth.shape, generator=generator) < 0.6, truth, (truth * 3 + 1) % 6)
    truth[:, :3] = IGNORE
    scores = segmentation_scores(sum(count_pixels(p, t, 6) for p, t in zip(predicted, truth, strict=True)))
    options = dict(num_classes=6, ignore_index=IGNORE)
    iou = metrics.MulticlassJaccardIndex(**options, average=None)(predicted, truth)
    acc = metrics.MulticlassAccuracy(**options, average=None)(predicted, truth)
    overall = metrics.MulticlassAccuracy(**options, average="micro")(predicted, truth)
    assert scores["iou"] == pytest.approx((100 * iou).tolist()) and scores["miou"] == pytest.approx(
        100 * iou.mean().item()
    )
    assert scores["acc"] == pytest.approx((100 * acc).tolist()) and scores["macc"] == pytest.approx(
        100 * acc.mean().item()
    )
    assert scores["aacc"] == pytest.approx(100 * overall.item())


def test_absent_classes_against_torchmetrics():
    """Classes 2 and 5 have neither true nor predicted pixels, so both leave them out of the means."""
    metrics = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(1)
    present = torch.tensor([0, 1, 3, 4])
    truth, predicted = (present[torch.randint(0, 4, (20, 30), generator=generator)] for _ in range(2))
    truth[:3] = IGNORE
    scores = segmentation_scores(count_pixels(predicted, truth, 6))
    options = dict(num_classes=6, ignore_index=IGNORE, average="macro")
    assert scores["iou"][2] is None is scores["acc"][5]
    assert scores["miou"] == pytest.approx(100 * metrics.MulticlassJaccardIndex(**options)(predicted, truth).item())
    assert scores["macc"] == pytest.approx(100 * metrics.MulticlassAccuracy(**options)(predicted, truth).item())


# ----------------------------------------------------------------------------------------------------------- losses


def slow_loss(logits, labels):
    """The sum of -log p over labelled pixels, pixel by pixel, of logits that are at the labels' resolution."""
    total = 0.0
    for b, row, column in np.ndindex(*labels.shape):
        if labels[b, row, column] != IGNORE:
            values = logits[b, :, row, column].double()
            total += (values.exp().sum().log() - values[labels[b, row, column].item()]).item()
    return total


def test_losses_by_definition():
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (2, 4, 6), dtype=torch.uint8)
    labels[0, :2] = IGNORE
    logits = {"decode": torch.randn(2, 3, 2, 3), "aux": torch.randn(2, 3, 4, 6)}
    upsampled = torch.nn.functional.interpolate(logits["decode"], scale_factor=2, mode="bilinear")
    for valid, count in ((False, 48), (True, 36)):
        losses = segmentation_losses(logits, labels, valid)
        assert losses["decode"].item() == pytest.approx(slow_loss(upsampled, labels) / count, rel=1e-5)
        assert losses["aux"].item() == pytest.approx(0.4 * slow_loss(logits["aux"], labels) / count, rel=1e-5)
    empty = segmentation_losses(logits, torch.full_like(labels, IGNORE), True)
    assert empty["decode"] == 0


def _loss_of_share(rank):
    torch.manual_seed(0)
    labels, logits = torch.randint(0, 3, (4, 3, 3), dtype=torch.uint8), torch.randn(4, 3, 3, 3)
    labels[:2, :2] = IGNORE  # one process has fewer labelled pixels
    share = slice(2 * rank, 2 * rank + 2)
    return segmentation_losses({"decode": logits[share]}, labels[share], True)["decode"].item()


def test_the_mean_over_labelled_pixels_is_that_of_all_processes():
    both = run_in_two_processes(_loss_of_share)
    torch.manual_seed(0)
    labels, logits = torch.randint(0, 3, (4, 3, 3), dtype=torch.uint8), torch.randn(4, 3, 3, 3)
    labels[:2, :2] = IGNORE
    assert sum(both) / 2 == pytest.approx(segmentation_losses({"decode": logits}, labels, True)["decode"].item())


# -------------------------------------------------------------------------------------------------- slide inference


@pytest.mark.parametrize(("length", "expected"), [(512, [0]), (400, [0]), (683, [0, 171]), (1200, [0, 341, 682, 688])])
def test_windows_cover_the_axis(length, expected):
    assert window_starts(length, 512, 341) == expected


def test_slide_inference_of_a_constant_model_is_whole_inference():
    """Logits that depend on the pixel alone are the same in every window."""
    weights = torch.randn(5, 3, dtype=torch.float64)

    def predict(imgs):
        return torch.einsum("kc,nchw->nkhw", weights, imgs)

    for size in ((16, 16), (16, 37), (29, 21), (9, 30), (7, 5)):
        img = torch.randn(3, *size, dtype=torch.float64)
        whole = predict(img[None])[0]
        torch.testing.assert_close(slide_logits(predict, img, (16, 16), 10).double(), whole, rtol=1e-5, atol=1e-5)


def test_slide_inference_is_the_mean_over_windows():
    """Against loops over windows and pixels, with a model that sees its whole window."""

    def predict(imgs):
        assert imgs.shape[1:] == (2, 8, 8)
        return torch.stack([imgs[:, 0] + imgs.mean(dim=(1, 2, 3))[:, None, None], imgs[:, 1] ** 2], dim=1)

    img = torch.randn(2, 19, 8)
    total, count = torch.zeros(2, 19, 8), torch.zeros(19)
    for top in (0, 5, 10, 11):
        total[:, top : top + 8] += predict(img[None, :, top : top + 8])[0]
        count[top : top + 8] += 1
    torch.testing.assert_close(slide_logits(predict, img, (8, 8), 5), total / count[:, None])


def test_a_large_image_is_cut_into_several_batches():
    sizes = []

    def predict(imgs):
        sizes.append(len(imgs))
        return torch.stack([imgs[:, 0], imgs[:, 1] + imgs.mean(dim=(1, 2, 3))[:, None, None]], dim=1)

    img = torch.randn(2, 20, 23)
    total, count = torch.zeros(2, 20, 23), torch.zeros(20, 23)
    for top in (0, 5, 10, 12):
        for left in (0, 5, 10, 15):
            box = slice(top, top + 8), slice(left, left + 8)
            total[(slice(None), *box)] += predict(img[(None, slice(None), *box)])[0]
            count[box] += 1
    sizes.clear()
    torch.testing.assert_close(slide_logits(predict, img, (8, 8), 5), total / count)
    assert sizes == [8, 8]


# ---------------------------------------------------------------------------------------------------------- colours


def test_names_and_colours_of_classes(tmp_path):
    names, colors = read_classes(None, 150)
    assert names[149] == "149" and len(np.unique(colors, axis=0)) == 150 and np.array_equal(colors, default_colors(150))
    (tmp_path / "classes.txt").write_text("sky\n1 2 3 tall tree\n4 x\n")
    names, colors = read_classes(tmp_path / "classes.txt", 3)
    assert names == ["sky", "tall tree", "4 x"] and colors[1].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="names 3 classes, but there are 4"):
        read_classes(tmp_path / "classes.txt", 4)
    with pytest.raises(ValueError, match="does not exist"):
        read_classes(tmp_path / "none.txt", 4)


def test_a_picture_shows_image_truth_and_prediction():
    img = np.full((10, 20, 3), 9, np.uint8)
    truth, predicted = np.full((10, 20), IGNORE, np.uint8), np.full((10, 20), 1)
    picture = draw_predictions([(img, truth, predicted)] * 2, np.array([[1, 1, 1], [200, 10, 20]], np.uint8))
    row = picture[100]  # through the upper part of the panels
    panels = [row[6 + 198 * i + 50].tolist() for i in range(3)]
    assert panels == [[9, 9, 9], [0, 0, 0], [200, 10, 20]] and picture.shape == (20 + 2 * 198, 3 * 198 + 6, 3)
