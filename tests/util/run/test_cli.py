"""The parser's help and errors, the flags that a command line sets, and how programs end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from util.flag import Flag
from util.run.cli import (
    Parser,
    parse_with_recipe,
    prepare_file,
    user_errors,
)

ROOT = Path(__file__).resolve().parents[3]


def many_flags():
    """A parser of 22 flags, of which three are everyday ones."""
    parser = Parser("x.py", "", Flag("run", str, "here", "folder of the run", positional=True, nargs="?"))
    parser.add_flags(
        "data",
        Flag("data_path", str, "data", "root of the data; CIFAR is downloaded to it", everyday=True),
        Flag("hflip", bool, True, "mirror 50 %%", everyday=True),
    )
    parser.add_flags("rare", *[Flag(f"rare_{number}", help="seldom used") for number in range(19)])
    parser.add_flags("run", Flag("num_workers", int, help="workers (default: one per core)", everyday=True))
    return parser


def test_help_shows_flags_of_every_day_briefly_and_help_all_all(capsys):
    with pytest.raises(SystemExit, match="0"):
        many_flags().parse_args(["--help"])
    brief = " ".join(capsys.readouterr().out.split())
    assert "--data_path PATH root of the data (default: data)" in brief
    assert "mirror 50 % (default: True)" in brief
    assert "--rare" not in brief
    with pytest.raises(SystemExit, match="0"):
        many_flags().parse_args(["--help_all"])
    whole = " ".join(capsys.readouterr().out.split())
    assert "root of the data; CIFAR is downloaded to it (default: data)" in whole
    assert whole.count("seldom used") == 19


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--data_pth=x", "--data_path"),
        ("--workers 3", "--num_workers"),
        ("--data x", "--data_path"),  # no abbreviations: which ones are clear depends on the model
        ("more words", "words"),
        ("--hflip False", "False"),
        ("--num_workers x", "--num_workers"),
    ],
)
def test_misspelt_flags(flags, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        many_flags().parse_args(["here", *flags.split()])
    assert named in capsys.readouterr().err


def make_parser():
    parser = Parser(
        "main_x.py",
        "",
        Flag("run", str, "here", positional=True, nargs="?"),
        Flag("recipe"),
        Flag("output_dir", str, "output/x"),
        Flag("rate", float),
        Flag("epochs", int, 3),
        Flag("size", int, [32], nargs="*"),
        Flag("compile", bool, False),
        Flag("tag", repeats=True),
        Flag("eval", bool, False),
    )
    parser.set_defaults(rate=0.5, hidden="value")
    return parser


def test_the_command_wins_over_the_recipe_and_the_recipe_over_defaults():
    parser = make_parser()
    recipes = {"fast": {"epochs": 1, "rate": 2.0, "compile": True}}
    words = ["--recipe", "fast", "--rate=0.5", "--no-compile", "--size", "--tag", "a", "--tag", "b"]
    args = parse_with_recipe(parser, recipes, words)
    given = {"recipe": "fast", "rate": 0.5, "compile": False, "size": [], "tag": ["a", "b"]}
    assert {name: parser.given[name] for name in given} == given
    assert not {"epochs", "output_dir", "eval", "hidden"} & parser.given.keys()
    expected = {"run": "here", "output_dir": "output/x", "epochs": 1, "eval": False, "hidden": "value"}
    assert vars(args) == given | expected
    assert parser.flags_chosen().keys() == given.keys() | {"epochs"}
    assert parser.defaults["epochs"] == 3


def test_a_recipe_of_unknown_flags_is_refused():
    with pytest.raises(SystemExit, match="2"):
        parse_with_recipe(make_parser(), {"odd": {"depth": 3}}, ["--recipe", "odd"])


@pytest.mark.parametrize(
    ("word", "flag", "value"),
    [
        ("--output_dir=~/x", "output_dir", "/home/me/x"),
        ("~/x", "run", "/home/me/x"),
        ("LABEL=~/x", "run", "LABEL=/home/me/x"),
        ("./~/x", "run", "./~/x"),
    ],
)
def test_the_home_of_the_user_is_expanded(monkeypatch, word, flag, value):
    monkeypatch.setenv("HOME", "/home/me")
    args = make_parser().parse_args([word])
    assert getattr(args, flag) == value


def parse_schedule(flags, recipe=None):
    """Parses flags of a schedule whose defaults are 40 of 100 epochs and 50 of 500 iterations."""
    parser = Parser(
        "main_x.py",
        "",
        Flag("recipe"),
        Flag("epochs", int, 100),
        Flag("num_iters", int),
        Flag("warmup_epochs", float),
        Flag("warmup_iters", int),
    )
    parser.set_defaults(warmup_epochs=40, warmup_iters=50, num_iters=500)
    argv = flags.split()
    if recipe is not None:
        argv += ["--recipe", "mine"]
    return parse_with_recipe(parser, {"mine": recipe or {}}, argv)


LONG = {"epochs": 800, "warmup_epochs": 40}


@pytest.mark.parametrize(
    ("flags", "recipe", "warmups"),
    [
        ("", None, (40, 50)),
        ("--epochs 101", None, (40, 50)),
        ("--epochs 40", None, (16, 50)),
        ("--epochs 1600", LONG, (40, 50)),
        ("--epochs 400", LONG, (40, 50)),  # as the paper's own recipe
        ("--epochs 300", LONG, (30, 50)),
        ("--epochs 39", LONG, (3.9, 50)),
        ("", {"epochs": 20}, (8, 50)),  # the default warm-up
        ("--epochs 50", {"warmup_epochs": 10}, (5, 50)),
        ("--num_iters 30", None, (40, 3)),
        ("--num_iters 499", None, (40, 49)),
        ("--epochs 50 --warmup_epochs 40", None, (40, 50)),
    ],
)
def test_a_warm_up_that_no_flag_gives_fits_into_a_shorter_schedule(flags, recipe, warmups):
    args = parse_schedule(flags, recipe)
    assert (args.warmup_epochs, args.warmup_iters) == warmups
    assert isinstance(args.warmup_iters, int)


def test_a_recipe_s_warm_up_of_more_than_half_of_the_schedule_must_be_typed(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_schedule("", {"epochs": 10, "warmup_epochs": 6})
    assert "--warmup_epochs" in capsys.readouterr().err
    assert parse_schedule("--warmup_epochs 6", {"epochs": 10, "warmup_epochs": 6}).warmup_epochs == 6
    assert parse_schedule("", {"epochs": 10, "warmup_epochs": 5}).warmup_epochs == 5


MODELS = ["mae_tiny_patch16", "mae_small_patch16", "mae_base_patch16", "mae_large_patch16"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("--model list", 0, "\n".join(MODELS)),
        ("--recipe list", 0, "fast\nslow1\nslow2\n"),
        ("--model mae_bse_patch16", 2, "mae_base_patch16"),
        ("--model resnet", 2, "--model list"),
        ("--recipe slow", 2, "slow1, slow2"),
    ],
)
def test_names_of_models_and_recipes(argv, code, words, capsys):
    parser = Parser("main_x.py", "", Flag("recipe"), Flag("model", choices=MODELS))
    with pytest.raises(SystemExit) as stop:
        parse_with_recipe(parser, {"fast": {}, "slow1": {}, "slow2": {}}, argv.split())
    done = capsys.readouterr()
    assert stop.value.code == code
    assert words in done.out + done.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("first line\n    second line\n\nthird"), 2, "first line second line third"),
        (FileNotFoundError(2, "No such file or directory", "/no/where"), 2, "/no/where"),
        (OSError("the disk is gone"), 2, "the disk is gone"),
        (PermissionError(13, "Permission denied", "/"), 2, "root"),
        (FloatingPointError("not finite"), 3, "not finite"),
        (OSError(28, "No space left on device", "out.pth"), 75, "out.pth"),  # which may pass
        (OSError(5, "Input/output error"), 75, "Input/output error"),
    ],
)
def test_errors_of_users_and_of_the_storage(capsys, error, code, message):
    with pytest.raises(SystemExit) as stop, user_errors(Parser("x.py", "")):
        raise error
    assert stop.value.code == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "--help_all" not in shown  # it is for errors of flags


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), KeyError("a bug"), KeyboardInterrupt()])
def test_other_errors_pass(error):
    with pytest.raises(type(error)), user_errors(Parser("x.py", "")):
        raise error


def run_main(body, **options):
    """Runs a program whose main has this body, and returns the finished process."""
    lines = ["import os, signal, sys, time", "from util.run.cli import run_program", "def main():", f"    {body}"]
    code = "\n".join([*lines, "run_program(main, 'x.py')"])
    options = {"capture_output": True, **options}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=240, **options)


def test_ctrl_c_stops_a_loop_of_a_shell():
    """As on a terminal, the shell gets SIGINT, too. After a program with exit code 130 it would continue."""
    code = "from util.run.cli import run_program\nimport os, signal, time\ndef main():\n"
    code += "    os.killpg(0, signal.SIGINT); time.sleep(60)\nrun_program(main, 'x.py')"
    command = ["bash", "-c", 'for i in 1 2 3; do echo $i; "$0" -c "$1"; done', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "1\n", "x.py: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of its parent's death")
@pytest.mark.parametrize(("environment", "number"), [({"TORCHELASTIC_RUN_ID": "none"}, signal.SIGTERM), ({}, 0)])
def test_only_processes_of_torchrun_end_with_their_parent(environment, number):
    """A run that nohup has started outlives its shell."""
    ask = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    done = run_main(ask, env=os.environ | environment)  # 2: PR_GET_PDEATHSIG
    assert (done.returncode, done.stdout) == (0, f"{int(number)}\n"), done.stderr


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("body", "code"), [("sys.exit(2)", 2), ("raise KeyError('a bug')", 1), ("pass", 0)])
def test_a_failed_process_does_not_wait_for_the_other_ranks_of_nccl(backend, body, code):
    """The interpreter's end, which runs what atexit holds, would wait for them."""
    group = f"SimpleNamespace(is_initialized=lambda: True, get_backend=lambda: '{backend}')"
    begin = "import atexit; from types import SimpleNamespace; atexit.register(print, 'the end'); "
    done = run_main(f"{begin}sys.modules['torch.distributed'] = {group}; {body}")
    assert done.returncode == code
    assert done.stdout == ("" if backend == "nccl" and code else "the end\n")
    assert ("KeyError: 'a bug'" in done.stderr) == (code == 1)


def test_a_closed_pipe_ends_a_program_silently():
    reader, writer = os.pipe()
    os.close(reader)
    for body in ("print('x')", "[print('x' * 80) for _ in range(5000)]", "print('x'); sys.exit(0)"):
        done = run_main(body, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    os.close(writer)


@pytest.mark.parametrize(("outcome", "code"), [("False", 75), ("None", 0), ("True", 0), ("sys.exit(3)", 3)])
def test_exit_codes(outcome, code):
    done = run_main(f"return {outcome}")
    assert (done.returncode, done.stderr) == (code, "")


def test_why_a_path_cannot_be_written(tmp_path):
    prepare_file("--csv", None)
    prepare_file("--csv", tmp_path / "a" / "b" / "new.csv", [".csv"])
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "new.txt"):
        with pytest.raises(ValueError, match="^--csv"):
            prepare_file("--csv", path, [".csv", ".md"])
    with pytest.raises(OSError, match="file"):
        prepare_file("--csv", tmp_path / "file" / "b" / "new.csv")


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--model vit_nano_patch4", "sets --patch_size 16, but --model vit_nano_patch4"),
        ("--model vit_nano_patch4 --patch_size 4", ""),
        ("--model vit_large_patch16", ""),
        ("--model vit_giant_patch14", ""),  # as the recipe's own model, whose patches the recipe changes
        ("--model swin_base", ""),
        ("", ""),
    ],
)
def test_a_recipe_s_patches_do_not_silently_replace_those_in_a_model_s_name(flags, refusal, capsys):
    parser = Parser("x.py", "", Flag("recipe"), Flag("model", str, "vit_base_patch16"), Flag("patch_size", int))
    recipes = {"deep": {"model": "vit_huge_patch14", "patch_size": 16}}
    try:
        parse_with_recipe(parser, recipes, ["--recipe", "deep", *flags.split()])
    except SystemExit:
        assert refusal
    assert refusal in capsys.readouterr().err


def numbers_parser():
    parser = Parser("x.py", "", Flag("steps", int, at_least=1))
    parser.add_flags(
        "of a group",
        Flag("share", float, at_least=0, at_most=1),
        Flag("norm", float, above=0),
        Flag("betas", float, nargs=2),
        Flag("sides", int, nargs="*", at_least=1),
        Flag("rates", float, nargs="+", repeats=True, above=0, below=1),
    )
    return parser


@pytest.mark.parametrize(
    "flags",
    [
        "--steps 0",
        "--share -1",
        "--share 1.5",
        "--norm 0",
        "--norm inf",
        "--betas 0.9 nan",
        "--sides 4 0",
        "--rates 0.1 0.2 --rates 0.5 1",
    ],
)
def test_a_number_outside_the_bounds_of_its_flag_is_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        numbers_parser().parse_args(flags.split())
    assert flags.split()[0] in capsys.readouterr().err


def test_bounds_hold_for_the_values_of_a_recipe_too():
    parser = numbers_parser()
    assert parser.parse_args(["--steps", "1", "--share", "1", "--norm", "1e-9"]).steps == 1
    parser.set_defaults(steps=0)  # as a recipe does
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([])
