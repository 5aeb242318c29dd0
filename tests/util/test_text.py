"""Words for messages."""

import pytest

from util.text import close_to, count_of, duration, printable, rate, shorten


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (1, "image", "1 image"),
        (2, "image", "2 images"),
        (0, "step", "0 steps"),
        (1, "process", "1 process"),
        (8, "process", "8 processes"),
        (2, "class", "2 classes"),
        (2, "epoch", "2 epochs"),
        (3, "batch", "3 batches"),
    ],
)
def test_counts(number, noun, expected):
    assert count_of(number, noun) == expected


def test_short_lists():
    assert shorten([]) == ""
    assert shorten(["a", "b", "c"], 3) == "a, b, c"
    assert shorten(["a", "b", "c"], 2) == "a, b, ..."


def test_what_would_command_a_terminal_is_escaped():
    assert printable("\x1b[31mred\x07 \udcff\x9b") == r"\x1b[31mred\x07 \udcff\x9b"
    text = "ρ_d .5, 1 µs:\n\tcafé"
    assert printable(text) == text


def test_slow_rates_keep_their_digits():
    assert [rate(value) for value in (1412.4, 12.3, 8.04, 0.3149, 0.02)] == ["1412", "12", "8", "0.31", "0.02"]


def test_durations():
    assert duration(3723.4) == "1:02:03"
    assert duration(59.6) == "0:01:00"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("red", "; close to it: red_fox, infrared"),
        ("blu", "; close to it: blue"),
        ("bleu", "; close to it: blue"),
        ("zzz", ""),
    ],
)
def test_close_names(name, expected):
    """Those that begin with it come first."""
    assert close_to(name, ["infrared", "red_fox", "blue"]) == expected
