import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.until import wait_until
from tools import mutants
from tools.mutants import MUTANTS, ROOT, Mutant


def test_every_mutant_applies_to_today_s_code():
    counts = {mutant: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert [mutant for mutant, count in counts.items() if count != 1 or mutant.old == mutant.new] == []
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60
    assert [m for m in MUTANTS if not (ROOT / m.tests.split()[0]).exists()] == []


@pytest.mark.parametrize(
    ("mutant", "state"),
    [
        (Mutant("added.py", "a + b", "a - b", "test_code.py"), "killed"),
        (Mutant("added.py", "a + b", "b + a", "test_code.py"), "ALIVE"),
        (Mutant("added.py", "a * b", "a", "test_code.py"), "DOES NOT APPLY"),
        (Mutant("added.py", "a + b", "a - b", "test_code.py -k nothing"), "TESTS FAIL WITHOUT IT"),
    ],
)
def test_mutants_are_killed_or_not(mutant, state, tmp_path: Path, monkeypatch, capsys):
    code = "def add(a, b):\n    return a + b\n"
    (tmp_path / "added.py").write_text(code)
    (tmp_path / "test_code.py").write_text("from added import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    monkeypatch.setattr(mutants, "MUTANTS", [mutant])
    monkeypatch.setattr(
        mutants,
        "copy_tree",
        lambda target: [(target / p.name).write_text(p.read_text()) for p in tmp_path.glob("*.py")],
    )
    assert mutants.main([]) == (state != "killed")
    assert capsys.readouterr().out.startswith(f"{state} (")
    assert (tmp_path / "added.py").read_text() == code


def is_alive(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_tests_that_never_end_are_killed_with_what_they_have_started(tmp_path, monkeypatch):
    """Its time is over when the test has begun, whenever that is."""

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
            raise subprocess.TimeoutExpired(self.args, timeout)

    program = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    (tmp_path / "test_code.py").write_text(
        f"import subprocess, sys\n\n\ndef test_sleep():\n    subprocess.run([sys.executable, '-c', {program!r}])\n"
    )
    monkeypatch.replace_in(mutants, "subprocess.Popen", Popen)
    assert not mutants.run_tests(tmp_path, "test_code.py")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))
