"""The summary at the start of a run, the progress bar, and reports across a resume."""

import io
import json
import re
from pathlib import Path

import pytest

from tests.patches import MonkeyPatch
from util.run import logging
from util.run.logging import RunLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_summary_is_aligned_on_the_console_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log = RunLog(tmp_path, 0, 3)
    log.start_summary({"model": "mae_vit_base_patch16", "lr": "2.4e-3"})
    log.close()
    lines = ["  model  mae_vit_base_patch16", "  lr     2.4e-3"]
    assert capsys.readouterr().out.splitlines() == lines
    times = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert [re.sub(times, "", line) for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


def test_the_progress_bar_shows_the_epoch_and_the_latest_values(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.replace_in(logging, "sys.stderr", terminal)
    log = RunLog(tmp_path, 2, 6, steps_per_epoch=3)
    for step in (3, 4):
        log.advance()
        log.report(step, {"loss": 0.5}, f"step {step}", "loss 0.5")
    log.close()
    shown = terminal.getvalue().split("\r")
    assert any("epoch 0:" in text and "3/6" in text for text in shown)
    assert any("epoch 1:" in text and "4/6" in text and "loss 0.5" in text for text in shown)


def test_a_resumed_run_reports_each_step_once(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 0, 9)
    for step, interim in ((1, False), (2, False), (3, True)):
        first.report(step, {"loss": float(step)}, "", "", interim)
    first.close()
    resumed = RunLog(tmp_path, 1, 9)
    resumed.report(2, {"loss": 2.0}, "", "")
    resumed.close()
    assert [report["step"] for report in resumed.history()] == [1, 2]
    files = ("log.jsonl", "log-superseded.jsonl")
    steps = [[json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] for name in files]
    assert steps == [[1, 2], [2, 3]]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, 3, enabled=False)
    log.start_summary({"model": "x"})
    log.advance()
    log.report(1, {"loss": 1.0}, "", "")
    log.close()
    assert log.history() == [] and not any(tmp_path.iterdir())
