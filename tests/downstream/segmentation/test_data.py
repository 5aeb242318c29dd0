"""Label values, folders of pairs, the class-balance rule of crops, photometric distortion."""

import base64
import colorsys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.common import scaled_size
from downstream.segmentation.data import (
    IGNORE,
    LabelValues,
    ResizeForEvaluation,
    SegmentationAugment,
    SegmentationImages,
    distort,
    resize_bilinear,
    scale_saturation,
    turn_hue,
)
from tests.conftest import write_photo
from tests.downstream.bands import bands, write_bands
from tests.downstream.segmentation.pairs import write_pairs
from util.data.images import ImageError, Reading

STRIPES = [1, 1, 1, 2, 2, 2, 255, 255, 255, 0, 0, 0]  # of the second image
LABEL = "annotations/training/1.png"
IMAGE = "images/training/1.jpg"
SEVENS = np.full((30, 40), 7, np.uint8)


def open_pairs(root, num_classes=3, in_chans=3, split="train", **values):
    return SegmentationImages(root, split, LabelValues(num_classes, **values), Reading(in_chans))


def save(array, path):
    Image.fromarray(array).save(path)


# ----------------------------------------------------------------------------------------------------- label values


def test_values_become_classes():
    raw = np.array([0, 1, 2, 149, 150, 255], np.uint8)
    without_zero = LabelValues(150, reduce_zero_label=True)
    assert without_zero(raw).tolist() == [255, 0, 1, 148, 149, 255]
    assert LabelValues(151)(raw).tolist() == raw.tolist()
    without_nine = LabelValues(3, ignore_index=9)
    assert without_nine(np.array([9, 2], np.uint8)).tolist() == [255, 2]


def test_listed_values_become_classes_in_their_order():
    """One that is also --ignore_index is a class; maps then mark invalid pixels by another value."""
    values = LabelValues(3, label_values=[20, 10, 255])
    assert values(np.array([10, 255, 20], np.uint8)).tolist() == [1, 2, 0]
    assert values.no_class == 254
    for other in (0, 254):
        with pytest.raises(ValueError, match=f" {other},.*--label_values"):
            values(np.array([10, other], np.uint8))
    assert LabelValues(2, 7, label_values=[0, 255])(np.array([255, 7, 0], np.uint8)).tolist() == [1, IGNORE, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 256},
        {"num_classes": 255, "reduce_zero_label": True},
        {"num_classes": 3, "ignore_index": 2},
        {"num_classes": 3, "ignore_index": 256},
        {"num_classes": 2, "label_values": [0, 10, 20]},
        {"num_classes": 2, "label_values": [10, 10]},
        {"num_classes": 2, "label_values": [0, 256]},
    ],
)
def test_classes_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match="--num_classes|--ignore_index"):
        LabelValues(**options)


# ------------------------------------------------------------------------------------------------------------ pairs


def test_pairs_are_matched_by_name(tmp_path):
    write_pairs(tmp_path)
    write_pairs(tmp_path, 1, "training/more")
    (tmp_path / "images" / "training" / ".hidden.jpg").write_bytes(b"")
    (tmp_path / LABEL).rename((tmp_path / LABEL).with_suffix(".PNG"))
    images = open_pairs(tmp_path)
    images.check()
    assert images.names.tolist() == [b"0.jpg", b"1.jpg", b"2.jpg", b"3.jpg", b"more/0.jpg"]
    pair, _ = images.load_sample(1)
    assert pair.dtype == np.uint8
    assert np.array_equal(pair[..., :3], np.asarray(Image.open(tmp_path / IMAGE)))
    assert pair[0, :12, 3].tolist() == STRIPES


def test_palette_images_hold_indices(tmp_path):
    write_pairs(tmp_path, 2)
    label = Image.fromarray(np.full((30, 40), 2, np.uint8), mode="P")
    label.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    label.save(tmp_path / LABEL)
    assert (open_pairs(tmp_path).load_labels(1) == 2).all()


def write_palette(path, colors):
    label = Image.fromarray((np.indices((30, 40)).sum(axis=0) % 3).astype(np.uint8), mode="P")
    label.putpalette(sum(colors, []))
    label.save(path)


def test_palettes_may_differ_in_colors_that_no_pixel_has(tmp_path):
    """By indices, classes would be shuffled in each file."""
    write_pairs(tmp_path, 2)
    black, red, blue, green = [0, 0, 0], [200, 0, 0], [0, 0, 200], [0, 200, 0]
    other = tmp_path / "annotations/training/0.png"
    write_palette(other, [black, red, blue])
    write_palette(tmp_path / LABEL, [black, red, blue, green])
    open_pairs(tmp_path).check()
    write_palette(tmp_path / LABEL, [black, blue, red])
    with pytest.raises(ImageError, match="1.png"):
        open_pairs(tmp_path).check()


@pytest.mark.parametrize("layout", [{}, {"tile": (16, 16), "compression": "zlib"}])
def test_labels_may_be_tiffs(tmp_path, layout):
    tifffile = pytest.importorskip("tifffile")
    write_pairs(tmp_path, 2)
    path = (tmp_path / LABEL).with_suffix(".tif")
    tifffile.imwrite(path, np.array(Image.open(tmp_path / LABEL)), photometric="minisblack", **layout)
    (tmp_path / LABEL).unlink()
    images = open_pairs(tmp_path)
    images.check()
    assert images.load_labels(1)[0, :12].tolist() == STRIPES
    tifffile.imwrite(path, np.zeros((30, 40), np.float32))
    with pytest.raises(ImageError, match="1.tif"):
        images.load_labels(1)


# A grey PNG of 4 bits, whose values are (row + column) % 16; Pillow writes none.
GREY_PNG = (
    "iBL{Q4GJ0x0000DNk~Le0000e0000U1ONa40KP`<00000TuDShRCwC$&@lmkAOHZtr-BuzKm{sL!3tKO0u`u01u9ShBe**JU;w9I"
    "ZhAt@XYF&p%aO{}#=74{U`1d<U`OCU;6&g;;6~t$z<|I5ff0cTff<2?|L2FF4_G8C{Cidcod5s;07*qoM6N<$f&"
)


def test_labels_of_few_bits_are_read_as_they_are(tmp_path):
    """The largest value of 1 or 4 bits is not 255, which would mean ignored."""
    write_pairs(tmp_path, 2)
    rows, columns = np.indices((30, 40))
    (tmp_path / LABEL).write_bytes(base64.b85decode(GREY_PNG))
    save((rows + columns) % 2 == 1, tmp_path / "annotations/training/0.png")
    images = open_pairs(tmp_path, num_classes=20)
    images.check()
    assert np.array_equal(images.load_labels(1), (rows + columns) % 16)
    assert np.array_equal(images.load_labels(0), (rows + columns) % 2)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_five_bands_keep_their_type(tmp_path, dtype):
    """A scale of 1 changes no value."""
    images = open_pairs(write_bands(write_pairs(tmp_path, 2), ".npy", dtype), in_chans=5)
    images.check()
    sample, _ = images.load_sample(1)
    assert np.array_equal(sample[..., :5], bands(1, dtype))
    assert sample[0, :12, 5].tolist() == STRIPES
    pair = torch.from_numpy(sample).permute(2, 0, 1)
    img = pair[:5]
    shown, labels = ResizeForEvaluation((40, 30))(pair)
    assert torch.equal(shown.float(), img.float())
    assert labels.dtype == torch.uint8
    fill = [7, 8, 9, 10, 11]
    padded, classes = SegmentationAugment((64, 64), 0, fill, (40, 30), (1, 1), photometric=False)(pair, 0, 0)
    assert padded.dtype == img.dtype
    assert padded[:, :30, :40].tolist() in (img.tolist(), img.float().flip(-1).to(img.dtype).tolist())
    assert padded[:, 40, 3].tolist() == fill
    assert (classes[30:] == IGNORE).all()
    half = resize_bilinear(img, (15, 20))
    assert (half.float() - resize_bilinear(img.float(), (15, 20))).abs().max() <= 0.5


def remove_files(root):
    for path in root.rglob("*.??g"):
        path.unlink()


def write_values(root, *values):
    for path in (root / "annotations").rglob("*.png"):
        save(np.array(values, np.uint8)[np.arange(1200) % len(values)].reshape(30, 40), path)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda root: (root / LABEL).unlink(), "annotations/training.* 1$"),
        (lambda root: (root / IMAGE).unlink(), "images/training.* 1$"),
        (lambda root: write_photo(root / IMAGE, (41, 30)), "1.jpg"),
        (lambda root: save(SEVENS, root / LABEL), "1.png.* 7,.*--num_classes"),
        (lambda root: write_photo(root / LABEL, (40, 30)), "1.png"),
        (lambda root: save(SEVENS.astype(np.uint16), root / LABEL), "1.png.*16 bits"),
        (lambda root: (root / LABEL).write_bytes(b"\x89PNG"), "1.png"),
        (remove_files, "images/training"),
        (lambda root: (root / "annotations/training").rename(root / "all"), "annotations"),
        (lambda root: (root / "images").rename(root / "photos"), "images"),
        (lambda root: (root / "images/train").mkdir(), "images"),
        (lambda root: write_photo(root / "images/training/1.png", (40, 30)), "1.jpg' and '1.png"),
        (lambda root: write_values(root, 0, 255), "0 .class 0. 50.0%.* 255 .ignored. 50.0%"),
        (lambda root: write_values(root, 255), "--ignore_index"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, spoil, named):
    spoil(write_pairs(tmp_path))
    with pytest.raises(ValueError, match=named):
        open_pairs(tmp_path).check()


def test_validation_labels_are_all_checked_and_training_labels_in_part(tmp_path):
    for split in ("training", "validation"):
        write_pairs(tmp_path, 10, split, size=(8, 6))
        save(np.full((6, 8), 9, np.uint8), tmp_path / "annotations" / split / "3.png")
    images = open_pairs(tmp_path)
    images.num_checked = 5
    images.check()
    images.num_checked = 10
    with pytest.raises(ImageError, match="3.png"):
        images.check()
    images.check(max_bad_fraction=0.1)
    images = open_pairs(tmp_path, split="val")
    assert images.num_checked == 10
    with pytest.raises(ImageError, match="3.png"):
        images.check()


def test_a_single_class_is_enough_to_evaluate_or_if_it_is_asked_for(tmp_path):
    for split in ("training", "validation"):
        write_pairs(tmp_path, 2, split, values=(0, 255))
    open_pairs(tmp_path, 1).check()
    open_pairs(tmp_path, 2, split="val").check()


# ------------------------------------------------------------------------------------------------------ augmentation


def test_scaled_sizes():
    """(height, width): the short side becomes 512, unless the long one would exceed 2048. Halves are rounded up."""
    assert scaled_size((512, 683), 2048, 512) == (512, 683)
    assert scaled_size((300, 400), 2048, 512) == (512, 683)
    assert scaled_size((200, 1000), 2048, 512) == (410, 2048)
    assert scaled_size((1000, 600), 1024, 256) == (427, 256)


def test_image_and_labels_are_cropped_and_flipped_together():
    """The channels of the image are its labels, and the row and the column of each pixel."""
    labels = np.random.default_rng(0).integers(0, 5, (30, 40))
    rows, columns = np.indices(labels.shape)
    pair = torch.from_numpy(np.stack([labels, rows, columns, labels])).byte()
    options = dict(image_scale=(40, 30), ratio_range=(1, 1), photometric=False)
    augment = SegmentationAugment((16, 16), 0, (0, 0, 0), **options)
    flips = set()
    places = set()
    for index in range(40):
        img, cropped = augment(pair, 3, index)
        assert torch.equal(img[0], cropped)
        _, row, column = img.long()
        assert np.array_equal(labels[row, column], cropped)
        flips.add(bool(column[0, 0] > column[0, 1]))
        places.add((int(row.min()), int(column.min())))
    assert flips == {True, False}
    assert len(places) > 30
    assert torch.equal(augment(pair, 3, 39)[0], img)
    assert not torch.equal(augment(pair, 4, 39)[0], img)
    never = SegmentationAugment((16, 16), 0, (0, 0, 0), **options, hflip=False)
    for index in range(40):
        img, _ = never(pair, 3, index)
        assert img[2, 0, 0] < img[2, 0, 1]


def is_balanced(labels, top, left):
    """The rule in its own words, on a list of pixels."""
    window = labels[top : top + 8, left : left + 8]
    counts = Counter(window.flatten().tolist())
    del counts[IGNORE]
    return len(counts) > 1 and max(counts.values()) < 0.75 * counts.total()


def test_crops_are_drawn_until_their_classes_are_balanced():
    """Against the rule for each try. The corner of another class makes most first tries fail."""
    labels = torch.zeros(40, 40, dtype=torch.uint8)
    labels[:14, :14] = 1
    labels[:, 20:24] = IGNORE
    augment = SegmentationAugment((8, 8), 0, (0, 0, 0))
    rng = np.random.default_rng(0)
    used = set()
    for _ in range(200):
        draws = rng.uniform(size=20).tolist()
        for number in range(10):
            top = int(draws[2 * number] * 33)
            left = int(draws[2 * number + 1] * 33)
            if is_balanced(labels, top, left):
                break
        used.add(number)
        rows, columns = augment.choose_crop(labels, draws)
        assert (rows.start, columns.start) == (top, left)
    assert {0, 1, 2, 9} <= used


def pixels_of(img):
    """The pixels of [3, H, W] in [0, 255] as lists of channels in [0, 1]."""
    return (img.double() / 255).flatten(1).T.tolist()


def a_colourful_image():
    generator = torch.Generator().manual_seed(0)
    img = torch.randint(0, 256, (3, 6, 5), generator=generator).float()
    img[:, 0, 0] = 0  # black
    img[:, 0, 1] = 77  # grey
    return img


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_saturation_against_colorsys(factor):
    img = a_colourful_image()
    found = scale_saturation(img, factor)
    for pixel, scaled in zip(pixels_of(img), pixels_of(found), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected = colorsys.hsv_to_rgb(hue, min(1.0, saturation * factor), value)
        assert scaled == pytest.approx(expected, abs=4e-5)


@pytest.mark.parametrize("turn", [-0.1, 0.0, 0.07])
def test_hue_against_colorsys(turn):
    img = a_colourful_image()
    found = turn_hue(img, turn)
    for pixel, turned in zip(pixels_of(img), pixels_of(found), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        assert turned == pytest.approx(expected, abs=4e-5)


def distorted(img, **amounts):
    """`distort` by the named distortions alone, each by an amount in [0, 1)."""
    draws = [0.9] * 4 + [0.5] * 4 + [0.9]
    for number, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        if name in amounts:
            draws[number] = 0.0
            draws[4 + number] = amounts[name]
    return distort(img, draws)


def to_bytes(values):
    return values.clamp(0, 255).round().byte()


def test_distortions_are_drawn_one_by_one():
    x = a_colourful_image()
    img = x.byte()
    expected = [
        ({}, x),
        ({"brightness": 1.0}, x + 32),
        ({"brightness": 0.0}, x - 32),
        ({"contrast": 0.0}, x * 0.5),
        ({"contrast": 1.0}, x * 1.5),
        ({"saturation": 0.0}, scale_saturation(x, 0.5)),
        ({"hue": 0.0}, turn_hue(x, -18 / 180)),
        ({"hue": 0.5}, x),
        ({"hue": 0.999}, turn_hue(x, 18 / 180)),
    ]
    for amounts, values in expected:
        assert torch.equal(distorted(img, **amounts), to_bytes(values)), amounts


def test_evaluation_keeps_the_labels():
    pair = torch.randint(0, 256, (4, 30, 45), dtype=torch.uint8)
    img, labels = ResizeForEvaluation((2048, 60))(pair)
    assert img.shape == (3, 60, 90)
    assert torch.equal(labels, pair[3])
