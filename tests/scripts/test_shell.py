"""Shell scripts in unusual environments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stand_in(path, text="exit 0"):
    """Writes a program that runs `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def bash(command, folder, **environment):
    """Runs `command` without the variables of setup.sh that the tests themselves may have been started with."""
    env = {name: value for name, value in os.environ.items() if name not in ("PRMIM_VENV", "PYTHON", "CDPATH")}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env | environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def project(tmp_path):
    """A folder with setup.sh, an environment that needs no set-up, and another folder with a scripts/ of its own."""
    for name in ("project", "elsewhere"):
        (tmp_path / name / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "project/scripts")
    stand_in(tmp_path / "project/.venv/bin/python")
    return tmp_path / "project"


def test_an_exported_cdpath_changes_no_folder(project):
    command = 'set -euo pipefail; source scripts/setup.sh; echo "$root"; echo "$venv"'
    done = bash(command, project, CDPATH=str(project.with_name("elsewhere")))
    assert done.stdout.splitlines() == [str(project), str(project / ".venv")], done.stderr
    assert bash(command, project).stdout == done.stdout  # also without the variable


def test_the_path_of_python_may_hold_a_space(project):
    python = stand_in(project / "my python/bin/python")
    command = "set -euo pipefail; source scripts/setup.sh; find_python"
    assert bash(command, project, PYTHON=str(python)).stdout == f"{python}\n"
    done = bash(command, project, PYTHON=str(project / "no python"))
    assert done.returncode == 1
    assert "no Python >= 3.10" in done.stderr
