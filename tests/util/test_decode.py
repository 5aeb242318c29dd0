import io

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_photo
from util import decode as module
from util.decode import PILLOW_ERRORS, decode


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


FILES = {
    "4:2:0": lambda img: file_bytes(img, "JPEG", subsampling="4:2:0"),
    "4:4:4": lambda img: file_bytes(img, "JPEG", subsampling="4:4:4", quality=95),
    "progressive": lambda img: file_bytes(img, "JPEG", progressive=True),
    "grey": lambda img: file_bytes(img.convert("L"), "JPEG"),
    "CMYK": lambda img: file_bytes(img.convert("CMYK"), "JPEG"),
    "PNG, whatever its name": lambda img: file_bytes(img, "PNG"),
    "16 bits": lambda img: file_bytes(Image.fromarray(np.arange(2000, dtype=np.uint16).reshape(40, 50) * 30), "PNG"),
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


def test_plain_jpegs_go_the_fast_way_and_others_do_not(photo, monkeypatch):
    exact = pytest.importorskip("simplejpeg").decode_jpeg
    fast = []
    monkeypatch.setattr(module.simplejpeg, "decode_jpeg", lambda *args: fast.append(1) or exact(*args))
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
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        decode(FILES["4:2:0"](photo))
