"""The summary at the start of a run, the progress bar, and reports across a resume."""

import io
import json
import re
from pathlib import Path

from tests.patches import MonkeyPatch
from util.run.train import logging
from util.run.train.logging import RunLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_shows_the_epoch_and_the_latest_values(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.replace_in(logging, "sys.stderr", terminal)
    log = RunLog(tmp_path, 2, 6, steps_per_epoch=3)
    log.advance()
    log.report(3, {"loss": 0.25}, "step 3", "loss 0.25")
    log.advance()
    log.report(4, {"loss": 0.5}, "step 4", "loss 0.5")
    log.close()
    shown = terminal.getvalue()
    assert re.search(r"epoch 0:[^\r]*3/6", shown)
    assert re.search(r"epoch 1:[^\r]*4/6[^\r]*loss 0\.5", shown)


def test_a_resumed_run_reports_each_step_once(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 0, 9)
    first.report(1, {"loss": 1.0}, "", "")
    first.report(2, {"loss": 2.0}, "", "")
    first.report(3, {"loss": 3.0}, "", "", interim=True)
    first.close()
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # cut off by a kill
    resumed = RunLog(tmp_path, 1, 9)
    resumed.report(2, {"loss": 2.5}, "", "")
    resumed.close()
    expected = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.5}]
    assert resumed.history() == expected
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == expected


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, 3, enabled=False)
    log.info("x")
    log.advance()
    log.report(1, {"loss": 1.0}, "", "")
    log.close()
    assert log.history() == []
    assert not any(tmp_path.iterdir())
