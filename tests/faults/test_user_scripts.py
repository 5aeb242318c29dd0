"""User errors with all programs: their help, unknown flags; with scripts: wrong files and unwritable places."""

import re
from pathlib import Path

import pytest

from tests.documents import parser_of
from tests.scripts.programs import MAINS, SCRIPTS, run_file
from util.run.cli import FEW


@pytest.mark.parametrize("name", ["scripts/export.py", "downstream/probe/main_probe.py"])
def test_help_of_a_program_that_is_started(name, tmp_path):
    done = run_file(name, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(name).name} ")


@pytest.mark.parametrize("name", [*SCRIPTS, *MAINS])
def test_the_first_help_is_short_and_names_the_rest(name):
    """Flags that only reproduce a paper's recipe are on the list of all."""
    parser = parser_of(name)
    brief = parser.format_help()
    shown = set(re.findall(r"^  --([\w\[\]-]+)", brief, re.MULTILINE))
    flags = set(re.findall(r"^  --([\w\[\]-]+)", parser.format_help_all(), re.MULTILINE))
    if len(flags) <= FEW:
        assert shown == flags
    else:
        assert 15 <= len(shown) <= 40
        assert "--help_all" in brief
