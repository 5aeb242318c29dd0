"""Run a small-scale study of PR-MIM: pre-train and fine-tune all arms with the same images and steps, and report.

    python tools/study.py --data_path CIFAR10 --preset grid14      # the second study of docs/study.md, 11 core-hours
    python tools/study.py --data_path CIFAR10 --preset gpu         # a longer one on the paper's 14 x 14 grid, one GPU
    python tools/study.py --data_path CIFAR10 --report output/study.md                # the first study again
    python tools/study.py --data_path CIFAR10 --report output/study.md --arms mae plain50 prmim50 --seeds 0 1 2 3
    python tools/study.py --data_path CIFAR10 --preset peers --report output/study.md   # PR-MIM beside its peers

CIFAR10 contains train/ and val/ with class folders of 32-px images. tools/study_presets.py holds the arms and what they
share, tools/study_report.py and tools/study_comparisons.py what is compared. A seed determines the initial weights,
crops and visible tokens of all arms, so arms are compared seed by seed.

Runs start seed by seed, several at once, each in its own process. The CSV beside --report gets the numbers of each run
as soon as it has finished. The same command continues an interrupted study: it repeats no run of the CSV, even if the
runs' folders are gone. It never replaces a CSV of other settings, so an independent repetition needs another --report.
At the end, and after Ctrl-C, the script writes this preset's section of --report and the figures.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import study_report
from tools.study_presets import PRESETS, Flags, Preset
from tools.study_results import read_rows, write_rows
from util.code_version import files_hash
from util.data.datasets import available_cores
from util.run.cli import Parser, run_program, user_errors
from util.text import count_of, duration

ROOT = Path(__file__).resolve().parents[1]


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
                reading, pretrain, finetune = None, None, preset.finetune | dict(layer_decay=1.0)
            else:
                own = {name: value for name, value in method.items() if name not in ("reading", "pretrain_per_class")}
                reading, pretrain = method.get("reading"), to_argv(preset.pretrain | own | dict(seed=seed))
                finetune = preset.finetune
            is_finetuned = preset.finetuned_seeds is None or seed in preset.finetuned_seeds
            flags = to_argv(finetune | dict(seed=seed, eval_every=10**6))  # evaluate after the last epoch
            job = dict(
                reading=reading,
                pretrain=pretrain,
                finetune=flags if is_finetuned else None,
                labels_per_class=preset.labels_per_class,
                measured_images=preset.measured_images,
                data=data,
            ) | extra_settings(preset, method or {}, seed)
            runs.append(Run(arm, seed, output_dir / "runs" / f"{arm}-seed{seed}", job))
    return runs


def extra_settings(preset: Preset, method: Flags, seed: int) -> dict[str, Any]:
    """The parts of a job that only some presets have. Without them, the jobs of the others are as they always were."""
    job: dict[str, Any] = {}
    per_class = method.get("pretrain_per_class", preset.pretrain_per_class)
    if per_class not in (None, preset.labels_per_class):
        job["pretrain_per_class"] = per_class
    if preset.finetunes > 1:
        job["finetune_seeds"] = [preset.finetunes * seed + i for i in range(preset.finetunes)]
    return job | ({"frozen": True} if preset.frozen else {})


def check_jobs(runs: Iterable[Run]) -> None:
    """Raise ValueError if the folder of a run holds a run with other settings."""
    for run in runs:
        path = run.folder / "job.json"
        if path.exists() and (before := json.loads(path.read_text())) != run.job:
            keys = [key for key in {**before, **run.job} if before.get(key) != run.job.get(key)]
            changed = ", ".join(f"{key}: {before.get(key)} -> {run.job.get(key)}" for key in keys)
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
        if (folder / "val").resolve() != (data_path / "val").resolve():  # which may be a link, too
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


def images_hash(data_path: str | Path) -> str:
    """The first 12 digits of the SHA-256 of the names and contents of all images in train/ and val/."""
    folders = [path for split in ("train", "val") for path in (Path(data_path) / split).iterdir() if path.is_dir()]
    return files_hash([image for folder in sorted(folders) for image in images_in(folder)], Path(data_path))


def recorded_results(
    path: Path, preset: Preset, data: Mapping[str, Any], images: str | None = None
) -> list[dict[str, Any]]:
    """The rows of the CSV `path`, none if it does not exist. ValueError if one comes from other settings or images.

    images: their hash. None: it is not compared, as for rows without one.
    """
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        if images and row["images"] not in ("", images):
            raise ValueError(
                f"{str(path)!r} holds runs on other images (hash {row['images']}) than those of --data_path (hash "
                f"{images}); choose another --report"
            )
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
    machine: Callable[[Run], Mapping[str, Any]],
    max_hours: float | None,
    recorded: Collection[tuple[str, int]],
    on_result: Callable[[], None],
) -> list[Run]:
    """Run all runs without a result, up to `jobs` at once, and return the failed ones. No run starts after `max_hours`.

    machine: the folders and the resources of a run. recorded: (arm, seed) of runs whose results are known though their
    folders may be gone. on_result: called after each run that has finished. Ctrl-C and SIGTERM stop the running
    processes. After Ctrl-C the study still reports.
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
                running[start_run(run, jobs, machine(run))] = run
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
    measured = [f"{name} {result[name]:.2f} %" for name in ("top1", "knn", "ridge") if result.get(name) is not None]
    return f"{run.name}: " + (", ".join(measured) or result["status"])


def finished_results(preset: Preset, output_dir: Path, data: Mapping[str, Any], csv: Path) -> list[dict[str, Any]]:
    """The results of all finished runs of the preset, in the CSV or in folders, also of those that this call omits."""
    results = {(row["arm"], row["seed"]): row for row in recorded_results(csv, preset, data)}
    names = (re.fullmatch(r".*-seed(\d+)", path.name) for path in output_dir.glob("runs/*"))
    seeds = {int(name[1]) for name in names if name}
    for run in plan(preset, preset.arms, sorted(seeds), output_dir, data):
        result = run.result()
        # A run of an older version of the preset has another job.
        if result is not None and json.loads((run.folder / "job.json").read_text()) == run.job:
            results.setdefault((run.arm, run.seed), dict(arm=run.arm, seed=run.seed, job=run.job_hash) | result)
    arms = list(preset.arms)
    return [results[key] for key in sorted(results, key=lambda key: (key[1], arms.index(key[0])))]


@contextmanager
def locked_folder(csv: Path) -> Iterator[None]:
    """Waits until no other study reads and writes the CSVs of this folder."""
    csv.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(csv.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def update_csv(preset: Preset, output_dir: Path, data: Mapping[str, Any], csv: Path) -> None:
    """Add the finished runs to the CSV. An error is printed and does not stop the study: the next run tries again."""
    try:
        with locked_folder(csv):
            write_rows(csv, finished_results(preset, output_dir, data, csv))
    except (OSError, ValueError) as error:
        print(f"{csv} was not updated: {error}", flush=True)


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
        images = images_hash(args.data_path)
        recorded = {(row["arm"], row["seed"]) for row in recorded_results(csv, preset, data, images)}
    failed: list[Run] = []
    if not args.report_only:
        jobs = args.jobs or runs_at_once(preset, available_cores())
        numbers = {preset.labels_per_class, preset.pretrain_per_class}
        numbers |= {run.job["pretrain_per_class"] for run in runs if "pretrain_per_class" in run.job}
        with user_errors(parser):
            folders = {n: labelled_subset(args.data_path, n, output_dir / f"labelled_{n}").resolve() for n in numbers}

        def machine(run: Run) -> dict[str, Any]:
            return dict(
                data_path=str(folders[run.job.get("pretrain_per_class", preset.pretrain_per_class)]),
                labelled=str(folders[preset.labels_per_class]),
                images=images,
                device=preset.device,
                num_workers=0 if preset.device == "cpu" else max(1, available_cores() // jobs - 1),
            )

        update = functools.partial(update_csv, preset, output_dir, data, csv)
        failed = run_all(runs, jobs, machine, args.max_hours, recorded, update)
    with locked_folder(csv):
        if results := finished_results(preset, output_dir, data, csv):
            print(study_report.write(args.report, args.preset, results))
    if failed:
        names = ", ".join(run.name for run in failed)
        parser.exit(1, f"study.py: error: {count_of(len(failed), 'run')} failed: {names}\n")


if __name__ == "__main__":
    run_program(main, "study.py")
