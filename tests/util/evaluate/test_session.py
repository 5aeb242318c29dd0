"""What an evaluation has written stays, however the program ends."""

import json
import signal

import pytest

from tests.warm import Python

PROGRAM = """
import os
import signal
import sys
from util.evaluate.results import ResultsFile
from util.evaluate.session import evaluation_session
from util.run.cli import Parser
from pathlib import Path

parser = Parser("program.py")
parser.add_argument("--device", default="cpu")
folder = Path(sys.argv[1])
with evaluation_session(parser, parser.parse_args([]), folder):
    results = ResultsFile(folder / "results.json", "a.pth", "0", {{}}, lambda parts: {{}})
    results.add("first", 1.0)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM), ("raise OSError(116, 'Stale file handle')", 75)],
)
def test_finished_parts_stay(tmp_path, end, code):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    process = Python(program, tmp_path / "out")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == code, out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["parts"] == {"first": 1.0}
