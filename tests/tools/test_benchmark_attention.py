import pytest

from tools import benchmark_attention
from tools.benchmark_attention import WAYS


@pytest.fixture
def small(monkeypatch):
    layers = {"plain": (5, 2, 8, False), "biased": (5, 2, 8, True)}
    monkeypatch.setattr(benchmark_attention, "LAYERS", layers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_table_of_what_this_device_can_do(small, precision, tmp_path, capsys):
    path = tmp_path / "attention.md"
    flags = ["--batch_size", "2", "--rounds", "1", "--device", "cpu", "--precision", precision, "--markdown", str(path)]
    benchmark_attention.main(flags)
    text = capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == text and text.startswith(
        f"batch 2, cpu (1 thread), {precision}, 1 rounds"
    )
    plain, biased = (line.strip("| ").split(" | ") for line in text.splitlines()[4:])
    assert plain[:2] == ["plain", "5 × 2 × 8"] and biased[1] == "5 × 2 × 8, bias"
    times = dict(zip(WAYS, plain[2:-1], strict=True))
    assert {name for name, ms in times.items() if ms == "–"} == {"cudnn", "efficient"}
    assert plain[-1] in times and float(times["flash"]) >= 0 and biased[2 + list(WAYS).index("flash")] == "–"


@pytest.mark.parametrize(
    "wrong", [lambda q, k, v, bias: v.clone(), lambda q, k, v, bias: WAYS["auto"](q, k.detach(), v, bias)]
)
def test_a_wrong_kernel_is_found_by_its_output_or_its_gradients(small, wrong, monkeypatch, capsys):
    monkeypatch.setitem(WAYS, "math", wrong)
    benchmark_attention.main(["--batch_size", "2", "--rounds", "1", "--device", "cpu", "--precision", "fp32"])
    out, err = capsys.readouterr()
    assert "math at plain differs from float64 by" in err and out.splitlines()[4].endswith("| flash |")


def test_a_kernel_that_fails_is_said_and_left_out(small, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(WAYS, "math", fails)
    benchmark_attention.main(["--batch_size", "2", "--rounds", "1", "--device", "cpu", "--precision", "fp32"])
    out, err = capsys.readouterr()
    assert "math fails at plain: no such luck" in err and len(out.splitlines()) == 6


@pytest.mark.parametrize(
    ("flags", "message"), [("--batch_size 1", "must be at least 2"), ("--markdown /dev/null/a.md", "cannot be made")]
)
def test_errors_come_first(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_attention, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        benchmark_attention.main(flags.split())
    assert message in capsys.readouterr().err
