"""A small-scale study of PR-MIM: pre-trains and fine-tunes every arm on the same images for as many steps, and reports.

    python tools/study.py --data_path CIFAR10                      # a small ViT, two cores, about two hours
    python tools/study.py --data_path CIFAR10 --preset gpu         # a longer one on the paper's 14 x 14 grid, one GPU
    python tools/study.py --data_path CIFAR10 --arms mae plain50 prmim50 --seeds 0 1 2 3

CIFAR10 holds train/ and val/ with class folders of 32-px images. The study is the three tables below: what differs
between the arms (ARMS), what is equal in all of them (PRESETS), and what is compared with what (tools/study_report.py).
A seed fixes first weights, crops and visible tokens in every arm alike, so arms are compared pair by pair.

Runs go seed by seed, several at once, each in a process of its own; the same command again goes on where it stopped. At
the end (and at Ctrl-C) it writes the tables and plots of what is there: the section of this preset in --report, with the
numbers of every run as CSV and the figures beside it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchvision.datasets.folder import IMG_EXTENSIONS

from recipes import RECIPES
from tools import study_report
from util.data.datasets import available_cores
from util.run.cli import Parser
from util.run.logging import duration

ROOT = Path(__file__).resolve().parents[1]

# What an arm may differ in; everything else is the preset's.
METHOD = ("throw_ratio", "progressive", "sampling", "kernel_size", "aggregation")


def paper_arm(name):
    """The method of a row of the paper's ViT-B tables (recipes.py), at this study's size."""
    recipe = RECIPES[f"{name}_vit_base_100ep"]
    return {key: recipe[key] for key in METHOD if key in recipe}


PRMIM50 = paper_arm("prmim50")
# A dictionary is an arm's flags of main_pretrain.py; `reading` names a variant of tools/study_job.py that the core does
# not have; None is no pre-training at all.
ARMS = {
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


@dataclass(frozen=True)
class Preset:
    """What all arms share: flags of main_pretrain.py and main_finetune.py, labels, seeds, and what a run needs."""

    pretrain: dict
    finetune: dict
    labels_per_class: int | None  # the first so many of each class, by file name; None: all
    seeds: tuple = (0, 1)
    measured_images: int = 1000  # of val/, for the errors of reconstruction
    device: str = "cpu"
    gib_per_run: float = 1.0  # device memory; with the cores it bounds how many run at once
    scratch: dict = field(default_factory=lambda: dict(layer_decay=1.0))  # no layer knows more than another


PRESETS = {
    # Learning rates: the better of two, for MAE alone. 781 steps of pre-training, 312 of fine-tuning.
    "cpu": Preset(
        pretrain=dict(
            model="mae_vit_micro_patch4", epochs=1, warmup_epochs=0.1, total_batch_size=64, blr=1e-2, mask_ratio=0.75,
            norm_pix_loss=True,
        ),
        finetune=dict(
            recipe="finetune_cifar10", model="vit_micro_patch4", epochs=2, warmup_epochs=0.2, total_batch_size=64, blr=8e-3
        ),
        labels_per_class=1000,
    ),
    # 14 x 14 tokens, as in the paper: the images are enlarged to 56 px.
    "gpu": Preset(
        pretrain=dict(
            model="mae_vit_mini_patch4", input_size=56, epochs=100, warmup_epochs=10, total_batch_size=512, batch_size=512,
            blr=1e-3, mask_ratio=0.75, norm_pix_loss=True,
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
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    job: dict  # all that its result depends on

    @property
    def name(self):
        return f"{self.arm} seed {self.seed}"

    def result(self):
        """What the run measured, or None where it has not finished."""
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


def flags(settings):
    """{"blr": 1e-2, "progressive": False} -> ["--blr", "0.01", "--no-progressive"]"""
    argv = []
    for name, value in settings.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", str(value)]
    return argv


def plan(preset, arms, seeds, output_dir, data):
    """-> the runs, seed by seed, on the images that `data` describes."""
    runs = []
    for seed in seeds:
        for arm in arms:
            method = None if ARMS[arm] is None else dict(ARMS[arm])
            job = dict(
                reading=method.pop("reading", None) if method else None,
                pretrain=None if method is None else flags(preset.pretrain | method | dict(seed=seed)),
                finetune=flags(preset.finetune | (preset.scratch if method is None else {}) | dict(seed=seed, eval_every=10**6)),
                labels_per_class=preset.labels_per_class,
                measured_images=preset.measured_images,
                data=data,
            )
            runs.append(Run(arm, seed, output_dir / "runs" / f"{arm}-seed{seed}", job))
    return runs


def check_jobs(runs):
    """ValueError if a run's folder holds one of other settings."""
    for run in runs:
        path = run.folder / "job.json"
        if path.exists() and (before := json.loads(path.read_text())) != run.job:
            changed = ", ".join(f"{k}: {before.get(k)} -> {v}" for k, v in run.job.items() if before.get(k) != v)
            raise ValueError(f"{str(run.folder)!r} holds a run of other settings ({changed}); choose another --output_dir")


def describe_data(data_path, labels_per_class):
    """{split: {class: number of images}}; ValueError unless both splits hold the same classes, with enough labels each."""
    data = {split: {} for split in ("train", "val")}
    for split, classes in data.items():
        folder = Path(data_path) / split
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry.is_dir():
                classes[entry.name] = len(images_in(entry))
        if not classes:
            raise ValueError(f"--data_path {str(data_path)!r} needs class folders in {split}/")
    if list(data["train"]) != list(data["val"]):
        raise ValueError(f"train/ and val/ of {str(data_path)!r} must have the same classes, got {data}")
    for name, count in data["train"].items():
        if labels_per_class and count < labels_per_class:
            raise ValueError(f"class {name!r} has {count} images, and the preset fine-tunes on {labels_per_class} of each class")
    return data


def images_in(folder):
    return sorted(path for path in folder.iterdir() if path.name.lower().endswith(IMG_EXTENSIONS))


def labelled_subset(data_path, labels_per_class, folder):
    """A folder of links to the first images of each class and to val/; -> its path (the data itself if that is all of it)."""
    data_path = Path(data_path).resolve()
    if labels_per_class is None:
        return data_path
    if (folder / "val").is_symlink():  # linked last
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


def runs_at_once(preset, device, cores):
    """As many as there are cores, and as the GPU's free memory allows."""
    if device == "cpu":
        return cores
    import torch

    return max(1, min(cores // 2, int(torch.cuda.mem_get_info()[0] / 2**30 / preset.gib_per_run)))


class Scheduler:
    """Runs what has no result yet, so many at once, until all are done or the time is up."""

    def __init__(self, runs, jobs, machine, max_hours):
        self.waiting = [run for run in runs if run.result() is None]
        self.total, self.jobs, self.machine, self.max_hours = len(runs), jobs, machine, max_hours
        self.running, self.failed, self.seconds = {}, [], []
        self.start_time = time.monotonic()

    def start(self, run):
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "job.json").write_text(json.dumps(run.job, indent=1))
        threads = str(max(1, available_cores() // self.jobs))
        command = [sys.executable, str(ROOT / "tools/study_job.py"), str(run.folder), json.dumps(self.machine)]
        with open(run.folder / "log.txt", "a") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": threads}, cwd=ROOT
            )
        self.running[process] = (run, time.monotonic())

    def reap(self):
        for process in [p for p in self.running if p.poll() is not None]:
            run, since = self.running.pop(process)
            result = run.result()
            if result is None:
                self.failed.append(run)
                tail = "\n    ".join((run.folder / "log.txt").read_text().splitlines()[-3:])
                print(f"{run.name} FAILED (exit code {process.returncode}; {run.folder}/log.txt):\n    {tail}", flush=True)
                continue
            self.seconds.append(time.monotonic() - since)
            left = len(self.waiting) + len(self.running)
            eta = duration(left * sum(self.seconds) / len(self.seconds) / self.jobs)
            what = f"top-1 {result['top1']:.2f} %" if result["top1"] is not None else result["status"]
            print(f"{run.name}: {what}; {duration(self.seconds[-1])}; {left} of {self.total} runs to go, about {eta}", flush=True)

    def is_time_up(self):
        return self.max_hours is not None and time.monotonic() - self.start_time > self.max_hours * 3600

    def run(self):
        try:
            while self.waiting and not self.is_time_up() or self.running:
                while self.waiting and len(self.running) < self.jobs and not self.is_time_up():
                    self.start(self.waiting.pop(0))
                time.sleep(0.2)
                self.reap()
        finally:
            for process in self.running:
                process.terminate()
            for process in self.running:
                process.wait()


def get_args_parser():
    parser = Parser("study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--data_path", required=True, help="holds train/ and val/ with class folders")
    flag("--preset", default="cpu", choices=PRESETS)
    flag("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM", help=f"of {', '.join(ARMS)} (default: all)")
    flag("--seeds", nargs="+", type=int, help="default: the preset's")
    flag("--output_dir", default="output/study", help="its runs go to a folder of the preset's name in here")
    flag("--report", default=str(ROOT / "docs/study.md"), help="the Markdown file whose section of this preset is written")
    flag("--jobs", type=int, help="runs at once (default: what cores and memory allow)")
    flag("--max_hours", type=float, help="start no run after so long")
    flag("--report_only", action="store_true", help="run nothing; write the report of what is there")
    return parser


def main(argv=None):
    parser = get_args_parser()
    args = parser.parse_args(argv)
    preset, output_dir = PRESETS[args.preset], Path(args.output_dir) / args.preset
    try:
        if args.jobs is not None and args.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
        study_report.pyplot("study")
        data = describe_data(args.data_path, preset.labels_per_class)
        runs = plan(preset, args.arms, args.seeds or preset.seeds, output_dir, data)
        check_jobs(runs)
        if not args.report_only:
            check_device(preset, args.preset)
            labelled = labelled_subset(args.data_path, preset.labels_per_class, output_dir / f"labelled_{preset.labels_per_class}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    failed = []
    if not args.report_only:
        jobs = args.jobs or runs_at_once(preset, preset.device, available_cores())
        workers = 0 if preset.device == "cpu" else max(1, available_cores() // jobs - 1)
        machine = dict(data_path=str(Path(args.data_path).resolve()), labelled=str(labelled.resolve()))
        machine |= dict(device=preset.device, num_workers=workers)
        failed = run_all(Scheduler(runs, jobs, machine, args.max_hours), preset.device, output_dir)
    results = finished(preset, output_dir, data)
    if results:
        print(study_report.write(args.report, args.preset, results))
    if failed:
        parser.exit(1, f"study.py: error: {len(failed)} runs failed: {', '.join(run.name for run in failed)}\n")


def run_all(scheduler, device, output_dir):
    """-> the runs that failed. Ctrl-C, SIGTERM and SIGHUP stop the runs under way; Ctrl-C still reports."""
    print(
        f"{len(scheduler.waiting)} of {scheduler.total} runs to do, {scheduler.jobs} at once on {device}: {output_dir}", flush=True
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        scheduler.run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    return scheduler.failed


def finished(preset, output_dir, data):
    """What all finished runs of the preset measured, whichever of them this start was asked for."""
    seeds = {int(path.name.rpartition("-seed")[2]) for path in output_dir.glob("runs/*-seed*")}
    runs = [run for run in plan(preset, ARMS, sorted(seeds), output_dir, data) if run.result()]
    # Not those that an older preset left in the folder.
    runs = [run for run in runs if json.loads((run.folder / "job.json").read_text()) == run.job]
    return [dict(arm=run.arm, seed=run.seed) | run.result() for run in runs]


def check_device(preset, name):
    if preset.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"the preset {name!r} needs a CUDA device, and there is none here; --preset cpu needs none")


if __name__ == "__main__":
    main()
