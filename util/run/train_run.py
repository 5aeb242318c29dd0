"""What the training mains share: the split of the batch, resuming, saving, the loop over epochs.

A main subclasses `TrainRun`; `launch` turns what goes wrong into one paragraph and an exit code.
"""

import argparse
import inspect
import json
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from timm.layers import DropPath
from torch.nn.parallel import DistributedDataParallel

from util import attention
from util.data import decode
from util.data.bad_images import BadImages
from util.data.datasets import (
    DOWNLOADED,
    AddressedDataset,
    StepBatchSampler,
    available_cores,
    batches,
    open_images,
    steps_per_epoch,
)
from util.data.folders import list_folder, split_folders, split_of_tar
from util.data.images import EncodedImages, ImageError
from util.data.packed import PackedImages
from util.data.tars import find_tars
from util.data.transforms import Normalize
from util.lr_sched import Schedule
from util.recompute import recompute_blocks
from util.run import checkpoint, distributed, shard
from util.run.code_version import code_version, source_hash
from util.run.flags import resolve
from util.run.logging import RunLog, count_of, print_line
from util.run.resume_rules import MACHINE_FLAGS, PROCESS_FLAGS, find_changes, find_notes
from util.run.run_folder import FolderLock, find_checkpoint, writable_folder, write_json, write_progress
from util.run.signals import StopSignal, kill_workers
from util.run.train_engine import PRECISIONS, precision
from util.run.watchdog import TEMPORARY, Watchdog


def data_hint(args, process, images):
    """What would most likely help a run that waits for these images; nothing is said of a CPU that is its own loader."""
    cores = max(1, available_cores() // process.local_world_size)
    if args.num_workers == 0:
        return "" if process.device.type == "cpu" else "no worker loads ahead; set --num_workers"
    hints = [f"raise --num_workers, {args.num_workers} now, to this process's {cores} cores"] * (args.num_workers < cores - 1)
    if isinstance(images, EncodedImages):
        hints += ["pip install simplejpeg, which decodes JPEGs faster"] * (decode.simplejpeg is None and args.loader == "fast")
        hints += ["--loader reference is half as fast as the default"] * (args.loader == "reference")
    packed = isinstance(images, PackedImages)
    slow = "a faster disk, or --quality 90 of" if packed else "a faster disk, or fewer and larger files by"
    return "; ".join(hints) or f"more cores a GPU; {slow} scripts/pack_dataset.py"


def open_everywhere(args, split, labelled=False, max_bad_fraction=0.0):
    """`open_images` of the flags, in every process; one of them downloads or indexes first, and all hear it if that fails."""
    in_tars = args.dataset == "folder" and distributed.run_everywhere(lambda: bool(find_tars(args.data_path, split, labelled)))
    distributed.refuse_differences({"--data_path": "tars" if in_tars else "no tars"}, "kind of data")

    def open_split():
        return open_images(args.dataset, args.data_path, split, labelled, max_bad_fraction)

    if args.dataset in DOWNLOADED or in_tars:
        distributed.from_main(lambda: open_split() and None)
    images = distributed.run_everywhere(open_split)
    found = {"number of images": len(images), "names and labels": images.fingerprint()}
    distributed.refuse_differences(found, f"{split} data")
    images.reference = args.loader == "reference"
    return images


def describe_start(command: list[str]) -> dict[str, object]:
    """What a record says of the start that wrote it: the code, the command line, the hosts of all processes."""
    hosts = sorted(set(distributed.gather_objects(socket.gethostname())))
    return {"code": code_version(), "command": shlex.join(command), "hosts": hosts}


def refuse_different_starts(args: argparse.Namespace) -> None:
    """ValueError, in every process, where the processes were started with other flags, code or torch."""
    flags = {f"--{name}": value for name, value in vars(args).items() if name not in PROCESS_FLAGS}
    distributed.refuse_differences(flags | {"code": source_hash(), "torch": torch.__version__}, "flags and code")


def refuse_output_inside_data(args: argparse.Namespace) -> None:
    """ValueError where the run would write between its own images: the next start would read other data."""
    root, output_dir = Path(args.data_path).resolve(), Path(args.output_dir).resolve()
    if args.dataset != "folder" or not output_dir.is_relative_to(root) or not root.is_dir():
        return
    listing = list_folder(root)
    if any(split_of_tar(name) for name in listing.tars):
        return  # tars that name their split are read alone
    folders = [(root / name).resolve() for names in split_folders(listing).values() for name in names] or [root]
    inside = [folder for folder in folders if output_dir.is_relative_to(folder)]
    if inside:
        raise ValueError(
            f"--output_dir {args.output_dir!r} lies inside the images' folder {str(inside[0])!r}, where it would become "
            f"data; choose a folder outside of it"
        )


def image_bytes(input_size: int | Sequence[int]) -> int:
    """Bytes of a uint8 RGB crop of this side, or (height, width)."""
    height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
    return 3 * height * width


def has_drop_path(model: torch.nn.Module) -> bool:
    """Whether the model draws random numbers in its forward pass."""
    return any(isinstance(module, DropPath) and module.drop_prob for module in model.modules())


class TrainRun:
    """A run, ready to train: building it raises ValueError for whatever the user could have got wrong.

    A subclass's `__init__` calls this one, opens the data (`open_everywhere`), sets `images`, `transform`, `collator`,
    `model`, `optimizer` and, unless it is ImageNet's, `normalize`, and ends with `start`.
    """

    machine_flags = set(MACHINE_FLAGS)
    program = None  # the main that the run belongs to

    def __init__(self, args: argparse.Namespace, flags: list[str] | None = None) -> None:
        """`flags`: the command line that `args` were parsed from, for the record."""
        self.args = args
        self.process = distributed.init_process(args.device, max(30, args.dist_timeout / 60 + 5))
        self.origin = describe_start([self.program, *(flags or [])])
        refuse_different_starts(args)
        self.resolve()
        refuse_output_inside_data(args)
        self.output_dir = writable_folder(args.output_dir)
        self.normalize = Normalize().to(self.process.device)
        self.data = {}  # what identifies the images, for the checkpoints
        # The main process chooses, so that all resume from the same file.
        self.resume_path, self.remarks = distributed.from_main(self.enter_folder)

    def resolve(self):
        """Fills in what follows from other settings; ValueError for values that cannot be."""
        resolve(self.args, self.process)

    def enter_folder(self):
        """-> (checkpoint to resume, remarks); the folder is this run's until the process ends."""
        self.lock = FolderLock(self.output_dir)
        path, remarks = find_checkpoint(self.args.output_dir, self.args.resume)
        return path, self.lock.remarks + remarks

    @property
    def began_elsewhere(self) -> bool:
        """Whether this start begins at a checkpoint of another folder than its own."""
        return self.resume_path is not None and self.resume_path.resolve().parent != self.output_dir.resolve()

    @property
    def first_home(self):
        """The device that the model is built on: one to be sharded never lies on a GPU as a whole."""
        return torch.device("cpu") if self.args.shard else self.process.device

    def start(self, engine_class, **options):
        """Makes the engine (`options` are its own fields), restores the run if there is one, and says what will happen."""
        args, process = self.args, self.process
        self.steps_per_epoch = steps_per_epoch(len(self.images), args.total_batch_size)
        self.last_step = min(args.epochs * self.steps_per_epoch, args.max_steps or sys.maxsize)
        args.device = process.device.type
        args.precision, autocast, self.scaler = precision(args.precision, process.device)
        self.data |= {"num_images": len(self.images), "data": self.images.fingerprint()}
        distributed.refuse_differences({"teacher": self.extra_meta().get("teacher")}, "teacher")
        self.remarks += self.images.notes
        if args.precision == "bf16" and process.device.type == "cuda":  # sharded blocks round their norms, too
            self.machine_flags = self.machine_flags - {"shard"}
        content = self.restore(self.resume_path) if self.resume_path else None
        self.start_step = self.step = self.saved_step = content["meta"]["step"] if content else 0
        self.good_steps = [self.start_step]  # whose checkpoints are known to be good: resumed from, or saved since
        self.log = RunLog(self.output_dir, self.start_step, self.last_step, enabled=process.is_main)
        attention.prefer(args.attention)
        model = self.model
        if args.recompute:
            recompute_blocks(model)
        if args.shard:
            shard.shard(model, self.optimizer, process.device, PRECISIONS[args.precision], args.compile)
        elif args.compile:
            model.compile(fullgraph=True, dynamic=False)
        if process.world_size > 1 and not args.shard:
            # Buffers are not sent around with every step (evaluation sends them); the flag has a new name in newer torch.
            known = inspect.signature(DistributedDataParallel).parameters
            flag = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            # Accumulation leaves the reduction out of some backward passes, which a static graph does not know.
            static = args.accum_iter == 1
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static, **{flag: False})
        self.watchdog = Watchdog(args.dist_timeout, process.rank, process.world_size, process.store)
        self.engine = engine_class(
            model=model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            autocast=autocast,
            normalize=self.normalize,
            learning_rate=self.schedule(),
            accum_iter=args.accum_iter,
            images_per_step=args.total_batch_size,
            steps_per_epoch=self.steps_per_epoch,
            last_step=self.last_step,
            log=self.log,
            print_freq=args.print_freq,
            clip_grad=args.clip_grad,
            seed=args.seed,
            data_hint=data_hint(args, process, self.images),
            reached=self.watchdog.reached,
            **options,
        )
        if content:
            self.engine.meter.load_state_dict(content["meter"])
            self.remarks.append(f"resuming {self.resume_path} at step {self.start_step}")
        self.announce()

    def restore(self, path):
        """Loads weights, moments and loss scale; -> the checkpoint's content."""
        content = checkpoint.read_checkpoint(path)
        if "optimizer" not in content or not isinstance(content.get("meta"), dict):
            raise checkpoint.CheckpointError(
                f"{str(path)!r} holds weights but no run to resume; --resume takes a checkpoint of this program"
            )
        self.check_identity(content["meta"])
        checkpoint.load_strict(self.model, content["model"], "the checkpoint's weights")
        meta, now = content["meta"], self.meta(content["meta"]["step"])
        changes = find_changes(meta, now, self.machine_flags)
        notes = find_notes(meta, now, self.machine_flags, has_drop_path(self.model))
        self.origin["started_from"] = str(path) if self.began_elsewhere else meta.get("started_from")
        if changes and not self.args.allow_changes:
            raise ValueError(
                f"{str(path)!r} would go on with other results than it has so far: {'; '.join(changes)}. "
                f"Undo that, choose another --output_dir, or accept it by --allow_changes"
            )
        self.remarks += [f"warning: {change}" for change in changes] + notes
        today = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(content["optimizer"])
        except ValueError as error:
            raise checkpoint.CheckpointError(f"the checkpoint's optimizer does not fit these settings ({error})") from error
        for group, settings in zip(self.optimizer.param_groups, today, strict=True):
            group.update(settings)  # weight decay, say, is today's
        if content["meta"]["settings"]["precision"] == self.args.precision:
            self.scaler.load_state_dict(content["scaler"])
        return content

    def check_identity(self, meta):
        """ValueError if the checkpoint's run is another one than this."""
        if meta.get("program", self.program) != self.program:
            if self.began_elsewhere:
                hint = "; to fine-tune it, give it as --finetune" if meta["program"] == "main_pretrain.py" else ""
                raise ValueError(f"--resume {self.args.resume} is a run of {meta['program']}, not of {self.program}{hint}")
            raise ValueError(f"{self.args.output_dir!r} holds a run of {meta['program']}; choose another --output_dir")
        before, now = meta["settings"]["total_batch_size"], self.args.total_batch_size
        if before != now:
            raise ValueError(f"the run's total batch was {before} and now is {now}, so its steps would no longer mean the same")

    def settings(self):
        """The resolved settings as JSON knows them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self.args).items()}

    def schedule(self):
        args = self.args
        rates = dict(lr=args.lr, min_lr=args.min_lr, warmup_lr=args.warmup_lr, lr_steps=tuple(args.lr_steps))
        return Schedule(args.lr_schedule, self.steps_per_epoch, args.epochs, args.warmup_epochs, **rates)

    def describe(self):
        """One sentence on the model and the data."""
        raise NotImplementedError

    def announce(self):
        """Says what runs, and saves the resolved settings."""
        args, process, settings = self.args, self.process, self.settings()
        if process.is_main:
            write_json(self.output_dir / "settings.json", settings)
        self.log.info(f"{self.origin['command']} on {', '.join(self.origin['hosts'])}; {self.origin['code']}")
        self.log.info(json.dumps(settings))
        self.log.info(self.describe())
        self.log.info(
            f"{count_of(process.world_size, 'process')} on {args.device} in {args.precision}, total batch "
            f"{args.total_batch_size} = {args.batch_size} x {process.world_size} x {args.accum_iter} accumulated, "
            f"lr {args.lr:g} at its peak"
        )
        if args.device == "cuda" and torch.cuda.device_count() > 1 and process.world_size == 1:
            self.remarks.append(f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more")
        if args.compile:
            self.remarks.append("note: --compile takes minutes at the first step, before which nothing is reported")
        for remark in self.remarks:
            self.log.info(remark)

    def train(self):
        """Trains to the end, or until a signal; -> whether it was the end."""
        stop = StopSignal(self.process.device)
        try:
            return self.train_until(stop)
        except BaseException:
            stop.restore()
            raise

    def train_until(self, stop):
        stream, stopped = self.open_stream(), False
        for epoch in range(self.start_step // self.steps_per_epoch, self.args.epochs):
            end = min((epoch + 1) * self.steps_per_epoch, self.last_step)
            steps = range(max(epoch * self.steps_per_epoch, self.start_step), end)
            if steps and not stopped:
                stopped = self.engine.train_one_epoch(epoch, steps, stream, self.after_step, stop.agreed)
        if stopped and self.step < self.last_step:
            self.interrupt(stop)
            return False
        stop.settle()
        self.engine.at_report()
        self.finish()
        stop.finish()
        return True

    def open_stream(self):
        """The iterator over this process's batches, from the first step to the last."""
        args, process = self.args, self.process
        split = args.batch_size, args.accum_iter, process.rank, process.world_size
        addresses = StepBatchSampler(len(self.images), *split, args.seed, self.start_step, self.last_step)
        dataset = AddressedDataset(self.images, self.transform, replace=args.max_bad_fraction > 0)
        self.engine.at_report = BadImages(self.images, dataset.bad, args.max_bad_fraction, self.log.info).report
        pinned = process.device.type == "cuda"
        stored = args.batch_size * image_bytes(args.input_size)
        return batches(dataset, addresses, self.collator, args.num_workers, pinned, self.say, batch_bytes=stored)

    def say(self, message):
        """Of this process, which need not be the one that logs."""
        if self.process.is_main:
            self.log.info(message)
        else:
            print_line(f"rank {self.process.rank}: {message}", sys.stderr)

    def interrupt(self, stop: StopSignal) -> None:
        """A signal has stopped the run before its end: saves, so that no step is lost, and ends.

        Our signal handlers stay installed until the save is done: the previous ones might requeue the job or kill the
        process. For Ctrl-C it raises KeyboardInterrupt, so that the shell stops its script, too.
        """
        if distributed.from_main(lambda: self.saved_step != self.step):  # which alone knows whether a save succeeded
            self.save(self.step, required=True)
        what = stop.name or "a signal to another process"
        self.log.info(f"stopped by {what} after step {self.step} of {self.last_step}; the same command goes on from there")
        self.log.close()
        stop.close()
        distributed.shut_down()
        if stop.name == "SIGINT":
            kill_workers()  # a program that dies of SIGINT runs no exit handlers
            raise KeyboardInterrupt

    def finish(self):
        self.log.info(self.summary())
        self.log.close()
        distributed.shut_down()

    def summary(self):
        """What the run did, from its log, so that a finished run can say it again."""
        raise NotImplementedError

    def done_so_far(self) -> str:
        """ "for 100 steps on 24 images", or how far it is where --max_steps ended the run before its schedule."""
        done, images = count_of(self.last_step, "step"), count_of(len(self.images), "image")
        total = self.args.epochs * self.steps_per_epoch
        if self.last_step == total:
            return f"for {done} on {images}"
        return f"for {done} of {total} on {images}; the same command without --max_steps goes on"

    def closing_lines(self):
        newest, _ = checkpoint.newest_checkpoint(self.output_dir) if self.process.is_main else (None, None)
        return [f"  checkpoint   {newest}", f"  TensorBoard  tensorboard --logdir {self.output_dir / 'tensorboard'}"]

    def after_step(self, step):
        """Saves when it is time; `step` optimizer steps are done."""
        self.step = step
        if (
            step == self.last_step
            or step % self.steps_per_epoch == 0
            or (self.args.save_steps and step % self.args.save_steps == 0)
        ):
            self.save(step, required=step == self.last_step)

    def save(self, step, required):
        """Writes the checkpoint of `step`; FloatingPointError, in all processes, if its weights are not finite."""
        if distributed.all_reduce_sum(shard.count_bad(self.model.parameters())) > 0:
            raise FloatingPointError(f"the weights are not finite after step {step}: not saved; the last checkpoint is good")
        meter = self.engine.meter.state_dict()  # of all processes
        weights, moments = self.gathered(self.model), self.gathered(self.optimizer)
        if not self.process.is_main:
            return
        state = {"model": weights, "optimizer": moments, "scaler": self.scaler.state_dict(), "meter": meter}
        if self.write_checkpoint(step, state, self.meta(step), required, keep=self.is_kept(step)):
            self.saved_step = step
            write_progress(self.output_dir, step)

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of `step` is kept for good: each --save_every epochs, and at the end of the schedule."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return rest == 0 and (epoch % self.args.save_every == 0 or epoch == self.args.epochs)

    def gathered(self, part):
        """The state dict of the model or the optimizer, whole, on the main process; all must ask for it."""
        state = part.state_dict()
        return shard.gather(state, keep=self.process.is_main) if self.args.shard else state

    def write_checkpoint(self, name: int | str, state: dict, meta: dict, required: bool, keep: bool = False) -> bool:
        """Writes, prunes, and survives a full disk, unless this checkpoint is `required`: the older ones stand; -> success."""
        try:
            checkpoint.save_checkpoint(self.output_dir, name, state, meta, keep)
        except OSError as error:
            if required:
                raise
            self.log.info(f"warning: the checkpoint of step {name} could not be written ({error}); training goes on")
            return False
        try:
            if isinstance(name, int):
                self.good_steps = [*self.good_steps, name][-2:]
                checkpoint.prune_checkpoints(self.output_dir, self.good_steps)
        except OSError as error:
            self.log.info(f"warning: older checkpoints could not be removed ({error})")
        return True

    def meta(self, step):
        """What a checkpoint says of itself (JSON-able)."""
        return {
            "program": self.program,
            "step": step,
            "epoch": step / self.steps_per_epoch,
            "world_size": self.process.world_size,
            "settings": self.settings(),
            **self.data,
            "torch": torch.__version__,
            **self.origin,
            **self.extra_meta(),
        }

    def extra_meta(self):
        return {}


def exit_code(error):
    """2: user error; 3: loss or weights not finite; 4: unusable checkpoint; 75: I/O error, start the same command again."""
    codes = {FloatingPointError: 3, checkpoint.CheckpointError: 4, OSError: TEMPORARY}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 2)


def refuse(parser, error):
    """Ends the program with one paragraph and the error's `exit_code`."""
    message = str(error).strip()
    if "Traceback" in message:  # a worker's error
        message = message.splitlines()[-1].partition("Error: ")[2]
    again = "; the same command goes on from the newest checkpoint" * isinstance(error, OSError)
    distributed.let_go()
    parser.exit(exit_code(error), f"{parser.prog}: error: {message}{again}\n")


def launch(
    parser: argparse.ArgumentParser, args: argparse.Namespace, run_class: type[TrainRun], argv: list[str] | None = None
) -> bool:
    """Builds and trains the run, and ends with one paragraph where that cannot be; -> False if a signal stopped it.

    argv: the command line (default: this program's). KeyboardInterrupt if the signal was Ctrl-C's.
    """
    try:
        run = run_class(args, sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        distributed.shut_down()
        refuse(parser, error)
    try:
        with run.watchdog:
            return run.train()
    except (ImageError, FloatingPointError, OSError) as error:
        refuse(parser, error)
