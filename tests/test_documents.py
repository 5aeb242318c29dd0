"""The documents hold what they promise: snippets run, commands parse, names exist, numbers are those of the files."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import main_pretrain
from frameworks import registry
from recipes import FINETUNE_RECIPES, RECIPES
from scripts import export
from tests.conftest import write_photo
from tests.documents import (
    DOCUMENTS,
    RECIPES_OF,
    all_commands,
    blocks_of,
    commands_of,
    page_name,
    parse,
    parser_of,
    program_of,
    prose_of,
    slugs_of,
)
from tests.patches import MonkeyPatch
from tests.scripts.exports import detection_run
from tests.scripts.programs import MAINS, ROOT, SCRIPTS

README = ROOT / "README.md"
# The file that docs/add_a_framework.md shows, with a flag and models of its own.
EXAMPLE = "models_example_pr.py"
ADDS_THE_EXAMPLE = """
import models_example_pr
from frameworks import registry
from tests import patches

registry.NAMES["models_example_pr"] = ()
for name in models_example_pr.__all__:
    registry.MODELS[name] = getattr(models_example_pr, name)
patches.ALLOWED.add("models_example_pr")
"""
EXAMPLE_FLAG = "--loss_beta"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PROJECT_FILE = re.compile(
    r"(?<![\w/.<*-])(?:(?:scripts|tools|tests|util|docs|downstream|encoders|frameworks)/[\w./-]*\w"
    r"|(?:main|engine|models|framework|prmim|recipes|submitit_launch|requirements)[\w-]*\.(?:py|txt))(?![\w<*])"
)
RECIPE = re.compile(
    r"\w+_\d+ep|(?:\w+_)?(?:finetune|linprobe)_\w+|partial\d+_\w+|inat\d\d_\w+|cifar10(?:_\w+)?|quickstart(?:_finetune)?"
    r"|(?:ade20k|coco)_\w+"
)
COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")
WRITTEN = re.compile(r"--(?:csv|out) \S+")  # files that a command of a page will write
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
OTHER_FLAGS = {"--help", "--signal", "--array", EXAMPLE_FLAG}  # of sbatch and srun


# ------------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the snippets expect: images in PHOTOS, and what two commands of the README make of them."""
    folder = tmp_path_factory.mktemp("documents")
    for seed in range(8):
        name = "cat" if seed % 2 else "dog"
        photo = folder / "PHOTOS" / "train" / name / f"{seed}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        write_photo(photo, seed=seed)
    arguments_of = {}
    for command in commands_of(README):
        found = program_of(command)
        if found is not None and ("PHOTOS" in command.words or "output/photos" in command.words):
            program, arguments_of[program] = found
    small = ["--total_batch_size", "2", "--batch_size", "2", "--epochs", "1", "--warmup_epochs", "0"]
    small += ["--max_steps", "1", "--num_workers", "0"]
    with MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main_pretrain.main([*arguments_of["main_pretrain.py"], *small, "--picture_every", "0", "--device", "cpu"])
        export.main(arguments_of["scripts/export.py"])
        export.main(["output/photos", "--out", "model.pt2", "--format", "torch"])
        detection_run(folder / "detector")
        export.main(["detector", "--out", "detector.pt2", "--format", "torch"])
    return folder


def snippets() -> list[object]:
    """Returns the Python blocks of all pages, as parameters. tests/test_own_images.py runs those of its page."""
    parameters = []
    for path in DOCUMENTS:
        if path.name != "own_images.md":
            for number, text in enumerate(blocks_of(path, "python"), 1):
                parameters.append(pytest.param(text, id=f"{path.name}-{number}"))
    return parameters


@pytest.mark.parametrize("snippet", snippets())
def test_python_snippets_run_as_pasted(snippet: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_one_line_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    for command in all_commands():
        if command.words[:2] == ("python", "-c"):
            exec(command.words[2], {})
    assert "mask_ratio" in capsys.readouterr().out


def test_the_example_of_a_framework_keeps_the_contract(tmp_path: Path) -> None:
    """As the guide says: the contract's tests cover it without a new line. Those that compile take too long here."""
    (snippet,) = [text for text in blocks_of(ROOT / "docs" / "add_a_framework.md", "python") if EXAMPLE in text]
    (tmp_path / EXAMPLE).write_text(snippet)
    (tmp_path / "adds_the_example.py").write_text(ADDS_THE_EXAMPLE)
    chosen = "ExampleViT and not compile and not two_processes and not signature"
    flags = ["-q", "-p", "no:cacheprovider", "-p", "adds_the_example", "-k", chosen, f"--basetemp={tmp_path / 'temp'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_framework_contract.py", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------------------------------------------ commands


def test_commands_parse(capsys: pytest.CaptureFixture[str]) -> None:
    problems = []
    for command in all_commands():
        try:
            parse(command)
        except SystemExit:
            problems.append(f"{command}\n{capsys.readouterr().err}")
    assert problems == []


# --------------------------------------------------------------------------------------------------------------- names


def git(*command: str) -> list[str]:
    """Returns the lines that a git command prints; none if it fails, or if git is not installed."""
    if shutil.which("git") is None:
        return []
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


@pytest.fixture
def history() -> list[str]:
    """All commits, the newest first."""
    if git("rev-parse", "--show-toplevel", "--is-shallow-repository") != [str(ROOT), "false"]:
        pytest.skip("no git checkout with its whole history")
    return git("rev-list", "HEAD")


def test_local_links_lead_somewhere() -> None:
    broken = []
    for path in DOCUMENTS:
        for link in LINK.findall(prose_of(path)):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if not target.exists() or (anchor and anchor not in slugs_of(target)):
                broken.append(f"{page_name(path)}: {link}")
    assert broken == []


def test_every_page_is_linked() -> None:
    linked = {README}
    for path in DOCUMENTS:
        for link in LINK.findall(prose_of(path)):
            linked.add((path.parent / link.partition("#")[0]).resolve())
    assert [page_name(path) for path in DOCUMENTS if path not in linked] == []


def test_named_files_exist(history: list[str]) -> None:
    """Now, or in a commit that the page names: finished measurements' tools leave the tree."""
    missing = []
    for path in DOCUMENTS:
        text = WRITTEN.sub("", path.read_text())
        commits = set(COMMIT.findall(text))
        for name in sorted(set(PROJECT_FILE.findall(text))):
            if name == EXAMPLE or (ROOT / name).exists():
                continue
            if not any(git("cat-file", "-t", f"{commit}:{name}") for commit in commits):
                missing.append(f"{page_name(path)}: {name}")
    assert missing == []


def test_named_commits_are_in_the_history(history: list[str]) -> None:
    unknown = []
    for path in DOCUMENTS:
        for named in COMMIT.findall(path.read_text()):
            if not any(commit.startswith(named) for commit in history):
                unknown.append(f"{page_name(path)}: {named}")
    assert unknown == []


def is_recipe(name: str) -> bool:
    return any(name in recipes for recipes in (RECIPES, *RECIPES_OF.values()))


def test_named_recipes_exist() -> None:
    """`plain50_…` and `…_large_100ep` are the beginning and the end of a name."""
    unknown = []
    for path in DOCUMENTS:
        for word in " ".join(SPAN.findall(prose_of(path))).split():
            start, dots, end = word.partition("…")
            if dots:
                found = any(name.startswith(start) and name.endswith(end) for name in (*RECIPES, *FINETUNE_RECIPES))
            else:
                found = is_recipe(word) or not RECIPE.fullmatch(word)
            if not found:
                unknown.append(f"{page_name(path)}: {word}")
    assert unknown == []


@cache
def known_flags() -> set[str]:
    parsers = [torchrun_parser()]
    for program in (*MAINS, *SCRIPTS):
        parsers.append(parser_of(program))
    for model in registry.MODELS:
        parsers.append(main_pretrain.get_args_parser(model, ["attention"]))
    flags = set(OTHER_FLAGS)
    for parser in parsers:
        flags |= parser._option_string_actions.keys()
    return flags


def test_named_flags_exist() -> None:
    """But for those of the changelog, which names what left."""
    unknown = []
    for path in [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]:
        for span in SPAN.findall(prose_of(path)):
            for flag in FLAG.findall(span):
                if flag not in known_flags():
                    unknown.append(f"{page_name(path)}: {flag}")
    assert unknown == []


# -------------------------------------------------------------------------------------------------------------- the map


def test_the_map_of_the_code_names_every_module() -> None:
    table = (ROOT / "docs" / "map.md").read_text()
    files = {path.name for path in ROOT.glob("*.py")} - {path.name for path in ROOT.glob("models_*_pr.py")}
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []


def test_the_names_of_the_map_are_in_the_files_of_their_items() -> None:
    """A file is named from the root, or from a folder of its item. A name is defined in one of its item's files."""
    missing = []
    for item in re.findall(r"^(?:-|\d+\.) .*(?:\n .*)*", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE):
        spans = SPAN.findall(item)
        folders = [ROOT, *(ROOT / span for span in spans if span.endswith("/"))]
        code = ""
        names = []
        for span in spans:
            found = [folder / span for folder in folders if (folder / span).exists()]
            if span.endswith(".py") and found:
                code += found[0].read_text()
            elif not found and not span.startswith("--"):
                names.append(span)
        missing += [name for name in names if not re.search(rf"^(\s*(class|def) )?{name}\b", code, re.MULTILINE)]
    assert missing == []


# ---------------------------------------------------------------------------------------------------- the batch script


@pytest.mark.parametrize(
    ("code", "idle", "moved", "state", "wait"),
    [  # idle: exit codes of starts without progress in a row before this one; wait: None if it is not requeued
        (0, [], True, "RUNNING", None),
        (2, [], True, "RUNNING", None),
        (3, [], True, "RUNNING", None),
        (75, [], False, "RUNNING", 300),  # the storage has failed
        (75, [137] * 3 + [75] * 2, False, "RUNNING", 900),
        (75, [75] * 24, False, "RUNNING", None),
        (75, [75] * 24, True, "RUNNING", 0),
        (140, [], False, "RUNNING", 0),  # killed by USR2 before the run could handle it
        (137, [], True, "RUNNING", 0),
        (137, [], False, "RUNNING", 0),
        (137, [137] * 3, False, "RUNNING", None),
        (143, [], True, "COMPLETING", None),  # cancelled
    ],
)
@pytest.mark.parametrize(
    ("element", "job", "variables"),
    [
        ("", "77", {"SLURM_JOB_ID": "77"}),
        ("3", "70_3", {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}),
    ],
    ids=["alone", "in an array"],
)
def test_the_batch_script_requeues_what_can_go_on(
    code: int,
    idle: list[int],
    moved: bool,
    state: str,
    wait: int | None,
    element: str,
    job: str,
    variables: dict[str, str],
    tmp_path: Path,
) -> None:
    (script,) = [text for text in blocks_of(ROOT / "docs" / "cluster.md", "bash") if "#SBATCH" in text]
    out = tmp_path / f"output/prmim50_base{element}"
    out.mkdir(parents=True)
    (out / "checkpoint-20.json").touch()
    if idle:
        (out / ".idle-starts-77").write_text("".join(f"{number}\n" for number in idle))
    called = out / "called"
    moves = f"touch {shlex.quote(str(out))}/checkpoint-40.json" if moved else "true"
    fake(tmp_path / "srun", f"{moves}; exit {code}")
    fake(tmp_path / "squeue", f'[ "$3" = {job} ] && echo {state}')
    fake(tmp_path / "scontrol", f'echo "$@" >> {shlex.quote(str(called))}')
    environment = variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert called.exists() == (wait is not None)
    if wait is not None:
        later = f"update jobid={job} starttime=now+{wait}\n" if wait else ""
        assert called.read_text() == f"requeue {job}\n{later}"


def fake(program: Path, does: str) -> None:
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
