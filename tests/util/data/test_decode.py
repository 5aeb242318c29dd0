"""Decoded pixels are Pillow's, except for grey images of 16 bits; what cannot be decoded is refused by its header."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_photo
from util.data import decode as module
from util.data.decode import PILLOW_ERRORS, decode


def encode(img, kind, mode=None, **options):
    buffer = io.BytesIO()
    if mode:
        img = img.convert(mode)
    img.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def photo(tmp_path):
    write_photo(tmp_path / "a.png", size=(61, 47))
    return Image.open(tmp_path / "a.png")


def quarter_turn():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    return exif


def chunk(kind, data):
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def deep_colour_png(channels=3):
    """A PNG of 16 bits a channel, which Pillow cannot write: of two rows of three pixels, RGB or with alpha."""
    rows = b""
    for first in (0, 300):
        rows += b"\0" + np.linspace(first, first + 56_000, 3 * channels).astype(">u2").tobytes()
    color_type = {3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", 3, 2, 16, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PLAIN_JPEGS = {
    "4:2:0": lambda img: encode(img, "JPEG", subsampling="4:2:0"),
    "4:4:4": lambda img: encode(img, "JPEG", subsampling="4:4:4", quality=95),
    "progressive": lambda img: encode(img, "JPEG", progressive=True),
    "grey": lambda img: encode(img, "JPEG", "L"),
    "turned by EXIF": lambda img: encode(img, "JPEG", exif=quarter_turn()),
}
OTHERS = {
    "CMYK": lambda img: encode(img, "JPEG", "CMYK"),
    "PNG, whatever its name": lambda img: encode(img, "PNG"),
    "16 bits in colour": lambda img: deep_colour_png(),
    "grey and transparent": lambda img: encode(img, "PNG", "LA"),
    "two colours": lambda img: encode(img, "PNG", "1"),
    "PPM": lambda img: encode(img, "PPM"),
    "BMP": lambda img: encode(img, "BMP"),
    "WebP": lambda img: encode(img, "WEBP"),
    "TIFF": lambda img: encode(img, "TIFF", compression="tiff_lzw"),
    "CMYK TIFF": lambda img: encode(img, "TIFF", "CMYK"),
    "palette": lambda img: encode(img, "GIF", "P"),
    "transparent": lambda img: encode(img, "PNG", "RGBA"),
}
FILES = PLAIN_JPEGS | OTHERS


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("installed", [True, False])
def test_pixels_are_pillow_s_bit_for_bit(photo, kind, installed, monkeypatch):
    if installed:
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(module, "simplejpeg", None)
    data = FILES[kind](photo)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    pixels = decode(data)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, expected)
    assert np.array_equal(decode(data, reference=True), expected)


@pytest.mark.parametrize("kind", FILES)
def test_plain_jpegs_go_the_fast_way_and_others_do_not(photo, monkeypatch, kind):
    exact = pytest.importorskip("simplejpeg").decode_jpeg
    calls = []

    def note(*args):
        calls.append(args)
        return exact(*args)

    monkeypatch.replace_in(module, "simplejpeg.decode_jpeg", note)
    data = FILES[kind](photo)
    decode(data, reference=True)
    assert not calls
    decode(data)
    assert len(calls) == (kind in PLAIN_JPEGS)


# ----------------------------------------------------------------------------------------------------------- 16 bits

RAMP = np.linspace(0, 65535, 40 * 50).round().astype(np.uint16).reshape(40, 50)


def tiff(strip, bits):
    """A grey TIFF of 40 x 50 pixels, `bits` each, and one strip, little-endian."""
    tags = {
        256: 50,
        257: 40,
        258: bits,
        259: 1,
        262: 1,
        273: 8,
        277: 1,
        278: 40,
        279: len(strip),
    }
    header = b"II*\0" + struct.pack("<I", 8 + len(strip))
    directory = struct.pack("<H", len(tags))
    for tag, value in tags.items():
        directory += struct.pack("<HHII", tag, 3, 1, value)
    return header + strip + directory + bytes(4)


DEEP = {
    "PNG": encode(Image.fromarray(RAMP), "PNG"),
    "TIFF": encode(Image.fromarray(RAMP), "TIFF"),
    "TIFF by hand": tiff(RAMP.astype("<u2").tobytes(), 16),
    "big-endian TIFF": encode(Image.fromarray(RAMP.astype(">u2")), "TIFF"),
    "PGM": b"P5 50 40 65535\n" + RAMP.astype(">u2").tobytes(),
    "PGM of text": b"P2 50 40 65535\n" + " ".join(map(str, RAMP.ravel())).encode(),
}


@pytest.mark.parametrize("kind", DEEP)
def test_grey_of_16_bits_is_scaled(kind):
    pixels = decode(DEEP[kind])
    expected = np.rint(RAMP / 257)[:, :, None].repeat(3, axis=2)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, expected)
    assert np.array_equal(decode(DEEP[kind], reference=True), expected)


def test_grey_of_12_bits_is_scaled():
    """Pillow gives it the mode of 16 bits, with values up to 4095."""
    values = np.linspace(0, 4095, 40 * 50).round().astype(np.uint32).reshape(-1, 2)
    strip = b""
    for first, second in values.tolist():
        strip += (first << 12 | second).to_bytes(3, "big")
    expected = np.rint(values / 4095 * 255).reshape(40, 50)
    assert np.array_equal(decode(tiff(strip, 12))[..., 1], expected)


# -------------------------------------------------------------------------------------------------- what is refused


REFUSED = {
    "floats": encode(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"),
    "32-bit integers": encode(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
    "nothing": b"",
    "a letter": b"P",
    "a part of WebP": b"RIFF\0\0\0\0WEBPVP9 ",
    "another format": encode(Image.new("RGB", (4, 4)), "ICO"),
    "text": b"hello",
    "turned": encode(Image.new("RGB", (4, 8)), "TIFF", tiffinfo={274: 6}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_files_are_refused(kind):
    with pytest.raises(PILLOW_ERRORS):
        decode(REFUSED[kind])


@pytest.mark.parametrize("num_bytes", [20, 500])
def test_damaged_files_fail_as_in_pillow(photo, num_bytes):
    with pytest.raises(PILLOW_ERRORS):
        decode(FILES["4:2:0"](photo)[:num_bytes])
