"""The summary at the start of a run, the progress bar, and reports across a resume."""

import json
from pathlib import Path

from util.run.train.logging import RunLog


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
