"""The parser's help and errors, and the flags that a command line sets."""

from pathlib import Path

import pytest

from util.flag import Flag
from util.run.cli import (
    Parser,
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
        ("--data_pth=x", "--data_pth"),
        ("--data x", "--data x"),  # no abbreviations: which ones are clear depends on the model
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
    args = parser.parse_args(words, recipes=recipes)
    given = {"recipe": "fast", "rate": 0.5, "compile": False, "size": [], "tag": ["a", "b"]}
    assert {name: parser.given[name] for name in given} == given
    assert not {"epochs", "output_dir", "eval", "hidden"} & parser.given.keys()
    expected = {"run": "here", "output_dir": "output/x", "epochs": 1, "eval": False, "hidden": "value"}
    assert vars(args) == given | expected
    assert parser.flags_chosen().keys() == given.keys() | {"epochs"}
    assert parser.defaults["epochs"] == 3


def test_a_misspelt_flag_is_answered_with_those_close_to_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["--epoch=3"])
    assert "--epoch=3; close to it: epochs" in capsys.readouterr().err


def test_a_recipe_of_unknown_flags_is_refused():
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["--recipe", "odd"], recipes={"odd": {"depth": 3}})


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
    return parser.parse_args(argv, recipes={"mine": recipe or {}})


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
        parser.parse_args(argv.split(), recipes={"fast": {}, "slow1": {}, "slow2": {}})
    done = capsys.readouterr()
    assert stop.value.code == code
    assert words in done.out + done.err


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
        parser.parse_args(["--recipe", "deep", *flags.split()], recipes=recipes)
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
