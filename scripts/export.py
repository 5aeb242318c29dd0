"""Export a checkpoint's encoder or classifier to a file that timm loads, or its weights under MAE's names.

    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/finetune/checkpoint-best.pth --out classifier.pth
    python scripts/export.py output/mae --format mae --out mae_full.pth

The first argument is a checkpoint of this project or of MAE's releases, or the folder of a run (its newest intact
checkpoint is used). A .pth file holds {"model": weights}. All weights are float32.

--format timm   The encoder of a pre-trained checkpoint, or a whole fine-tuned classifier. The BatchNorm of a linear
                probe is folded into its linear layer. The script prints the `timm.create_model` line that loads the
                file. It runs this line and compares the features or logits with those of this project's model before
                the file is put in place. MAE's scripts can fine-tune such a .pth file, too. Normalise images with the
                printed mean and deviation: timm's defaults for these model names are different.
--format mae    A .pth file for MAE's scripts: encoder and decoder of a pre-trained MAE under the names of MAE's full
                releases, or a fine-tuned classifier. MAE's decoder has no aggregation, so PR-MIM runs that throw tokens
                are refused. Export their encoder with --format timm. The file is read back and compared bit for bit
                before it is put in place.
"""

import argparse
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_mae_pr
import models_vit
from main_pretrain import load_run
from util.atomic import replaced_file
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.encoder_weights import encoder_weights_of, load_encoder, refuse_foreign, rename_prefixes
from util.run import checkpoint
from util.run.cli import Parser, run_program, user_errors, why_not_writable

SUFFIXES = (".safetensors", ".pth")
TOLERANCE = 1e-5  # of the outputs, absolute and relative
MAE_MODELS = ("vit_base_patch16", "vit_large_patch16", "vit_huge_patch14")  # of MAE's models_vit.py
MAE_DECODER = dict(embed_dim=512, depth=8, num_heads=16)
INSTEAD = "export its encoder with --format timm; MAE's scripts can fine-tune that file"

Weights = dict[str, torch.Tensor]


def load_model(path: Path) -> tuple[models_vit.VisionTransformer, bool, dict[str, Any]]:
    """Load a checkpoint. Returns (model in eval mode, whether it is a classifier, the checkpoint's meta)."""
    content, what = checkpoint.read_checkpoint(path), repr(str(path))
    weights, meta = encoder_weights_of(content), checkpoint.meta_of(content)
    settings = meta.get("settings", {})
    refuse_other_networks(weights, settings, what)
    sizes = models_vit.read_sizes(weights, settings, what)
    head = weights.get("head.weight", weights.get("head.1.weight"))
    if head is not None:
        pool, is_probe = "avg" if "fc_norm.weight" in weights else "token", "head.1.weight" in weights
        model = models_vit.VisionTransformer(num_classes=len(head), global_pool=pool, probe=is_probe, **sizes)
        checkpoint.load_strict(model, weights, f"the weights in {what}")
        return model.eval(), True, meta
    model = models_vit.VisionTransformer(num_classes=1, global_pool="token", **sizes)
    refuse_foreign(model, weights, what)
    del content, weights  # load_encoder reads the file again; with the optimizer's state it may be large
    report = load_encoder(model, path)
    assert not report.resized, report
    return model.eval(), False, meta


def refuse_other_networks(weights: Weights, settings: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for encoders with relative positions, which are not plain ViTs."""
    if not any(name.endswith("relative_position_bias_table") for name in weights):
        return
    kind = "a Swin Transformer" if any(".downsample." in name for name in weights) else "a ViT with relative positions"
    name = f"{settings['model']}, {kind}" if settings.get("model") else kind
    flag = "--eval --resume" if "nb_classes" in settings else "--finetune"
    raise ValueError(
        f"{what} holds {name}: only plain ViTs can be exported, which are those of MAE, MFF, LocalMIM, TEC and "
        f"CrossMAE; main_finetune.py {flag} takes it as it is"
    )


def timm_weights(model: models_vit.VisionTransformer, is_classifier: bool) -> Weights:
    """The model's state dict under timm's names. Only the names of the head differ from ours."""
    state = model.state_dict()
    without_head = {name: value for name, value in state.items() if not name.startswith("head.")}
    if not is_classifier:
        return without_head
    if not isinstance(model.head, torch.nn.Sequential):
        return state
    # BatchNorm, then linear: W ((x - mean) / s) + b = (W / s) x + (b - (W / s) mean), with s = sqrt(var + eps).
    names = ("0.running_mean", "0.running_var", "1.weight", "1.bias")
    mean, var, weight, bias = (state[f"head.{name}"].double() for name in names)
    weight = weight / (var + model.head[0].eps).sqrt()
    return without_head | {"head.weight": weight.float(), "head.bias": (bias - weight @ mean).float()}


def timm_arguments(model: models_vit.VisionTransformer, is_classifier: bool) -> tuple[str, dict[str, Any]]:
    """The model name and keyword arguments with which `timm.create_model` builds `model`, without a checkpoint."""
    (height, width), patch_size, block = model.img_size, model.patch_size, model.blocks[0]
    factory, _ = models_vit.find_factory(model.embed_dim, len(model.blocks), "the model")
    options: dict[str, Any] = {}
    if (height, width) != (224, 224):
        options["img_size"] = height if height == width else (height, width)
    name = f"{factory.rpartition('_')[0]}_patch{patch_size}_224"
    if not timm.is_model(name):
        name = f"{factory}_224"
        options["patch_size"] = patch_size
    if not timm.is_model(name):  # timm has no ViT of this size: give all sizes
        name = "vit_base_patch16_224"
        options |= dict(embed_dim=model.embed_dim, depth=len(model.blocks), num_heads=block.attn.num_heads)
    in_chans, mlp_ratio = model.patch_embed.proj.in_channels, block.mlp.fc1.out_features / model.embed_dim
    if in_chans != 3:
        options["in_chans"] = in_chans
    if mlp_ratio != 4:
        options["mlp_ratio"] = mlp_ratio
    if not is_classifier:
        return name, options | {"num_classes": 0}
    num_classes = len(timm_weights(model, True)["head.weight"])
    return name, options | {"global_pool": model.global_pool, "num_classes": num_classes}


def loading_line(name: str, options: Mapping[str, Any], path: Path) -> str:
    """The `timm.create_model` call that loads the file at `path`, as Python source."""

    def quoted(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    arguments = {**options, "checkpoint_path": str(path)}
    return f"timm.create_model({quoted(name)}, {', '.join(f'{k}={quoted(v)}' for k, v in arguments.items())})"


@torch.inference_mode()
def largest_difference(
    model: models_vit.VisionTransformer, is_classifier: bool, path: Path, name: str, options: Mapping[str, Any]
) -> str:
    """Load the file at `path` with timm, and return the largest difference of its features or logits as text.

    The outputs of two random images are compared in float32. If they differ by more than TOLERANCE, which may be
    rounding, they are compared in float64. ValueError if they still differ, or if timm does not load the file.
    """
    try:
        theirs = timm.create_model(name, **options, checkpoint_path=str(path)).eval()
    except RuntimeError as error:
        raise ValueError(f"timm {timm.__version__} does not load the weights, nothing is written: {error}") from error
    generator = torch.Generator().manual_seed(0)
    imgs = torch.randn(2, model.patch_embed.proj.in_channels, *model.img_size, generator=generator)
    differences = []
    for dtype in (torch.float32, torch.float64):
        models = model.to(dtype), theirs.to(dtype)
        expected, output = (m(imgs.to(dtype)) if is_classifier else m.forward_features(imgs.to(dtype)) for m in models)
        differences.append(f"{(output - expected).abs().max().item():.1e}")
        if torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return " in float32, which is rounding: in float64 ".join(differences)
    outputs = "logits" if is_classifier else "features"
    raise ValueError(
        f"timm's {outputs} differ from ours by up to {differences[-1]}, more than {TOLERANCE}; nothing is written"
    )


def mae_weights(model: models_mae_pr.MaskedAutoencoderViT) -> Weights:
    """The model's state dict under the names of MAE's full releases: the inverse of `load_official`."""
    official = {ours: theirs for theirs, ours in models_mae_pr.OFFICIAL_NAMES.items()}
    return rename_prefixes(model.state_dict(), official)


def refuse_other_frameworks(weights: Weights, settings: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for pre-trained checkpoints that are not MAE's, or that have MAE's names already."""
    if "decoder_embed.weight" in weights:
        raise ValueError(f"{what} has MAE's names already")
    name = settings.get("model", "mae_")
    if not name.startswith("mae_"):
        raise ValueError(f"{what} holds {name}, and --format mae is for MAE's framework alone: {INSTEAD}")


def load_mae(path: Path) -> models_mae_pr.MaskedAutoencoderViT:
    """Load a pre-trained model of MAE's framework. ValueError if MAE's own code could not run it."""
    model, settings = load_run(path)
    if model.decoder.aggregation is not None:
        raise ValueError(
            f"{str(path)!r} was trained with --throw_ratio {settings['throw_ratio']}: its decoder reconstructs thrown "
            f"tokens by an aggregation, which MAE's decoder lacks; {INSTEAD}"
        )
    if model.img_size[0] != model.img_size[1]:
        raise ValueError(f"{str(path)!r} is for images of {model.img_size} pixels, and MAE's are square: {INSTEAD}")
    return model


def check_reads_back(path: Path, model: torch.nn.Module) -> None:
    """Raise ValueError unless the file at `path` holds the weights of `model`, bit for bit."""
    again, content = copy.deepcopy(model), checkpoint.read_checkpoint(path)
    for value in again.state_dict().values():
        value.zero_()
    if isinstance(again, models_mae_pr.MaskedAutoencoderViT):
        again.load_official(content)
    else:
        checkpoint.load_strict(again, content["model"], "the weights in the file")
    read = again.state_dict()
    different = [name for name, value in model.state_dict().items() if not torch.equal(value, read[name])]
    if different:
        raise ValueError(f"{checkpoint.shorten(different)} read back from the file differ; nothing is written")


def mae_name(model: torch.nn.Module, decoder: torch.nn.Module | None) -> str:
    """A sentence that names the model of MAE's scripts with the sizes of `model` and of `decoder`."""
    sizes = dict(patch_size=model.patch_size, **block_sizes(model))
    factory, published = models_vit.find_factory(sizes["embed_dim"], sizes["depth"], "the model")
    is_known = factory in MAE_MODELS and sizes == published
    if decoder is not None:
        is_known = is_known and block_sizes(decoder) == MAE_DECODER and model.img_size == (224, 224)
        factory = f"mae_{factory}"
    if is_known:
        return f"MAE's scripts read it as {factory}"
    return f"MAE's scripts have no model of this size: {', '.join(f'{k} {v}' for k, v in sizes.items())}"


def block_sizes(model: torch.nn.Module) -> dict[str, int]:
    """Width, depth and heads of the blocks of an encoder or a decoder."""
    block = model.blocks[0]
    return dict(embed_dim=block.mlp.fc2.out_features, depth=len(model.blocks), num_heads=block.attn.num_heads)


def write_weights(path: Path, state: Weights, metadata: dict[str, str]) -> None:
    """Write the file that the suffix asks for: .pth holds {"model": state}, .safetensors also holds the metadata."""
    path.touch()
    mode = path.stat().st_mode
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path, metadata)
        path.chmod(mode)  # safetensors may leave a file that only its owner can read
    else:
        torch.save({"model": state}, path)


def export_timm(source: Path, out: Path) -> list[str]:
    """Export the checkpoint at `source` for timm. Returns the lines that describe the file."""
    model, is_classifier, meta = load_model(source)
    state = timm_weights(model, is_classifier)
    name, options = timm_arguments(model, is_classifier)
    mean, std = pixel_statistics(meta.get("settings", {}))
    facts = {"timm": {"model_name": name, **options}, "mean": mean, "std": std}
    if is_classifier and meta.get("classes"):
        facts["classes"] = meta["classes"]
    metadata = {"format": "pt", "source": source.name, **{key: json.dumps(value) for key, value in facts.items()}}
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, metadata)
        difference = largest_difference(model, is_classifier, temporary, name, options)
    kind, outputs = ("classifier", "logits") if is_classifier else ("encoder", "features")
    return [
        describe(kind, source, out, state),
        f"largest difference of timm's {outputs} from ours, on two random images: {difference}",
        f"images: pixels in [0, 1], normalised with mean {mean} and std {std}",
        loading_line(name, options, out),
    ]


def export_mae(source: Path, out: Path) -> list[str]:
    """Export the checkpoint at `source` for MAE's scripts. Returns the lines that describe the file."""
    if out.suffix != ".pth":
        raise ValueError(f"--format mae writes a .pth, which is what MAE's scripts read, got --out {str(out)!r}")
    content = checkpoint.read_checkpoint(source)
    weights, settings = encoder_weights_of(content), checkpoint.meta_of(content).get("settings", {})
    is_classifier = "head.weight" in weights or "head.1.weight" in weights
    if not is_classifier:
        refuse_other_frameworks(weights, settings, repr(str(source)))
    del content, weights  # the file is read again
    if is_classifier:
        kind, model = "classifier", load_model(source)[0]
        state, name = model.state_dict(), mae_name(model, None)
    else:
        kind, model = "encoder and decoder", load_mae(source)
        state, name = mae_weights(model), mae_name(model, model.decoder)
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, {})
        check_reads_back(temporary, model)
    mean, std = pixel_statistics(settings)
    lines = [
        describe(kind, source, out, state),
        "read back from the file: the same weights, bit for bit",
        f"images: pixels in [0, 1], normalised with mean {mean} and std {std}",
        name,
    ]
    if not is_classifier and model.counts.num_thrown:
        lines.append("note: tokens were thrown in training, so the decoder has seen fewer tokens than MAE gives it")
    return lines


def pixel_statistics(settings: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation with which a run normalises its images."""
    return list(settings.get("mean") or IMAGENET_MEAN), list(settings.get("std") or IMAGENET_STD)


def describe(kind: str, source: Path, out: Path, state: Weights) -> str:
    """A line that names the written file and its size."""
    num_parameters = sum(value.numel() for value in state.values())
    return f"{kind} of {source}: {out} ({num_parameters / 1e6:.1f} M parameters, {out.stat().st_size / 1e6:.0f} MB)"


FORMATS = {"timm": export_timm, "mae": export_mae}


def check_out(path: Path, source: Path, overwrite: bool) -> None:
    """Raise ValueError if the file `path` cannot or should not be written."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {' or '.join(SUFFIXES)}")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    if reason := why_not_writable(path):
        raise ValueError(f"--out {str(path)!r} cannot be written: {reason}")
    if path.exists() and not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")


def export(source: str | Path, out: str | Path, overwrite: bool = False, layout: str = "timm") -> list[str]:
    """Export a checkpoint, or the newest one of a run's folder. Returns the lines that describe the file `out`."""
    source, out = checkpoint.find_checkpoint_file(source), Path(out)
    if not source.is_file():
        raise ValueError(f"no checkpoint at {str(source)!r}: give the path of a file or the folder of a run")
    check_out(out, source, overwrite)
    return FORMATS[layout](source, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("export.py", description=__doc__)
    flag = parser.add_argument
    flag("run", help="a checkpoint, or the folder of a run")
    flag("--out", required=True, help="write this file: .safetensors or .pth")
    flag("--format", default="timm", choices=FORMATS, help="names and layout of the weights")
    flag("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace --out if it exists")
    args = parser.parse_args(argv)
    with user_errors(parser):
        lines = export(args.run, args.out, args.overwrite, args.format)
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main, "export.py")
