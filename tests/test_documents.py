"""The documents hold what they promise: snippets run, commands parse, and every name in them exists."""

import argparse
import csv
import importlib
import inspect
import os
import re
import shlex
import shutil
import statistics
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import timm
import torchvision
from PIL import Image
from torch.distributed.run import get_args_parser as torchrun_parser

import main_pretrain
from downstream.recipes import DETECTION_RECIPES, SEGMENTATION_RECIPES
from encoders import classifiers
from frameworks import registry
from recipes import FINETUNE_RECIPES, RECIPES
from scripts import export
from submitit_launch import MAINS as MAINS_OF_THE_LAUNCHER
from tests import test_framework_contract as contract
from tests.conftest import write_photo
from tests.patches import MonkeyPatch, StandIn
from tests.scripts.programs import MAINS, ROOT, SCRIPTS
from util.run.cli import Parser, parse_with_recipe

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The file that docs/add_a_framework.md shows, with a flag and models of its own.
EXAMPLE, EXAMPLE_FLAG, EXAMPLE_MODELS = "models_example_pr.py", "--loss_beta", "example_"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PROJECT_FILE = re.compile(
    r"(?<![\w/.<*-])(?:(?:scripts|tools|tests|util|docs|downstream)/[\w./-]*\w"
    r"|(?:main|engine|models|framework|prmim|recipes|submitit_launch|requirements)[\w-]*\.(?:py|txt))(?![\w<*])"
)
MODEL = re.compile(r"\b[a-z]\w*_patch\d+\w*\b")
RECIPE = re.compile(
    r"\w+_\d+ep|(?:\w+_)?(?:finetune|linprobe)_\w+|partial\d+_\w+|inat\d\d_\w+|cifar10(?:_\w+)?|quickstart(?:_finetune)?"
    r"|(?:ade20k|coco)_\w+"
)
RECIPES_OF = {
    "main_finetune.py": FINETUNE_RECIPES,
    "downstream/segmentation/main_segmentation.py": SEGMENTATION_RECIPES,
    "downstream/detection/main_detection.py": DETECTION_RECIPES,
}
COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
OTHER_FLAGS = {"--help", "--signal", "--array", "--kill-on-bad-exit", EXAMPLE_FLAG}  # of sbatch and srun


@dataclass(frozen=True)
class Command:
    """A shell command of a document, as words."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join(self.words)}"


def blocks_of(path: Path, *languages: str) -> list[str]:
    """Returns the fenced blocks of a document that are in one of the languages."""
    return [text for language, text in FENCE.findall(path.read_text()) if language in languages]


def prose_of(path: Path) -> str:
    """Returns a document without its fenced blocks."""
    return FENCE.sub("", path.read_text())


def snippets() -> list[object]:
    """Returns the Python blocks of all documents but the guide of tests/test_own_images.py, as parameters of a test."""
    paths = [path for path in DOCUMENTS if path.name != "own_images.md"]
    numbered = [(path, *block) for path in paths for block in enumerate(blocks_of(path, "python"), 1)]
    return [pytest.param(text, id=f"{path.name}-{i}") for path, i, text in numbered]


# ------------------------------------------------------------------------------------------------- shell into commands


def commands_of(path: Path) -> Iterator[Command]:
    """Yields the simple commands of a document's shell blocks. Variables that were set before are filled in."""
    variables: dict[str, str] = {}
    for block in blocks_of(path, "bash", "sh", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            for words in simple_commands(string.Template(line).safe_substitute(variables)):
                while words and (assignment := re.fullmatch(r"(\w+)=(.*)", words[0])):
                    variables[assignment[1]] = assignment[2]
                    words = words[1:]
                if words:
                    yield Command(path.name, tuple(words))


def simple_commands(line: str) -> list[list[str]]:
    """Splits a shell line at `;`, `&&`, `|` and the like, and drops comments and redirections' operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|()<>"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


@cache
def all_commands() -> list[Command]:
    return [command for path in DOCUMENTS for command in commands_of(path)]


def program_of(command: Command) -> tuple[str, list[str]] | None:
    """Returns (the project's program that a command runs, its arguments). `...` stands for what is left out."""
    for i, word in enumerate(command.words):
        if word.removeprefix("./") in (*MAINS, *SCRIPTS) and i > 0:
            if command.words[0] == "torchrun":
                check_torchrun(command.words[1:])
            return word, [argument for argument in command.words[i + 1 :] if argument != "..."]
    return None


def check_torchrun(words: tuple[str, ...]) -> None:
    """Parses the flags of torchrun itself. NODE stands for the number of a node."""
    torchrun_parser().parse_args(["0" if word == "NODE" else word for word in words if word != "..."])


class ParserFound(BaseException):
    """Carries the parser that a program has built. No program catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser)
        self.parser = parser


def parser_of(program: str) -> argparse.ArgumentParser:
    """Returns the parser that the program builds for its command line."""
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ParserFound(parser)

    with MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", stop)
        try:
            module.main([])
        except ParserFound as found:
            return found.parser
    raise AssertionError(f"{program} parses no command line")


def parse(program: str, argv: list[str]) -> argparse.Namespace:
    """Parses a program's arguments as it does itself; of the launcher also those of the main that it starts."""
    parser = parser_of(program)
    if any(action.dest == "recipe" for action in parser._actions):
        return parse_with_recipe(parser, RECIPES_OF.get(program, RECIPES), argv)
    if program == "scripts/reproduce_table.py" and "--" in argv:  # what follows is torchrun's or the launcher's
        argv = argv[: argv.index("--")]
    args = parser.parse_args(argv)
    if program == "submitit_launch.py":
        parse(MAINS_OF_THE_LAUNCHER[args.main].replace(".", "/") + ".py", args.argv)
    return args


def check_parses(command: Command, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Parses a command of the project; returns its program. Fails with the program's own error."""
    try:
        found = program_of(command)
        if found is not None:
            parse(*found)
    except SystemExit:
        pytest.fail(f"{command}\n{capsys.readouterr().err}")
    return found[0] if found else None


# ------------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the snippets expect: images in PHOTOS, and what two commands of the README make of them."""
    folder = tmp_path_factory.mktemp("documents")
    for label, name in enumerate(("cat", "dog")):
        (folder / "PHOTOS" / "train" / name).mkdir(parents=True)
        for i in range(4):
            write_photo(folder / "PHOTOS" / "train" / name / f"{i}.jpg", seed=10 * label + i)
    programs = [found for command in commands_of(ROOT / "README.md") if (found := program_of(command))]
    (pretrain,) = (argv for name, argv in programs if name == "main_pretrain.py" and "PHOTOS" in argv)
    (to_timm,) = (argv for name, argv in programs if name == "scripts/export.py")
    small = ["--batch_size", "2", "--epochs", "1", "--warmup_epochs", "0", "--max_steps", "1", "--num_workers", "0"]
    with MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main_pretrain.main([*pretrain, *small, "--picture_every", "0", "--device", "cpu"])
        export.main(to_timm)
        export.main(["output/photos", "--out", "photos_encoder"])
    return folder


class SmallCIFAR10:
    """In the place of torchvision's, which is downloaded."""

    classes = ("cat", "dog")

    def __init__(self, root: str, train: bool, download: bool) -> None:
        self.items = [(Image.new("RGB", (32, 32)), label) for label in (0, 1)]

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        return iter(self.items)


@pytest.mark.parametrize("snippet", snippets())
def test_python_snippets_run_as_pasted(snippet: str, place: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    library = StandIn(torchvision.datasets, CIFAR10=SmallCIFAR10)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", library)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_the_example_of_a_framework_keeps_the_contract(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Runs the contract's tests on it, save those that compile or start processes."""
    (snippet,) = blocks_of(ROOT / "docs" / "add_a_framework.md", "python")
    (tmp_path / EXAMPLE).write_text(snippet)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(Path(EXAMPLE).stem)
    (name,) = (name for name in module.__all__ if isinstance(getattr(module, name), type))
    monkeypatch.setitem(contract.CLASSES, name, getattr(module, name))
    arms = (dict(throw_ratio=0.0), dict(throw_ratio=0.5, progressive=False), dict(throw_ratio=0.5))
    checked = 0
    for test_name, test in vars(contract).items():
        arguments = inspect.signature(test).parameters.keys() if test_name.startswith("test_") else set()
        if "name" not in arguments or not arguments <= {"name", "arm", "tmp_path"} or "compile" in test_name:
            continue
        if "process" in test_name:
            continue
        given = {"name": name, "tmp_path": tmp_path}
        for arm in arms if "arm" in arguments else ({},):
            test(**{argument: (given | {"arm": arm})[argument] for argument in arguments})
            checked += 1
    assert checked > 20
    model = getattr(module, name)
    assert [f"--{flag.name}" for flag in model.flags] == [EXAMPLE_FLAG]
    with pytest.raises(ValueError, match="loss_beta must be above 0, got 0"):
        model(loss_beta=0, embed_dim=32, num_heads=2)


def test_one_line_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [command.words[2] for command in all_commands() if command.words[:2] == ("python", "-c")]
    for program in programs:
        exec(program, {})
    printed = capsys.readouterr().out
    assert programs and "mask_ratio" in printed


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_parse(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(path):
        check_parses(command, capsys)


def test_every_main_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {check_parses(command, capsys) for command in all_commands()}
    assert {*MAINS, *(name for name in SCRIPTS if name.startswith("scripts/"))} <= shown


def test_a_wrong_command_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        "main_pretrain.py --recipe prmim50_vit_bse",
        "main_finetune.py --finetun_e x",
        "main_pretrain.py --epochs x",
    )
    launcher = "submitit_launch.py --nodes 2 main_pretrain --no_such_flag"
    torchrun = "torchrun --nproc_per_nod_e 2 main_pretrain.py"
    for line in (*(f"python {words}" for words in wrong), f"python {launcher}", torchrun):
        (tmp_path / "d.md").write_text(f"```bash\nx=1 # a comment\n{line} \\\n  ...; echo done\n```\n")
        first, echo = commands_of(tmp_path / "d.md")
        assert echo.words == ("echo", "done")
        with pytest.raises(pytest.fail.Exception, match="error"):
            check_parses(first, capsys)


# --------------------------------------------------------------------------------------------------------------- names


def git(*command: str) -> list[str]:
    """Returns the lines that a git command prints; none if it fails, or if git is not installed."""
    if shutil.which("git") is None:
        return []
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def has_whole_history() -> bool:
    return git("rev-parse", "--show-toplevel", "--is-shallow-repository") == [str(ROOT), "false"]


def slugs_of(path: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(prose_of(path)):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if link.startswith("http"):
            continue
        if not target.exists() or (anchor and anchor not in slugs_of(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(path: Path) -> None:
    """Now, or in a commit that the page names: finished measurements' tools leave the tree."""
    text = path.read_text()
    missing = {name for name in PROJECT_FILE.findall(text) if name != EXAMPLE and not (ROOT / name).exists()}
    if missing and not has_whole_history():
        pytest.skip("no git checkout with its whole history")
    commits = set(COMMIT.findall(text))
    assert [name for name in sorted(missing) if not any(git("cat-file", "-t", f"{c}:{name}") for c in commits)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_models_exist(path: Path) -> None:
    known = registry.MODELS.keys() | classifiers.MODELS.keys()
    named = set(MODEL.findall(FENCE.sub(r"\2", path.read_text()).replace("…", " ")))
    assert (
        sorted(
            n
            for n in named
            if n not in known and not n.startswith(EXAMPLE_MODELS) and not is_recipe(n) and not timm.is_model(n)
        )
        == []
    )


def is_recipe(name: str) -> bool:
    return any(name in recipes for recipes in (RECIPES, *RECIPES_OF.values()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_recipes_exist(path: Path) -> None:
    """`plain50_…` and `…_large_100ep` are the beginning and the end of a name."""
    unknown = []
    for word in " ".join(SPAN.findall(prose_of(path))).split():
        start, dots, end = word.partition("…")
        if dots:
            found = any(name.startswith(start) and name.endswith(end) for name in (*RECIPES, *FINETUNE_RECIPES))
        else:
            found = is_recipe(word) or not RECIPE.fullmatch(word)
        if not found:
            unknown.append(word)
    assert not unknown


@cache
def known_flags() -> frozenset[str]:
    parsers = [torchrun_parser(), *(parser_of(program) for program in (*MAINS, *SCRIPTS))]
    return frozenset(flag for parser in parsers for action in parser._actions for flag in action.option_strings)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_flags_exist(path: Path) -> None:
    named = {flag for span in SPAN.findall(prose_of(path)) for flag in FLAG.findall(span)}
    assert sorted(named - known_flags() - OTHER_FLAGS) == []


def test_named_commits_are_in_the_history() -> None:
    if not has_whole_history():
        pytest.skip("no git checkout with its whole history")
    history = git("rev-list", "HEAD")
    named = {(path.name, found) for path in DOCUMENTS for found in COMMIT.findall(path.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(commit.startswith(name[1]) for commit in history)] == []


def test_the_table_of_faults_has_the_rows_of_the_tests() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    marked = {row for text in sources for row in re.findall(r'mark\.fault\(\s*"(\w+)"', text)}
    with open(ROOT / "docs" / "faults.csv", newline="") as file:
        assert {row["row"] for row in csv.DictReader(file)} == marked


def test_costs_of_a_step_are_those_of_the_files_on_every_page() -> None:
    """Counts as they are, times within their noise of 0.04."""
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    table = re.findall(r"^\| \.(\d+) \| (\S+) \| (\S+) / \S+ \| (\S+) / \S+ \| (\S+) / \S+ \|", text, re.MULTILINE)
    assert len(table) == 4
    columns = ["gmac_ratio", "saved_mb_ratio", "ms_ratio"]
    for name in ("cost_vit_base_cpu.csv", "cost_reference_cpu.csv"):
        with open(ROOT / "docs" / name, newline="") as file:
            measured = {row["recipe"]: [float(row[column]) for column in columns] for row in csv.DictReader(file)}
        for throw_ratio, method, *printed in table:
            recipe = f"{method.lower().replace('-', '')}{throw_ratio}_vit_base_100ep"
            if recipe in measured:
                gmac, saved, seconds = measured[recipe]
                assert [f"{gmac:.3f}"[1:], f"{saved:.3f}"[1:]] == printed[:2]
                assert float(printed[2]) == pytest.approx(seconds, abs=0.045)
    (prmim50,) = (row[-1] for row in table if row[:2] == ("50", "PR-MIM"))
    for page in (ROOT / "README.md", ROOT / "docs" / "pretrain.md"):
        assert f"{prmim50} ± 0.04 of MAE's time" in " ".join(page.read_text().split())


def test_the_third_study_prints_the_differences_of_its_rows() -> None:
    with open(ROOT / "docs" / "study_frozen14.csv", newline="") as file:
        outcome = {
            (row["arm"], row["seed"]): (float(row["knn"]) + float(row["ridge"])) / 2 for row in csv.DictReader(file)
        }

    def mean(method: str, seed: str) -> float:
        arms = ["mae"] if method == "MAE" else [method.lower().replace("-", "") + ratio for ratio in ("50", "65")]
        return statistics.mean(outcome[arm, seed] for arm in arms)

    row = re.compile(
        r"^\| \d (\S+) − ([\w-]+)[^|]*\| ([−+][\d.]+) \| [^|]*\| ([\d.]+) \| [^|]+\| [^|]+\|$", re.MULTILINE
    )
    third, _, _ = (ROOT / "docs" / "study.md").read_text().partition("## The second study")
    printed = row.findall(third)
    assert len(printed) == 5
    for method, other, difference, deviation in printed:
        differences = [mean(method, seed) - mean(other, seed) for seed in sorted({seed for _, seed in outcome})]
        assert difference == f"{statistics.mean(differences):+.2f}".replace("-", "−")
        assert deviation == f"{statistics.stdev(differences):.2f}"


def test_the_readme_is_a_front_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert [path.name for path in DOCUMENTS[1:] if f"docs/{path.name}" not in text] == []


def test_the_table_of_the_code_names_every_module() -> None:
    table = (ROOT / "docs" / "pretrain.md").read_text().partition("## The code")[2]
    files = {path.name for path in ROOT.glob("*.py")} - {path.name for path in ROOT.glob("models_*_pr.py")}
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []


@pytest.mark.fault(
    "F54", "the guide's batch script, alone and in an array: srun ends with a code", "requeued if that can help"
)
@pytest.mark.parametrize(
    ("code", "moved", "state", "requeued"),
    [
        (0, True, "RUNNING", False),
        (2, True, "RUNNING", False),
        (3, True, "RUNNING", False),
        (75, False, "RUNNING", True),
        (140, False, "RUNNING", True),  # killed by USR2 before the run could handle it
        (137, True, "RUNNING", True),
        (137, False, "RUNNING", False),
        (143, True, "COMPLETING", False),  # cancelled
    ],
)
def test_the_batch_script_requeues_what_can_go_on(
    code: int, moved: bool, state: str, requeued: bool, tmp_path: Path
) -> None:
    (script,) = [code for _, code in FENCE.findall((ROOT / "docs" / "cluster.md").read_text()) if "#SBATCH" in code]
    assert "--kill-on-bad-exit=1" in script
    for array, job in ((None, "77"), ("3", "70_3")):
        out = tmp_path / f"output/prmim50_base{array or ''}"
        out.mkdir(parents=True)
        (out / ".progress").write_text("20\n")
        fakes = {
            "srun": f"{'echo 40 > ' + shlex.quote(str(out / '.progress')) if moved else ':'}; exit {code}",
            "squeue": f'[ "$3" = {job} ] && echo {state}',
            "scontrol": f'echo "$@" >> {shlex.quote(str(out / "called"))}',
        }
        for name, does in fakes.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
        if array:
            environment |= {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": array}
        assert subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment).returncode == code
        called = (out / "called").read_text() if (out / "called").exists() else ""
        assert called == (f"requeue {job}\n" if requeued else "")
