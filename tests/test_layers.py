"""The import order of the code base, and the limits that keep its files readable."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for p in ROOT.rglob("*.py") if not {".venv", "output", "data"} & set(p.relative_to(ROOT).parts))
FRAMEWORKS = {p.stem for p in ROOT.glob("models_*_pr.py")}

ENCODERS = {"models_vit", "models_relative_vit", "models_absolute_vit", "models_swin"}

# file -> what of this project it may import, beside `util`
ALLOWED = {
    "recipes": set(),
    "paper_tables": set(),
    "table_runs": {"paper_tables"},
    "models_vit": set(),
    "models_relative_vit": {"models_vit"},
    "models_absolute_vit": {"models_vit", "models_relative_vit"},
    "models_swin": {"models_vit", "models_relative_vit"},  # patches and their embedding; the bias
    "prmim": {"models_vit"},
    "framework": {"prmim", "models_vit"},
    "reconstruction": {"prmim", "framework"},
    "attention_phases": {"framework"},
    "models_teacher": {"prmim", "models_vit"},
    "engine_pretrain": set(),
    "engine_finetune": set(),
    "engine_probe": set(),
    "monitor": {"framework", "reconstruction", "engine_probe"},
    "models_probe": {"encoders", "models_vit"},
    "main_probe": {"engine_probe", "models_probe"},
    "main_pretrain": {
        "prmim",
        "framework",
        "reconstruction",
        "attention_phases",
        "engine_pretrain",
        "recipes",
        "monitor",
    }
    | FRAMEWORKS,
    "main_finetune": {"encoders", "engine_finetune", "recipes", *ENCODERS},
    "main_robustness": {"main_finetune", "engine_finetune"},
    "encoders": ENCODERS,
    "timm_models": ENCODERS,
    "hubconf": {"encoders", "timm_models", *ENCODERS},
    "models_reference_mae": {"models_vit"},
    "submitit_launch": {"recipes", "main_pretrain", "main_finetune", "main_robustness", "main_probe"},
} | {name: {"prmim", "framework", *ENCODERS, "models_mae_pr"} for name in FRAMEWORKS}  # some are built on MAE
ALLOWED["models_tec_pr"] |= {"models_teacher"}
ALLOWED["models_amt_pr"] |= {"models_simmim_pr"}  # AMT has a version on SimMIM


def imports(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    return modules


def project_modules():
    return {p.stem for p in ROOT.glob("*.py")} | {"util", "scripts", "tools", "tests", "downstream"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent == ROOT], ids=lambda p: p.name)
def test_imports_run_one_way(path):
    ours = imports(path) & project_modules() - {"util"}
    assert ours <= ALLOWED[path.stem]
    assert path.stem not in ("recipes", "paper_tables") or not imports(path)


@pytest.mark.parametrize("path", sorted((ROOT / "util").rglob("*.py")), ids=lambda p: p.name)
def test_util_imports_nothing_outside_util(path):
    assert not imports(path) & project_modules() - {"util"}


def test_the_core_never_imports_what_is_downstream():
    """Only a part of the script for whole tables reads the names of downstream recipes, a file without imports."""
    core = [p for p in FILES if p.relative_to(ROOT).parts[0] not in ("downstream", "tests")]
    assert [p.name for p in core if "downstream" in imports(p)] == ["deviations.py"]
    text = (ROOT / "scripts" / "deviations.py").read_text()
    assert re.findall("downstream[.][a-z_.]+", text) == ["downstream.recipes"]
    assert not imports(ROOT / "downstream" / "recipes.py")
    for path in (p for p in FILES if p.relative_to(ROOT).parts[0] == "downstream"):
        assert not imports(path) & {"scripts", "tools", "tests", "main_pretrain", "main_finetune", "submitit_launch"}


def test_scripts_and_tools_are_imported_by_tests_alone():
    """A script or a tool may import its siblings."""
    for path in FILES:
        place = path.relative_to(ROOT).parts[0]
        if place != "tests":
            assert not imports(path) & {"scripts", "tools", "tests"} - {place}, path


def test_files_and_functions_stay_short():
    long = [f"{p.name}: {n} lines" for p in FILES if (n := len(p.read_text().splitlines())) > 500]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                most = 80 if node.name in ("main", "__init__") else 60
                long += [f"{path.name}: {node.name} has {lines} lines"] if lines > most else []
    assert not long
