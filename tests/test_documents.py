"""The documents hold what they promise: snippets run, commands parse, names exist, numbers are those of the files."""

import ast
import csv
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import timm
from torch.distributed.run import get_args_parser as torchrun_parser

import main_pretrain
from encoders import classifiers
from frameworks import registry
from recipes import FINETUNE_RECIPES, RECIPES
from scripts import export
from tests.conftest import write_photo
from tests.documents import (
    DOCUMENTS,
    FENCE,
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
from tests.scripts.programs import MAINS, ROOT, SCRIPTS

README = ROOT / "README.md"
# The file that docs/add_a_framework.md shows, with a flag and models of its own.
EXAMPLE = "models_example_pr.py"
ADDS_THE_EXAMPLE = """
import models_example_pr
from frameworks import registry
from tests import patches

registry.FRAMEWORKS += (models_example_pr,)
patches.ALLOWED.add("models_example_pr")
"""
EXAMPLE_FLAG = "--loss_beta"
EXAMPLE_MODELS = "example_"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
PROJECT_FILE = re.compile(
    r"(?<![\w/.<*-])(?:(?:scripts|tools|tests|util|docs|downstream|encoders|frameworks)/[\w./-]*\w"
    r"|(?:main|engine|models|framework|prmim|recipes|submitit_launch|requirements)[\w-]*\.(?:py|txt))(?![\w<*])"
)
MODEL = re.compile(r"\b[a-z]\w*_patch\d+\w*\b")
RECIPE = re.compile(
    r"\w+_\d+ep|(?:\w+_)?(?:finetune|linprobe)_\w+|partial\d+_\w+|inat\d\d_\w+|cifar10(?:_\w+)?|quickstart(?:_finetune)?"
    r"|(?:ade20k|coco)_\w+"
)
COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")
WRITTEN = re.compile(r"--(?:csv|out) \S+")  # files that a command of a page will write
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
OTHER_FLAGS = {"--help", "--signal", "--array", "--kill-on-bad-exit", EXAMPLE_FLAG}  # of sbatch and srun


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
        export.main(["output/photos", "--out", "photos_encoder"])
        export.main(["output/photos", "--out", "model.pt2", "--format", "torch"])
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
    chosen = "ExampleViT and not compile and not two_processes"
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


def test_every_program_is_shown() -> None:
    shown = set()
    for command in all_commands():
        found = program_of(command)
        if found is not None:
            shown.add(found[0])
    wanted = {*MAINS, *(name for name in SCRIPTS if name.startswith("scripts/"))}
    assert sorted(wanted - shown) == []


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


def test_named_models_exist() -> None:
    known = registry.MODELS.keys() | classifiers.MODELS.keys()
    unknown = []
    for path in DOCUMENTS:
        text = FENCE.sub(r"\2", path.read_text()).replace("…", " ")
        for name in sorted(set(MODEL.findall(text)) - known):
            if not (is_recipe(name) or name.startswith(EXAMPLE_MODELS) or timm.is_model(name)):
                unknown.append(f"{page_name(path)}: {name}")
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
    flags = set(OTHER_FLAGS)
    for parser in parsers:
        flags |= parser._option_string_actions.keys()
    return flags


def test_named_flags_exist() -> None:
    unknown = []
    for path in DOCUMENTS:
        for span in SPAN.findall(prose_of(path)):
            for flag in FLAG.findall(span):
                if flag not in known_flags():
                    unknown.append(f"{page_name(path)}: {flag}")
    assert unknown == []


# ------------------------------------------------------------------------------------------------------------- numbers


def rows_of(name: str) -> list[dict[str, str]]:
    with open(ROOT / "docs" / name, newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    """Each row is the mark of a test: what is done, what is expected, and the test's file."""
    marked = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fault":
                row, action, expected = (ast.literal_eval(argument) for argument in node.args)
                marked[row] = {
                    "row": row,
                    "action": action,
                    "expected": expected,
                    "test": page_name(path),
                }
    assert {row["row"]: row for row in rows_of("faults.csv")} == marked


def test_the_costs_of_a_step_are_those_of_the_files() -> None:
    """Counts as they are, times within their noise of 0.04."""
    text = (ROOT / "docs" / "costs.md").read_text()
    row_of_table = r"^\| \.(\d+) \| (\S+) \| (\S+) / \S+ \| (\S+) / \S+ \| (\S+) / \S+ \|"
    printed = {}
    for throw_ratio, method, *cells in re.findall(row_of_table, text, re.MULTILINE):
        arm = method.lower().replace("-", "") + throw_ratio
        printed[f"{arm}_vit_base_100ep"] = cells
    assert len(printed) == 4
    for row in (*rows_of("cost_vit_base_cpu.csv"), *rows_of("cost_reference_cpu.csv")):
        if row["recipe"] in printed:
            macs, memory, time = printed[row["recipe"]]
            assert f"{float(row['gmac_ratio']):.3f}" == f"0{macs}"
            assert f"{float(row['saved_mb_ratio']):.3f}" == f"0{memory}"
            assert float(time) == pytest.approx(float(row["ms_ratio"]), abs=0.045)
    time = printed["prmim50_vit_base_100ep"][-1]
    assert f"{time} ± 0.04 of MAE's time" in " ".join(README.read_text().split())


def test_the_third_study_prints_the_differences_of_its_rows() -> None:
    outcome = {}
    for row in rows_of("studies/study_frozen14.csv"):
        outcome[row["arm"], row["seed"]] = (float(row["knn"]) + float(row["ridge"])) / 2

    def mean(method: str, seed: str) -> float:
        if method == "MAE":
            return outcome["mae", seed]
        arm = method.lower().replace("-", "")
        return (outcome[f"{arm}50", seed] + outcome[f"{arm}65", seed]) / 2

    text = (ROOT / "docs" / "study.md").read_text()
    printed = re.findall(r"^\| (\S+) − (\S+) \| ([−+][\d.]+) \[", text, re.MULTILINE)
    assert len(printed) == 5
    seeds = sorted({seed for _, seed in outcome})
    for method, other, difference in printed:
        differences = [mean(method, seed) - mean(other, seed) for seed in seeds]
        assert difference == f"{statistics.mean(differences):+.2f}".replace("-", "−")


LENGTH_ARMS = ("mae", "plain50", "progressive50", "prmim50")
Outcomes = dict[tuple[str, str, int], list[float]]  # {(outcome, arm, passes): percent of each seed}


def outcomes_of_length() -> Outcomes:
    outcomes: Outcomes = {}
    for row in sorted(rows_of("studies/study_length.csv"), key=lambda row: row["seed"]):
        measured = {"fine-tuned": row["finetuned"], "last block fine-tuned": row["last_block"]}
        values = {outcome: float(percent) for outcome, percent in measured.items() if percent}
        values["frozen"] = (float(row["knn"]) + float(row["ridge"])) / 2
        for outcome, value in values.items():
            outcomes.setdefault((outcome, row["arm"], int(row["passes"])), []).append(value)
    return outcomes


# Student's t at .975, by the number of seeds.
QUANTILES = {4: 3.1824, 8: 2.3646, 18: 2.1098}
Scores = dict[str, dict[str, float]]  # {arm: {seed: percent}}
CONTRASTS = (("plain50", "mae"), ("progressive50", "plain50"), ("prmim50", "mae"), ("prmim50", "progressive50"))


def scores_of(rows: list[dict[str, str]], outcome: str, **conditions: str) -> Scores:
    """Returns the percent of fine-tuning or of frozen features in the rows of a study that meet the conditions."""
    scores: Scores = {}
    for row in rows:
        if any(row[name] != value for name, value in conditions.items()):
            continue
        if outcome == "frozen" and row["knn"]:
            scores.setdefault(row["arm"], {})[row["seed"]] = (float(row["knn"]) + float(row["ridge"])) / 2
        if outcome == "fine-tuned":
            percent = row.get("finetuned") or row.get("top1")
            if percent:
                scores.setdefault(row["arm"], {})[row["seed"]] = float(percent)
    return scores


def printed_difference(scores: Scores, arm: str, other: str) -> str:
    """Returns the mean difference over the seeds of both arms, with its 95 % interval, as the pages print it."""
    seeds = sorted(scores[arm].keys() & scores[other].keys())
    gains = [scores[arm][seed] - scores[other][seed] for seed in seeds]
    half = QUANTILES[len(seeds)] * statistics.stdev(gains) / len(seeds) ** 0.5
    return f"{statistics.mean(gains):+.2f} ± {half:.2f}".replace("-0.00", "0.00").replace("-", "−")


def all_scores() -> dict[tuple[str, str, str], Scores]:
    """Returns {(steps × images, tokens, outcome): scores}."""
    gpu = rows_of("studies/study_gpu.csv")
    length = rows_of("studies/study_length.csv")
    found = {}
    for outcome in ("fine-tuned", "frozen"):
        for passes, steps in (("32", "6,240"), ("24", "4,680"), ("8", "1,560")):
            found[f"{steps} × 256", "8×8, one rate", outcome] = scores_of(gpu, outcome, passes=passes)
        for passes, steps in (("8", "12,496"), ("4", "6,248"), ("1", "1,562")):
            found[f"{steps} × 32", "8×8", outcome] = scores_of(length, outcome, passes=passes)
        found["1,562 × 32", "14×14", outcome] = scores_of(rows_of("studies/study_frozen14.csv"), outcome)
        found["781 × 32", "14×14", outcome] = scores_of(rows_of("studies/study_grid14.csv"), outcome)
    del found["1,560 × 256", "8×8, one rate", "fine-tuned"]
    return found


def test_when_throwing_pays_is_that_of_the_rows() -> None:
    _, table, _ = re.split("<!-- .*throwing -->", (ROOT / "docs" / "pretrain.md").read_text())
    expected = all_scores()
    lines = table.strip().splitlines()[2:]
    assert len(lines) == len(expected)
    for line in lines:
        setting, seeds, outcome, *differences = line.strip("| ").split(" | ")
        steps, _, tokens = setting.partition(", ")
        scores = expected[steps, tokens, outcome]
        assert seeds == str(min(len(of_arm) for of_arm in scores.values()))
        assert differences == [printed_difference(scores, *contrast) for contrast in CONTRASTS], setting


def test_the_longest_runs_are_printed_as_measured() -> None:
    expected = all_scores()
    text = " ".join((ROOT / "docs" / "study.md").read_text().split())
    level = {}
    for (steps, _, outcome), scores in expected.items():
        level[steps, outcome] = f"{statistics.mean(scores['mae'].values()):.2f}"
    longest, shorter, shortest = "6,240 × 256", "4,680 × 256", "1,560 × 256"
    of_longest = f"{level[longest, 'fine-tuned']} fine-tuned after 32 passes"
    frozen = f"frozen {level[longest, 'frozen']} after 32, {level[shorter, 'frozen']} after 24"
    assert f"MAE reached {of_longest} and {level[shorter, 'fine-tuned']} after 24, {frozen}" in text
    assert f"and {level[shortest, 'frozen']} after 8." in text
    primary = printed_difference(expected[longest, "8×8, one rate", "fine-tuned"], "prmim50", "mae")
    assert f"within ±0.5: {primary}, **undecided**" in text
    _, table, _ = re.split("<!-- .*measured.* -->", README.read_text())
    mae, plain, prmim = [line.strip("| ").split(" | ")[1:] for line in table.strip().splitlines()[2:]]
    for column, outcome in enumerate(("fine-tuned", "frozen")):
        scores = expected["6,240 × 256", "8×8, one rate", outcome]
        assert mae[column] == f"{statistics.mean(scores['mae'].values()):.2f}"
        assert plain[column] == printed_difference(scores, "plain50", "mae")
        assert prmim[column] == printed_difference(scores, "prmim50", "mae")


def test_the_study_of_length_prints_the_answers_of_its_rows() -> None:
    """The five differences, and that the smallest p-value is above Holm's first bound."""
    outcomes = outcomes_of_length()

    def gain(outcome: str, arm: str, other: str, passes: int) -> list[float]:
        pairs = zip(outcomes[outcome, arm, passes], outcomes[outcome, other, passes], strict=True)
        return [value - of_other for value, of_other in pairs]

    gains = [gain("frozen", "progressive50", "plain50", passes) for passes in (1, 4, 8)]
    slopes = [statistics.linear_regression((0, 2, 3), of_seed).slope for of_seed in zip(*gains, strict=True)]
    sampling = []
    for outcome in ("fine-tuned", "frozen"):
        sampling += [gain(outcome, "prmim50", "progressive50", passes) for passes in (1, 4, 8)]
    differences = [
        gain("fine-tuned", "plain50", "mae", 8),
        gain("fine-tuned", "progressive50", "plain50", 8),
        gain("fine-tuned", "prmim50", "mae", 8),
        slopes,
        [statistics.mean(of_seed) for of_seed in zip(*sampling, strict=True)],
    ]
    text = (ROOT / "docs" / "study.md").read_text()
    printed = re.findall(
        r"^\| (\d): .* \| (\S+) \| (\S+) to (\S+) \| (\.\d+) \|$", text.replace("−", "-"), re.MULTILINE
    )
    assert [number for number, *_ in printed] == ["1", "2", "3", "4", "5"]
    for (number, mean, low, high, p), of_seed in zip(printed, differences, strict=True):
        assert mean == f"{statistics.mean(of_seed):+.2f}"
        quantile = 3.4995  # of Student's t with 7 degrees of freedom, at .995
        if number == "3":
            quantile = 2.9980  # at .99
        half = quantile * statistics.stdev(of_seed) / 8**0.5
        assert float(low) == pytest.approx(statistics.mean(of_seed) - half, abs=0.006)
        assert float(high) == pytest.approx(statistics.mean(of_seed) + half, abs=0.006)
        assert float(p) > 0.05 / 5
        # A p-value above the bound is an interval of its level that reaches the value of the test.
        reached = [0.0]
        if number == "3":
            reached = [-0.5, 0.5]
        assert any(float(low) <= value <= float(high) for value in reached)


def test_the_map_of_the_code_names_every_module() -> None:
    table = (ROOT / "docs" / "map.md").read_text()
    files = {path.name for path in ROOT.glob("*.py")} - {path.name for path in ROOT.glob("models_*_pr.py")}
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []


def test_the_names_of_the_map_are_in_the_files_of_their_rows() -> None:
    """A file is named from the root, or from a folder of its row. A name is defined in one of its row's files."""
    missing = []
    for row in re.findall(r"^\|.*\|$", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE):
        spans = SPAN.findall(row)
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


@pytest.mark.fault(
    "F54", "the guide's batch script, alone and in an array: srun ends with a code", "requeued if that can help"
)
@pytest.mark.parametrize(
    ("code", "idle", "moved", "state", "requeued"),
    [  # idle: starts without progress in a row before this one
        (0, 0, True, "RUNNING", False),
        (2, 0, True, "RUNNING", False),
        (3, 0, True, "RUNNING", False),
        (75, 2, False, "RUNNING", True),
        (75, 3, False, "RUNNING", False),
        (75, 3, True, "RUNNING", True),
        (140, 0, False, "RUNNING", True),  # killed by USR2 before the run could handle it
        (137, 0, True, "RUNNING", True),
        (137, 0, False, "RUNNING", True),
        (137, 3, False, "RUNNING", False),
        (143, 0, True, "COMPLETING", False),  # cancelled
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
    idle: int,
    moved: bool,
    state: str,
    requeued: bool,
    element: str,
    job: str,
    variables: dict[str, str],
    tmp_path: Path,
) -> None:
    (script,) = [text for text in blocks_of(ROOT / "docs" / "cluster.md", "bash") if "#SBATCH" in text]
    out = tmp_path / f"output/prmim50_base{element}"
    out.mkdir(parents=True)
    progress = out / ".progress"
    progress.write_text("20\n")
    if idle:
        (out / ".idle-starts-77").write_text("\n" * idle)
    called = out / "called"
    moves = f"echo 40 > {shlex.quote(str(progress))}" if moved else "true"
    fake(tmp_path / "srun", f"{moves}; exit {code}")
    fake(tmp_path / "squeue", f'[ "$3" = {job} ] && echo {state}')
    fake(tmp_path / "scontrol", f'echo "$@" >> {shlex.quote(str(called))}')
    environment = variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert called.exists() == requeued
    if requeued:
        assert called.read_text() == f"requeue {job}\n"


def fake(program: Path, does: str) -> None:
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
