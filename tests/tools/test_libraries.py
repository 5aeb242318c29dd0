"""tools/test_libraries.sh with a stand-in for pip and pytest: the versions that it asks for."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *"pip list"*) printf 'numpy 1\\nunrelated 2\\ntorch 3\\n' ;;
    -c*) exit ${TOO_NEW:-0} ;;
    *) echo "$@" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the script, the requirement files, and an environment whose python prints its arguments."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tools").mkdir()
    for path in (ROOT / "tools/test_libraries.sh", ROOT / "scripts/setup.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def call(project, *arguments, **environment):
    command = ["bash", str(project / "tools" / "test_libraries.sh"), *arguments]
    environment = {**os.environ, "PRMIM_VENV": str(project / "venv"), **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def declared():
    """{name: lowest version} of all requirements without the linters."""
    text = "".join(path.read_text() for path in ROOT.glob("requirements*.txt"))
    return dict(re.findall(r"^(?!mypy)([\w-]+)>=([\d.]+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize(("which", "sign"), [("lowest", "=="), ("newest", ">=")])
def test_every_requirement_is_asked_for(project, which, sign):
    done = call(project, which, "-k", "sampling")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(";")[0] for line in (project / "venv" / "requirements.txt").read_text().splitlines()]
    assert sorted(lines) == sorted(f"{name}{sign}{version}" for name, version in declared().items())
    assert len(lines) >= 14 and "ruff" not in "".join(lines)
    steps = done.stdout.splitlines()
    assert any("pip install" in step and ("--upgrade" in step) == (which == "newest") for step in steps)
    assert "numpy 1" in steps and "torch 3" in steps and "unrelated 2" not in steps
    assert steps[-1] == "-m pytest -q -k sampling"


@pytest.mark.parametrize("arguments", [(), ("oldest",)])
def test_another_first_argument_is_refused(project, arguments):
    done = call(project, *arguments)
    assert done.returncode == 2 and done.stdout == "" and "must be lowest or newest" in done.stderr


def test_a_python_without_wheels_of_the_lowest_versions_is_refused(project):
    done = call(project, "lowest", TOO_NEW="1")
    assert done.returncode == 2 and "lowest needs Python 3.10 to 3.12" in done.stderr and "install" not in done.stdout
    assert call(project, "newest", TOO_NEW="1").returncode == 0
