"""The notebook runs, its stored outputs are complete, and its weights are those of the model card."""

import json
import re

import pytest

from tests.runs import ROOT
from util.run.checkpoint import read_checkpoint, sha256

DEMO = ROOT / "demo"


@pytest.fixture(scope="module")
def notebook():
    return json.loads((DEMO / "prmim.ipynb").read_text())


def code(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(notebook, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("skimage")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(DEMO)
    names: dict = {}
    for cell in code(notebook):
        exec(compile(cell, "prmim.ipynb", "exec"), names)
    pyplot.close("all")
    out = capsys.readouterr().out
    assert "36 visible + 36 retained + 72 thrown" in out and "timm.create_model(" in out
    far = {kind: float(value) for kind, value in re.findall(r"(random|furthest) .*largest ([\d.]+)", out)}
    assert far["furthest"] < far["random"]


def test_outputs_are_stored_and_name_no_machine(notebook):
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"] and all(output["output_type"] != "error" for output in cell["outputs"])
    pictures = [o for cell in notebook["cells"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 5
    text = json.dumps([{k: v for k, v in cell.items() if k != "outputs"} for cell in notebook["cells"]])
    streams = json.dumps([o.get("text") for cell in notebook["cells"] for o in cell.get("outputs", [])])
    assert not re.search(r"/(root|home|opt|work|tmp)/", text + streams)


def test_the_weights_are_those_of_the_card():
    path, card = DEMO / "micro.pth", (DEMO / "README.md").read_text()
    assert path.stat().st_size < 5e6 and sha256(path) in card
    info = read_checkpoint(path).info
    assert str(info.run.step) in card and info.run.origin.code.split()[1].rstrip(",") in card
