"""A model with its training loop, driven step by step."""

from argparse import Namespace
from contextlib import contextmanager

import torch

import engine_finetune
import engine_pretrain
from encoders.models_swin import swin_micro_patch4_window4
from models_vit import vit_micro_patch4
from tests.test_framework_contract import build
from util.collectives import rank_and_world_size
from util.data.transforms import Normalize
from util.run.processes.distributed import Process
from util.run.processes.supervise import Watchdog
from util.run.start.plan import RunSchedule
from util.run.train.loop import TrainLoop


@contextmanager
def forbidden_waits():
    """Inside, whatever makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class SilentLog:
    def __init__(self):
        self.reports = []
        self.lines = []

    def advance(self):
        pass

    def info(self, line):
        self.lines.append(line)

    def report(self, step, scalars, line, interim=False):
        self.reports.append({"step": step, **scalars})


class Found(Exception):
    """Carries the losses of a micro-batch out of the loop."""


class Driver:
    """Runs an engine's `train_one_epoch` on `model`. `more` are its last arguments."""

    def __init__(self, train, model, loop, *more):
        self.train = train
        self.model = model
        self.loop = loop
        self.more = more

    def step(self, batches, step):
        """Makes the optimizer step number `step`."""
        self.loop.step = step
        self.train(self.model, batches, range(step, step + 1), self.loop, *self.more)

    def steps(self, steps, batches, after_step=lambda step: None):
        """Makes steps and calls `after_step` with the number of steps done after each."""
        for step in steps:
            self.step(batches, step)
            after_step(step + 1)

    def losses_of(self, batch, step, micro=0):
        """Returns the losses of a micro-batch, {name: scalar}, and changes no weights."""
        loop = self.loop
        scaled_loss = loop.scaled_loss
        accum_iter = loop.accum_iter

        computed = []

        def stop(losses):
            computed.append(losses)
            if len(computed) == micro + 1:
                raise Found(losses)
            return scaled_loss(losses)

        loop.scaled_loss = stop
        loop.accum_iter = micro + 1
        try:
            self.step(iter([batch] * (micro + 1)), step)
        except Found as found:
            return found.args[0]
        finally:
            loop.scaled_loss = scaled_loss
            loop.accum_iter = accum_iter
            loop.optimizer.zero_grad()
        raise AssertionError("the loop computed no losses")

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def a_run(device="cpu", precision_name="fp32", accum_iter=1, **flags):
    """What the loop reads of a `Run`."""
    defaults = dict(clip_grad=None, seed=0, print_freq=2, max_steps=None, max_bad_fraction=0.5)
    return Namespace(
        args=Namespace(**(defaults | flags)),
        plan=Namespace(
            precision=precision_name, total_batch_size=8, accum_iter=accum_iter, num_workers=0, device=device
        ),
        process=Process(torch.device(device), *rank_and_world_size()),
        watchdog=Watchdog(600, 600),
        first_step=0,
    )


def a_schedule(learning_rate, steps_per_epoch=25, num_steps=100):
    return RunSchedule(steps_per_epoch, num_steps, num_steps, learning_rate, "", (), num_steps / steps_per_epoch)


def a_driver(model, optimizer, learning_rate, precision_name="fp32", device="cpu", augment=None, **options):
    """A Driver of the pre-training loop, or of fine-tuning with `augment`. options: of `a_run`."""
    run = a_run(device, precision_name, **options)
    schedule = a_schedule(learning_rate)
    loop = TrainLoop(run, model, optimizer, schedule, Normalize().to(device), SilentLog(), state={})
    if augment is None:
        return Driver(engine_pretrain.train_one_epoch, model, loop)
    return Driver(engine_finetune.train_one_epoch, model, loop, augment)


def update_with_part(loop):
    """A newcomer's update of pre-training: it logs one more value, which is computed before the clipping."""
    part_norm = loop.total_norm(loop.parameters[:3])
    return {**engine_pretrain.update(loop), "part_norm": part_norm}


CLASSIFIERS = {"ViT": vit_micro_patch4, "Swin": swin_micro_patch4_window4}


def make(name):
    """A small model: a framework by the name of its class, or a classifier."""
    torch.manual_seed(0)
    if name in CLASSIFIERS:
        return CLASSIFIERS[name](num_classes=5, drop_path_rate=0.3)
    return build(name)


def batches_of(name, model, rank, num, size=2):
    generator = torch.Generator().manual_seed(rank)
    for i in range(num):
        imgs = torch.randint(0, 256, (size, 3, *model.img_size), dtype=torch.uint8, generator=generator)
        if name in CLASSIFIERS:
            yield imgs, torch.randint(0, 5, (size,), generator=generator)
        else:
            samples = [(torch.zeros(1), 0, (rank, size * i + j)) for j in range(size)]
            _, labels, *orders = model.collator("furthest", 0)(samples)
            yield imgs, labels, *orders
