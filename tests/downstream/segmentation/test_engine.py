"""Losses, slide inference and scores against slow derivations; colours."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from downstream.segmentation.data import IGNORE
from downstream.segmentation.engine_segmentation import (
    WINDOW_WEIGHTS,
    read_classes,
    segmentation_losses,
    slide_logits,
    window_starts,
)
from downstream.segmentation.metrics import count_pixels, segmentation_scores

# ----------------------------------------------------------------------------------------------------------- scores


def test_scores_by_hand():
    """Class 2 is never there and never predicted; class 3 is predicted but never there."""
    truth = torch.tensor([0, 0, 0, 1, 1, 1, IGNORE, IGNORE])
    predicted = torch.tensor([0, 0, 1, 1, 1, 3, 0, 2])
    scores = segmentation_scores(count_pixels(predicted, truth, 4))
    two_thirds = pytest.approx(100 * 2 / 3)
    assert scores["iou"] == [two_thirds, 50.0, None, 0.0]
    assert scores["acc"] == [two_thirds, two_thirds, None, None]
    assert scores["miou"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    assert scores["macc"] == pytest.approx(100 * 2 / 3)
    assert scores["aacc"] == pytest.approx(100 * 4 / 6)


# ----------------------------------------------------------------------------------------------------------- losses


def slow_loss(logits, labels):
    """The sum of -log p over labelled pixels, pixel by pixel, of logits that are at the labels' resolution."""
    total = 0.0
    for b, row, column in np.ndindex(*labels.shape):
        label = labels[b, row, column].item()
        if label != IGNORE:
            values = logits[b, :, row, column].double()
            total += (values.exp().sum().log() - values[label]).item()
    return total


@pytest.mark.parametrize(("mean_over_valid", "count"), [(False, 48), (True, 36)])
def test_losses_by_definition(mean_over_valid, count):
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (2, 4, 6), dtype=torch.uint8)
    labels[0, :2] = IGNORE
    decode = torch.randn(2, 3, 2, 3)
    aux = torch.randn(2, 3, 4, 6)
    losses = segmentation_losses({"decode": decode, "aux": aux}, labels, mean_over_valid)
    upsampled = F.interpolate(decode, scale_factor=2, mode="bilinear")
    of_decode = slow_loss(upsampled, labels) / count
    of_aux = 0.4 * slow_loss(aux, labels) / count
    assert losses["decode"].item() == pytest.approx(of_decode, rel=1e-5)
    assert losses["aux"].item() == pytest.approx(of_aux, rel=1e-5)
    nothing = torch.full_like(labels, IGNORE)
    assert segmentation_losses({"decode": decode}, nothing, mean_over_valid)["decode"] == 0


# -------------------------------------------------------------------------------------------------- slide inference


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (512, [0]),
        (400, [0]),
        (683, [0, 171]),
        (1200, [0, 341, 682, 688]),
    ],
)
def test_windows_cover_the_axis(length, expected):
    assert window_starts(length, 512, 341) == expected


@pytest.mark.parametrize("window_weights", WINDOW_WEIGHTS)
@pytest.mark.parametrize("size", [(16, 16), (16, 37), (29, 21), (9, 30), (7, 5)])
def test_slide_inference_of_a_constant_model_is_whole_inference(size, window_weights):
    """Logits that depend on the pixel alone are the same in every window."""
    weights = torch.randn(5, 3, dtype=torch.float64)

    def predict(imgs):
        return torch.einsum("kc,nchw->nkhw", weights, imgs)

    img = torch.randn(3, *size, dtype=torch.float64)
    logits = slide_logits(predict, img, (16, 16), 10, window_weights)
    whole = predict(img[None])[0]
    assert_close(logits.double(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window_weights", WINDOW_WEIGHTS)
def test_slide_inference_is_the_mean_over_windows(window_weights):
    """Against loops over windows, with a model that sees its whole window. A batch holds up to 8 of a row."""
    sizes = []

    def predict(imgs):
        sizes.append(len(imgs))
        return imgs + imgs.mean(dim=(1, 2, 3), keepdim=True)

    img = torch.randn(2, 20, 50)
    weights = torch.ones(8, 8)
    if window_weights == "gaussian":
        for y, x in np.ndindex(8, 8):
            weights[y, x] = math.exp(-((y - 3.5) ** 2 + (x - 3.5) ** 2) / 2)  # the deviation is an eighth
    total = torch.zeros(2, 20, 50)
    count = torch.zeros(20, 50)
    for top in (0, 5, 10, 12):
        for left in (*range(0, 42, 5), 42):
            rows = slice(top, top + 8)
            columns = slice(left, left + 8)
            window = img[:, rows, columns]
            total[:, rows, columns] += weights * predict(window[None])[0]
            count[rows, columns] += weights
    sizes.clear()
    logits = slide_logits(predict, img, (8, 8), 5, window_weights)
    assert_close(logits, total / count)
    assert sizes == [8, 2] * 4


# ---------------------------------------------------------------------------------------------------------- colours


def test_names_and_colours_of_classes(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("4 5 6 sky\n1 2 3 tall tree\n4 x\n", encoding="utf-8-sig")
    names, colors = read_classes(path, 3)
    assert names == ["sky", "tall tree", "4 x"]
    assert colors[:2].tolist() == [[4, 5, 6], [1, 2, 3]]
    for other in (path, tmp_path / "none.txt"):
        with pytest.raises(ValueError, match="--class_names"):
            read_classes(other, 4)
    names, colors = read_classes(None, 150)
    assert names[149] == "149"
    assert len(np.unique(colors, axis=0)) == 150
