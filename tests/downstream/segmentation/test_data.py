"""Label values, folders of pairs, the class-balance rule of crops, photometric distortion."""

import colorsys
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from downstream.common import scaled_size
from downstream.segmentation.data import (
    DISTORTION_DRAWS,
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
from util.text import count_of

# ----------------------------------------------------------------------------------------------------- label values


def test_values_become_classes():
    raw = np.array([[0, 1, 2], [149, 150, 255]], np.uint8)
    assert LabelValues(150, reduce_zero_label=True)(raw).tolist() == [[255, 0, 1], [148, 149, 255]]
    assert LabelValues(151)(raw).tolist() == [[0, 1, 2], [149, 150, 255]]
    assert LabelValues(3, ignore_index=9)(np.array([[9, 2]], np.uint8)).tolist() == [[255, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_classes=0), "--num_classes 0 takes the values 0 to -1"),
        (dict(num_classes=256), "0 to 255 of 8-bit label files, which must not contain --ignore_index 255"),
        (dict(num_classes=255, reduce_zero_label=True), "1 to 255"),
        (dict(num_classes=3, ignore_index=2), "must not contain --ignore_index 2"),
        (dict(num_classes=3, ignore_index=256), "--ignore_index must lie between 0 and 255, got 256"),
    ],
)
def test_classes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LabelValues(**options)


# ------------------------------------------------------------------------------------------------------------ pairs


def test_pairs_are_matched_by_name(tmp_path):
    write_pairs(tmp_path)
    write_pairs(tmp_path, 1, "training/more")
    (tmp_path / "images" / "training" / ".hidden.jpg").write_bytes(b"")
    images = SegmentationImages(tmp_path, "train", LabelValues(3))
    assert [bytes(name) for name in images.names] == [b"0.jpg", b"1.jpg", b"2.jpg", b"3.jpg", b"more/0.jpg"]
    images.check()
    pair, _ = images.load_sample(1)
    assert pair.shape == (30, 40, 4) and pair.dtype == np.uint8
    assert np.array_equal(pair[..., :3], np.asarray(Image.open(tmp_path / "images/training/1.jpg")))
    assert pair[0, :12, 3].tolist() == [1, 1, 1, 2, 2, 2, 255, 255, 255, 0, 0, 0]


def test_palette_images_hold_indices(tmp_path):
    write_pairs(tmp_path, 1)
    label = Image.fromarray(np.full((30, 40), 2, np.uint8), mode="P")
    label.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
    label.save(tmp_path / "annotations/training/0.png")
    assert (SegmentationImages(tmp_path, "train", LabelValues(3)).load_sample(0)[0][..., 3] == 2).all()


def grey_png(values, bits):
    """A grey PNG of 1, 2, 4 or 8 bits per pixel, by the format's definition."""
    height, width = values.shape
    planes = (values[..., None] >> np.arange(bits - 1, -1, -1)) & 1  # each value, highest bit first
    rows = np.packbits(planes.reshape(height, -1).astype(np.uint8), axis=1)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_labels_of_few_bits_are_read_as_they_are(tmp_path, bits):
    """The largest value of 1, 2 or 4 bits is not 255, which would mean ignored."""
    write_pairs(tmp_path, 1)
    values = np.random.default_rng(0).integers(0, min(2**bits, 20), (30, 40))
    (tmp_path / "annotations/training/0.png").write_bytes(grey_png(values, bits))
    images = SegmentationImages(tmp_path, "train", LabelValues(20))
    images.check()
    assert np.array_equal(images.load_sample(0)[0][..., 3], values) and images.has_class


def test_images_of_one_bit_are_black_and_white(tmp_path):
    write_pairs(tmp_path, 1)
    values = np.random.default_rng(0).integers(0, 2, (30, 40))
    (tmp_path / "images/training/0.jpg").unlink()
    (tmp_path / "images/training/0.png").write_bytes(grey_png(values, 1))
    images = SegmentationImages(tmp_path, "train", LabelValues(3), in_chans=1)
    images.check()
    assert np.array_equal(images.load_sample(0)[0][..., 0], 255 * values)


def test_label_files_keep_their_names(tmp_path):
    label = write_pairs(tmp_path, 2) / "annotations/training/1.png"
    label.rename(label.with_suffix(".PNG"))
    images = SegmentationImages(tmp_path, "train", LabelValues(3))
    images.check()
    assert images.label_path(1).endswith("1.PNG") and images.label_path(0).endswith("0.png")
    label.write_bytes(b"")
    with pytest.raises(ValueError, match="label files in '.*annotations/training' differ in their ending alone: 1"):
        SegmentationImages(tmp_path, "train", LabelValues(3))


@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_images_of_other_channels(tmp_path, channels):
    write_pairs(tmp_path, 1)
    (tmp_path / "images/training/0.jpg").unlink()
    array = np.random.default_rng(0).integers(0, 256, (30, 40, channels), dtype=np.uint8)
    if channels == 6:
        np.save(tmp_path / "images/training/0.npy", array)
    else:
        mode = {1: "L", 2: "LA", 4: "RGBA"}[channels]
        Image.fromarray(array if channels > 1 else array[..., 0], mode=mode).save(tmp_path / "images/training/0.png")
    images = SegmentationImages(tmp_path, "train", LabelValues(3), channels)
    images.check()
    assert np.array_equal(images.load_sample(0)[0][..., :-1], array)
    with pytest.raises(
        ImageError, match=f"has {count_of(channels, 'channel')} of uint8, but the model takes 5 channels"
    ):
        SegmentationImages(tmp_path, "train", LabelValues(3), 5).check()


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("suffix", [".npy", ".tif"])
def test_five_bands_keep_their_type(tmp_path, dtype, suffix):
    """Labels travel in the type of the image. A scale of 1 changes no value."""
    write_bands(write_pairs(tmp_path, 2), suffix, dtype)
    images = SegmentationImages(tmp_path, "train", LabelValues(3), in_chans=5)
    images.check()
    assert str(images.pixel_format) == f"5 channels of {dtype}"
    loaded = images.load_sample(1)[0]
    assert np.array_equal(loaded[..., :5], bands(1, dtype))
    pair = torch.from_numpy(loaded).permute(2, 0, 1)
    img, labels = ResizeForEvaluation((40, 30))(pair)
    assert torch.equal(img.float(), pair[:5].float()) and labels.dtype == torch.uint8
    assert labels[0, :12].tolist() == [1, 1, 1, 2, 2, 2, 255, 255, 255, 0, 0, 0]
    fill = [7.0, 8, 9, 10, 11] if dtype == "float32" else [7, 8, 9, 10, 11]
    padded, classes = SegmentationAugment((64, 64), 0, fill, (40, 30), (1, 1))(pair, 0, 0)
    flipped = [img.float(), img.float().flip(-1)]
    assert padded.dtype == img.dtype and any(torch.equal(padded[:, :30, :40].float(), whole) for whole in flipped)
    assert padded[:, 30:].float().flatten(1).unique(dim=1)[:, 0].tolist() == fill and (classes[30:] == IGNORE).all()
    half = resize_image(pair[:5], (15, 20))
    assert half.dtype == img.dtype and (half.float() - resize_image(pair[:5].float(), (15, 20))).abs().max() <= 0.5


def save(array, path):
    Image.fromarray(array).save(path)


LABEL, IMAGE = "annotations/training/1.png", "images/training/1.jpg"
BAD = [
    (lambda root: (root / LABEL).unlink(), r"1 name without a label file \(.png\) in '.*annotations/training': 1"),
    (lambda root: (root / IMAGE).unlink(), "1 name with a label file but no image in '.*images/training': 1"),
    (lambda root: write_photo(root / IMAGE, (41, 30)), "1.jpg' has 41 x 30 pixels, its labels '.*1.png' 40 x 30"),
    (
        lambda root: save(np.full((30, 40), 7, np.uint8), root / LABEL),
        "1.png' is no label file of this data set: it holds the values 7; 0 to 2 are classes, 255 is ignored",
    ),
    (
        lambda root: save(np.zeros((30, 40, 3), np.uint8), root / LABEL),
        "1.png' has 3 channels; labels must be one class index per pixel",
    ),
    (
        lambda root: save(np.zeros((30, 40), np.uint16), root / LABEL),
        "1.png' cannot be read: its values have 16 bits; labels must have 8",
    ),
    (lambda root: (root / LABEL).write_bytes((root / LABEL).read_bytes()[:60]), "1.png' cannot be read"),
    (lambda root: [path.unlink() for path in root.rglob("*.??g")], "images/training' holds no images"),
    (
        lambda root: (root / "annotations/training").rename(root / "annotations/all"),
        "annotations' has no folder of the split 'train'; expected are images/training",
    ),
    (lambda root: (root / "images/train").mkdir(), "images' has two folders for the split 'train'"),
    (lambda root: write_photo(root / "images/training/1.png", (40, 30)), "differ in their ending alone: 1.jpg"),
]


@pytest.mark.fault("U80", "segmentation data: missing, mismatched, unreadable or foreign files", "refused by name")
@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_bad_data_is_refused_by_name(tmp_path, spoil, message):
    spoil(write_pairs(tmp_path))
    with pytest.raises(ValueError, match=message):
        SegmentationImages(tmp_path, "train", LabelValues(3)).check()


def bad_numbers(root, **options):
    """Numbers of the files that `check` names."""
    try:
        SegmentationImages(root, "train", LabelValues(3)).check(**options)
    except ImageError as error:
        return {int(number) for number in re.findall(r"training/(\d+)\.png", str(error))}
    return set()


def test_all_sizes_and_label_values_are_checked(tmp_path, monkeypatch):
    """Two bad files that are not among the evenly spaced ones: one of another size, one with another value."""
    monkeypatch.setattr("downstream.segmentation.data.NUM_CHECKED", 5)
    root = write_pairs(tmp_path, 10, size=(8, 6))
    assert not bad_numbers(root, all_labels=True)
    save(np.full((6, 8), 9, np.uint8), root / "annotations/training/3.png")
    assert not bad_numbers(root) and bad_numbers(root, all_labels=True) == {3}
    shares = [bad_numbers(root, all_labels=True, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(map(len, shares)) == [0, 1]
    assert not bad_numbers(root, all_labels=True, max_bad_fraction=0.1)
    save(np.zeros((6, 9), np.uint8), root / "annotations/training/5.png")
    assert bad_numbers(root) == {5} and not bad_numbers(root, max_bad_fraction=0.1)


def test_ignored_pixels_have_no_class(tmp_path):
    write_pairs(tmp_path, 2, values=(255,))
    images = SegmentationImages(tmp_path, "train", LabelValues(3))
    images.check(all_labels=True)
    assert not images.has_class
    Image.fromarray(np.eye(30, 40, dtype=np.uint8) + 254).save(tmp_path / "annotations/training/1.png")
    images = SegmentationImages(tmp_path, "train", LabelValues(255))
    images.check(all_labels=True)
    assert images.has_class


def test_the_flag_for_classes_that_begin_at_1_is_named():
    with pytest.raises(
        ValueError, match="values 150; 0 to 149 are classes.*if classes begin at 1: --reduce_zero_label"
    ):
        LabelValues(150)(np.array([[150]], np.uint8))
    with pytest.raises(ValueError, match="the values 151; 1 to 150 are classes, 255 is ignored, and so is 0$"):
        LabelValues(150, reduce_zero_label=True)(np.array([[151]], np.uint8))


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
    out, labels = resize_image(img, (4, 5))[0], resize_labels(img[0], (4, 5))
    for row in range(4):
        for column in range(5):
            y, x = max(0, (row + 0.5) * 7 / 4 - 0.5), max(0, (column + 0.5) * 9 / 5 - 0.5)
            y0, x0 = int(y), int(x)
            corners = [
                (1 - abs(y - r)) * (1 - abs(x - c)) * img[0, min(r, 6), min(c, 8)].item()
                for r in (y0, y0 + 1)
                for c in (x0, x0 + 1)
            ]
            assert abs(out[row, column].item() - sum(corners)) <= 1
            assert labels[row, column] == img[0, int(row * 7 / 4), int(column * 9 / 5)]


def a_pair(labels):
    """An image whose channels show the labels and the place of each pixel."""
    rows, columns = np.indices(labels.shape)
    return torch.from_numpy(np.stack([labels, rows, columns, labels]).astype(np.uint8))


def test_image_and_labels_are_cropped_and_flipped_together():
    labels = np.random.default_rng(0).integers(0, 5, (30, 40))
    augment = SegmentationAugment((16, 16), 0, (0, 0, 0), (40, 30), (1, 1), photometric=False)
    flips, places = set(), set()
    for index in range(40):
        img, out = augment(a_pair(labels), 3, index)
        assert torch.equal(img[0], out) and img.shape == (3, 16, 16)
        assert np.array_equal(labels[img[1].long(), img[2].long()], out)
        flips.add(bool(img[2, 0, 0] > img[2, 0, 1]))
        places.add((int(img[1].min()), int(img[2].min())))
    assert flips == {True, False} and len(places) > 30
    assert {top for top, _ in places} <= set(range(15)) and {left for _, left in places} <= set(range(25))
    again = augment(a_pair(labels), 3, 39)
    assert torch.equal(again[0], img) and not torch.equal(augment(a_pair(labels), 4, 39)[0], img)


def test_small_images_are_padded_at_the_bottom_and_the_right():
    augment = SegmentationAugment((16, 16), 0, (1, 2, 3), (12, 10), (1, 1), photometric=False)
    img, labels = augment(torch.full((4, 10, 12), 7, dtype=torch.uint8), 0, 0)
    assert (labels[:10, :12] == 7).all() and (labels == IGNORE).sum() == 256 - 120
    assert (img[:, :10, :12] == 7).all() and img[:, 12, 3].tolist() == [1, 2, 3] == img[:, 3, 13].tolist()


def is_balanced(labels, top, left):
    """The rule in its own words, on a list of pixels."""
    pixels = [v for v in labels[top : top + 8, left : left + 8].flatten().tolist() if v != IGNORE]
    shares = [pixels.count(v) / len(pixels) for v in set(pixels)]
    return len(shares) > 1 and max(shares) < 0.75


def test_crops_are_drawn_until_their_classes_are_balanced():
    """Against the rule for each try. The corner of another class makes most first tries fail."""
    labels = torch.zeros(40, 40, dtype=torch.uint8)
    labels[:14, :14], labels[:, 20:24] = 1, IGNORE
    augment = SegmentationAugment((8, 8), 0, (0, 0, 0))
    rng, used = np.random.default_rng(0), []
    for _ in range(200):
        draws = rng.uniform(size=20)
        tries = [(int(a * 33), int(b * 33)) for a, b in draws.reshape(10, 2)]
        good = [i for i, place in enumerate(tries) if is_balanced(labels, *place)]
        used.append(good[0] if good else 9)
        assert augment.choose_crop(labels, draws.tolist()) == tries[used[-1]]
    assert {0, 1, 2, 9} <= set(used)
    assert augment.choose_crop(torch.zeros(8, 5, dtype=torch.uint8), [0.99] * 20) == (0, 0)


def test_saturation_and_hue_against_colorsys():
    img = torch.randint(0, 256, (3, 6, 5), generator=torch.Generator().manual_seed(0)).float()
    img[:, 0, 0], img[:, 0, 1] = 0, 77  # black and grey
    for factor in (0.5, 1.0, 1.5):
        out = scale_saturation(img, factor)
        for pixel, found in zip(img.flatten(1).T.tolist(), out.flatten(1).T.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in pixel))
            expected = colorsys.hsv_to_rgb(h, min(1.0, s * factor), v)
            assert found == pytest.approx([255 * c for c in expected], abs=1e-2)
    for turn in (-0.1, 0.0, 0.07):
        out = turn_hue(img, turn)
        for pixel, found in zip(img.flatten(1).T.tolist(), out.flatten(1).T.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in pixel))
            assert found == pytest.approx([255 * c for c in colorsys.hsv_to_rgb((h + turn) % 1, s, v)], abs=1e-2)


def test_distortions_are_drawn_one_by_one():
    img = torch.randint(0, 256, (3, 6, 5), dtype=torch.uint8)
    off = [0.9] * 4 + [0.5] * 4 + [0.9]
    assert len(off) == DISTORTION_DRAWS and torch.equal(distort(img, off), img)

    def only(number, amount, last=0.9):
        draws = list(off)
        draws[number], draws[4 + number], draws[8] = 0.0, amount, last
        return distort(img, draws)

    assert torch.equal(only(0, 1.0), (img.float() + 32).clamp(0, 255).byte())
    assert torch.equal(only(0, 0.0), (img.float() - 32).clamp(0, 255).byte())
    assert torch.equal(only(1, 0.0), (img.float() * 0.5).round().byte())
    assert torch.equal(only(1, 1.0, last=0.1), (img.float() * 1.5).clamp(0, 255).round().byte())
    assert torch.equal(only(2, 0.0), scale_saturation(img.float(), 0.5).round().byte())
    for amount, step in ((0.0, -18), (0.999, 18), (0.5, 0)):
        assert torch.equal(only(3, amount), turn_hue(img.float(), step / 180).round().byte())
    # Brightness clips before contrast if contrast comes later.
    both = distort(img, [0, 0, 0.9, 0.9, 1.0, 0.0, 0.5, 0.5, 0.1])
    assert torch.equal(both, ((img.float() + 32).clamp(0, 255) * 0.5).round().byte())
    grey = distort(img[:1], [0.9, 0.9, 0, 0, 0.5, 0.5, 0, 0, 0.9])
    assert torch.equal(grey, img[:1])


def test_evaluation_keeps_the_labels(tmp_path):
    pair = torch.randint(0, 256, (4, 30, 45), dtype=torch.uint8)
    img, labels = ResizeForEvaluation((2048, 60))(pair)
    assert img.shape == (3, 60, 90) and torch.equal(labels, pair[3])
