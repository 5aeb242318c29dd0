"""Fine-tunes a pre-trained encoder: fully, its last blocks, or a linear probe; and evaluates any classifier.

    torchrun --nproc_per_node 8 main_finetune.py --recipe finetune_vit_base --data_path IMAGENET --finetune output/prmim50_base
    python main_finetune.py --recipe finetune_vit_base --trainable_blocks 2 --finetune ... # the last two blocks
    python main_finetune.py --recipe linprobe_vit_base --finetune ...                      # the head alone
    python main_finetune.py --eval --resume mae_finetuned_vit_base.pth --data_path IMAGENET

The same command again resumes the run at the step of its newest good checkpoint.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.optim import param_groups_layer_decay
from tqdm import tqdm

import models_relative_vit
import models_swin
import models_vit
from engine_finetune import FinetuneEngine, evaluate
from recipes import FINETUNE_DEFAULTS, FINETUNE_RECIPES, LINPROBE_DEFAULTS
from util.data.datasets import AddressedDataset, batches, every_image_once, stack
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD, FinetuneAugment, Normalize, RandomResizedCropFlip, ResizeCenterCrop
from util.lars import LARS
from util.run import checkpoint, distributed, shard
from util.run.cli import Parser, flags_given, parse_with_recipe, run_program
from util.run.flags import add_data_flags, add_optimisation_flags, add_run_flags, check_least, resolve, resolve_workers
from util.run.logging import count_of
from util.run.run_folder import write_json
from util.run.train_engine import precision
from util.run.train_run import TrainRun, image_bytes, launch, open_everywhere, refuse, refuse_different_starts
from util.run.watchdog import BETWEEN

ENCODERS = (models_vit, models_relative_vit, models_swin)
MODELS = {name: getattr(module, name) for module in ENCODERS for name in module.__all__ if name.islower()}
# Classes and validation images of what is published.
IMAGENET, INATURALIST = (1000, 50_000), {"inat18": (8142, 24_426), "inat19": (1010, 3030)}


def get_args_parser():
    parser = Parser("main_finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("--recipe", help="named defaults from recipes.py; explicit flags win")
    flag("--eval", action=boolean, default=False, help="only evaluate the classifier at --resume on val/")

    model = parser.add_argument_group("model").add_argument
    model("--model", default="vit_base_patch16", choices=MODELS)
    model("--finetune", help="the pre-trained encoder: a checkpoint or a run's folder; without it, training is from scratch")
    model("--first_release_merging", action=boolean, default=False, help="--finetune is one of GreenMIM's public files")
    model("--input_size", type=int, help="image side in pixels (default: the model's)")
    model("--patch_size", type=int, help="default: the model's")
    model("--trainable_blocks", type=int, help="train the last so many blocks and the head; 0: linear probing (default: all)")
    model("--global_pool", choices=("avg", "token"), help="what the head sees (default: avg; token for linear probing)")
    model("--drop_path", type=float, help="rate of the last block; it grows linearly from 0")
    model("--nb_classes", type=int, help="checked against the data, which has the say")

    add_optimisation_flags(parser.add_argument_group("optimisation"))
    optimisation = parser.add_argument_group("optimisation of fine-tuning").add_argument
    optimisation("--optimizer", choices=("adamw", "lars"), help="default: adamw; lars for linear probing")
    optimisation("--layer_decay", type=float, help="factor on the learning rate from each layer to the one before it")
    optimisation("--cls_token_layer_decay", action=boolean, default=True, help="off: the class token learns like the head (TEC)")

    add_data_flags(parser.add_argument_group("data"))
    augmentation = parser.add_argument_group("augmentation").add_argument
    augmentation("--aa", help="timm's RandAugment policy; 'none': none")
    augmentation("--color_jitter", type=float, help="strength, where there is no --aa")
    augmentation("--smoothing", type=float, help="label smoothing")
    augmentation("--reprob", type=float, help="probability of random erasing")
    augmentation("--remode", default="pixel", choices=("pixel", "rand", "const"), help="what fills the erased box")
    augmentation("--recount", type=int, default=1, help="erased boxes an image")
    augmentation("--mixup", type=float, help="alpha; 0: off")
    augmentation("--cutmix", type=float, help="alpha; 0: off")
    augmentation("--mixup_prob", type=float, default=1.0, help="of mixing a batch at all")
    augmentation("--mixup_switch_prob", type=float, default=0.5, help="of cutmix, where both are on")
    augmentation("--mixup_mode", default="batch", choices=("batch", "pair", "elem"))
    augmentation("--clip_crop", action=boolean, help="one try a crop, clipped to the image: MAE's linear probing, without --aa")

    evaluation = parser.add_argument_group("evaluation").add_argument
    evaluation("--eval_every", type=int, default=1, help="epochs between evaluations; the last epoch always is")
    evaluation("--crop_pct", type=float, help="val images are resized to input_size / crop_pct (default: .875; 1 above 224 px)")
    evaluation("--mean", type=float, nargs=3, help="of the pixels in [0, 1] (default: the checkpoint's, else ImageNet's)")
    evaluation("--std", type=float, nargs=3)

    add_run_flags(parser.add_argument_group("run"))
    parser.set_defaults(output_dir="output/finetune", **FINETUNE_DEFAULTS)
    return parser


def parse_args(argv=None):
    """-> (parser, args). A linear probe has other defaults than fine-tuning; a recipe and explicit flags win over both."""
    parser = get_args_parser()
    args = parse_with_recipe(parser, FINETUNE_RECIPES, argv)
    if args.recipe and (FINETUNE_RECIPES[args.recipe].get("trainable_blocks") == 0) != (args.trainable_blocks == 0):
        probes = ", ".join(name for name in FINETUNE_RECIPES if "linprobe" in name)
        parser.error(
            f"recipe {args.recipe!r} does not go with --trainable_blocks {args.trainable_blocks}: linear probing (0) has recipes "
            f"of its own, {probes}"
        )
    if args.trainable_blocks == 0:
        parser.set_defaults(**LINPROBE_DEFAULTS)
        args = parse_with_recipe(parser, FINETUNE_RECIPES, argv)
    return parser, args


def build_model(settings):
    """The classifier that `settings` (vars(args), or a checkpoint's) describe; what is not trained is frozen."""
    names = {"input_size": "img_size", "patch_size": "patch_size", "drop_path": "drop_path_rate"}
    options = {option: settings[name] for name, option in names.items() if settings.get(name) is not None}
    probe = settings["trainable_blocks"] == 0
    model = MODELS[settings["model"]](
        num_classes=settings["nb_classes"], global_pool=settings["global_pool"], probe=probe, **options
    )
    if settings["trainable_blocks"] is not None and settings["trainable_blocks"] != len(model.blocks):
        model.freeze_all_but(settings["trainable_blocks"])
    return model


def load_classifier(path, args):
    """-> (model in eval mode, settings, its classes or None) of a fine-tuned checkpoint: ours, MAE's or timm's.

    Ours know what they are; of the others all is read from the weights.
    """
    path = checkpoint.find_checkpoint_file(path)
    content = checkpoint.read_checkpoint(path)
    weights = checkpoint.encoder_weights_of(content)
    head = weights.get("head.weight", weights.get("head.1.weight"))
    if head is None:
        raise ValueError(f"{str(path)!r} holds no classifier (no head.weight): fine-tune the encoder first, with --finetune")
    meta = content["meta"] if isinstance(content.get("meta"), dict) else {}
    settings = dict(meta.get("settings", {}))
    if "model" not in settings:
        sizes = models_vit.read_sizes(weights, settings, repr(str(path)))
        settings |= dict(
            model=models_vit.find_factory(sizes["embed_dim"], sizes["depth"], repr(str(path)))[0],
            input_size=sizes["img_size"][0],
            patch_size=sizes["patch_size"],
            global_pool="avg" if "fc_norm.weight" in weights else "token",
            trainable_blocks=0 if "head.1.weight" in weights else None,
            nb_classes=len(head),
        )
    model = build_model(settings)
    checkpoint.load_strict(model, weights, f"the weights in {str(path)!r}")
    for name in ("crop_pct", "mean", "std"):
        settings[name] = settings.get(name) if getattr(args, name) is None else getattr(args, name)
    return model.eval(), settings, meta.get("classes")


def check_classes(ours, theirs, what, whose):
    """ValueError where the class lists differ, with the first that do."""
    if list(ours) != list(theirs):
        odd = sorted(set(ours) ^ set(theirs))
        difference = f"only one of them has {', '.join(odd[:5])}" if odd else "in another order"
        raise ValueError(f"{what} has {len(ours)} classes, {whose} {len(theirs)}; {difference}")


def check_pixel_statistics(args):
    if any(value <= 0 for value in args.std or ()):
        raise ValueError(f"--std must be positive, got {args.std}")


def notes_on(dataset, images):
    """A remark where the images to evaluate on look like a part of a published set."""
    found = len(images.classes), len(images)
    whole = INATURALIST.get(dataset, IMAGENET if found[0] == IMAGENET[0] else found)
    if found == whole:
        return []
    name = dataset if dataset in INATURALIST else "ImageNet"
    return [f"note: {found[1]} validation images of {found[0]} classes; {name} has {whole[1]} of {whole[0]}"]


def find_encoder(finetune: str | None, is_resumed: bool) -> dict[str, object] | None:
    """Which checkpoint --finetune means: its path, SHA-256, and how far its pre-training is, where it says so.

    A run that is resumed needs it no longer: None where it is gone by then.
    """
    if finetune is None or (is_resumed and not Path(finetune).exists()):
        return None
    try:
        path = checkpoint.find_checkpoint_file(finetune)
    except checkpoint.CheckpointError:  # an empty folder
        if is_resumed:
            return None
        raise
    if not path.is_file():
        raise ValueError(f"--finetune {finetune!r} does not exist: give a checkpoint, or the folder of a run")
    meta = checkpoint.read_record(path) or checkpoint.read_checkpoint(path).get("meta")
    meta = meta if isinstance(meta, dict) else {}
    encoder = {"path": str(path.resolve()), "sha256": checkpoint.recorded_sha256(path), "step": meta.get("step")}
    if meta.get("settings", {}).get("epochs"):
        encoder |= {"epoch": meta["epoch"], "epochs": meta["settings"]["epochs"]}
    return encoder


def unfinished(encoder: dict) -> list[str]:
    """A warning where the encoder's own training has not come to its end."""
    if encoder.get("epochs") is None or encoder["epoch"] >= encoder["epochs"]:
        return []
    return [
        f"warning: the training of {encoder['path']} is not finished: it is at step {encoder['step']}, "
        f"epoch {encoder['epoch']:.4g} of {encoder['epochs']}"
    ]


def is_finished(meta: dict) -> bool:
    """Whether a checkpoint is that of the end of its run's schedule."""
    return meta["epoch"] >= meta["settings"]["epochs"]


def compare_encoders(before: dict, now: dict | None, is_over: bool, output_dir: str) -> list[str]:
    """-> what to say of the encoder of a run that is resumed. `before`: what it began from; `now`: what --finetune names.

    ValueError where that is another encoder. A pre-training run that has gone on since is the same one while this run
    is under way, but no longer once it is over: its results would pass for those of the newer checkpoint.
    """
    if now is None or now["sha256"] == before.get("sha256"):
        return []
    was, new = (Path(encoder["path"]).resolve() if encoder["path"] else None for encoder in (before, now))
    if "sha256" not in before and was in (new, new.parent):
        return []  # records of older versions hold a path alone, of a file or of a folder
    steps = [before.get("step"), now.get("step")]
    same_run = was is not None and was.parent == new.parent and None not in steps and steps[0] < steps[1]
    if same_run and not is_over:
        return [f"warning: this run continues from {was}; {new}, which is newer, is ignored"]
    raise ValueError(
        f"{output_dir!r} holds {'the results' if is_over else 'a run'} of {repr(str(was)) if was else 'training from scratch'}, "
        f"not of {str(new)!r}; choose another --output_dir"
    )


class FinetuneRun(TrainRun):
    """Images, classifier and evaluation of a fine-tuning run."""

    # The split of the batch counts: mixup, drop path and a probe's BatchNorm see the micro-batches.
    machine_flags = TrainRun.machine_flags - {"batch_size", "accum_iter"} | {"finetune", "eval", "eval_every"}
    program = "main_finetune.py"

    def __init__(self, args: argparse.Namespace, flags: list[str] | None = None) -> None:
        super().__init__(args, flags)
        self.images = open_everywhere(args, "train", labelled=True, max_bad_fraction=args.max_bad_fraction)
        self.val_images = open_everywhere(args, "val", labelled=True)
        self.data = {"num_val_images": len(self.val_images), "val_data": self.val_images.fingerprint()}
        self.classes = self.images.classes
        check_classes(self.classes, self.val_images.classes, "the training data", "the validation data")
        if args.nb_classes not in (None, len(self.classes)):
            raise ValueError(f"--nb_classes {args.nb_classes}, but the data has {len(self.classes)} classes; leave the flag out")
        args.nb_classes = len(self.classes)

        self.remarks += self.val_images.notes + notes_on(args.dataset, self.val_images)

        torch.manual_seed(args.seed)  # the same first weights in every process
        self.model = build_model(vars(args))
        self.encoder = distributed.from_main(lambda: find_encoder(args.finetune, self.resume_path is not None))
        if self.encoder and not self.resume_path:
            report = checkpoint.load_encoder(self.model, self.encoder["path"], args.first_release_merging, self.classes)
            self.remarks += [f"encoder from {self.encoder['path']}: {report}", *unfinished(self.encoder)]
        elif not self.resume_path:
            if self.model.frozen:
                raise ValueError(f"--trainable_blocks {args.trainable_blocks} needs --finetune: what is frozen must be pre-trained")
            self.remarks.append("no --finetune: training from scratch")
        model = self.model.to(self.first_home)
        args.input_size, args.patch_size = model.img_size[0], model.patch_size
        self.normalize = Normalize(args.mean, args.std).to(self.process.device)
        self.transform = make_augmentation(args)
        self.val_transform = ResizeCenterCrop(args.input_size, args.crop_pct, args.loader == "reference")
        self.collator = stack
        self.optimizer = make_optimizer(model, args)
        self.start(
            FinetuneEngine,
            label_smoothing=args.smoothing,
            mixup=make_mixup(args),
            erase=RandomErasing(args.reprob, mode=args.remode, max_count=args.recount, device=self.process.device)
            if args.reprob
            else None,
        )

    def resolve(self):
        args = self.args
        args.aa = None if args.aa == "none" else args.aa
        args.mean, args.std = args.mean or IMAGENET_MEAN, args.std or IMAGENET_STD
        args.global_pool = args.global_pool or ("token" if args.trainable_blocks == 0 else "avg")
        args.optimizer = args.optimizer or ("lars" if args.trainable_blocks == 0 else "adamw")
        # A probe's BatchNorm sees 512 images at a time in MAE's protocol.
        resolve(args, self.process, default_batch_size=512 if args.trainable_blocks == 0 else 64)
        check_pixel_statistics(args)
        check_least(args, 0, "trainable_blocks drop_path smoothing reprob mixup cutmix mixup_prob mixup_switch_prob color_jitter")
        check_least(args, 1, "nb_classes recount eval_every")
        for name in ("drop_path", "smoothing", "reprob", "mixup_prob", "mixup_switch_prob"):
            if getattr(args, name) > 1:
                raise ValueError(f"--{name} must be at most 1, got {getattr(args, name)}")
        if not 0 < args.layer_decay <= 1:
            raise ValueError(f"--layer_decay must lie in (0, 1], got {args.layer_decay}")
        if args.clip_crop and (args.aa or args.color_jitter):
            raise ValueError(f"--clip_crop goes without --aa and --color_jitter, got {args.aa!r} and {args.color_jitter}")
        if (args.mixup or args.cutmix) and args.batch_size % 2:
            raise ValueError(f"mixup pairs the images of a batch, so --batch_size must be even, got {args.batch_size}")
        if args.trainable_blocks == 0 and args.model in models_swin.__all__:
            raise ValueError(f"--trainable_blocks 0, linear probing, is for ViTs; --model {args.model} has no probe")
        if args.trainable_blocks == 0 and args.batch_size == 1:
            raise ValueError("a linear probe's BatchNorm needs more than one image a micro-batch, got --batch_size 1")

    def check_identity(self, meta):
        super().check_identity(meta)
        before = meta.get("encoder") or {"path": meta["settings"]["finetune"]}
        self.remarks += compare_encoders(before, self.encoder, is_finished(meta), self.args.output_dir)
        self.args.finetune = meta["settings"]["finetune"]
        self.encoder = before if before["path"] else None
        check_classes(meta["classes"], self.classes, "the run", "the data")

    def describe(self):
        args, trained = self.args, sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        share = {None: "all blocks", 0: "a linear probe"}.get(args.trainable_blocks, f"the last {args.trainable_blocks} block(s)")
        return (
            f"{args.model}, {share}: {trained / 1e6:.2f} M trainable parameters; {len(self.classes)} classes, "
            f"{count_of(len(self.images), 'image')} in {self.images.root}, {count_of(self.steps_per_epoch, 'step')} an epoch; "
            f"{count_of(len(self.val_images), 'image')} in {self.val_images.root} to evaluate on"
        )

    def train(self):
        step = self.start_step
        if self.is_evaluated_after(step) and not distributed.from_main(lambda: step in self.evaluations()):
            self.evaluate(step)  # the run was stopped between the checkpoint and its evaluation
        return super().train()

    def finish(self):
        if self.process.is_main:
            write_json(self.output_dir / "results.json", self.results())
        super().finish()

    def after_step(self, step):
        super().after_step(step)
        if self.is_evaluated_after(step):
            self.evaluate(step)

    def is_evaluated_after(self, step):
        epoch, rest = divmod(step, self.steps_per_epoch)
        return step > 0 and not rest and (epoch % self.args.eval_every == 0 or epoch == self.args.epochs)

    def evaluate(self, step):
        """Scores val/ after an epoch, logs it, and keeps the weights if they are the best so far."""
        distributed.broadcast_buffers(self.model)
        view = self.val_images, self.val_transform, self.normalize
        alive = partial(self.watchdog.reached, step - 1, BETWEEN)
        result = score(self.model, *view, self.engine.autocast, self.args, alive=alive)
        # All processes must know, since gathering takes them all.
        best = distributed.from_main(lambda: result["top1"] > self.best_before(step))
        weights = self.gathered(self.model) if best else None
        if not self.process.is_main:
            return
        # Logged last: what is not in the log is evaluated again after a kill.
        if best:
            self.write_checkpoint("best", {"model": weights}, {**self.meta(step), "val": result}, required=False)
        scalars = {"epoch": step // self.steps_per_epoch - 1, **{f"val_{name}": value for name, value in result.items()}}
        line = f"top-1 {result['top1']:.2f} %, top-5 {result['top5']:.2f} % on {result['num_images']} images"
        self.log.report(step, scalars, f"after epoch {scalars['epoch']}: {line}", line)
        try:
            write_json(self.output_dir / "results.json", self.results())
        except OSError as error:  # at the end it is written again
            self.log.info(f"warning: results.json could not be written ({error}); training goes on")

    def best_before(self, step):
        """Top-1 of the best checkpoint on disk, of an earlier step than this; -1 where there is none."""
        meta = checkpoint.read_record(self.output_dir / "checkpoint-best.pth")
        return meta["val"]["top1"] if meta and meta["step"] < step else -1.0

    def evaluations(self):
        """{step: report} of all evaluations so far; on the main process."""
        return {r["step"]: r for r in self.log.history() if "val_top1" in r}

    def results(self):
        evaluations = list(self.evaluations().values())
        if not evaluations:
            return {}
        best = max(evaluations, key=lambda r: r["val_top1"])
        return {"last": evaluations[-1], "best": best, "encoder": self.encoder, "code": self.origin["code"]}

    def extra_meta(self):
        return {"classes": self.classes, "encoder": self.encoder}

    def summary(self):
        lines = [f"trained {self.args.model} {self.done_so_far()}"]
        results = self.results()
        for name, r in ((name, results[name]) for name in ("last", "best") if name in results):
            lines.append(f"  {name:4} epoch   top-1 {r['val_top1']:.2f} %, top-5 {r['val_top5']:.2f} % (epoch {r['epoch']})")
        return "\n".join(lines + self.closing_lines())


def make_augmentation(args):
    reference = args.loader == "reference"
    if args.clip_crop:
        return RandomResizedCropFlip(args.input_size, args.seed, args.crop_scale, clip=True, reference=reference)
    return FinetuneAugment(args.input_size, args.seed, args.crop_scale, args.aa, args.color_jitter, reference)


def make_mixup(args):
    if not (args.mixup or args.cutmix):
        return None
    return Mixup(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
        mode=args.mixup_mode,
        label_smoothing=args.smoothing,
        num_classes=args.nb_classes,
    )


def make_optimizer(model, args):
    if not args.cls_token_layer_decay and not hasattr(model, "cls_token"):
        raise ValueError(f"--no-cls_token_layer_decay is for models with a class token, which {args.model} has not")
    model.cls_token_layer_decay = args.cls_token_layer_decay
    groups = param_groups_layer_decay(model, args.weight_decay, model.no_weight_decay(), layer_decay=args.layer_decay)
    if args.optimizer == "lars":
        return LARS(groups, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.999), fused=True)


def score(model, images, transform, normalize, autocast, args, columns=None, alive=lambda: None):
    """`evaluate` on all of `images`, shared by the processes; `alive` is called with each batch."""
    rank, world_size = distributed.rank_and_world_size()
    device = normalize.mean.device
    addresses = every_image_once(len(images), args.batch_size, rank, world_size)
    pinned, stored = device.type == "cuda", args.batch_size * image_bytes(transform.size)
    stream = batches(AddressedDataset(images, transform), addresses, stack, args.num_workers, pinned, batch_bytes=stored)
    bar = tqdm(stream, total=len(addresses), unit="batch", leave=False, disable=rank != 0 or not sys.stderr.isatty())
    stream = (alive() or batch for batch in bar)
    if shard.is_sharded(model):
        most = len(every_image_once(len(images), args.batch_size, 0, world_size))  # no process has more than the first
        stream = shard.in_company(stream, most, model, torch.zeros(1, 3, *model.img_size, device=device), autocast)
    return evaluate(model, stream, len(images), normalize, autocast, columns)


def evaluate_only(args: argparse.Namespace, given: set[str] | frozenset[str] = frozenset()) -> dict[str, float]:
    """--eval: scores val/ with the classifier at --resume; -> the result. `given`: the flags that were set explicitly."""
    process = distributed.init_process(args.device)
    refuse_different_starts(args)
    if args.shard:
        raise ValueError("--shard is for training: --eval keeps no gradients and no moments, so leave it out")
    if args.resume in ("auto", "none"):
        raise ValueError("--eval needs --resume: the path of a fine-tuned checkpoint, or a run's folder")
    args.batch_size = args.batch_size or 64
    check_least(args, 1, "batch_size")
    check_least(args, 0, "num_workers")
    check_pixel_statistics(args)
    resolve_workers(args, process)
    model, settings, classes = load_classifier(args.resume, args)
    for name in ("model", "input_size", "patch_size"):
        if name in given and getattr(args, name) != settings[name]:
            raise ValueError(
                f"--{name} {getattr(args, name)}, but the classifier at {args.resume!r} has {settings[name]}: leave the flag out"
            )
    transform = ResizeCenterCrop(settings["input_size"], settings["crop_pct"], args.loader == "reference")
    images = open_everywhere(args, "val", labelled=True)
    if classes:
        check_classes(classes, images.classes, "the checkpoint", "the data")
    elif len(images.classes) != settings["nb_classes"]:
        raise ValueError(f"the head of {args.resume!r} has {settings['nb_classes']} classes, the data {len(images.classes)}")
    normalize = Normalize(settings["mean"] or IMAGENET_MEAN, settings["std"] or IMAGENET_STD).to(process.device)
    _, autocast, _ = precision(args.precision, process.device)
    result = score(model.to(process.device), images, transform, normalize, autocast, args)
    if process.is_main:
        for note in images.notes + notes_on(args.dataset, images):
            print(note)
        print(f"top-1 {result['top1']:.3f} %, top-5 {result['top5']:.3f} %, loss {result['loss']:.4f} on {len(images)} images")
    distributed.shut_down()
    return result


def main(argv=None):
    parser, args = parse_args(argv)
    if not args.eval:
        return launch(parser, args, FinetuneRun, argv)
    try:
        return evaluate_only(args, flags_given(parser, argv))
    except (ValueError, FloatingPointError, OSError) as error:
        distributed.shut_down()
        refuse(parser, error)


if __name__ == "__main__":
    run_program(main, "main_finetune.py")
