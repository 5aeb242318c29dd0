"""`--check_data`: the set-up of a run by its own command and flags, whose errors are collected, and a report.

It ends before the first step, and writes nothing into the output folder. `Run.begin` is the context in which errors are
collected (`util.findings`), and `Run.restore` ends it.
"""

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from util import collectives
from util.cores import available_cores
from util.data import loader
from util.data.statistics import Statistics
from util.data.survey import numbers_of, survey, survey_copies, survey_neighbours
from util.findings import Findings, Part, collected, collecting
from util.run.cli import Parser, prepare_file
from util.run.files.lock import existing_folder
from util.run.files.reports import write_json
from util.run.processes.distributed import Process, gpu_memory, shut_down
from util.run.start.errors import describe_error
from util.run.start.folder import Space, Start
from util.run.start.plan import Plan, RunSchedule
from util.text import count_of, printable

GRADIENT = 4  # bytes of a parameter's gradient
USER_ERROR = 2  # exit code


@contextmanager
def check_of_data(parser: Parser, args: argparse.Namespace, process: Process) -> Iterator[Findings]:
    """Context of the set-up of a run. With --check_data it collects errors, reports, and ends the program.

    Rank 0 reports, and ends with exit code 2 if the run would be refused.
    """
    if args.check_data is None:
        if args.check_json is not None:
            raise ValueError("--check_json is for --check_data: give both")
        yield Findings()
        return
    path: Path | None = None
    if args.check_json is not None:
        path = Path(args.check_json)
    collectives.run_on_rank0(lambda: prepare_file("--check_json", path, (".json",)))
    with collecting() as findings:
        yield findings
    errors = errors_of_ranks(parser, findings)
    shut_down()
    if process.is_main:
        report = make_report(args, findings, errors)
        print(printable("\n".join(report.lines)), flush=True)
        if path is not None:
            write_json(path, report.content)
        if errors:
            number = count_of(len(errors), "error")
            parser.exit(USER_ERROR, f"{parser.prog}: error: the run would be refused: {number} above\n")
    elif errors:
        parser.exit(0)  # rank 0 has not finished


def errors_of_ranks(parser: Parser, findings: Findings) -> list[str]:
    """Returns the messages of all ranks' errors, each once. All ranks must call it."""
    messages: list[str] = []
    for errors in collectives.gather_objects([describe_error(parser, error) for error in findings.errors]):
        for message in errors:
            cause = re.sub(r"^rank \d+ failed: ", "", message)
            if cause not in messages:
                messages.append(cause)
    return messages


def make_report(args: argparse.Namespace, findings: Findings, errors: Sequence[str]) -> Part:
    """Returns all that was found. Looks at the images that were opened."""
    report = Part(lines=[f"--check_data: no step is made, and nothing is written to {args.output_dir}"])
    splits: dict[str, Any] = {}
    notes = list(findings.notes)
    for split, images in findings.opened.items():
        try:
            part = survey(images, with_every_file=args.check_data == "duplicates")
        except OSError as error:
            part = Part(lines=[f"not looked at: {error}"])
        splits[split] = part.content
        add_section(report, f"{split}: {count_of(len(images), 'image')} in {images.root}", part.lines)
        notes += images.notes
    neighbours = Part()
    if args.dataset == "folder":
        neighbours = survey_neighbours(args.data_path, findings.opened)
    add_section(report, f"--data_path {args.data_path}", neighbours.lines)
    copies = Part()
    if args.check_data == "duplicates":
        copies = survey_copies(findings.opened)
        add_section(report, "images with the same bytes", copies.lines)
    run_lines = findings.run.lines
    if not run_lines:
        free = shutil.disk_usage(existing_folder(args.output_dir)).free
        run_lines = [
            f"disk         {bytes_of(free)} free for {args.output_dir}; an error came before what the run needs"
        ]
    add_section(report, "run", [*run_lines, f"hours        {how_to_know_hours(args)}"])
    notes = list(dict.fromkeys(notes))
    add_section(report, "notes", notes)
    add_section(report, f"errors: {len(errors)}; the run would be refused", errors)
    if not errors:
        report.lines += ["", "no errors: the run would start"]
    report.content = {
        "splits": splits,
        "data_path": neighbours.content,
        **copies.content,
        "run": findings.run.content,
        "notes": notes,
        "errors": list(errors),
    }
    return report


def how_to_know_hours(args: argparse.Namespace) -> str:
    """Returns what tells the length of the run in time, which a check does not."""
    return "not known here: --max_steps 20 in a folder of its own prints images per second"


def add_section(report: Part, title: str, lines: Sequence[str]) -> None:
    """Adds lines below a title, if there are any."""
    if lines:
        report.lines += ["", title, *[f"  {line}" for line in lines]]


# --------------------------------------------------------------------------------------------------------------- run


def describe_run(
    start: Start,
    plan: Plan,
    schedule: RunSchedule,
    step: int,
    model: torch.nn.Module,
    images: Any,
    statistics: Statistics,
    space: Space,
    fitting_batch: Callable[[int, str], int] | None,
) -> Part:
    """Returns length, disk space and memory of a run. All ranks must call it. Errors are collected.

    step: at which it would begin. images: of training. statistics: by which it normalises them. fitting_batch: see
    `make_plan`.
    """
    part = Part()
    if start.continues_here:
        part.lines.append(f"resumes      {start.resume_path} at step {step}")
    part.content["first_step"] = step
    part.content["steps"] = schedule.num_steps
    part.lines.append(f"schedule     {schedule.summary}, {plan.total_batch_size} images a step")
    mean, std = statistics
    part.content["mean"] = mean
    part.content["std"] = std
    part.lines.append(f"normalises   by mean {numbers_of(mean)}, deviation {numbers_of(std)}")
    part.add(describe_space(space, start.output_dir))
    part.add(describe_memory(start.process, plan, model, space, fitting_batch))
    with collected():
        collectives.run_everywhere(lambda: check_shared_memory(plan, model, images))
    return part


def describe_space(space: Space, output_dir: Path) -> Part:
    """Returns what the checkpoints take of the disk."""
    content = {
        "free_bytes": space.free,
        "checkpoint_bytes": space.checkpoint,
        "needed_bytes": space.needed_in_all,
    }
    line = f"disk         {bytes_of(space.free)} free for {output_dir}; a checkpoint takes {bytes_of(space.checkpoint)}"
    return Part(content, [f"{line}, all checkpoints to come up to {bytes_of(space.needed_in_all)}"])


def describe_memory(
    process: Process,
    plan: Plan,
    model: torch.nn.Module,
    space: Space,
    fitting_batch: Callable[[int, str], int] | None,
) -> Part:
    """Returns what model and optimizer take of the memory, and how many images fit beside them, if that is known."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    state = space.checkpoint + GRADIENT * trained
    memory = gpu_memory(process.device)
    place = "a GPU"
    if not memory:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // process.local_world_size
        place = "a process's share of this machine"
    content: dict[str, Any] = {"state_bytes": state, "memory_bytes": memory, "cores": available_cores()}
    lines = [f"memory       weights, gradients and moments take {bytes_of(state)} of {bytes_of(memory)} of {place}"]
    if fitting_batch is None:
        lines.append("             what the images of a micro-batch take is not predicted for this model")
        return Part(content, lines)
    fitting = fitting_batch(memory, plan.precision)
    content["fitting_batch_size"] = fitting
    images = count_of(plan.batch_size, "image")
    lines.append(f"             micro-batches have {images}; about {fitting} would fit, by arithmetic")
    return Part(content, lines)


def check_shared_memory(plan: Plan, model: Any, images: Any) -> None:
    """Raises the error of a loader whose batches do not fit into shared memory."""
    height, width = model.img_size
    batch_bytes = images.pixel_format.pixel_bytes * height * width * plan.batch_size
    if plan.num_workers:
        loader.check_space(batch_bytes, plan.num_workers, plan.num_workers)


def bytes_of(number: float) -> str:
    """Returns a number of bytes in words."""
    if number >= 1e9:
        return f"{number / 1e9:.1f} GB"
    return f"{number / 1e6:.1f} MB"
