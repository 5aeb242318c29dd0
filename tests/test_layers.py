"""The import order of the code base."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def is_source(path):
    """Whether it is no file of a virtual environment, whose folder begins with a dot, of a run or of a data set."""
    folder = path.relative_to(ROOT).parts[0]
    return not folder.startswith(".") and folder not in ("output", "data")


FILES = sorted(path for path in ROOT.rglob("*.py") if is_source(path))
MODELS = {"models_vit", "encoders"}
MAINS = {"main_pretrain", "main_finetune"}
TAKEN_OF_MAINS = {"main", "parse_args", "get_args_parser", "PROGRAM"}

# A file or a folder -> what of this project it may import, beside itself. `None`: everything that is not named below.
ALLOWED: dict[str, set[str]] = {
    "recipes": set(),
    "util": set(),
    "models_vit": {"util"},
    "encoders": {"util", "models_vit"},
    "prmim": {"util", *MODELS},
    "framework": {"util", *MODELS, "prmim"},
    "models_mae_pr": {"util", *MODELS, "prmim", "framework"},
    "frameworks": {"util", *MODELS, "prmim", "framework", "models_mae_pr"},
    "engine_pretrain": {"util"},
    "engine_finetune": {"util"},
    "monitor": {"util", "framework"},
    "main_pretrain": {"util", "encoders", "prmim", "framework", "frameworks", "engine_pretrain", "recipes", "monitor"},
    "eval_finetune": {"util", "encoders", "engine_finetune"},
    "main_finetune": {"util", "encoders", "engine_finetune", "eval_finetune", "recipes"},
    "hubconf": {"encoders", "downstream"},
    "submitit_launch": {"util", "recipes", *MAINS},
    "downstream": {"util", *MODELS, "engine_finetune"},
}

# The rooms of util/run, from the lowest one. A file knows its own room and those before it; "": cli.py.
ROOMS = ("", "processes", "files", "start", "train")
# A folder in util -> what else of util it may import. The files beside the folders are leaves.
ALLOWED_IN_UTIL = {
    "": set(),
    "data": {""},
    "run": {"", "data"},
    "evaluate": {"", "data", "run"},
}


def imports(path):
    """The modules that a file imports, with dots."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def places(path):
    """The files and folders of this project that a file imports."""
    ours = {p.stem for p in ROOT.glob("*.py")} | {p.parent.name for p in ROOT.glob("*/__init__.py")}
    return {module.partition(".")[0] for module in imports(path)} & ours


def place_of(path):
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("place", sorted(ALLOWED))
def test_imports_run_one_way(place):
    files = [path for path in FILES if place_of(path) == place]
    assert files
    for path in files:
        assert places(path) - {place} <= ALLOWED[place], path


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions count as well."""
    imported = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not name.startswith("tests."):
            imported[name] = imports(path)
    while imported:
        leaves = [name for name, modules in imported.items() if not modules & imported.keys()]
        assert leaves, sorted(imported)
        for name in leaves:
            del imported[name]


def test_recipes_import_nothing():
    assert not imports(ROOT / "recipes.py")
    assert not imports(ROOT / "downstream" / "recipes.py")


@pytest.mark.parametrize("folder", sorted(ALLOWED_IN_UTIL))
def test_data_knows_no_run_and_a_run_no_evaluation(folder):
    names = {path.parent.name for path in (ROOT / "util").glob("*/__init__.py")}
    assert names | {""} == ALLOWED_IN_UTIL.keys()
    files = (ROOT / "util").glob("*.py") if folder == "" else (ROOT / "util" / folder).rglob("*.py")
    for path in files:
        others = set()
        for module in imports(path):
            if module.startswith("util."):
                name = module.split(".")[1]
                if name not in names:
                    name = ""  # a file of util itself
                others.add(name)
        others.discard(folder)
        assert others <= ALLOWED_IN_UTIL[folder], path


def test_the_rooms_of_a_run_know_only_those_before_them():
    """Also for types: what names a type of a later room is in the wrong one."""
    run = ROOT / "util" / "run"
    assert {path.parent.name for path in run.glob("*/__init__.py")} | {""} == set(ROOMS)
    for number, room in enumerate(ROOMS):
        for path in (run / room).glob("*.py"):
            used = set()
            for module in imports(path):
                if module.startswith("util.run."):
                    first = module.split(".")[2]
                    used.add(first if first in ROOMS else "")
            assert used <= set(ROOMS[: number + 1]), path


def test_no_framework_imports_another_but_those_built_on_mae():
    built_on = {"models_amt_pr": {"models_simmim_pr"}}  # AMT has a version on SimMIM
    for path in (ROOT / "frameworks").glob("models_*_pr.py"):
        others = {module.rpartition(".")[2] for module in imports(path) if module.startswith("frameworks.models_")}
        others = {name for name in others if (ROOT / "frameworks" / f"{name}.py").exists()}
        assert others <= built_on.get(path.stem, set()), path


def test_scripts_and_tools_are_imported_by_siblings_and_tests_alone():
    for path in FILES:
        place = place_of(path)
        if place != "tests":
            assert not places(path) & {"scripts", "tools", "tests"} - {place}, path


def test_a_main_is_no_library():
    """Other programs take a main's parser, or start it. All else that they need is elsewhere."""
    mains = {path.stem for path in FILES if path.stem.startswith("main_")}
    for path in FILES:
        if place_of(path) == "tests":
            continue
        taken = set()
        for module in imports(path):
            parent, _, name = module.rpartition(".")
            if parent.rpartition(".")[2] in mains:
                taken.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in mains:
                taken.add(node.attr)
        assert taken <= TAKEN_OF_MAINS, path


def test_each_file_in_scripts_and_tools_is_a_program():
    """What programs share is in scripts/parts."""
    files = {*ROOT.glob("scripts/*.py"), *ROOT.glob("tools/*.py")}
    for path in files - {ROOT / "scripts" / "__init__.py", ROOT / "tools" / "__init__.py"}:
        text = path.read_text()
        assert '\nif __name__ == "__main__":\n    run_program(main' in text, path


def test_help_waits_for_no_slow_library():
    mains = "main_pretrain, main_finetune, downstream.probe.main_probe, downstream.segmentation.main_segmentation"
    slow = {"timm", "torchvision", "torch._dynamo", "torch.distributed.fsdp", "tensorboard", "triton"}
    code = f"import sys, {mains}; print({slow} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.stdout == "set()\n", found.stderr


def test_the_top_level_tells_the_story():
    assert len(list(ROOT.glob("*.py"))) <= 13
