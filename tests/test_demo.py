"""The notebook runs, its stored outputs are complete, and its weights are those of the model card."""

import json
import re

import pytest

from tests.runs import ROOT
from util.run.files.checkpoint import read_checkpoint, sha256

DEMO = ROOT / "demo"


@pytest.fixture(scope="module")
def notebook():
    return json.loads((DEMO / "prmim.ipynb").read_text())


def test_the_notebook_runs(notebook, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("skimage")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(DEMO)
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "prmim.ipynb", "exec"), names)
    pyplot.close("all")
    out = capsys.readouterr().out
    assert "36 visible + 36 retained + 72 thrown" in out
    assert "timm.create_model(" in out
    largest = dict(re.findall(r"(random|furthest) .*largest ([\d.]+)", out))
    assert float(largest["furthest"]) < float(largest["random"])


def test_the_weights_are_those_of_the_card():
    path = DEMO / "micro.pth"
    card = (DEMO / "README.md").read_text()
    assert path.stat().st_size < 5e6
    assert sha256(path) in card
    run = read_checkpoint(path).info.run
    assert str(run.step) in card
    commit = run.origin.code.split()[1].rstrip(",")
    assert commit in card
