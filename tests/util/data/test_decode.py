import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from tests.conftest import write_photo
from util.data import decode as module
from util.data.decode import PILLOW_ERRORS, decode, open_image


def file_bytes(img, kind, **options):
    buffer = io.BytesIO()
    img.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def photo(tmp_path):
    write_photo(tmp_path / "a.png", size=(61, 47))
    return Image.open(tmp_path / "a.png")


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    return exif


def deep_colour_png():
    """A PNG of 16 bits a channel, which Pillow cannot write: of two rows of three pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + struct.pack(">9H", *range(k, k + 63_000, 7_000)) for k in (0, 300))
    header = struct.pack(">IIBBBBB", 3, 2, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


FILES = {
    "4:2:0": lambda img: file_bytes(img, "JPEG", subsampling="4:2:0"),
    "4:4:4": lambda img: file_bytes(img, "JPEG", subsampling="4:4:4", quality=95),
    "progressive": lambda img: file_bytes(img, "JPEG", progressive=True),
    "grey": lambda img: file_bytes(img.convert("L"), "JPEG"),
    "CMYK": lambda img: file_bytes(img.convert("CMYK"), "JPEG"),
    "PNG, whatever its name": lambda img: file_bytes(img, "PNG"),
    "16 bits in colour": lambda img: deep_colour_png(),
    "grey and transparent": lambda img: file_bytes(img.convert("LA"), "PNG"),
    "two colours": lambda img: file_bytes(img.convert("1"), "PNG"),
    "PPM": lambda img: file_bytes(img, "PPM"),
    "BMP": lambda img: file_bytes(img, "BMP"),
    "WebP": lambda img: file_bytes(img, "WEBP"),
    "TIFF": lambda img: file_bytes(img, "TIFF", compression="tiff_lzw"),
    "CMYK TIFF": lambda img: file_bytes(img.convert("CMYK"), "TIFF"),
    "palette": lambda img: file_bytes(img.convert("P"), "GIF"),
    "transparent": lambda img: file_bytes(img.convert("RGBA"), "PNG"),
    "turned by EXIF": lambda img: file_bytes(img, "JPEG", exif=turned()),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("installed", [True, False])
def test_pixels_are_pillow_s_bit_for_bit(photo, kind, installed, monkeypatch):
    if installed:
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(module, "simplejpeg", None)
    data = FILES[kind](photo)
    pixels = decode(data)
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.array_equal(pixels, decode(data, reference=True))


RAMP = np.linspace(0, 65535, 40 * 50).round().astype(np.uint16).reshape(40, 50)


def tiff(values, bits):
    """A grey TIFF of `bits` a pixel and one strip, little-endian."""
    height, width = values.shape
    if bits == 12:
        pairs = values.astype(np.uint32).reshape(-1, 2)
        packed = pairs[:, 0] << 12 | pairs[:, 1]
        strip = b"".join(int(value).to_bytes(3, "big") for value in packed)
    else:
        strip = values.astype("<u2").tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(strip)}
    entries = b"".join(struct.pack("<HHII", tag, 4 if value > 65535 else 3, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + struct.pack("<H", len(tags)) + entries + bytes(4)


DEEP = {
    "PNG": (lambda: file_bytes(Image.fromarray(RAMP), "PNG"), "I;16"),
    "TIFF": (lambda: file_bytes(Image.fromarray(RAMP), "TIFF"), "I;16"),
    "TIFF by hand": (lambda: tiff(RAMP, 16), "I;16"),
    "big-endian TIFF": (lambda: file_bytes(Image.fromarray(RAMP.astype(">u2")), "TIFF"), "I;16B"),
    "PGM": (lambda: b"P5 50 40 65535\n" + RAMP.astype(">u2").tobytes(), "I"),
    "PGM of text": (lambda: b"P2 50 40 65535\n" + " ".join(map(str, RAMP.ravel())).encode(), "I"),
}


@pytest.mark.fault(
    "U26", "16-bit grey images; grey float TIFFs, with `--in_chans 3`", "scaled to 8 bits; refused by name"
)
@pytest.mark.parametrize("kind", DEEP)
def test_grey_of_16_bits_is_scaled(kind):
    data, mode = DEEP[kind][0](), DEEP[kind][1]
    assert Image.open(io.BytesIO(data)).mode in (mode, "I" if kind == "PNG" else mode)  # older Pillows: "I"
    pixels = decode(data)
    assert pixels.shape == (40, 50, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert all(np.array_equal(pixels[..., k], np.rint(RAMP / 257)) for k in range(3))
    assert pixels.min() == 0 and pixels.max() == 255 and np.array_equal(pixels, decode(data, reference=True))


def test_grey_of_16_bits_of_older_pillows_is_scaled():
    """They read a PNG in the mode of 32-bit integers."""
    img = Image.fromarray(RAMP.astype(np.int32))
    img.format = "PNG"
    assert img.mode == "I" and module.has_16_bits(img)
    assert np.array_equal(module.to_8_bits(img), np.rint(RAMP / 257))


def test_grey_of_12_bits_is_scaled():
    """Pillow gives it the mode of 16 bits, with values up to 4095."""
    values = np.linspace(0, 4095, 40 * 50).round().astype(np.uint16).reshape(40, 50)
    assert np.array_equal(decode(tiff(values, 12))[..., 1], np.rint(values / 4095 * 255))


def header_only(*args, **options):
    img = Image.open(*args, **options)
    img.load = lambda: pytest.fail("more than the header is read")
    return img


@pytest.mark.fault(
    "U26", "16-bit grey images; grey float TIFFs, with `--in_chans 3`", "scaled to 8 bits; refused by name"
)
@pytest.mark.parametrize(("kind", "message"), [(np.float32, "floating-point numbers"), (np.int32, "32-bit integers")])
def test_pixels_without_a_range_are_refused_by_their_header(kind, message, tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    Image.fromarray((RAMP / 65535).astype(kind)).save(path)
    monkeypatch.replace_in(module, "Image.open", header_only)
    for read in (lambda: open_image(str(path)), lambda: open_image(path), lambda: decode(path.read_bytes())):
        with pytest.raises(ValueError, match=f"its pixels are .*{message}, which have no fixed range: convert it to 8"):
            read()


def test_pillow_s_warning_of_large_images_stays_on_for_others():
    data = file_bytes(Image.new("1", (9600, 9600)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the size is checked here
        with pytest.raises(Image.DecompressionBombError, match="9600 x 9600 pixels are"):
            decode(data)
    code = "import warnings, util.data.decode; print([f[2].__name__ for f in warnings.filters])"
    filters = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "DeprecationWarning" in filters and "DecompressionBombWarning" not in filters
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(io.BytesIO(data))


def test_formats_that_a_pillow_lacks_and_others_are_refused():
    for data in (b"", b"P", b"RIFF\0\0\0\0WEBPVP9 ", file_bytes(Image.new("RGB", (4, 4)), "ICO")):
        with pytest.raises(UnidentifiedImageError, match="it does not begin as one of JPEG, PNG"):
            open_image(io.BytesIO(data))


def test_plain_jpegs_go_the_fast_way_and_others_do_not(photo, monkeypatch):
    exact = pytest.importorskip("simplejpeg").decode_jpeg
    fast = []
    monkeypatch.replace_in(module, "simplejpeg.decode_jpeg", lambda *args: fast.append(1) or exact(*args))
    for kind, make in FILES.items():
        fast.clear()
        decode(make(photo))
        assert bool(fast) == (kind in ("4:2:0", "4:4:4", "progressive", "grey", "turned by EXIF")), kind
        fast.clear()
        decode(make(photo), reference=True)
        assert not fast


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d[:20], lambda d: b"", lambda d: b"hello"])
def test_damaged_files_fail_as_in_pillow(photo, damage):
    with pytest.raises(PILLOW_ERRORS):
        decode(damage(FILES["4:2:0"](photo)))


def test_a_jpeg_that_would_unfold_to_gigabytes_is_pillow_s_to_refuse(photo, monkeypatch):
    monkeypatch.setattr(module, "max_pixels", lambda: 1000)
    with pytest.raises(Image.DecompressionBombError):
        decode(FILES["4:2:0"](photo))
