"""Runs a main with a fault in it: python tests/faults/faulty.py FAULT STEP RANK MARKER main_pretrain [flags]

The fault strikes process RANK (or "all") when it gets to optimizer step STEP (of data: to that image), once: MARKER, a
path, remembers it over restarts ("-": it strikes at every start). Nothing of this is in the trainer; here its methods
are wrapped.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from util import atomic
from util.data import open as open_module
from util.data.images import EncodedImages
from util.run.exits import run_program
from util.run.files import checkpoint
from util.run.processes import supervise
from util.run.processes.supervise import Watchdog
from util.run.train import wrap
from util.run.train.loop import TrainLoop


def kill_a_worker():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def hold(loop):
    """Waits until a signal has asked this process to stop, so that no run is over before the test has sent one."""
    while loop.stop.name is None:
        time.sleep(0.1)


def hold_work(loop):
    """Waits in work between steps until a signal has come. A start that resumes at this step does the work."""
    print("in the work", flush=True)
    while loop.stop.name is None and loop.step > loop.first_step:
        time.sleep(0.1)


def fail():
    raise RuntimeError("a fault")


def seem_slow(seconds):
    """The watchdog looks, and so much time seems to have passed since the last heartbeat."""
    (watchdog,) = [thread for thread in threading.enumerate() if isinstance(thread, Watchdog)]
    watchdog.since -= seconds
    time.sleep(1)


HANGS = ("hang", "hang-mount", "hang-worker")  # until the watchdog ends the process, whose time-out is over at once
AT_STEP = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": fail,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "signal": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "kill-worker": kill_a_worker,
}
# Places in a save: (function of `os`, its call in a save that does not come back).
IN_SAVE = {
    "kill-before-sync": ("fsync", 1),
    "kill-before-rename": ("replace", 1),
    "kill-after-rename": ("fsync", 3),
    "kill-before-json": ("replace", 2),
    "kill-after-json": ("fsync", 5),
}


class Fault:
    def __init__(self, name, step, rank, marker):
        self.name = name
        self.step = int(step)
        self.rank = rank
        self.marker = marker
        self.calls = 0
        self.mark = Path(f"{marker}.{os.environ.get('RANK', '0')}")

    def strikes(self, step):
        """Whether it does, at this step of this process; from then on it has."""
        if step < self.step or self.rank not in ("all", os.environ.get("RANK", "0")):
            return False
        if self.marker == "-":
            return step == self.step or self.name == "nan-forever"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
            return True
        return False

    def install(self):
        if self.name == "slow-compile":
            wrap.compile_parts = lambda model: None
        if self.name in (*HANGS, "slow-compile"):
            supervise.PULSE = 0.1
        if self.name in HANGS and not self.mark.exists():
            Watchdog._seconds_left = self.seconds_left(Watchdog._seconds_left)
        if self.name == "own-folder":  # for relative paths every process has a disk of its own
            own = Path(f"{self.marker}.{os.environ['RANK']}")
            own.mkdir()
            os.chdir(own)
        TrainLoop.set_rates = self.faulty_step(TrainLoop.set_rates)
        TrainLoop.seed_draws = self.faulty_seed(TrainLoop.seed_draws)
        TrainLoop.scaled_loss = self.faulty_loss(TrainLoop.scaled_loss)
        TrainLoop.stop_if_asked = self.faulty_question(TrainLoop.stop_if_asked)
        if self.name in IN_SAVE:
            checkpoint.save_checkpoint = self.faulty_save(checkpoint.save_checkpoint)
        if self.name == "hang-mount":
            open_module.folder_identity = self.faulty_mount(open_module.folder_identity)
        if self.name in ("hang-worker", "wait-in-worker", "fail-load"):
            EncodedImages.load = self.faulty_load(EncodedImages.load)

    def seconds_left(self, exact):
        return lambda watchdog: 0.0 if self.mark.exists() else exact(watchdog)

    def faulty_step(self, set_rates):
        def step(loop, number):
            if self.name in AT_STEP and self.strikes(number):
                AT_STEP[self.name]()
            if self.name == "hold" and self.strikes(number):
                hold(loop)
            return set_rates(loop, number)

        return step

    def faulty_seed(self, seed_draws):
        def seed(loop, step, micro):  # it comes first in a forward pass
            if self.name == "hang" and self.strikes(step):
                time.sleep(10_000)
            if self.name == "slow-compile" and self.strikes(step):
                seem_slow(3000)
            return seed_draws(loop, step, micro)

        return seed

    def faulty_loss(self, scaled_loss):
        def loss(loop, losses):
            if self.name.startswith("nan") and self.strikes(loop.step):
                losses = {name: value * torch.nan for name, value in losses.items()}
            return scaled_loss(loop, losses)

        return loss

    def faulty_question(self, stop_if_asked):
        def ask(loop):
            if self.name == "hold-work" and self.strikes(loop.step):
                self.calls += 1
                if self.calls > 1:  # the first question comes before the work
                    hold_work(loop)
            return stop_if_asked(loop)

        return ask

    def faulty_load(self, load):
        def load_image(images, i):  # `step` counts images
            self.calls += 1
            if self.calls >= self.step and self.strikes(self.calls):
                if self.name == "fail-load":
                    raise OSError(5, "Input/output error")
                time.sleep(10_000)
            return load(images, i)

        return load_image

    def faulty_mount(self, identify):
        def identify_folder(path):
            if self.strikes(self.step):
                time.sleep(10_000)
            return identify(path)

        return identify_folder

    def faulty_save(self, save):
        def save_in_thread(output_dir, step, *args):
            atomic.os = self.faulty_os(step - 1, *IN_SAVE[self.name])
            try:
                return save(output_dir, step, *args)
            finally:
                atomic.os = os

        return save_in_thread

    def faulty_os(self, step, name, call):
        """The module `os`, one of whose functions kills the process at its `call`-th call in a save after `step`."""
        fault = self
        exact = getattr(os, name)
        fault.calls = 0

        class FaultyOs:
            def __getattr__(self, attribute):
                if attribute == name:
                    return deadly
                return getattr(os, attribute)

        def deadly(*args):
            fault.calls += 1
            if fault.calls == call and fault.strikes(step):
                os.kill(os.getpid(), signal.SIGKILL)
            return exact(*args)

        return FaultyOs()


if __name__ == "__main__":
    name, step, rank, marker, main, *flags = sys.argv[1:]
    Fault(name, step, rank, marker).install()
    run_program(partial(importlib.import_module(main).main, flags), f"{main}.py")
