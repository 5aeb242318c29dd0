import csv
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from scripts import profile_pretrain
from tests.runs import refused
from util.run.cli import Parser

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--batch_size", "2", "--rounds", "2", "--device", "cpu"]


def test_recipes_are_measured_side_by_side(tmp_path, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(profile_pretrain, "compile_parts", compiled.append)
    more = ["--code", "compiled", "--csv", str(tmp_path / "cost.csv")]
    profile_pretrain.main(["cifar10_mae", "cifar10", "cifar10_tec", "cifar10_greenmim", *SMALL, *more])
    assert len(compiled) == 4
    assert "| cifar10_greenmim |" in capsys.readouterr().out
    with open(tmp_path / "cost.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["peak_mb"] == ""
        assert 0 < float(row["ms_q1"]) <= float(row["ms"]) <= float(row["ms_q3"])
    assert [row["rounds"] for row in rows] == ["5", "4", "3", "2"]  # a row is timed with each that comes after it
    mae, ours, _, _ = rows
    assert float(ours["gmac_ratio"]) == pytest.approx(float(ours["gmac"]) / float(mae["gmac"]))
    assert float(ours["saved_mb_ratio"]) < 0.9
    assert float(ours["ms_ratio"]) == pytest.approx(float(ours["ms"]) / float(mae["ms"]))


def test_the_networks_of_others_are_measured_in_the_same_step(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "cost.csv"
    profile_pretrain.main(["cifar10", "timm", "transformers", *SMALL, "--csv", str(path)])
    with open(path, newline="") as file:
        ours, *others = csv.DictReader(file)
    assert [row["recipe"] for row in others] == ["timm", "transformers"]
    for row in others:
        assert float(row["throw_ratio"]) == 0
        assert float(row["saved_mb"]) > 1.2 * float(ours["saved_mb"])  # no token is thrown
        assert float(row["ms"]) > 0


def test_a_model_is_trained_from_images(photos, tmp_path):
    path = tmp_path / "cost.csv"
    flags = [*SMALL, "--batch_size", "4", "--data_steps", "8", "--csv", str(path), "--data_path", str(photos)]
    profile_pretrain.main(["quickstart", *flags])
    with open(path, newline="") as file:
        _, *rows = csv.DictReader(file)
    assert [row["recipe"] for row in rows] == [f"quickstart, R = {repeats}, from {photos}" for repeats in (2, 1, 4)]
    for row in rows:
        assert float(row["images_per_second"]) == pytest.approx(4 / (float(row["ms"]) / 1e3))


def test_a_recipe_has_its_row_before_the_next_one_is_measured(tmp_path, monkeypatch):
    """As if the limit of the benchmark ended it while the second recipe is compiled."""
    measure = profile_pretrain.measure

    def measure_one(name, *rest):
        if name == "cifar10_mae":
            raise KeyboardInterrupt
        return measure(name, *rest)

    monkeypatch.setattr(profile_pretrain, "measure", measure_one)
    path = tmp_path / "cost.csv"
    with pytest.raises(KeyboardInterrupt):
        profile_pretrain.main(["cifar10", "cifar10_mae", *SMALL, "--steps", "3", "--csv", str(path)])
    with open(path, newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["recipe"], row["rounds"], row["steps"]) == ("cifar10", "1", "3")
    assert float(row["ms"]) > 0


@pytest.mark.gpu
def test_peak_memory_is_that_of_a_step_without_the_other_recipes(tmp_path):
    path = tmp_path / "cost.csv"
    recipes = ["cifar10"] * 3  # the first one's peak has the workspaces of cuBLAS
    profile_pretrain.main([*recipes, "--batch_size", "64", "--rounds", "1", "--csv", str(path)])
    with open(path, newline="") as file:
        _, second, third = (float(row["peak_mb"]) for row in csv.DictReader(file))
    assert third == pytest.approx(second, rel=0.1)


@pytest.mark.parametrize("flags", ["cifar11", "timm", "cifar10 --csv /", "cifar10 --device cpu --cuda_graph"])
def test_user_errors(flags, capsys):
    assert flags.split()[-1] in refused(capsys, profile_pretrain.main, *flags.split())


def run_benchmark(tmp_path, failing):
    """Runs it with stand-ins for nvidia-smi and python, which prints its arguments and fails if they hold `failing`."""
    tools = {
        "nvidia-smi": "#!/bin/sh\necho GPU 0: stand-in\n",
        "python": f'#!/usr/bin/env bash\nprintf "%q " "$@"\necho\ncase "$*" in *"{failing}"*) exit 2;; esac\n',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "PRMIM_SETUP": "0",
        "IMAGES": "photos",
    }
    command = ["bash", ROOT / "scripts/benchmark_gpu.sh"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("nothing", ""),
        ("-m gpu", ""),
        ("plain25_vit_base_100ep", "cost_base failed"),
        ("--data_path photos", "cost_short failed"),
    ],
)
def test_the_gpu_benchmark_runs_to_its_end_whatever_fails(tmp_path, failing, message):
    (tmp_path / "out").mkdir()
    for name in ("environment.txt", "cost_base.md", "cost_mine.md"):
        (tmp_path / "out" / name).write_text("of an earlier run")
    done = run_benchmark(tmp_path, failing)
    assert done.returncode == (failing != "nothing")
    assert message in done.stderr
    if not message:
        assert done.stderr == ""
    assert "-m gpu" in (tmp_path / "out/tests.txt").read_text()
    assert "GPU 0: stand-in" in (tmp_path / "out/environment.txt").read_text()
    assert "of an earlier run" not in (tmp_path / "out/cost_base.md").read_text()
    assert (tmp_path / "out/cost_mine.md").exists()


def test_the_gpu_benchmark_s_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.replace_in(profile_pretrain, "torch.cuda.is_available", lambda: True)
    profiles = []
    for line in run_benchmark(tmp_path, "nothing").stdout.splitlines():
        program, *flags = shlex.split(line)
        if program.endswith("profile_pretrain.py"):
            args = Parser("profile_pretrain.py", None, *profile_pretrain.FLAGS).parse_args(flags)
            assert set(args.recipes) <= {*profile_pretrain.RECIPES, *profile_pretrain.PEERS}
            assert args.csv
            assert args.steps == 5
            assert args.data_path == ["photos"] * (args.csv.stem == "cost_short")
            how = (args.code[-1], args.cuda_graph, args.attention)
            profiles.append((len(args.recipes), args.recipes[0], *how, args.batch_size))
    assert profiles == [
        (4, "prmim50_vit_base_100ep", "compiled", False, "flash", 512),
        (2, "prmim50_vit_base_100ep", "compiled", False, "short", 512),
        (2, "prmim50_vit_base_100ep", "compiled", True, "short", 512),
        (7, "mae_vit_base_100ep", "eager", False, "auto", 512),
        (3, "mae_vit_large_100ep", "eager", False, "auto", 256),
    ]
