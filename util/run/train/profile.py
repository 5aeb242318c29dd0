"""What `--profile STEP` leaves in the output folder: a trace of three steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, record_function

from util.run.processes.distributed import Process
from util.run.train.logging import RunLog

NUM_STEPS = 3


class Profile:
    """On rank 0 it traces the steps after step `first`; None: nothing, at no cost. last_step: of this start."""

    def __init__(self, first: int | None, last_step: int, process: Process, log: RunLog) -> None:
        self.steps = range(0)
        if first is not None:
            self.steps = range(first, min(first + NUM_STEPS, last_step))
        self.process = process
        self.log = log
        self.profiler: profile | None = None  # while it traces

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
            self.profiler.stop()
            path = self.log.output_dir / f"trace-{self.steps.start}.json"
            self.profiler.export_chrome_trace(str(path))
            self.log.info(f"trace of the steps from {self.steps.start + 1} on: {path}")
            self.profiler = None
