"""Run a small-scale study of PR-MIM: pre-train and fine-tune all arms with the same images and steps, and report.

    python tools/study.py --data_path CIFAR10 --preset grid14      # the second study of docs/study.md, nine core-hours
    python tools/study.py --data_path CIFAR10 --preset gpu         # a longer one on the paper's 14 x 14 grid, one GPU
    python tools/study.py --data_path CIFAR10 --report output/study.md                # the first study again
    python tools/study.py --data_path CIFAR10 --report output/study.md --arms mae plain50 prmim50 --seeds 0 1 2 3
    python tools/study.py --data_path CIFAR10 --preset peers --report output/study.md   # PR-MIM beside its peers

CIFAR10 contains train/ and val/ with class folders of 32-px images. ARMS below holds what differs between the arms,
PRESETS what they share, and tools/study_report.py what is compared. A seed determines the initial weights, crops and
visible tokens of all arms, so arms are compared seed by seed.

Runs start seed by seed, several at once, each in its own process. The CSV beside --report gets the numbers of each run
as soon as it has finished. The same command continues an interrupted study: it repeats no run of the CSV, even if the
runs' folders are gone. It never replaces a CSV of other settings, so an independent repetition needs another --report.
At the end, and after Ctrl-C, the script writes this preset's section of --report and the figures.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import RECIPES
from tools import study_comparisons, study_report
from tools.study_results import read_rows, write_rows
from util.data.datasets import available_cores
from util.run.cli import Parser, run_program, user_errors
from util.text import count_of, duration

ROOT = Path(__file__).resolve().parents[1]

Flags = dict[str, Any]

# The flags in which arms may differ. All other flags are the preset's.
METHOD = ("throw_ratio", "progressive", "sampling", "kernel_size", "aggregation")


def paper_arm(name: str) -> Flags:
    """The method of a row of the paper's ViT-B tables in recipes.py."""
    recipe = RECIPES[f"{name}_vit_base_100ep"]
    return {key: recipe[key] for key in METHOD if key in recipe}


PRMIM50 = paper_arm("prmim50")
PLAIN50 = paper_arm("plain50")
# {arm: its flags of main_pretrain.py}. "reading" names a variant in tools/readings.py. None: no pre-training.
ARMS: dict[str, Flags | None] = {
    "mae": paper_arm("mae"),
    **{f"{name}{ratio}": paper_arm(f"{name}{ratio}") for ratio in (50, 25, 65) for name in study_report.ABLATION},
    "all": PRMIM50 | dict(applies_to="all"),
    "predictions": PRMIM50 | dict(reading="predictions"),
    **{f"kernel{size}": paper_arm(f"kernel{size}") for size in (3, 5, 9, 11)},
    **{kind: paper_arm(kind) for kind in ("avgpool", "transformer", "convnext")},
    "avgpool_all": paper_arm("avgpool") | dict(applies_to="all"),
    "init_average": PRMIM50 | dict(reading="init_average"),
    "init_normal": PRMIM50 | dict(reading="init_normal"),
    "scratch": None,
}
_CROSSMAE: Flags = dict(model="crossmae_vit_micro_patch4")
_CROSSMAE14: Flags = dict(model="crossmae_vit_nano_patch4")
# PR-MIM and its peers, with half of the tokens thrown.
PEERS: dict[str, Flags | None] = {
    **{name: ARMS[name] for name in ("mae", "plain50", "furthest50", "progressive50", "prmim50")},
    "cell50": PLAIN50 | dict(sampling="running_cell"),
    "attention50": PLAIN50 | dict(sampling="attention"),
    "amt": PLAIN50 | dict(model="amt_vit_micro_patch4", mask_ratio=0.85, throw_ratio=0.4, sampling="attention"),
    "crossmae": paper_arm("mae") | _CROSSMAE,
    "crossmae_plain50": PLAIN50 | _CROSSMAE,
    "crossmae_plain50_lr": PLAIN50
    | _CROSSMAE
    | dict(blr=1e-2 / 3),  # its release scales the rate by the predicted share
    "crossmae_prmim50": PRMIM50 | _CROSSMAE,
    "scratch": None,
}
# The second study, on the paper's grid of 14 x 14 tokens.
GRID14: dict[str, Flags | None] = {
    "mae": ARMS["mae"],
    **{f"{name}{ratio}": ARMS[f"{name}{ratio}"] for ratio in (50, 65) for name in ("plain", "progressive", "prmim")},
    "prmim50_all": ARMS["all"],
    "prmim50_masknorm": PRMIM50 | dict(reading="mask_normalised"),
    "prmim50_convnext": ARMS["convnext"],
    "prmim50_gaussian": PRMIM50 | dict(reading="gaussian"),
    "prmim50_cell": PRMIM50 | dict(sampling="running_cell"),
    "crossmae": paper_arm("mae") | _CROSSMAE14,
    "crossmae_prmim50": PRMIM50 | _CROSSMAE14,
}
# Its learning rate, for MAE alone.
TUNING14: dict[str, Flags | None] = {f"mae_blr{blr:g}": paper_arm("mae") | dict(blr=blr) for blr in (1e-2, 2e-2, 4e-2)}


@dataclass(frozen=True)
class Preset:
    """What all arms share: flags of the mains, data, seeds, and the resources of a run."""

    pretrain: Flags
    finetune: Flags
    labels_per_class: int | None  # fine-tune on the first images of each class, by file name; None: on all
    arms: Mapping[str, Flags | None] = field(default_factory=lambda: ARMS)
    pretrain_per_class: int | None = None  # pre-train on the first images of each class; None: on all
    finetunes: int = 1  # fine-tunings of each encoder, with seeds of their own
    frozen: bool = False  # also measure the frozen encoder, by kNN and ridge regression
    seeds: tuple[int, ...] = (0, 1)
    measured_images: int = 1000  # of val/, for the errors of reconstruction
    device: str = "cpu"
    gib_per_run: float = 1.0  # device memory, which limits the number of runs at once
    scratch: Flags = field(default_factory=lambda: dict(layer_decay=1.0))  # extra fine-tuning flags of arm "scratch"


_GRID14 = Preset(
    pretrain=dict(
        model="mae_vit_nano_patch4", input_size=56, epochs=1, warmup_epochs=0.1, total_batch_size=32, blr=2e-2,
        mask_ratio=0.75, norm_pix_loss=True,
    ),
    finetune=dict(
        recipe="finetune_cifar10", model="vit_nano_patch4", input_size=56, epochs=2, warmup_epochs=0.2,
        total_batch_size=16, blr=3.2e-2,
    ),
    labels_per_class=500,
    arms=GRID14,
    pretrain_per_class=2500,
    finetunes=2,
    frozen=True,
    seeds=study_comparisons.SEEDS,
)  # fmt: skip
PRESETS = {
    # Learning rates: the better of two, for MAE alone. 781 steps of pre-training, 312 of fine-tuning.
    "cpu": Preset(
        pretrain=dict(
            model="mae_vit_micro_patch4", epochs=1, warmup_epochs=0.1, total_batch_size=64, blr=1e-2, mask_ratio=0.75,
            norm_pix_loss=True,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_micro_patch4", epochs=2, warmup_epochs=0.2, total_batch_size=64,
            blr=8e-3,
        ),
        labels_per_class=1000,
    ),
    # As `cpu`, but five epochs of 10,000 images, because attention maps are refreshed between epochs: after each epoch.
    "peers": Preset(
        pretrain=dict(
            model="mae_vit_micro_patch4", epochs=5, warmup_epochs=0.5, total_batch_size=64, blr=1e-2, mask_ratio=0.75,
            norm_pix_loss=True, attention_start=0, attention_every=1,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_micro_patch4", epochs=2, warmup_epochs=0.2, total_batch_size=64,
            blr=8e-3,
        ),
        labels_per_class=1000,
        arms=PEERS,
        pretrain_per_class=1000,
        seeds=(0, 1, 2),
    ),
    # 14 x 14 tokens, as in the paper: the images are enlarged to 56 px.
    "gpu": Preset(
        pretrain=dict(
            model="mae_vit_mini_patch4", input_size=56, epochs=100, warmup_epochs=10, total_batch_size=512,
            batch_size=512, blr=1e-3, mask_ratio=0.75, norm_pix_loss=True,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_mini_patch4", input_size=56, epochs=30, warmup_epochs=3,
            total_batch_size=512, batch_size=512, blr=2e-3, aa="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0,
        ),
        labels_per_class=None,
        seeds=(0, 1, 2),
        measured_images=10_000,
        device="cuda",
        gib_per_run=12.0,
    ),
    # 14 x 14 tokens on two cores: 781 steps of pre-training, twice 624 of fine-tuning.
    "grid14": _GRID14,
    "tuning14": replace(_GRID14, arms=TUNING14, seeds=(100, 101)),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    job: dict[str, Any]  # everything that the result depends on

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def job_hash(self) -> str:
        """The first 12 digits of the SHA-256 of the job."""
        return hashlib.sha256(json.dumps(self.job, sort_keys=True).encode()).hexdigest()[:12]

    def result(self) -> dict[str, Any] | None:
        """What the run measured, or None if it has not finished."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """The command line of flags: {"blr": 1e-2, "progressive": False} becomes ["--blr", "0.01", "--no-progressive"]."""
    argv = []
    for name, value in flags.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", str(value)]
    return argv


def plan(
    preset: Preset, arms: Iterable[str], seeds: Iterable[int], output_dir: Path, data: Mapping[str, Any]
) -> list[Run]:
    """The runs of all arms, seed by seed, on the images that `data` describes."""
    runs = []
    for seed in seeds:
        for arm in arms:
            method = preset.arms[arm]
            if method is None:
                reading, pretrain, finetune = None, None, preset.finetune | preset.scratch
            else:
                own = {name: value for name, value in method.items() if name != "reading"}
                reading, pretrain = method.get("reading"), to_argv(preset.pretrain | own | dict(seed=seed))
                finetune = preset.finetune
            job = dict(
                reading=reading,
                pretrain=pretrain,
                finetune=to_argv(finetune | dict(seed=seed, eval_every=10**6)),  # evaluate after the last epoch
                labels_per_class=preset.labels_per_class,
                measured_images=preset.measured_images,
                data=data,
            ) | extra_measures(preset, seed)
            runs.append(Run(arm, seed, output_dir / "runs" / f"{arm}-seed{seed}", job))
    return runs


def extra_measures(preset: Preset, seed: int) -> dict[str, Any]:
    """The parts of a job that only some presets have. Without them, the jobs of the others are as they always were."""
    job: dict[str, Any] = {}
    if preset.pretrain_per_class not in (None, preset.labels_per_class):
        job["pretrain_per_class"] = preset.pretrain_per_class
    if preset.finetunes > 1:
        job["finetune_seeds"] = [preset.finetunes * seed + i for i in range(preset.finetunes)]
    return job | ({"frozen": True} if preset.frozen else {})


def check_jobs(runs: Iterable[Run]) -> None:
    """Raise ValueError if the folder of a run holds a run with other settings."""
    for run in runs:
        path = run.folder / "job.json"
        if path.exists() and (before := json.loads(path.read_text())) != run.job:
            changed = ", ".join(f"{k}: {before.get(k)} -> {v}" for k, v in run.job.items() if before.get(k) != v)
            raise ValueError(
                f"{str(run.folder)!r} holds a run with other settings ({changed}); choose another --output_dir"
            )


def describe_data(data_path: str | Path, labels_per_class: int | None) -> dict[str, dict[str, int]]:
    """Count the images: {split: {class: number}}. ValueError if the splits' classes differ, or for too few labels."""
    data: dict[str, dict[str, int]] = {}
    for split in ("train", "val"):
        folder = Path(data_path) / split
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        data[split] = {entry.name: len(images_in(entry)) for entry in entries if entry.is_dir()}
        if not data[split]:
            raise ValueError(f"--data_path {str(data_path)!r} needs class folders in {split}/")
    if list(data["train"]) != list(data["val"]):
        raise ValueError(f"train/ and val/ of {str(data_path)!r} must have the same classes, got {data}")
    for name, count in data["train"].items():
        if labels_per_class and count < labels_per_class:
            raise ValueError(f"class {name!r} has {count} images, but the preset needs {labels_per_class} per class")
    return data


def images_in(folder: Path) -> list[Path]:
    """The image files in a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.name.lower().endswith(IMG_EXTENSIONS))


def labelled_subset(data_path: str | Path, labels_per_class: int | None, folder: Path) -> Path:
    """Link the first images of each class and val/ into `folder`. Returns `folder`, or the data's if all are used."""
    data_path = Path(data_path).resolve()
    if labels_per_class is None:
        return data_path
    if (folder / "val").is_symlink():  # the last link, so the others exist
        if (folder / "val").resolve() != data_path / "val":
            raise ValueError(f"{str(folder)!r} holds links to other images than those of {str(data_path)!r}: remove it")
        return folder
    for source in sorted(path for path in (data_path / "train").iterdir() if path.is_dir()):
        target = folder / "train" / source.name
        target.mkdir(parents=True, exist_ok=True)
        for image in images_in(source)[:labels_per_class]:
            if not (target / image.name).is_symlink():
                (target / image.name).symlink_to(image)
    (folder / "val").symlink_to(data_path / "val")
    return folder


def recorded_results(path: Path, preset: Preset, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the CSV `path`, none if it does not exist. ValueError if one comes from other settings."""
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        arm, seed = row["arm"], row["seed"]
        same = arm in preset.arms and plan(preset, [arm], [seed], path.parent, data)[0].job_hash == row["job"]
        if not same:
            raise ValueError(
                f"{str(path)!r} holds a run with other settings or of an older version ({arm} seed {seed}), and would "
                "be replaced; choose another --report"
            )
    return rows


def runs_at_once(preset: Preset, cores: int) -> int:
    """The number of runs for which the cores, and the free memory of the GPU, suffice."""
    if preset.device == "cpu":
        return cores
    return max(1, min(cores // 2, int(torch.cuda.mem_get_info()[0] / 2**30 / preset.gib_per_run)))


def start_run(run: Run, jobs: int, machine: Mapping[str, Any]) -> subprocess.Popen:
    """Start the process of a run. Its output is in log.txt."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "job.json").write_text(json.dumps(run.job, indent=1))
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, available_cores() // jobs))}
    command = [sys.executable, str(ROOT / "tools/study_job.py"), str(run.folder), json.dumps(machine)]
    with open(run.folder / "log.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT)


def run_all(
    runs: Sequence[Run],
    jobs: int,
    machine: Mapping[str, Any],
    max_hours: float | None,
    recorded: Collection[tuple[str, int]],
    on_result: Callable[[], None],
) -> list[Run]:
    """Run all runs without a result, up to `jobs` at once, and return the failed ones. No run starts after `max_hours`.

    recorded: (arm, seed) of runs whose results are known though their folders may be gone. on_result: called after each
    run that has finished. Ctrl-C and SIGTERM stop the running processes. After Ctrl-C the study still reports.
    """
    waiting = [run for run in runs if run.result() is None and (run.arm, run.seed) not in recorded]
    failed: list[Run] = []
    running: dict[subprocess.Popen, Run] = {}
    print(f"{len(waiting)} of {len(runs)} runs to do, {jobs} at once: {runs[0].folder.parent}", flush=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    start, done = time.monotonic(), 0
    try:
        while waiting or running:
            if max_hours is not None and time.monotonic() - start > 3600 * max_hours:
                waiting.clear()
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[start_run(run, jobs, machine)] = run
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                run, done = running.pop(process), done + 1
                left = len(waiting) + len(running)
                eta = duration((time.monotonic() - start) / done * left)
                print(f"{describe_end(run, process.returncode)}; {left} runs to go, about {eta}", flush=True)
                if run.result() is None:
                    failed.append(run)
                else:
                    on_result()
    except KeyboardInterrupt:
        print("stopped; the same command continues the study")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


def describe_end(run: Run, exit_code: int) -> str:
    """The result of a run whose process has ended."""
    result, log = run.result(), run.folder / "log.txt"
    if result is None:
        tail = "\n    ".join(log.read_text().splitlines()[-3:])
        return f"{run.name} FAILED (exit code {exit_code}; {log}):\n    {tail}\n"
    return f"{run.name}: " + (result["status"] if result["top1"] is None else f"top-1 {result['top1']:.2f} %")


def finished_results(preset: Preset, output_dir: Path, data: Mapping[str, Any], csv: Path) -> list[dict[str, Any]]:
    """The results of all finished runs of the preset, in folders or in the CSV, also of those that this call omits."""
    results = {(row["arm"], row["seed"]): row for row in recorded_results(csv, preset, data)}
    seeds = {int(path.name.rpartition("-seed")[2]) for path in output_dir.glob("runs/*-seed*")}
    for run in plan(preset, preset.arms, sorted(seeds), output_dir, data):
        result = run.result()
        # A run of an older version of the preset has another job.
        if result is not None and json.loads((run.folder / "job.json").read_text()) == run.job:
            results[run.arm, run.seed] = dict(arm=run.arm, seed=run.seed, job=run.job_hash) | result
    arms = list(preset.arms)
    return [results[key] for key in sorted(results, key=lambda key: (key[1], arms.index(key[0])))]


def get_args_parser() -> Parser:
    """The flags of this script."""
    parser = Parser("study.py", description=__doc__)
    group = parser.add_argument_group("what is run").add_argument
    group("--data_path", required=True, help="folder with train/ and val/, which hold class folders")
    group("--preset", default="cpu", choices=PRESETS, help="sizes and schedules of all arms")
    group("--arms", nargs="+", metavar="ARM", help="arms to run (default: all of the preset)")
    group("--seeds", nargs="+", type=int, help="without it, the preset's")
    group = parser.add_argument_group("output").add_argument
    group("--output_dir", default="output/study", help="the runs are in a subfolder with the preset's name")
    group("--report", default=str(ROOT / "docs/study.md"), help="write the preset's section of this Markdown file")
    group("--report_only", action="store_true", help="run nothing; report the finished runs")
    group = parser.add_argument_group("machine").add_argument
    group("--jobs", type=int, help="number of runs at once; without it, as many as cores and memory allow")
    group("--max_hours", type=float, help="start no run after this time")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = get_args_parser()
    args = parser.parse_args(argv)
    preset, output_dir = PRESETS[args.preset], Path(args.output_dir) / args.preset
    with user_errors(parser):
        if args.jobs is not None and args.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
        unknown = [arm for arm in args.arms or () if arm not in preset.arms]
        if unknown:
            raise ValueError(
                f"--arms {unknown[0]!r} is not an arm of --preset {args.preset}, choose from {', '.join(preset.arms)}"
            )
        if preset.device == "cuda" and not args.report_only and not torch.cuda.is_available():
            raise ValueError(f"--preset {args.preset} needs a CUDA device, and there is none; --preset cpu needs none")
        study_report.pyplot("study")  # fail before the runs if matplotlib is missing
        data = describe_data(args.data_path, max(preset.labels_per_class or 0, preset.pretrain_per_class or 0))
        runs = plan(preset, args.arms or preset.arms, args.seeds or preset.seeds, output_dir, data)
        check_jobs(runs)
        csv = study_report.csv_path(args.report, args.preset)
        recorded = {(row["arm"], row["seed"]) for row in recorded_results(csv, preset, data)}
    failed: list[Run] = []
    if not args.report_only:
        jobs = args.jobs or runs_at_once(preset, available_cores())
        with user_errors(parser):
            labelled, unlabelled = (
                labelled_subset(args.data_path, number, output_dir / f"labelled_{number}")
                for number in (preset.labels_per_class, preset.pretrain_per_class)
            )
        machine = dict(
            data_path=str(unlabelled.resolve()),
            labelled=str(labelled.resolve()),
            device=preset.device,
            num_workers=0 if preset.device == "cpu" else max(1, available_cores() // jobs - 1),
        )
        csv.parent.mkdir(parents=True, exist_ok=True)
        failed = run_all(
            runs,
            jobs,
            machine,
            args.max_hours,
            recorded,
            on_result=lambda: write_rows(csv, finished_results(preset, output_dir, data, csv)),
        )
    if results := finished_results(preset, output_dir, data, csv):
        print(study_report.write(args.report, args.preset, results))
    if failed:
        names = ", ".join(run.name for run in failed)
        parser.exit(1, f"study.py: error: {count_of(len(failed), 'run')} failed: {names}\n")


if __name__ == "__main__":
    run_program(main, "study.py")
