"""What an evaluation has written stays, however the program ends."""

import errno
import signal
from types import SimpleNamespace

import pytest
import torch

from tests.two_processes import run_in_two_processes
from tests.warm import Python
from util.evaluate import evaluator
from util.evaluate.results import Evaluation
from util.run.files.json_files import read_json

PROGRAM = """
import os
import signal
import sys
from util.evaluate.results import ResultsFile
from util.flag import Flag
from util.run.cli import Parser
from util.run.start.begin import begin
from pathlib import Path

parser = Parser("program.py", "", Flag("device", str, "cpu"))
folder = Path(sys.argv[1])
with begin(parser.prog, parser, parser.parse_args([]), folder):
    results = ResultsFile(folder / "results.json", "a.pth", "0", {{}}, lambda parts: {{}})
    results.add("first", 1.0)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "state"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ("stopped", "SIGTERM")),
        ("raise OSError(116, 'Stale file handle')", 75, ("failed", "[Errno 116] Stale file handle")),
    ],
)
def test_finished_parts_stay(tmp_path, end, code, state):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    process = Python(program, tmp_path / "out")
    out, _ = process.communicate(timeout=900)
    assert process.returncode == code, out
    assert read_json(tmp_path / "out" / "results.json")["parts"] == {"first": 1.0}
    content = read_json(tmp_path / "out" / "run.json")
    assert (content["state"], content["why"]) == state


def _error_of_an_evaluation(rank, folder):
    evaluator.context_of_loop = lambda loop: None
    loop = SimpleNamespace(
        step=3,
        steps_per_epoch=3,
        model=torch.nn.Linear(1, 1),
        run=SimpleNamespace(process=SimpleNamespace(is_main=rank == 0), output_dir=folder, first_weights=None),
    )
    evaluation = evaluator.Evaluator(loop, None, lambda context: Evaluation({"top1": 1.0}), describe=str)
    try:
        evaluation.perform()
    except OSError as error:
        return error.errno
    return None


def test_all_ranks_end_alike_if_results_cannot_be_written(tmp_path):
    """Rank 0 alone would leave the others in a collective."""
    assert run_in_two_processes(_error_of_an_evaluation, tmp_path / "gone") == [errno.ENOENT] * 2
