"""What the training mains share: the split of the batch, resuming, saving, the loop over epochs.

A main subclasses `TrainRun`; `launch` turns what goes wrong into one paragraph and an exit code.
"""

import inspect
import json
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from util import attention, checkpoint, decode, distributed, shard
from util.bad_images import BadImages
from util.datasets import (
    DOWNLOADED,
    AddressedDataset,
    StepBatchSampler,
    available_cores,
    batches,
    open_images,
    steps_per_epoch,
)
from util.images import EncodedImages, ImageError
from util.logging import RunLog
from util.lr_sched import Schedule
from util.packed import PackedImages
from util.recompute import recompute_blocks
from util.run_folder import FolderLock, find_checkpoint, writable_folder
from util.signals import StopSignal
from util.tars import find_tars
from util.train_engine import PRECISIONS, precision
from util.transforms import Normalize
from util.watchdog import TEMPORARY, Watchdog

# What may differ between two starts of one run without changing its results.
MACHINE_FLAGS = set(
    "recipe batch_size accum_iter num_workers data_path output_dir resume device attention compile recompute shard max_steps "  # noqa: SIM905
    "save_every save_steps print_freq allow_changes max_bad_fraction dist_timeout".split()
)
# Another split of the same total: the same images in the same steps. Where draws follow the split, that is said.
SPLIT_FLAGS = {"batch_size", "accum_iter"}


def resolve(args, process, default_batch_size=64):
    """Fills in what follows from other settings: batch split, learning rate, workers. ValueError if it cannot be."""
    check_least(args, 1, "batch_size epochs print_freq save_every accum_iter total_batch_size max_steps")
    check_least(args, 0, "num_workers save_steps picture_every seed weight_decay min_lr blr lr warmup_lr")
    if not 0 < args.dist_timeout <= 1e6:
        raise ValueError(f"--dist_timeout must lie between 0 and a million seconds, got {args.dist_timeout}")
    if not 0 <= args.max_bad_fraction < 1:
        raise ValueError(f"--max_bad_fraction must lie in [0, 1), got {args.max_bad_fraction}")
    if args.clip_grad is not None and args.clip_grad <= 0:
        raise ValueError(f"--clip_grad must be above 0, got {args.clip_grad}")
    if bool(args.lr_steps) != (args.lr_schedule == "simmim_steps"):
        raise ValueError(f"--lr_steps go with --lr_schedule simmim_steps, got {args.lr_steps} and {args.lr_schedule!r}")
    if args.seed >= 2**63:
        raise ValueError(f"--seed must be below 2^63, got {args.seed}")
    if not 0 <= args.warmup_epochs <= args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} must lie between 0 and --epochs {args.epochs}")
    if not 0 < args.crop_scale[0] <= args.crop_scale[1] <= 1:
        raise ValueError(f"--crop_scale must be two areas 0 < low <= high <= 1, got {args.crop_scale}")
    if args.shard:
        shard.check_group()
    split_batch(args, process.world_size, default_batch_size)
    args.lr = args.blr * args.total_batch_size / 256 if args.lr is None else args.lr
    resolve_workers(args, process)


def resolve_workers(args, process):
    if args.num_workers is None:
        args.num_workers = min(16, max(1, available_cores() // process.local_world_size - 1))  # one core is the trainer's


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


def check_least(args, least, names):
    """ValueError if one of the flags `names` (where the program has it and it is set) is below `least`."""
    for name in names.split():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")


def split_batch(args, world_size, default=64):
    """Sets batch_size, accum_iter and total_batch_size, so that total = batch_size * world_size * accum_iter, or ValueError.

    Without --batch_size a process takes the most that fits the total, up to `default` images.
    """
    total = args.total_batch_size
    if total is None:
        args.batch_size, args.accum_iter = args.batch_size or 64, args.accum_iter or 1
        args.total_batch_size = args.batch_size * args.accum_iter * world_size
        return
    per_process, rest = divmod(total, world_size)
    if rest:
        raise ValueError(f"a total batch of {total} cannot be split over {world_size} processes: change one of them")
    most = args.batch_size or (per_process // args.accum_iter if args.accum_iter else default)
    fitting = max(size for size in range(1, max(1, most) + 1) if per_process % size == 0)
    if args.batch_size not in (None, fitting):
        split = f"--batch_size {args.batch_size} on {world_size} processes"
        raise ValueError(f"a total batch of {total} cannot be split into {split}: try --batch_size {fitting}")
    if args.accum_iter not in (None, per_process // fitting):
        split = f"--batch_size {fitting} on {world_size} processes takes {per_process // fitting}"
        raise ValueError(f"--accum_iter {args.accum_iter}, but a total batch of {total} with {split}")
    args.batch_size, args.accum_iter = fitting, per_process // fitting


def open_everywhere(args, split, labelled=False, max_bad_fraction=0.0):
    """`open_images` of the flags, in every process; one of them downloads or indexes first, and all hear it if that fails."""
    if args.dataset in DOWNLOADED or (args.dataset == "folder" and find_tars(args.data_path, split, labelled)):
        distributed.from_main(lambda: open_images(args.dataset, args.data_path, split, labelled, max_bad_fraction) and None)
    images = open_images(args.dataset, args.data_path, split, labelled, max_bad_fraction)
    images.reference = args.loader == "reference"
    return images


class TrainRun:
    """A run, ready to train: building it raises ValueError for whatever the user could have got wrong.

    A subclass's `__init__` calls this one, opens the data (`open_everywhere`), sets `images`, `transform`, `collator`,
    `model`, `optimizer` and, unless it is ImageNet's, `normalize`, and ends with `start`.
    """

    machine_flags = MACHINE_FLAGS
    program = None  # the main that the run belongs to

    def __init__(self, args):
        self.args = args
        self.process = distributed.init_process(args.device, max(30, args.dist_timeout / 60 + 5))
        self.resolve()
        self.output_dir = writable_folder(args.output_dir)
        self.normalize = Normalize().to(self.process.device)
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
        self.data = {"num_images": len(self.images), "data": self.images.fingerprint()}
        if args.precision == "bf16" and process.device.type == "cuda":  # sharded blocks round their norms, too
            self.machine_flags = self.machine_flags - {"shard"}
        content = self.restore(self.resume_path) if self.resume_path else None
        self.start_step = self.step = self.saved_step = content["meta"]["step"] if content else 0
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
        changes, notes = self.changes(content["meta"]), self.notes(content["meta"])
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
            raise ValueError(f"{self.args.output_dir!r} holds a run of {meta['program']}; choose another --output_dir")
        before, now = meta["settings"]["total_batch_size"], self.args.total_batch_size
        if before != now:
            raise ValueError(f"the run's total batch was {before} and now is {now}, so its steps would no longer mean the same")

    def changes(self, meta):
        """What differs from the run so far, and changes its results."""
        settings, before = self.settings(), meta["settings"]
        # A flag that the run's program did not have yet has changed nothing: its default is what was done before.
        known = before.keys() & settings.keys() - self.machine_flags - SPLIT_FLAGS
        changes = [
            f"--{name} was {before[name]} and now is {settings[name]}" for name in sorted(known) if before[name] != settings[name]
        ]
        if any(meta.get(name, now) != now for name, now in self.data.items()):
            was, now = (f"{data['num_images']} images (names and labels {data.get('data', '?')[:8]})" for data in (meta, self.data))
            changes.append(f"the data had {was} and now has {now}: their order would be another")
        return changes

    def notes(self, meta):
        """What differs from the run so far, and may: where draws follow the split of the batch, not to the last bit."""
        settings, before = self.settings(), meta["settings"]
        split = {name: (before[name], settings[name]) for name in sorted(SPLIT_FLAGS)}
        split["world_size"] = meta["world_size"], self.process.world_size
        changed = [f"{name} was {was} and now is {now}" for name, (was, now) in split.items() if was != now]
        if not changed:
            return []
        draws = "" if "batch_size" in self.machine_flags else "; draws and statistics within a step are others"
        return [f"note: the same images in each step, split otherwise ({', '.join(changed)}){draws}"]

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
            (self.output_dir / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")
        self.log.info(json.dumps(settings))
        self.log.info(self.describe())
        self.log.info(
            f"{process.world_size} process(es) on {args.device} in {args.precision}, total batch {args.total_batch_size} = "
            f"{args.batch_size} x {process.world_size} x {args.accum_iter} accumulated, lr {args.lr:.3g} at its peak"
        )
        if args.device == "cuda" and torch.cuda.device_count() > 1 and process.world_size == 1:
            self.remarks.append(f"note: 1 of {torch.cuda.device_count()} GPUs is used; torchrun --nproc_per_node uses more")
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
        stop.close()
        self.engine.at_report()
        self.finish()
        return True

    def open_stream(self):
        """The iterator over this process's batches, from the first step to the last."""
        args, process = self.args, self.process
        split = args.batch_size, args.accum_iter, process.rank, process.world_size
        addresses = StepBatchSampler(len(self.images), *split, args.seed, self.start_step, self.last_step)
        dataset = AddressedDataset(self.images, self.transform, replace=args.max_bad_fraction > 0)
        self.engine.at_report = BadImages(self.images, dataset.bad, args.max_bad_fraction, self.log.info).report
        return batches(dataset, addresses, self.collator, args.num_workers, process.device.type == "cuda", self.say)

    def say(self, message):
        """Of this process, which need not be the one that logs."""
        if self.process.is_main:
            self.log.info(message)
        else:
            print(f"process {self.process.rank}: {message}", file=sys.stderr, flush=True)

    def interrupt(self, stop):
        """A signal has stopped the run before its end: saves, so that no step is lost, and ends.

        Until then, signals go on being noted alone: what they meant before may be to requeue the job, or to die.
        """
        if distributed.from_main(lambda: self.saved_step != self.step):  # which alone knows whether a save succeeded
            self.save(self.step, required=True)
        what = stop.name or "a signal to another process"
        self.log.info(f"stopped by {what} after step {self.step} of {self.last_step}; the same command goes on from there")
        self.log.close()
        stop.close()
        distributed.shut_down()

    def finish(self):
        self.log.info(self.summary())
        self.log.close()
        distributed.shut_down()

    def summary(self):
        """What the run did, from its log, so that a finished run can say it again."""
        raise NotImplementedError

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
        if self.write_checkpoint(step, state, self.meta(step), required):
            self.saved_step = step

    def gathered(self, part):
        """The state dict of the model or the optimizer, whole, on the main process; all must ask for it."""
        state = part.state_dict()
        return shard.gather(state, keep=self.process.is_main) if self.args.shard else state

    def write_checkpoint(self, name, state, meta, required):
        """Writes, prunes, and survives a full disk, unless this checkpoint is `required`: the older ones stand; -> success."""
        try:
            checkpoint.save_checkpoint(self.output_dir, name, state, meta)
        except OSError as error:
            if required:
                raise
            self.log.info(f"warning: the checkpoint of step {name} could not be written ({error}); training goes on")
            return False
        try:
            checkpoint.prune_checkpoints(self.output_dir, keep=lambda meta: meta["epoch"] % self.args.save_every == 0)
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
            **self.extra_meta(),
        }

    def extra_meta(self):
        return {}


def exit_code(error):
    """2: a user's error; 3: numbers that are not finite; 4: a checkpoint that cannot be used; 75: a disk; start again."""
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


def launch(parser, args, run_class):
    """Builds and trains the run, and ends with one paragraph where that cannot be; -> False if a signal stopped it."""
    try:
        run = run_class(args)
    except (ValueError, OSError) as error:
        distributed.shut_down()
        refuse(parser, error)
    try:
        with run.watchdog:
            return run.train()
    except (ImageError, FloatingPointError, OSError) as error:
        refuse(parser, error)
