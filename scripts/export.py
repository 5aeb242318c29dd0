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
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_mae_pr
import models_vit
from encoders import PLAIN, build_model, find_kind
from main_pretrain import load_run
from timm_models import is_classifier, largest_difference, timm_arguments, timm_weights
from util.atomic import replaced_file
from util.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from util.encoder_weights import encoder_weights_of, rename_prefixes
from util.run import checkpoint
from util.run.cli import Parser, run_program, user_errors, why_not_writable

SUFFIXES = (".safetensors", ".pth")
MAE_MODELS = ("vit_base_patch16", "vit_large_patch16", "vit_huge_patch14")  # of MAE's models_vit.py
MAE_DECODER = dict(embed_dim=512, depth=8, num_heads=16)
INSTEAD = "export its encoder with --format timm; MAE's scripts can fine-tune that file"

Weights = dict[str, torch.Tensor]


def refuse_other_kinds(content: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for encoders that are not plain ViTs."""
    kind, settings = find_kind(encoder_weights_of(content)), checkpoint.meta_of(content).get("settings", {})
    if kind is PLAIN:
        return
    name = f"{settings['model']}, {kind.name}" if settings.get("model") else kind.name
    flag = "--eval --resume" if "nb_classes" in settings else "--finetune"
    raise ValueError(
        f"{what} holds {name}: only plain ViTs can be exported to a single file, which are those of MAE, MFF, "
        f"LocalMIM, TEC and CrossMAE; main_finetune.py {flag} takes it as it is"
    )


def loading_line(name: str, options: Mapping[str, Any], path: Path) -> str:
    """The `timm.create_model` call that loads the file at `path`, as Python source."""

    def quoted(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    arguments = {**options, "checkpoint_path": str(path)}
    return f"timm.create_model({quoted(name)}, {', '.join(f'{k}={quoted(v)}' for k, v in arguments.items())})"


def check_loads(path: Path, model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    """Load the file at `path` with timm, and return the largest difference of its outputs from the model's as text.

    ValueError if they differ by more than rounding, or if timm does not load the file.
    """
    try:
        theirs = timm.create_model(name, **options, checkpoint_path=str(path)).eval()
    except RuntimeError as error:
        raise ValueError(f"timm {timm.__version__} does not load the weights, nothing is written: {error}") from error
    return largest_difference(model, theirs)


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


def check_reads_back(path: Path, model: nn.Module) -> None:
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


def mae_name(model: nn.Module, decoder: nn.Module | None) -> str:
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


def block_sizes(model: nn.Module) -> dict[str, int]:
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
    content = checkpoint.read_checkpoint(source)
    refuse_other_kinds(content, repr(str(source)))
    model, meta = build_model(content, repr(str(source))), checkpoint.meta_of(content)
    del content
    state = timm_weights(model)
    name, options = timm_arguments(model)
    mean, std = pixel_statistics(meta.get("settings", {}))
    facts = {"timm": {"model_name": name, **options}, "mean": mean, "std": std}
    if is_classifier(model) and meta.get("classes"):
        facts["classes"] = meta["classes"]
    metadata = {"format": "pt", "source": source.name, **{key: json.dumps(value) for key, value in facts.items()}}
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, metadata)
        difference = check_loads(temporary, model, name, options)
    kind, outputs = ("classifier", "logits") if is_classifier(model) else ("encoder", "features")
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
    has_head = "head.weight" in weights or "head.1.weight" in weights
    if has_head:
        refuse_other_kinds(content, repr(str(source)))
        kind, model = "classifier", build_model(content, repr(str(source)))
        state, name = model.state_dict(), mae_name(model, None)
    else:
        refuse_other_frameworks(weights, settings, repr(str(source)))
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
    if not has_head and model.counts.num_thrown:
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
