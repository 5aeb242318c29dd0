import csv
import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

import main_pretrain
from framework import Framework
from models_mae_pr import MaskedAutoencoderViT
from scripts import profile_pretrain
from scripts.parts.reference_mae import ReferenceMAE
from scripts.profile_pretrain import Step, add_ratios, markdown
from tests.patches import StandIn
from tests.runs import refused
from util import costs
from util.costs import saved_bytes
from util.plots import pyplot

ROOT = Path(__file__).resolve().parents[2]


def row(recipe, model, throw_ratio, gmac, saved_mb, ms, peak_mb=None):
    costs = dict(gmac=gmac, saved_mb=saved_mb, ms=ms, peak_mb=peak_mb, images_per_second=8e3 / ms, parameters=86.0)
    how = dict(batch_size=8, rounds=3, device="cpu", precision="fp32", torch="2", attention="auto", compile=False)
    return dict(recipe=recipe, model=model, throw_ratio=throw_ratio, **costs, **how)


def settings_of(*flags):
    return vars(profile_pretrain.parse_with_recipe(profile_pretrain.get_args_parser(), profile_pretrain.RECIPES, flags))


def test_saved_memory_of_an_image_is_that_of_its_activations():
    """Weights do not count, because they are saved once per batch."""
    args = profile_pretrain.parse_args(["cifar10", "--batch_size", "2", "--device", "cpu"])[1]
    settings = settings_of("--model", "mae_vit_micro_patch4")
    step = Step(settings, args, torch.device("cpu"), None)
    count = lambda n: saved_bytes(lambda: step.forward(*step.repeated(n)))  # noqa: E731
    assert count(6) - count(3) == pytest.approx(3e6 * step.saved_mb())
    kept_by_weights = count(1) - 1e6 * step.saved_mb()
    assert kept_by_weights > 0.8 * 4 * sum(
        p.numel() for p in step.model.parameters() if p.dim() > 1 and p.requires_grad
    )


def test_peak_memory_is_that_of_the_first_timed_step_without_the_other_recipes(monkeypatch):
    """Check the order of the calls, with stand-ins for those of CUDA. Each recipe is built once, and none is freed."""
    events, held = [], iter([1e9, 3e9])
    init, call, warm_up = Step.__init__, Step.__call__, Step.warm_up

    def init_as_if_on_cuda(step, settings, args, device, images):
        init(step, settings, args, torch.device("cpu"), images)
        step.device = device
        events.append("built")

    monkeypatch.setattr(Step, "__init__", init_as_if_on_cuda)
    monkeypatch.setattr(Step, "__call__", lambda step: events.append("step") or call(step))
    monkeypatch.setattr(Step, "warm_up", lambda step: warm_up(step) or events.append("warm"))
    monkeypatch.replace_in(costs, "torch.cuda.synchronize", lambda: None)
    monkeypatch.replace_in(costs, "torch.cuda.get_device_name", lambda: "GPU")
    monkeypatch.replace_in(profile_pretrain, "torch.cuda.reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.replace_in(profile_pretrain, "torch.cuda.memory_allocated", lambda: next(held))
    peak = lambda: events.append("read") or 5e9  # noqa: E731
    monkeypatch.replace_in(profile_pretrain, "torch.cuda.max_memory_allocated", peak)
    args = profile_pretrain.parse_args(["cifar10", "--batch_size", "2", "--rounds", "1"])[1]
    recipes = [settings_of("--model", "mae_vit_micro_patch4", "--throw_ratio", ratio) for ratio in ("0", "0.5")]
    *_, rows = profile_pretrain.measure(recipes, args, torch.device("cuda"), None)
    assert [row["peak_mb"] for row in rows] == [4000, 2000]
    assert events == ["built", "step", "step", "warm", "reset", "step", "read"] * 2


def test_files_hold_what_was_measured_so_far(monkeypatch, tmp_path):
    """The second recipe fails: the first one's row, of one round, is in the files."""
    measure_first = profile_pretrain.measure_first

    def measure_one(settings, *rest):
        return measure_first(settings, *rest) if settings["recipe"] == "cifar10_mae" else pytest.fail("cut")

    monkeypatch.setattr(profile_pretrain, "measure_first", measure_one)
    flags = ["--batch_size", "2", "--rounds", "5", "--device", "cpu"]
    files = ["--csv", str(tmp_path / "cost.csv"), "--markdown", str(tmp_path / "cost.md")]
    with pytest.raises(pytest.fail.Exception):
        profile_pretrain.main(["cifar10_mae", "cifar10", *flags, *files])
    with open(tmp_path / "cost.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["recipe"] == "cifar10_mae" and row["rounds"] == "1" and float(row["ms"]) > 0
    assert "1 rounds" in (tmp_path / "cost.md").read_text()


def test_compiled_is_the_timed_step_and_said_in_the_title(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(Framework, "compile", lambda model, **options: calls.append(options))
    flags = ["cifar10", "--batch_size", "2", "--rounds", "1", "--device", "cpu"]
    profile_pretrain.main(flags)
    assert not calls and "compiled" not in capsys.readouterr().out
    profile_pretrain.main([*flags, "--compile"])
    assert (
        calls == [dict(fullgraph=True, dynamic=False)] and ", compiled\n" in capsys.readouterr().out.partition("|")[0]
    )


def test_ratios_are_to_the_same_model_without_throwing():
    base, large = "mae_vit_base_patch16", "mae_vit_large_patch16"
    rows = [
        row("prmim50_vit_base_100ep", base, 0.5, 6.0, 30.0, 70.0, peak_mb=8.0),
        row("mae_vit_base_100ep", base, 0.0, 8.0, 40.0, 100.0, peak_mb=10.0),
        row("prmim50_vit_large_100ep", large, 0.5, 16.0, 60.0, 50.0),
    ]
    add_ratios(rows)
    assert [r["gmac_ratio"] for r in rows] == [0.75, 1.0, 16 / 6]  # no ViT-L throws nothing: relative to the first row
    assert [r["ms_ratio"] for r in rows] == [0.7, 1.0, 50 / 70]
    assert [r["peak_mb_ratio"] for r in rows] == [0.8, 1.0, None]
    assert [r.get("paper_memory_ratio") for r in rows] == [0.64, None, 0.82]
    text = markdown(rows)
    assert text.startswith("batch 8, cpu, fp32, 3 rounds, torch 2\n\n| recipe | ρ_d |")
    ours = "6.000 | 0.750 / 0.72 | 30.0 | 0.750 / 0.64 | 8 | 0.800 / 0.64 | 70.0 | 0.700 / 0.75"
    assert f"| prmim50_vit_base_100ep | 0.5 | 86.0 | {ours} | 114.3 |\n" in text
    theirs = "16.000 | 2.667 / 0.87 | 60.0 | 2.000 / 0.82 | – | – | 50.0 | 0.714"
    assert f"| prmim50_vit_large_100ep | 0.5 | 86.0 | {theirs} | 160.0 |\n" in text


def test_the_plot_has_a_line_for_each_model_and_way(tmp_path):
    plt, drawn = pyplot("prmim-cost"), []
    plt = StandIn(plt, subplots=lambda *a, _subplots=plt.subplots, **k: drawn.append(_subplots(*a, **k)) or drawn[-1])
    base, large = "mae_vit_base_patch16", "mae_vit_large_patch16"
    rows = [row("mae", base, 0.0, 10, 10, 10), row("plain50", base, 0.5, 7, 6, 7)]
    rows.append(row("prmim50_vit_base_100ep", base, 0.5, 7, 6, 8))
    profile_pretrain.plot(plt, add_ratios(rows), tmp_path / "one.svg")
    rows += [row("mael", large, 0.0, 20, 20, 20), row("prmim50_vit_large_100ep", large, 0.5, 18, 16, 17)]
    profile_pretrain.plot(plt, add_ratios(rows), tmp_path / "two.svg")
    lines = [{line.get_label(): list(line.get_ydata()) for line in axes[0].lines} for _, axes in drawn]
    assert lines[0] == {"PR-MIM": [1, 0.7], "plain": [1, 0.7], "paper": [0.72]}
    ours = {"PR-MIM, mae_vit_base": [1, 0.7], "plain, mae_vit_base": [1, 0.7], "PR-MIM, mae_vit_large": [1, 0.9]}
    assert lines[1] == ours | {"paper": [0.72, 0.87]} and (tmp_path / "two.svg").stat().st_size > 5000


def test_the_files_numbers_are_the_unrounded_ones(tmp_path):
    rows = add_ratios(
        [row("a", "mae_vit_base_patch16", 0.0, 9.67512345, 40 / 3, 1e3 / 7), row("b", "x", 0.5, 7, 10, 3, 1 / 3)]
    )
    profile_pretrain.write_csv(tmp_path / "cost.csv", profile_pretrain.COLUMNS, rows)
    with open(tmp_path / "cost.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == profile_pretrain.COLUMNS and set(rows[0]) < set(profile_pretrain.COLUMNS)
    texts = ("recipe", "model", "device", "precision", "torch", "attention", "compile")
    for was, now in zip(rows, read, strict=True):
        assert {k: str(v) for k, v in was.items() if k in texts} == {k: now[k] for k in texts}
        assert {k: float(v) if v else None for k, v in now.items() if k in was and k not in texts} == {
            k: v for k, v in was.items() if k not in texts
        }


def test_tables_are_recipes():
    for names in profile_pretrain.TABLES.values():
        assert set(names) <= set(profile_pretrain.RECIPES)


def test_a_row_a_recipe_on_the_console_and_in_files(photos, tmp_path, capsys):
    flags = ["--batch_size", "2", "--rounds", "1", "--device", "cpu", "--data_path", str(photos)]
    files = ["--csv", str(tmp_path / "cost.csv"), "--markdown", str(tmp_path / "cost.md")]
    profile_pretrain.main(["cifar10_mae", "cifar10_plain50", "cifar10", *flags, *files])
    out = capsys.readouterr().out
    assert out.endswith((tmp_path / "cost.md").read_text())
    with open(tmp_path / "cost.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["recipe"] for r in rows] == ["cifar10_mae", "cifar10_plain50", "cifar10"]
    assert [float(r["gmac_ratio"]) for r in rows] == pytest.approx([1, 0.720, 0.726], abs=0.002)
    saved = [float(r["saved_mb_ratio"]) for r in rows]
    assert saved[0] == 1 and saved[1] < saved[2] < 0.75  # the grid of the aggregation is saved, too
    assert all(float(r["ms"]) > 0 and r["peak_mb"] == "" for r in rows)
    assert out.count("| cifar10") == 3 and out.count("in the first of 1 rounds") == 3


@pytest.mark.gpu
def test_peak_memory_falls_with_what_is_thrown(tmp_path):
    flags = ["--batch_size", "64", "--rounds", "1", "--device", "cuda", "--csv", str(tmp_path / "cost.csv")]
    profile_pretrain.main(["mae_vit_base_100ep", "prmim50_vit_base_100ep", *flags])
    with open(tmp_path / "cost.csv", newline="") as file:
        mae, ours = csv.DictReader(file)
    assert 1 > float(ours["peak_mb_ratio"]) > 0.5 and float(mae["peak_mb"]) > 64 * float(mae["saved_mb"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give names of recipes, or --table"),
        ("cifar10 --table large", "give names of recipes, or --table"),
        ("cifra10", "profile_pretrain.py: error: unknown recipe 'cifra10'; close to it: cifar10"),
        ("cifar10 --rounds 0", "must be at least 1, got 8, 0 and 1"),
        ("cifar10 --batch_size 0", "must be at least 1, got 0, 7 and 1"),
        ("cifar10 --predict H200 --gpus 0", "must be at least 1, got None, 7 and 0"),
        ("cifar10 --predict H200 --plot x.svg", "--predict goes without --against and --plot"),
        ("cifar10 --predict V100", "invalid choice: 'V100'"),
        ("cifar10 --csv .", "'.' cannot be written: it is a folder"),
        ("cifar10 --csv setup.cfg/cost.csv", "cannot be made: File exists"),
        ("cifar10 --plot cost.xyz", "--plot 'cost.xyz' must end in .svg or .png"),
        ("cifar10 --data_path nowhere", "nowhere"),
    ],
)
def test_errors_come_before_any_measurement(flags, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").touch()
    monkeypatch.setattr(profile_pretrain, "measure", lambda *_: pytest.fail("measured"))
    assert message in refused(capsys, profile_pretrain.main, *flags.split())


def test_too_little_memory_says_what_to_do(monkeypatch, capsys):
    def measure(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profile_pretrain, "measure", measure)
    error = refused(capsys, profile_pretrain.main, "cifar10", "cifar10_mae", "--batch_size", "96")
    assert "2 recipes" in error and "batch of 96" in error and "give a smaller --batch_size, or fewer recipes" in error


def test_the_gpu_benchmark_refuses_without_a_gpu(tmp_path):
    """It ends before the set-up, which needs more programs than this PATH has."""
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}" if os.path.exists(f"/usr/bin/{tool}") else f"/bin/{tool}")
    script = ROOT / "scripts/benchmark_gpu.sh"
    done = subprocess.run(
        [tmp_path / "bash", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=240
    )
    assert (
        done.returncode == 1 and done.stderr == "benchmark_gpu.sh: error: no NVIDIA GPU here (nvidia-smi lists none)\n"
    )


def run_benchmark(tmp_path, failing):
    """Run it with stand-ins for nvidia-smi and python, which prints its arguments and fails if they hold `failing`."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: stand-in\n")
    stand_in = f'printf "%q " "$@"\necho\ncase "$*" in *"{failing}"*) exit 2;; esac\n'
    (tmp_path / "python").write_text(f"#!/usr/bin/env bash\n{stand_in}")
    for tool in ("nvidia-smi", "python"):
        (tmp_path / tool).chmod(0o755)
    if not (tmp_path / "out").exists():
        (tmp_path / "out").mkdir()
        for name in ("environment.txt", "cost_base.md", "cost_mine.md"):
            (tmp_path / "out" / name).write_text("of an earlier run")
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "PRMIM_SETUP": "0",
        "IMAGES": "photos",
    }
    return subprocess.run(
        ["bash", ROOT / "scripts/benchmark_gpu.sh"], env=env, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(
    ("failing", "status", "message"),
    [
        ("nothing", 0, ""),
        ("-m gpu", 1, ""),
        ("--table ablation", 1, "cost_base failed"),
        ("--table large", 1, "cost_large failed"),
    ]
    + [
        ("reference --compile", 1, "cost_compiled failed"),
        ("main_pretrain.py", 1, "from JPEGs failed"),
    ],
)
def test_the_gpu_benchmark_runs_to_its_end_whatever_fails(tmp_path, failing, status, message):
    done = run_benchmark(tmp_path, failing)
    assert done.returncode == status and message in done.stderr and bool(done.stderr) == bool(message)
    for flags in (
        "--table ablation --against reference",
        "--table large --batch_size 256",
        "--against reference --compile",
    ):
        assert flags in done.stdout
    assert "main_pretrain.py --recipe prmim50_vit_base_100ep --data_path photos" in done.stdout
    assert "-m gpu" in (tmp_path / "out/tests.txt").read_text()
    assert "GPU 0: stand-in" in (tmp_path / "out/environment.txt").read_text()
    assert not (tmp_path / "out/cost_base.md").exists()  # the stand-in does not write it
    assert (tmp_path / "out/cost_mine.md").exists()


def test_the_gpu_benchmark_leaves_other_folders_alone(tmp_path):
    for name in ("cost_vit_base_cpu.csv", "mine/notes"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "out" / name).write_text("mine")
    done = run_benchmark(tmp_path, "nothing")
    assert done.returncode == 1 and "holds other files: give a new or empty folder" in done.stderr
    found = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == ["cost_vit_base_cpu.csv", "mine/notes"]


def test_the_gpu_benchmark_s_commands_are_understood_and_its_limits_are_those_it_promises(tmp_path, monkeypatch):
    monkeypatch.replace_in(profile_pretrain, "torch.cuda.is_available", lambda: True)
    lines = [shlex.split(line) for line in run_benchmark(tmp_path, "nothing").stdout.splitlines()]
    profiles = [profile_pretrain.parse_args(line[1:])[1] for line in lines if line[0].endswith("profile_pretrain.py")]
    assert [(args.table, args.compile, args.batch_size) for args in profiles] == [
        (None, True, 512),
        ("ablation", False, 512),
        ("large", False, 256),
    ]
    assert all(args.csv and args.markdown for args in profiles)
    parts = (ROOT / "scripts/benchmark_gpu.sh").read_text().split("# From JPEGs")
    seconds = [
        sum(int(n) + 5 for n in re.findall(r"^ *(?:timeout -k 5|profile \w+) (\d+)", text, re.M)) for text in parts
    ]
    assert "in at most 10 minutes" in parts[0] and seconds[0] == 600
    assert "3.5 minutes" in parts[0] and 2 * seconds[1] == 210


def test_the_reference_is_compared_with_its_own_size():
    rows = [row("reference", "mae_vit_base_patch16", 0.0, 10, 20, 30), row("a", "mae_vit_base_patch16", 0.5, 7, 10, 15)]
    rows.append(row("b", "mae_vit_large_patch16", 0.5, 20, 40, 60))
    assert [r.get("times_reference") for r in add_ratios(rows)] == [1, 2, None]


def test_the_gpu_benchmark_refuses_a_torch_without_cuda(tmp_path):
    done = run_benchmark(tmp_path, "torch.cuda.is_available")
    assert done.returncode == 1 and "PyTorch cannot use it" in done.stderr and "-m gpu" not in done.stdout


def test_the_reference_is_mae_with_nothing_thrown():
    """The reference and our model have the same loss and gradients with equal weights, in float64."""
    torch.manual_seed(0)
    sizes = dict(img_size=64, patch_size=16, embed_dim=96, depth=2, num_heads=3)
    reference = ReferenceMAE(**sizes).double()
    ours = MaskedAutoencoderViT(**sizes, norm_pix_loss=True, throw_ratio=0).double()
    ours.load_official(reference.state_dict())
    imgs, ids_shuffle = torch.randn(3, 3, 64, 64).double(), torch.rand(3, 16).argsort(dim=1)
    losses = reference(imgs, ids_shuffle), sum(ours(imgs, ids_shuffle).values())
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for name in ("blocks.0.attn.qkv.weight", "patch_embed.proj.weight", "cls_token"):
        torch.testing.assert_close(reference.get_parameter(name).grad, ours.get_parameter(name).grad)
    assert torch.isfinite(reference(imgs))  # without ids_shuffle


def test_a_run_against_the_reference(tmp_path, capsys, monkeypatch):
    """A ViT of two blocks, registered as a size of the reference, with all outputs of the script."""
    sizes = dict(patch_size=32, embed_dim=192, depth=2, num_heads=3)
    monkeypatch.setitem(profile_pretrain.SIZES, "mae_vit_tiny_patch16", sizes)
    monkeypatch.setitem(main_pretrain.MODELS, "mae_vit_tiny_patch16", partial(MaskedAutoencoderViT, **sizes))
    monkeypatch.setitem(profile_pretrain.RECIPES, "tiny", dict(model="mae_vit_tiny_patch16", throw_ratio=0.0))
    monkeypatch.setitem(profile_pretrain.RECIPES, "tiny50", dict(model="mae_vit_tiny_patch16", throw_ratio=0.5))
    flags = ["--against", "reference", "--batch_size", "2", "--rounds", "1", "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    profile_pretrain.main(["tiny", "tiny50", *flags, "--csv", "c.csv", "--plot", "p.png"])
    with open("c.csv", newline="") as file:
        rows = {row["recipe"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["reference", "tiny", "tiny50"] and float(rows["reference"]["times_reference"]) == 1
    # The reference embeds and predicts all tokens, and saves the output of softmax.
    assert 1 < float(rows["reference"]["gmac"]) / float(rows["tiny"]["gmac"]) < 1.05
    assert float(rows["tiny50"]["saved_mb"]) < float(rows["tiny"]["saved_mb"]) < float(rows["reference"]["saved_mb"])
    parameters = sum(p.numel() for p in MaskedAutoencoderViT(**sizes, throw_ratio=0).parameters() if p.requires_grad)
    assert float(rows["tiny"]["parameters"]) == parameters / 1e6
    assert (tmp_path / "p.png").stat().st_size > 5000 and "× reference" in capsys.readouterr().out


def test_the_reference_knows_mae_alone(capsys):
    assert "--against reference is for mae_vit_base_patch16" in refused(
        capsys, profile_pretrain.main, "simmim_vit_base_100ep", "--against", "reference", "--device", "cpu"
    )
