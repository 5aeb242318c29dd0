"""Label values, folders of pairs, the class-balance rule of crops, photometric distortion."""

import colorsys
import re
import struct
import unicodedata
import zlib
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
    resize_image,
    resize_labels,
    scale_saturation,
    turn_hue,
)
from tests.conftest import write_photo
from tests.downstream.bands import bands, write_bands
from tests.downstream.segmentation.pairs import write_pairs
from util.data.images import ImageError

STRIPES = [1, 1, 1, 2, 2, 2, 255, 255, 255, 0, 0, 0]  # of the second image
FIRST_LABELS = "annotations/training/0.png"
FIRST_IMAGE = "images/training/0.jpg"


def open_pairs(root, num_classes=3, in_chans=3):
    return SegmentationImages(root, "train", LabelValues(num_classes), in_chans)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "--num_classes 0 takes the values 0 to -1"),
        ({"num_classes": 256}, "0 to 255 of 8-bit label files, which must not contain --ignore_index 255"),
        ({"num_classes": 255, "reduce_zero_label": True}, "1 to 255"),
        ({"num_classes": 3, "ignore_index": 2}, "must not contain --ignore_index 2"),
        ({"num_classes": 3, "ignore_index": 256}, "--ignore_index must lie between 0 and 255, got 256"),
    ],
)
def test_classes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LabelValues(**options)


@pytest.mark.parametrize(
    ("reduce_zero_label", "value", "message"),
    [
        (False, 150, "values 150; 0 to 149 are classes.*if classes begin at 1: --reduce_zero_label"),
        (True, 151, "values 151; 1 to 150 are classes, 255 is ignored, and so is 0$"),
    ],
)
def test_values_without_a_meaning_are_refused(reduce_zero_label, value, message):
    values = LabelValues(150, reduce_zero_label=reduce_zero_label)
    with pytest.raises(ValueError, match=message):
        values(np.array([[value]], np.uint8))


# ------------------------------------------------------------------------------------------------------------ pairs


def test_pairs_are_matched_by_name(tmp_path):
    write_pairs(tmp_path)
    write_pairs(tmp_path, 1, "training/more")
    (tmp_path / "images" / "training" / ".hidden.jpg").write_bytes(b"")
    images = open_pairs(tmp_path)
    images.check()
    assert images.names.tolist() == [b"0.jpg", b"1.jpg", b"2.jpg", b"3.jpg", b"more/0.jpg"]
    pair, _ = images.load_sample(1)
    assert pair.dtype == np.uint8
    img = np.asarray(Image.open(tmp_path / IMAGE))
    assert np.array_equal(pair[..., :3], img)
    assert pair[0, :12, 3].tolist() == STRIPES


def test_pairs_are_matched_in_any_form_of_unicode_and_unread_images_are_noted(tmp_path):
    """A Mac may have written the images, another machine the labels."""
    write_pairs(tmp_path, 2)
    name = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    (tmp_path / IMAGE).rename(tmp_path / "images" / "training" / f"{unicodedata.normalize('NFD', name)}.jpg")
    (tmp_path / LABEL).rename(tmp_path / "annotations" / "training" / f"{unicodedata.normalize('NFC', name)}.png")
    (tmp_path / "images" / "training" / "2.gif").touch()
    images = open_pairs(tmp_path)
    images.check()
    assert images.load_sample(1)[0].shape == (30, 40, 4)
    assert images.notes == ["note: not read: 1 file ending in .gif"]


def test_palette_images_hold_indices(tmp_path):
    write_pairs(tmp_path, 1)
    twos = np.full((30, 40), 2, np.uint8)
    label = Image.fromarray(twos, mode="P")
    label.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    label.save(tmp_path / FIRST_LABELS)
    assert (open_pairs(tmp_path).load_labels(0) == 2).all()


def png_chunk(kind, data):
    length = struct.pack(">I", len(data))
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return length + kind + data + checksum


def grey_png(values, bits):
    """A grey PNG of 1, 2, 4 or 8 bits per pixel, by the format's definition."""
    height, width = values.shape
    all_bits = np.unpackbits(values.astype(np.uint8)[..., None], axis=2)  # highest bit first
    rows = np.packbits(all_bits[..., -bits:].reshape(height, -1), axis=1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    content += png_chunk(b"IHDR", header)
    content += png_chunk(b"IDAT", zlib.compress(lines))
    return content + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_labels_of_few_bits_are_read_as_they_are(tmp_path, bits):
    """The largest value of 1, 2 or 4 bits is not 255, which would mean ignored."""
    write_pairs(tmp_path, 1)
    num_values = min(2**bits, 20)
    values = np.random.default_rng(0).integers(0, num_values, (30, 40))
    (tmp_path / FIRST_LABELS).write_bytes(grey_png(values, bits))
    images = open_pairs(tmp_path, num_classes=20)
    images.check()
    assert np.array_equal(images.load_labels(0), values)
    assert images.label_counts.num_pixels.sum() == values.size
    assert images.label_counts.num_classes_found == len(np.unique(values))


def test_label_files_keep_their_names(tmp_path):
    write_pairs(tmp_path, 1)
    label = tmp_path / FIRST_LABELS
    label.rename(label.with_suffix(".PNG"))
    images = open_pairs(tmp_path)
    images.check()
    assert images.label_path(0).endswith("0.PNG")


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_five_bands_are_read_with_their_labels(tmp_path, dtype):
    write_bands(write_pairs(tmp_path, 2), ".npy", dtype)
    images = open_pairs(tmp_path, in_chans=5)
    images.check()
    assert str(images.pixel_format) == f"5 channels of {dtype}"
    pair, _ = images.load_sample(1)
    assert np.array_equal(pair[..., :5], bands(1, dtype))
    assert pair[0, :12, 5].tolist() == STRIPES


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_transforms_keep_the_type_of_five_bands(dtype):
    """A scale of 1 changes no value."""
    img = torch.from_numpy(bands(1, dtype)).permute(2, 0, 1)
    pair = torch.cat([img, torch.ones_like(img[:1])])
    shown, labels = ResizeForEvaluation((40, 30))(pair)
    assert torch.equal(shown.float(), img.float())
    assert labels.dtype == torch.uint8
    fill = torch.arange(7, 12).to(img.dtype)
    augment = SegmentationAugment((64, 64), 0, fill.tolist(), (40, 30), (1, 1))
    padded, classes = augment(pair, 0, 0)
    assert padded.dtype == img.dtype
    values = img.tolist()
    mirrored = img.flip(-1).tolist()
    assert padded[:, :30, :40].tolist() in (values, mirrored)
    assert padded[:, 40, 3].tolist() == fill.tolist()
    assert (classes[30:] == IGNORE).all()


def test_images_of_16_bits_are_resized_as_floats_and_rounded():
    img = torch.from_numpy(bands(1, "uint16")).permute(2, 0, 1)
    half = resize_image(img, (15, 20))
    exact = resize_image(img.float(), (15, 20))
    assert half.dtype == torch.uint16
    assert (half.float() - exact).abs().max() <= 0.5


def remove_files(root):
    for path in root.rglob("*.??g"):
        path.unlink()


LABEL = "annotations/training/1.png"
IMAGE = "images/training/1.jpg"
SEVENS = np.full((30, 40), 7, np.uint8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / LABEL).unlink(), r"1 name without a label file \(.png\) in '.*annotations/training': 1"),
        (lambda root: (root / IMAGE).unlink(), "1 name with a label file but no image in '.*images/training': 1"),
        (lambda root: write_photo(root / IMAGE, (41, 30)), "1.jpg' has 41 x 30 pixels, its labels '.*1.png' 40 x 30"),
        (lambda root: save(SEVENS, root / LABEL), "it holds the values 7; 0 to 2 are classes"),
        (lambda root: write_photo(root / LABEL, (40, 30)), "1.png' has 3 channels; labels must be one"),
        (lambda root: save(SEVENS.astype(np.uint16), root / LABEL), "1.png' cannot be read: its values have 16"),
        (lambda root: (root / LABEL).write_bytes(b"\x89PNG"), "1.png' cannot be read"),
        (remove_files, "images/training' holds no images"),
        (lambda root: (root / "annotations/training").rename(root / "all"), "annotations' has 0 folders of the split"),
        (lambda root: (root / "images").rename(root / "photos"), "images' is no folder: give --data_path"),
        (lambda root: (root / "images/train").mkdir(), "images' has 2 folders of the split 'train'"),
        (lambda root: write_photo(root / "images/training/1.png", (40, 30)), "differ in their ending alone"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, spoil, message):
    spoil(write_pairs(tmp_path))
    with pytest.raises(ValueError, match=message):
        open_pairs(tmp_path).check()


def bad_numbers(root, **options):
    """Numbers of the label files that `check` names."""
    try:
        open_pairs(root).check(**options)
    except ImageError as error:
        return re.findall(r"training/(\d+)\.png", str(error))
    return []


def test_label_values_of_validation_are_all_checked_by_the_ranks_together(tmp_path, monkeypatch):
    """The bad file is not among the evenly spaced ones, which are checked in training."""
    monkeypatch.setattr("downstream.segmentation.data.NUM_CHECKED", 5)
    root = write_pairs(tmp_path, 10, size=(8, 6))
    save(np.full((6, 8), 9, np.uint8), root / "annotations/training/3.png")
    assert bad_numbers(root) == []
    assert bad_numbers(root, all_labels=True) == ["3"]
    assert bad_numbers(root, all_labels=True, rank=0, world_size=2) == []
    assert bad_numbers(root, all_labels=True, rank=1, world_size=2) == ["3"]
    assert bad_numbers(root, all_labels=True, max_bad_fraction=0.1) == []


def test_sizes_are_all_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("downstream.segmentation.data.NUM_CHECKED", 5)
    root = write_pairs(tmp_path, 10, size=(8, 6))
    save(np.zeros((6, 9), np.uint8), root / "annotations/training/5.png")
    assert bad_numbers(root) == ["5"]
    assert bad_numbers(root, max_bad_fraction=0.1) == []


def counts_of(root, num_classes, **values):
    images = SegmentationImages(root, "train", LabelValues(num_classes, **values))
    images.check()
    return images.label_counts


def test_a_check_counts_classes_and_ignored_pixels(tmp_path):
    """Stripes of four values, in ten columns each."""
    counts = counts_of(write_pairs(tmp_path, 4, size=(48, 30)), 5)
    for value in (0, 1, 2, 255):
        assert counts.num_pixels[value] == 4 * 12 * 30
    assert str(counts) == "labels of 4 files: 3 of 5 classes found, 25.0 % of the pixels are ignored"
    counts.refuse_one_class("train")


ONE_CLASS = "one of {} classes was found in 2 label files of the train split: of the pixels, "


@pytest.mark.parametrize(
    ("values", "num_classes", "options", "message"),
    [
        (
            (0, 255),
            2,
            {},
            "50.0 % are 0 (class 0), 50.0 % are 255 (ignored); if 255, --ignore_index, is a class, change it in the "
            "files to a value from 0 to 1; ",
        ),
        (
            (0, 1),
            2,
            {"reduce_zero_label": True},
            "50.0 % are 0 (ignored), 50.0 % are 1 (class 0); if 0 is a class, leave out --reduce_zero_label; ",
        ),
        ((0,), 5, {}, "100.0 % are 0 (class 0); "),
    ],
)
def test_labels_of_one_class_are_refused_with_their_values(tmp_path, values, num_classes, options, message):
    write_pairs(tmp_path, 2, values=values, size=(48, 30))
    counts = counts_of(tmp_path, num_classes, **options)
    with pytest.raises(ImageError) as refusal:
        counts.refuse_one_class("train")
    assert str(refusal.value).startswith(ONE_CLASS.format(num_classes) + message)


def test_a_single_class_that_is_asked_for_is_enough(tmp_path):
    write_pairs(tmp_path, 2, values=(0, 255))
    counts_of(tmp_path, 1).refuse_one_class("train")


# ------------------------------------------------------------------------------------------------------ augmentation


def test_scaled_sizes():
    """(height, width): the short side becomes 512, unless the long one would exceed 2048. Halves are rounded up."""
    assert scaled_size((512, 683), 2048, 512) == (512, 683)
    assert scaled_size((300, 400), 2048, 512) == (512, 683)
    assert scaled_size((200, 1000), 2048, 512) == (410, 2048)
    assert scaled_size((1000, 600), 1024, 256) == (427, 256)


def test_resizing_against_slow_interpolation():
    """Half-pixel centres; no antialiasing. Labels are those of the pixel floor(i * scale)."""
    img = torch.randint(0, 256, (1, 7, 9), dtype=torch.uint8)
    resized = resize_image(img, (4, 5))[0]
    labels = resize_labels(img[0], (4, 5))
    for row in range(4):
        for column in range(5):
            y = max(0, (row + 0.5) * 7 / 4 - 0.5)
            x = max(0, (column + 0.5) * 9 / 5 - 0.5)
            expected = 0.0
            for r in (int(y), int(y) + 1):
                for c in (int(x), int(x) + 1):
                    weight = (1 - abs(y - r)) * (1 - abs(x - c))
                    expected += weight * img[0, min(r, 6), min(c, 8)].item()
            assert abs(resized[row, column].item() - expected) <= 1
            nearest = img[0, int(row * 7 / 4), int(column * 9 / 5)]
            assert labels[row, column] == nearest


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


def test_small_images_are_padded_at_the_bottom_and_the_right():
    augment = SegmentationAugment((16, 16), 0, (1, 2, 3), (12, 10), (1, 1), photometric=False)
    pair = torch.full((4, 10, 12), 7, dtype=torch.uint8)
    img, labels = augment(pair, 0, 0)
    assert (labels[:10, :12] == 7).all()
    assert (labels == IGNORE).sum() == 256 - 120
    assert (img[:, :10, :12] == 7).all()
    assert img[:, 12, 3].tolist() == [1, 2, 3]
    assert img[:, 3, 13].tolist() == [1, 2, 3]


def is_balanced(labels, top, left):
    """The rule in its own words, on a list of pixels."""
    window = labels[top : top + 8, left : left + 8]
    counts = Counter(window.flatten().tolist())
    del counts[IGNORE]
    return len(counts) > 1 and max(counts.values()) < 0.75 * counts.total()


def test_the_first_crop_is_taken_if_any_share_of_a_class_will_do():
    augment = SegmentationAugment((8, 8), 0, (0, 0, 0), cat_max_ratio=1)
    draws = np.random.default_rng(0).uniform(size=20).tolist()
    labels = torch.zeros(40, 40, dtype=torch.uint8)
    rows, columns = augment.choose_crop(labels, draws)
    assert rows.start == int(draws[0] * 33)
    assert columns.start == int(draws[1] * 33)


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


def distorted(img, contrast_is_last=False, **amounts):
    """`distort` by the named distortions alone, each by an amount in [0, 1)."""
    draws = [0.9] * 4 + [0.5] * 4 + [0.9]
    if contrast_is_last:
        draws[8] = 0.1
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


def test_contrast_comes_before_or_after_the_colours():
    x = a_colourful_image()
    expected = {
        False: scale_saturation((x * 1.5).clamp(0, 255), 1.5),
        True: scale_saturation(x, 1.5) * 1.5,
    }
    for contrast_is_last, values in expected.items():
        found = distorted(x.byte(), contrast_is_last, contrast=1.0, saturation=1.0)
        assert torch.equal(found, to_bytes(values))


def test_colours_of_other_images_are_not_distorted():
    img = torch.randint(0, 256, (1, 6, 5), dtype=torch.uint8)
    assert torch.equal(distorted(img, saturation=0.0, hue=0.0), img)


def test_evaluation_keeps_the_labels():
    pair = torch.randint(0, 256, (4, 30, 45), dtype=torch.uint8)
    img, labels = ResizeForEvaluation((2048, 60))(pair)
    assert img.shape == (3, 60, 90)
    assert torch.equal(labels, pair[3])
