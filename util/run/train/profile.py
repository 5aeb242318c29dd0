"""What `--profile STEP` leaves in the output folder: a trace of three steps, and the memory of a GPU that was full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from util.run.processes.distributed import Process
from util.run.processes.supervise import print_error
from util.run.start.errors import is_full_gpu
from util.run.train.logging import RunLog

NUM_STEPS = 3
NUM_ROWS = 10  # of the table in the log
NUM_EVENTS = 100_000  # allocations and frees that are remembered: some tens of steps


class Profile:
    """Context manager of a training. On rank 0 it traces the steps after step `first`; None: nothing, at no cost.

    last_step: of this start.

    On a GPU every rank remembers its allocations meanwhile, with their stacks, and writes them if the memory is full.
    """

    def __init__(self, first: int | None, last_step: int, process: Process, output_dir: Path, log: RunLog) -> None:
        self.steps = range(0)
        if first is not None:
            self.steps = range(first, min(first + NUM_STEPS, last_step))
        self.process = process
        self.output_dir = output_dir
        self.log = log
        self.remembers = first is not None and process.device.type == "cuda"
        self.profiler: profile | None = None  # while it traces

    def __enter__(self) -> "Profile":
        if self.remembers:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=NUM_EVENTS)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Writes the memory, if that is why the training ends. A trace that is not complete is lost."""
        if self.profiler is not None:
            self.profiler.stop()
        if not self.remembers:
            return
        if is_full_gpu(error):
            path = self.output_dir / f"memory-{self.process.rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            print_error(f"memory of process {self.process.rank}: {path}, for https://pytorch.org/memory_viz")
        torch.cuda.memory._record_memory_history(enabled=None)

    def cut(self, steps: range) -> range:
        """Returns the first of these steps: one alone if it is traced, otherwise all up to the first that is."""
        if steps.start in self.steps:
            return steps[:1]
        if self.steps and steps.start < self.steps.start < steps.stop:
            return range(steps.start, self.steps.start)
        return steps

    @contextmanager
    def trace(self, steps: range) -> Iterator[None]:
        """Context of training these steps, which `cut` has returned."""
        if steps.start not in self.steps or not self.process.is_main:
            yield
            return
        if steps.start == self.steps.start:
            activities = [ProfilerActivity.CPU]
            if self.process.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()
        with record_function(f"step {steps.start + 1}"):
            yield
        if self.profiler is not None and steps.stop == self.steps.stop:
            self.write(self.profiler)
            self.profiler = None

    def write(self, profiler: profile) -> None:
        """Writes the trace, and logs what took longest."""
        profiler.stop()
        path = self.output_dir / f"trace-{self.steps.start}.json"
        profiler.export_chrome_trace(str(path))
        lines = most_expensive(profiler.key_averages(), self.process.device.type)
        self.log.info("\n".join([f"trace of the steps from {self.steps.start + 1} on: {path}", *lines]))


def most_expensive(events: Any, device_type: str) -> list[str]:
    """Returns lines about the operators that took longest, or the kernels of a GPU, without what they have called."""
    times = []
    for event in events:
        microseconds = event.self_cpu_time_total
        kind = DeviceType.CPU
        if device_type == "cuda":
            microseconds = event.self_device_time_total
            kind = DeviceType.CUDA
        if event.device_type == kind and not event.is_user_annotation:
            times.append((microseconds / 1e3, event.count, event.key))
    total = sum(milliseconds for milliseconds, _, _ in times)
    lines = []
    for milliseconds, count, name in sorted(times, reverse=True)[:NUM_ROWS]:
        lines.append(f"{milliseconds:10.2f} ms  {milliseconds / total:6.1%}  {count:6} x  {name[:80]}")
    return lines
