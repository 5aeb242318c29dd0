"""Writes a checkpoint's encoder or classifier as a file that timm loads, or its weights under MAE's own names.

    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/finetune/checkpoint-best.pth --out classifier.pth
    python scripts/export.py output/mae --format mae --out mae_full.pth

The first argument is a checkpoint (ours, or MAE's release) or a run's folder (its newest good checkpoint). The suffix
of --out says which kind of file is written; a .pth holds {"model": weights}. All weights are float32.

--format timm   of a pre-trained checkpoint the encoder alone, without decoder and optimiser; of a fine-tuned one
                everything. The BatchNorm of a linear probe is folded into its linear layer. The printed
                `timm.create_model` line loads the file, every key of it and no other; before the file gets its name,
                that very line is run, and its features or logits are compared with this project's model. MAE's
                scripts fine-tune a .pth of this format, too. Normalise images as the script says: timm's own default
                for these names is another mean and deviation.
--format mae    what MAE's own scripts read, as .pth: encoder and decoder of a pre-trained MAE under the names of MAE's
                full releases, or a fine-tuned classifier. MAE's decoder has no aggregation, so runs of PR-MIM that
                throw tokens are refused: export their encoder with --format timm. Before the file gets its name, it is
                read back and compared bit for bit.
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_mae_pr
import models_vit
from scripts.visualize import find_checkpoint, load_run
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.run import checkpoint
from util.run.cli import Parser, replaced_file, run_program, user_errors, why_not_writable

SUFFIXES = (".safetensors", ".pth")
TOLERANCE = 1e-5  # of the outputs, absolute and relative
# timm's names for the sizes that it has; for all others the line names a ViT-B and overrides its sizes.
TIMM_SIZES = {"tiny": models_vit.TINY, "small": models_vit.SMALL, "base": models_vit.BASE}
TIMM_SIZES |= {"large": models_vit.LARGE, "huge": models_vit.HUGE}
MAE_SIZES = {"base_patch16": models_vit.BASE, "large_patch16": models_vit.LARGE, "huge_patch14": models_vit.HUGE}
MAE_DECODER = dict(embed_dim=512, depth=8, num_heads=16)

Weights = dict[str, torch.Tensor]


def load_model(path: Path) -> tuple[models_vit.VisionTransformer, bool, dict[str, Any]]:
    """-> (our model in eval mode, whether it is a classifier, the checkpoint's meta) of a checkpoint file."""
    content, what = checkpoint.read_checkpoint(path), f"{str(path)!r}"
    weights = checkpoint.encoder_weights_of(content)
    meta = meta_of(content)
    refuse_other_networks(weights, meta.get("settings", {}), what)
    sizes = models_vit.read_sizes(weights, meta.get("settings", {}), what)
    head = weights.get("head.weight", weights.get("head.1.weight"))
    if head is not None:
        model = models_vit.VisionTransformer(
            num_classes=len(head),
            global_pool="avg" if "fc_norm.weight" in weights else "token",
            probe="head.1.weight" in weights,
            **sizes,
        )
        checkpoint.load_strict(model, weights, f"the weights in {what}")
        return model.eval(), True, meta
    model = models_vit.VisionTransformer(num_classes=1, global_pool="token", **sizes)
    checkpoint.refuse_foreign(model, weights, what)
    del content, weights  # the optimiser's state may be twice the model, and the file is read once more
    report = checkpoint.load_encoder(model, path)
    assert not report.resized, report
    return model.eval(), False, meta


def meta_of(content: dict[str, Any]) -> dict[str, Any]:
    """What our checkpoints say of themselves; empty for other files."""
    return content["meta"] if isinstance(content.get("meta"), dict) else {}


def refuse_other_networks(weights: Weights, settings: dict[str, Any], what: str) -> None:
    """ValueError, with the model's name, for encoders that timm's and MAE's plain ViTs cannot hold."""
    if not any(name.endswith("relative_position_bias_table") for name in weights):
        return
    kind = "a Swin Transformer" if any(".downsample." in name for name in weights) else "a ViT with relative positions"
    name = f"{settings['model']}, {kind}" if settings.get("model") else kind
    flag = "--eval --resume" if "nb_classes" in settings else "--finetune"
    raise ValueError(
        f"{what} holds {name}: only plain ViTs can be exported, which are those of MAE, MFF, LocalMIM and TEC; "
        f"main_finetune.py {flag} takes it as it is"
    )


def timm_weights(model: models_vit.VisionTransformer, is_classifier: bool) -> Weights:
    """The model's state dict under timm's names, which are ours but for the head: none, or one linear layer."""
    state = model.state_dict()
    if not is_classifier:
        return {name: value for name, value in state.items() if not name.startswith("head.")}
    if isinstance(model.head, torch.nn.Sequential):
        # W ((x - mean) / s) + b = (W / s) x + (b - (W / s) mean), with s = sqrt(var + eps); rounded once, at the end.
        names = ("0.running_mean", "0.running_var", "1.weight", "1.bias")
        mean, var, weight, bias = (state[f"head.{name}"].double() for name in names)
        weight = weight / (var + model.head[0].eps).sqrt()
        state = {name: value for name, value in state.items() if not name.startswith("head.")}
        state |= {"head.weight": weight.float(), "head.bias": (bias - weight @ mean).float()}
    return state


def timm_arguments(model: models_vit.VisionTransformer, is_classifier: bool) -> tuple[str, dict[str, Any]]:
    """-> (model name, keyword arguments) with which `timm.create_model` builds `model`; without a checkpoint's path."""
    (height, width), patch_size = model.img_size, model.patch_size
    block = model.blocks[0]
    sizes = dict(embed_dim=model.embed_dim, depth=len(model.blocks), num_heads=block.attn.num_heads)
    named = [name for name, size in TIMM_SIZES.items() if sizes.items() <= size.items()]
    size = named[0] if named else "base"
    name = f"vit_{size}_patch{patch_size}_224"
    options = {} if (height, width) == (224, 224) else {"img_size": height if height == width else (height, width)}
    if not named or not timm.is_model(name):
        name = f"vit_{size}_patch{TIMM_SIZES[size]['patch_size']}_224"
        options["patch_size"] = patch_size
    options |= {} if named else sizes
    in_chans, mlp_ratio = model.patch_embed.proj.in_channels, block.mlp.fc1.out_features / model.embed_dim
    options |= {"in_chans": in_chans} if in_chans != 3 else {}
    options |= {"mlp_ratio": mlp_ratio} if mlp_ratio != 4 else {}
    if is_classifier:
        options |= {"global_pool": model.global_pool, "num_classes": len(timm_weights(model, True)["head.weight"])}
        return name, options
    return name, {**options, "num_classes": 0}


def loading_line(name: str, options: dict[str, Any], path: Path) -> str:
    """The call of timm that loads the file at `path`, as Python source."""
    quoted = {k: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for k, v in options.items()}
    arguments = "".join(f", {k}={v}" for k, v in quoted.items())
    return f'timm.create_model("{name}"{arguments}, checkpoint_path={json.dumps(str(path), ensure_ascii=False)})'


@torch.inference_mode()
def largest_difference(
    model: models_vit.VisionTransformer, is_classifier: bool, path: Path, name: str, options: dict[str, Any]
) -> str:
    """Loads the file at `path` into timm's model; -> the largest difference of its features, or logits, as text.

    On two random images. What float32 does not settle, since a network may blow up its rounding, is computed again in
    float64. ValueError where timm does not take the file, or where the outputs are not those of `model`.
    """
    try:
        theirs = timm.create_model(name, **options, checkpoint_path=str(path)).eval()
    except RuntimeError as error:
        raise ValueError(f"timm {timm.__version__} does not take the weights, nothing is written: {error}") from error
    generator = torch.Generator().manual_seed(0)
    imgs = torch.randn(2, model.patch_embed.proj.in_channels, *model.img_size, generator=generator)
    differences = []
    for dtype in (torch.float32, torch.float64):
        models = model.to(dtype), theirs.to(dtype)
        expected, output = (m(imgs.to(dtype)) if is_classifier else m.forward_features(imgs.to(dtype)) for m in models)
        differences.append(f"{(output - expected).abs().max().item():.1e}")
        if torch.allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return " in float32, which is rounding: in float64 ".join(differences)
    raise ValueError(
        f"timm's model gives other {'logits' if is_classifier else 'features'} than ours, by up to {differences[-1]} "
        f"where {TOLERANCE} is allowed; nothing is written"
    )


def mae_weights(model: models_mae_pr.MaskedAutoencoderViT) -> Weights:
    """The model's state dict under the names of MAE's full releases: the inverse of its `load_official`."""
    ours = {new: old for old, new in models_mae_pr.OFFICIAL_NAMES.items()}
    renamed = {}
    for name, value in model.state_dict().items():
        prefix = next((new for new in ours if name.startswith(new)), "")
        renamed[ours.get(prefix, "") + name[len(prefix) :]] = value
    return renamed


INSTEAD = "export its encoder with --format timm, which MAE's scripts fine-tune, too"


def refuse_other_frameworks(weights: Weights, settings: dict[str, Any], what: str) -> None:
    """ValueError where a pre-trained checkpoint is not of MAE's framework, or has MAE's names already."""
    if "decoder_embed.weight" in weights:
        raise ValueError(f"{what} has MAE's names already")
    name = settings.get("model", "mae_")
    if not name.startswith("mae_"):
        raise ValueError(f"{what} holds {name}, and --format mae is for MAE's framework alone: {INSTEAD}")


def load_mae(path: Path) -> models_mae_pr.MaskedAutoencoderViT:
    """The pre-trained model of MAE's framework at `path`; ValueError where MAE's own code could not run it."""
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
    """ValueError unless the file at `path` gives the weights of `model`, bit for bit."""
    again, content = copy.deepcopy(model), checkpoint.read_checkpoint(path)
    for value in again.state_dict().values():
        value.zero_()
    if isinstance(again, models_mae_pr.MaskedAutoencoderViT):
        again.load_official(content)
    else:
        checkpoint.load_strict(again, content["model"], "the weights in the file")
    read = again.state_dict()
    other = [name for name, value in model.state_dict().items() if not torch.equal(value, read[name])]
    if other:
        raise ValueError(f"{', '.join(other[:5])} read back from the file are not the model's; nothing is written")


def mae_name(model: Any, decoder: Any) -> str:
    """Which model of MAE's own scripts has the sizes of `model`, and of `decoder` where there is one."""
    sizes = dict(patch_size=model.patch_size, **widths_of(model))
    named = [name for name, size in MAE_SIZES.items() if sizes == size]
    if not named or (decoder is not None and (widths_of(decoder), model.img_size) != (MAE_DECODER, (224, 224))):
        return f"MAE's scripts have no model of this size: {', '.join(f'{k} {v}' for k, v in sizes.items())}"
    return f"MAE's scripts read it as {'mae_' if decoder is not None else ''}vit_{named[0]}"


def widths_of(model: Any) -> dict[str, int]:
    """The sizes of an encoder's or a decoder's blocks, by MAE's names."""
    width = model.blocks[0].mlp.fc2.out_features
    return dict(embed_dim=width, depth=len(model.blocks), num_heads=model.blocks[0].attn.num_heads)


def check_out(path: Path, source: Path, overwrite: bool) -> None:
    """ValueError where nothing can or should be written at `path`."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {' or '.join(SUFFIXES)}, which says the kind of file")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    if reason := why_not_writable(path):
        raise ValueError(f"--out {str(path)!r} cannot be written: {reason}")
    if path.exists() and not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")


def write_weights(path: Path, state: Weights, metadata: dict[str, str]) -> None:
    """Writes what the suffix says: .pth holds {"model": state}; .safetensors alone has room for the metadata."""
    path.touch()
    mode = path.stat().st_mode
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path, metadata)
        path.chmod(mode)  # safetensors may leave a file that its owner alone can read
    else:
        torch.save({"model": state}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def export_timm(source: Path, out: Path) -> list[str]:
    """Writes the checkpoint at `source` for timm to the file `out`; -> the lines that describe it."""
    model, is_classifier, meta = load_model(source)
    state = timm_weights(model, is_classifier)
    name, options = timm_arguments(model, is_classifier)
    mean, std = pixel_statistics(meta.get("settings", {}))
    facts = {"timm": {"model_name": name, **options}, "mean": mean, "std": std, "source": source.name}
    facts |= {"classes": meta["classes"]} if is_classifier and meta.get("classes") else {}
    metadata = {"format": "pt", **{k: v if k == "source" else json.dumps(v) for k, v in facts.items()}}
    # The file gets its name when it is known to be right: until then an older one of that name stands.
    with replaced_file(out) as temporary:
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
    """Writes the checkpoint at `source` for MAE's own scripts to the file `out`; -> the lines that describe it."""
    if out.suffix != ".pth":
        raise ValueError(f"--format mae writes a .pth, which is what MAE's scripts read, got --out {str(out)!r}")
    content = checkpoint.read_checkpoint(source)
    weights, settings = checkpoint.encoder_weights_of(content), meta_of(content).get("settings", {})
    is_classifier = "head.weight" in weights or "head.1.weight" in weights
    if not is_classifier:
        refuse_other_frameworks(weights, settings, repr(str(source)))
    del content, weights  # the file is read once more
    model = load_model(source)[0] if is_classifier else load_mae(source)
    state = model.state_dict() if is_classifier else mae_weights(model)
    with replaced_file(out) as temporary:
        write_weights(temporary, state, {})
        check_reads_back(temporary, model)
    mean, std = pixel_statistics(settings)
    lines = [
        describe("classifier" if is_classifier else "encoder and decoder", source, out, state),
        "read back from the file: the same weights, bit for bit",
        f"images: pixels in [0, 1], normalised with mean {mean} and std {std}",
        mae_name(model, None if is_classifier else model.decoder),
    ]
    if not is_classifier and model.counts.num_thrown:
        lines.append("note: tokens were thrown in training, so the decoder has not seen as many as MAE gives it")
    return lines


def pixel_statistics(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation with which the images of a run were normalised."""
    return list(settings.get("mean") or IMAGENET_MEAN), list(settings.get("std") or IMAGENET_STD)


def describe(kind: str, source: Path, out: Path, state: Weights) -> str:
    """The file that was written, with its size."""
    num_parameters = sum(value.numel() for value in state.values())
    return f"{kind} of {source}: {out} ({num_parameters / 1e6:.1f} M parameters, {out.stat().st_size / 1e6:.0f} MB)"


FORMATS = {"timm": export_timm, "mae": export_mae}


def export(source: str | Path, out: str | Path, overwrite: bool = False, layout: str = "timm") -> list[str]:
    """Writes the checkpoint or run's folder at `source` to the file `out`; -> the lines that describe it."""
    source, out = find_checkpoint(source), Path(out)
    if not source.is_file():
        raise ValueError(f"no checkpoint at {str(source)!r}: give the path of a file or of a run's folder")
    check_out(out, source, overwrite)
    return FORMATS[layout](source, out)


def main(argv: Sequence[str] | None = None) -> None:
    """The program; `argv` stands for the command line."""
    parser = Parser("export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("run", help="a checkpoint or a run's folder")
    flag("--out", required=True, help="the file to write: .safetensors or .pth")
    flag("--format", default="timm", choices=FORMATS, help="whose names and layout the file has (default: timm)")
    flag("--overwrite", action=boolean, default=False, help="replace --out if it exists")
    args = parser.parse_args(argv)
    with user_errors(parser):
        lines = export(args.run, args.out, args.overwrite, args.format)
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main, "export.py")
