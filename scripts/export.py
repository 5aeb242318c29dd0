"""Export a checkpoint's encoder or classifier for timm, as a folder or a file, or its weights under MAE's names.

    python scripts/export.py output/prmim50_base --out prmim50_base
    python scripts/export.py output/finetune/checkpoint-best.pth --out classifier --push_to_hub ME/prmim50_base
    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/mae --format mae --out mae_full.pth

The first argument is a checkpoint of this project or of a release, or the folder of a run (its newest intact checkpoint
is used). All weights are float32. Every file also holds the image size, the mean, the deviation and the type
of the pixels, and the classes and the evaluation view of a classifier. The programs of this project read them.

--format timm   The encoder of a pre-trained checkpoint, or a whole fine-tuned classifier. The BatchNorm of a linear
                probe is folded into its linear layer. The script prints the `timm.create_model` line that loads the
                result. It loads it once, and compares the features or logits with those of this project's model before
                anything is put in place.
    FOLDER      An --out without suffix becomes a folder in timm's layout for the Hugging Face Hub: config.json,
                model.safetensors, the model card README.md, and export.json, which records what this script has
                written. For every encoder.
    FILE        A .safetensors, or a .pth that holds {"model": weights, "meta": JSON string}. For plain ViTs. MAE's
                scripts can fine-tune such a .pth, too; they ignore "meta". Normalise images with the printed mean and
                deviation: timm's defaults for these model names are different.
--format mae    A .pth file for MAE's scripts: encoder and decoder of a pre-trained MAE under the names of MAE's full
                releases, or a fine-tuned classifier. MAE's decoder has no aggregation, so PR-MIM runs that throw tokens
                are refused. Export their encoder with --format timm.
--push_to_hub   uploads the folder with huggingface_hub. Nothing is uploaded without this flag.
"""

import argparse
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
from encoders.kinds import PLAIN, find_factory
from encoders.load import Weights, build, read
from encoders.models_swin import SwinEncoder
from encoders.names import Tensors, rename_prefixes
from main_pretrain import load_run, own_flags
from scripts.hub import CARD, CONFIG, RECORD, WEIGHTS, open_hub, push
from scripts.model_card import model_card
from scripts.timm_models import (
    data_config,
    is_classifier,
    largest_difference,
    output_of,
    random_images,
    timm_arguments,
    timm_weights,
)
from util.atomic import filled_folder, replaced_file
from util.code_version import code_version
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import describe_pixels, known_statistics
from util.run import checkpoint
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.folder import read_json

SUFFIXES = (".safetensors", ".pth")
MAE_MODELS = ("vit_base_patch16", "vit_large_patch16", "vit_huge_patch14")  # of MAE's models_vit.py
MAE_DECODER = dict(embed_dim=512, depth=8, num_heads=16)
INSTEAD = "export its encoder with --format timm to a .pth, which MAE's scripts can fine-tune"


# ------------------------------------------------------------------------------------------------------------ for timm


def export_timm(weights: Weights, out: Path, location: str) -> list[str]:
    """Export the encoder or the classifier for timm, as a file or as a folder. Returns the lines that describe it.

    location: where the model card of a folder says that timm finds the model, `local-dir:FOLDER` or `hf-hub:NAME`.
    """
    if out.suffix:
        refuse_other_kinds(weights)
    model, report = build(weights)
    (name, options), facts = timm_arguments(model), known_facts(model, weights.meta)
    state, source = timm_weights(model), Path(weights.path)
    if out.suffix:
        call, contents = timm_call(name, **options, checkpoint_path=str(out)), ""
        with replaced_file(out, durable=True) as temporary:
            architecture = json.dumps({"model_name": name, **options})
            write_weights(temporary, state, facts, {"source": source.name, "timm": architecture})
            difference = check_loads(model, name, **options, checkpoint_path=str(temporary))
    else:
        call, contents = timm_call(location, pretrained=True), f" with {', '.join((CONFIG, WEIGHTS, CARD, RECORD))}"
        config = data_config(model, weights.settings, facts["mean"], facts["std"])
        with filled_folder(out) as temporary:
            write_config(temporary, name, options, config, facts.get("classes"))
            write_weights(temporary / WEIGHTS, state, facts, {"source": source.name})
            difference = check_loads(model, f"local-dir:{temporary}", pretrained=True)
            public = location if location.startswith("hf-hub:") else f"local-dir:{out.name}"  # no path of this machine
            card = model_card(
                Path(public.partition(":")[2]).name,
                describe_model(model, name, options, config, facts),
                weights.meta,
                source.parent,
                tuple(flag.name for flag in own_flags()),
                f"import timm\n\nmodel = {timm_call(public, pretrained=True)}.eval()",
                is_classifier(model),
            )
            (temporary / CARD).write_text(card)
            record = {"source": source.name, "sha256": checkpoint.recorded_sha256(source), "code": code_version()}
            hashes = {file: checkpoint.sha256(temporary / file) for file in (CONFIG, WEIGHTS, CARD)}
            (temporary / RECORD).write_text(json.dumps(record | {"files": hashes}, indent=1) + "\n")
    kind, outputs = ("classifier", "logits") if is_classifier(model) else ("encoder", "features")
    return [
        describe(f"{kind} of {source}: {out}{contents}", state, facts),
        f"largest difference of timm's {outputs} from ours, on two random images: {difference}",
        *(f"note: {remark}" for remark in report.remarks),
        call,
    ]


def refuse_other_kinds(weights: Weights) -> None:
    """Raise ValueError for encoders that are not plain ViTs."""
    if weights.kind is not PLAIN:
        flag = "--finetune" if weights.num_classes is None else "--eval --resume"
        raise ValueError(
            f"{weights.what} holds {weights.kind.name}: only plain ViTs can be exported to a single file, which are "
            "those of MAE, MFF, LocalMIM, TEC and CrossMAE; give --out without a suffix for a folder; "
            f"main_finetune.py {flag} takes it as it is"
        )


def timm_call(name: str, **options: Any) -> str:
    """The call of `timm.create_model` with these arguments, as Python source."""

    def quoted(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)

    return f"timm.create_model({', '.join([quoted(name), *(f'{k}={quoted(v)}' for k, v in options.items())])})"


def check_loads(model: nn.Module, name: str, **options: Any) -> str:
    """Load what was written with timm. Returns the largest difference of its outputs from those of `model`, as text.

    ValueError if they differ by more than rounding, or if timm does not load it.
    """
    try:
        theirs = timm.create_model(name, **options).eval()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"timm {timm.__version__} does not load the weights, nothing is written: {error}") from error
    return largest_difference(model, theirs)


def write_config(
    folder: Path, name: str, options: Mapping[str, Any], config: dict[str, Any], classes: list[str] | None
) -> None:
    """Write timm's config.json. timm writes it together with untrained weights, which are then replaced."""
    untrained = timm.create_model(name, pretrained_cfg=config, **options)
    labels = {"label_names": classes} if classes else {}
    try:
        timm.models.save_for_hf(
            untrained, folder, model_config=labels, model_args=dict(options), safe_serialization=True
        )
    except RuntimeError as error:  # timm does not find a huggingface_hub that it can use
        raise ValueError(f"timm {timm.__version__} cannot write its config.json: {error}") from error


def describe_model(
    model: nn.Module, name: str, options: Mapping[str, Any], config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    """The rows of the model card about the model itself. name, options: of timm. facts: see `known_facts`."""
    changed = ", ".join(f"{k}={v}" for k, v in options.items() if k not in ("num_classes", "global_pool"))
    channels, height, width = config["input_size"]
    if is_classifier(model):
        outputs = f"logits of {config['num_classes']} classes"
    else:
        pooled = "their mean" if isinstance(model, SwinEncoder) else "the class token"
        outputs = f"`model.forward_features(images)` returns the features of all tokens, `model(images)` {pooled}"
    return {
        "timm architecture": f"`{name}` with `{changed}`" if changed else f"`{name}`",
        "output": outputs,
        "parameters": f"{sum(value.numel() for value in model.state_dict().values()) / 1e6:.1f} M",
        "images": f"{channels} channels, {height} x {width} pixels, patches of {model.patch_size} x {model.patch_size}",
        "input": describe_pixels(facts.get("pixels")),
        "pixel mean": ", ".join(f"{value:.6g}" for value in facts["mean"]),
        "pixel standard deviation": ", ".join(f"{value:.6g}" for value in facts["std"]),
    }


# ------------------------------------------------------------------------------------------------- for MAE's scripts


def export_mae(weights: Weights, out: Path) -> list[str]:
    """Export a pre-trained MAE or a classifier for MAE's scripts. Returns the lines that describe the file."""
    if out.suffix != ".pth":
        raise ValueError(f"--format mae writes a .pth, which is what MAE's scripts read, got --out {str(out)!r}")
    has_head = weights.num_classes is not None
    if has_head:
        refuse_other_kinds(weights)
        kind, (model, _) = "classifier", build(weights)
        state, name = model.state_dict(), mae_name(model, None)
    else:
        kind, model = "encoder and decoder", load_mae(weights)
        state, name = mae_weights(model), mae_name(model, model.decoder)
    with torch.inference_mode():
        output_of(model, random_images(model), has_head)  # FloatingPointError if it is not finite
    facts = known_facts(model, weights.meta)
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, facts, {})
    lines = [describe(f"{kind} of {weights.path}: {out}", state, facts), name]
    if not has_head and model.counts.num_thrown:
        lines.append("note: tokens were thrown in training, so the decoder has seen fewer tokens than MAE gives it")
    return lines


def load_mae(weights: Weights) -> models_mae_pr.MaskedAutoencoderViT:
    """Load a pre-trained model of MAE's framework. ValueError if MAE's own code could not run it."""
    what = weights.what
    if "decoder_embed.weight" in weights.tensors:
        raise ValueError(f"{what} has MAE's names already")
    if not weights.settings.get("model", "mae_").startswith("mae_"):
        advice = INSTEAD if weights.kind is PLAIN else "export its encoder with --format timm to a folder, for timm"
        raise ValueError(f"{what}: --format mae is for MAE's framework alone: {advice}")
    model, settings = load_run(weights.path)
    if model.decoder.aggregation is not None:
        raise ValueError(
            f"{what} was trained with --throw_ratio {settings['throw_ratio']}: its decoder reconstructs thrown tokens "
            f"by an aggregation, which MAE's decoder lacks; {INSTEAD}"
        )
    if model.img_size[0] != model.img_size[1]:
        raise ValueError(f"{what} is for images of {model.img_size} pixels, and MAE's are square: {INSTEAD}")
    return model


def mae_weights(model: models_mae_pr.MaskedAutoencoderViT) -> Tensors:
    """The model's state dict under the names of MAE's full releases: the inverse of `load_official`."""
    official = {ours: theirs for theirs, ours in models_mae_pr.OFFICIAL_NAMES.items()}
    return rename_prefixes(model.state_dict(), official)


def mae_name(model: nn.Module, decoder: nn.Module | None) -> str:
    """A sentence that names the model of MAE's scripts with the sizes of `model` and of `decoder`."""
    sizes = dict(patch_size=model.patch_size, **block_sizes(model))
    factory, published = find_factory(sizes["embed_dim"], sizes["depth"], "the model")
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


# -------------------------------------------------------------------------------------------------------------- files


def known_facts(model: nn.Module, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored beside the weights, see `checkpoint.EXPORTED_FACTS`, as far as it is known.

    meta: of the checkpoint. ValueError if the pixel statistics are unknown.
    """
    settings, in_chans = checkpoint.pixel_settings(meta), model.in_chans
    found = known_statistics(settings, PixelFormat(in_chans, settings["pixels"] or RGB8.dtype))
    if found is None or {*map(len, found)} != {in_chans}:
        raise ValueError(
            f"the checkpoint does not hold the pixel mean and deviation of its {in_chans} channels, got "
            f"{settings['mean']} and {settings['std']}: give a checkpoint of a run that stores them"
        )
    facts = {"mean": found[0], "std": found[1], "pixels": settings["pixels"]}
    facts |= {"input_size": list(model.img_size), "crop_pct": meta.get("settings", {}).get("crop_pct")}
    facts["classes"] = meta.get("classes") if is_classifier(model) else None
    return {name: value for name, value in facts.items() if value}


def write_weights(path: Path, state: Tensors, facts: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write the file that the suffix asks for. Both hold the facts, and .safetensors also the metadata."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    if path.suffix == ".safetensors":
        texts = {name: json.dumps(value) for name, value in facts.items()}
        safetensors.torch.save_file(state, path, {"format": "pt", **metadata, **texts})
        path.chmod(mode)  # safetensors may leave a file that only its owner can read
    else:
        torch.save({"model": state, "meta": json.dumps(checkpoint.meta_of_facts(facts))}, path)


def describe(what: str, state: Tensors, facts: Mapping[str, Any]) -> str:
    """The sizes of the weights, and the images of the model. facts: see `known_facts`."""
    million = sum(value.numel() for value in state.values()) / 1e6
    pixels = describe_pixels(facts.get("pixels"))
    return f"{what}; {million:.1f} M parameters; {pixels}, normalised with mean {facts['mean']} and std {facts['std']}"


def check_out(path: Path, source: Path, overwrite: bool) -> None:
    """Raise ValueError if the file, or the folder if it has no suffix, cannot or should not be written."""
    is_folder = not path.suffix
    if not is_folder and path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {' or '.join(SUFFIXES)}, or have no suffix for a folder")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    if is_folder and path.exists() and not path.is_dir():
        raise ValueError(f"--out {str(path)!r} is a file; without a suffix it names a folder")
    prepare_file("--out", path / CONFIG if is_folder and path.exists() else path)
    if path.exists() and not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")
    if is_folder and path.exists():
        written = read_json(path / RECORD).get("files", {})
        present = [name for name in (CONFIG, WEIGHTS, CARD) if (path / name).exists()]
        others = [name for name in present if checkpoint.sha256(path / name) != written.get(name)]
        if others:
            raise ValueError(
                f"--out {str(path)!r}: {', '.join(others)} there was not written by this script, or was changed since: "
                "move it away, or give another folder"
            )


def check_push(push_to_hub: str | None, private: bool, layout: str, out: Path) -> None:
    """Raise ValueError if the flags of an upload do not go with the others."""
    if private and push_to_hub is None:
        raise ValueError("--private belongs to --push_to_hub: leave it out")
    if push_to_hub is not None and (layout != "timm" or out.suffix):
        raise ValueError(
            f"--push_to_hub uploads a folder of --format timm, got --format {layout} and --out {str(out)!r}: "
            "give --out a name without a suffix"
        )


def export(
    source: str | Path,
    out: str | Path,
    overwrite: bool = False,
    layout: str = "timm",
    push_to_hub: str | None = None,
    private: bool = False,
) -> list[str]:
    """Export the weights at `source`, see `encoders.load.read`. Returns the lines that describe `out`."""
    source, out = checkpoint.find_checkpoint_file(source), Path(out)
    if not source.is_file():
        raise ValueError(f"no checkpoint at {str(source)!r}: give the path of a file or the folder of a run")
    check_push(push_to_hub, private, layout, out)
    check_out(out, source, overwrite)
    if layout == "mae":
        return export_mae(read(source), out)
    if push_to_hub is None:
        return export_timm(read(source), out, f"local-dir:{out}")
    api, name = open_hub(push_to_hub, overwrite)
    return [*export_timm(read(source), out, f"hf-hub:{name}"), push(api, name, out, private)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("export.py", description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("run", help="a checkpoint, or the folder of a run")
    flag("--out", required=True, help="write this file, .safetensors or .pth, or this folder if it has no suffix")
    flag("--format", default="timm", choices=("timm", "mae"), help="names and layout of the weights")
    help_text = "replace --out if it exists; in a folder, only files that this script has written"
    flag("--overwrite", action=boolean, default=False, help=help_text)
    flag("--push_to_hub", metavar="NAME", help="upload the folder to this repository of the Hugging Face Hub")
    flag("--private", action=boolean, default=False, help="make the new repository of --push_to_hub private")
    args = parser.parse_args(argv)
    with user_errors(parser):
        lines = export(args.run, args.out, args.overwrite, args.format, args.push_to_hub, args.private)
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main, "export.py")
