"""The summary at the start of a run, the progress bar, and reports across a resume."""

from pathlib import Path

from util.run.train.logging import RunLog


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, 3, enabled=False)
    log.info("x")
    log.advance()
    log.report(1, {"loss": 1.0}, "")
    log.close()
    assert log.history() == []
    assert not any(tmp_path.iterdir())
