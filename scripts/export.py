"""Export a checkpoint's encoder or classifier for timm or Transformers, or its weights under MAE's names.

    python scripts/export.py output/prmim50_base --out prmim50_base
    python scripts/export.py output/finetune/checkpoint-best.pth --out classifier --push_to_hub ME/prmim50_base
    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/mae --format transformers --out vit_mae
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
--format transformers
    FOLDER      Such a folder for `from_pretrained`, with a preprocessor_config.json of the evaluation view and the
                statistics. For plain ViTs. A pre-trained MAE becomes a ViTMAEForPreTraining, any other encoder a
                ViTModel, and a classifier on the class token a ViTForImageClassification. Transformers' decoder has no
                aggregation: of PR-MIM runs that throw tokens the encoder alone is exported. The library need not be
                installed.
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
from frameworks.registry import load_run
from scripts.parts.hub import CARD, CONFIG, PROCESSOR, RECORD, WEIGHTS, open_hub, push
from scripts.parts.model_card import model_card
from scripts.parts.timm_models import (
    data_config,
    is_classifier,
    largest_difference,
    num_outputs,
    output_of,
    random_images,
    timm_arguments,
    timm_weights,
)
from scripts.parts.transformers_models import (
    processor_config,
    transformers_class,
    transformers_config,
    transformers_names,
)
from util.atomic import filled_folder, replaced_file
from util.code_version import code_version
from util.data.pixel_format import RGB8, PixelFormat
from util.data.statistics import describe_pixels, known_statistics
from util.run import checkpoint
from util.run.checkpoint import CheckpointInfo
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.folder import read_json

SUFFIXES = (".safetensors", ".pth")
MAE_MODELS = ("vit_base_patch16", "vit_large_patch16", "vit_huge_patch14")  # of MAE's models_vit.py
MAE_DECODER = dict(embed_dim=512, depth=8, num_heads=16)
PRETRAINING = "ViTMAEForPreTraining"


# ------------------------------------------------------------------------------------------------------------ for timm


def export_timm(weights: Weights, out: Path, repository: str | None) -> list[str]:
    """Export the encoder or the classifier for timm, as a file or as a folder. Returns the lines that describe it.

    repository: of the Hub, to which a folder will be uploaded.
    """
    if out.suffix:
        refuse_other_kinds(weights, "to a single file", "give --out without a suffix for a folder")
    model, report = build(weights)
    (name, options), facts = timm_arguments(model), known_facts(model, weights.info)
    state, source = timm_weights(model), Path(weights.path)
    if out.suffix:
        call, contents = timm_call(name, **options, checkpoint_path=str(out)), ""
        with replaced_file(out, durable=True) as temporary:
            architecture = json.dumps({"model_name": name, **options})
            write_weights(temporary, state, facts, {"source": source.name, "timm": architecture})
            difference = check_loads(model, name, **options, checkpoint_path=str(temporary))
    else:
        location = f"hf-hub:{repository}" if repository else f"local-dir:{out}"
        call, contents = timm_call(location, pretrained=True), f" with {', '.join((CONFIG, WEIGHTS, CARD, RECORD))}"
        config = data_config(model, weights.settings, facts["mean"], facts["std"])
        with filled_folder(out) as temporary:
            write_config(temporary, name, options, config, facts.get("classes"))
            write_weights(temporary / WEIGHTS, state, facts, {"source": source.name})
            difference = check_loads(model, f"local-dir:{temporary}", pretrained=True)
            changed = ", ".join(f"{k}={v}" for k, v in options.items() if k not in ("num_classes", "global_pool"))
            pooled = "their mean" if isinstance(model, SwinEncoder) else "the class token"
            output = f"`model.forward_features(images)` returns the features of all tokens, `model(images)` {pooled}"
            rows = {"timm architecture": f"`{name}` with `{changed}`" if changed else f"`{name}`", "output": output}
            public = location if repository else f"local-dir:{out.name}"  # no path of this machine
            usage = f"import timm\n\nmodel = {timm_call(public, pretrained=True)}.eval()"
            write_card(temporary, weights, model, rows | describe_model(model, facts), public, "timm", usage)
    kind, outputs = ("classifier", "logits") if is_classifier(model) else ("encoder", "features")
    return [
        describe(f"{kind} of {source}: {out}{contents}", state, facts),
        f"largest difference of timm's {outputs} from ours, on two random images: {difference}",
        *(f"note: {remark}" for remark in report.remarks),
        call,
    ]


def refuse_other_kinds(weights: Weights, where: str, advice: str) -> None:
    """Raise ValueError for encoders that are not plain ViTs. where, advice: for the message."""
    if weights.kind is not PLAIN:
        flag = "--finetune" if weights.num_classes is None else "--eval --resume"
        raise ValueError(
            f"{weights.what} holds {weights.kind.name}: only plain ViTs can be exported {where}, which are those of "
            f"MAE, MFF, LocalMIM, TEC and CrossMAE; {advice}; main_finetune.py {flag} takes it as it is"
        )


def refuse_class_tokens(weights: Weights, whose: str) -> None:
    """Raise ValueError for several class tokens. whose: encoders, which have one."""
    number = weights.sizes.get("num_cls_tokens", 1) if weights.kind is PLAIN else 1
    if number > 1:
        raise ValueError(
            f"{weights.what} has {number} class tokens, and {whose} have one: use --format timm, whose register tokens "
            "are the others"
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


# ---------------------------------------------------------------------------------------------------- for Transformers


def export_transformers(weights: Weights, out: Path, repository: str | None) -> list[str]:
    """Export a model for Transformers, as a folder. Returns the lines that describe it.

    repository: of the Hub, to which the folder will be uploaded.
    """
    if out.suffix:
        raise ValueError(f"--format transformers writes a folder: give --out without a suffix, got {str(out)!r}")
    refuse_other_kinds(weights, "for Transformers", "leave out --format transformers for a folder for timm")
    refuse_class_tokens(weights, "Transformers' ViTs")
    model, remarks = transformers_model(weights)
    name, facts, source = transformers_class(model), known_facts(model, weights.info), Path(weights.path)
    state = mae_weights(model) if name == PRETRAINING else timm_weights(model)
    config = transformers_config(model, facts.get("classes"), weights.settings.get("mask_ratio"))
    with filled_folder(out) as temporary:
        for file, content in ((CONFIG, config), (PROCESSOR, processor_config(model, facts))):
            (temporary / file).write_text(json.dumps(content, indent=2) + "\n")
        write_weights(temporary / WEIGHTS, transformers_names(state, name), facts, {"source": source.name})
        difference = check_reads(model, state, temporary)
        output = "the loss and the reconstructed patches" if name == PRETRAINING else "the features of all tokens"
        rows = {"class of Transformers": f"`{name}`", "output": output} | describe_model(model, facts)
        public = repository or out.name  # no path of this machine
        usage = transformers_usage(name, public)
        write_card(temporary, weights, model, rows, public, "transformers", usage)
    contents = ", ".join((CONFIG, WEIGHTS, PROCESSOR, CARD, RECORD))
    return [
        describe(f"{name} of {source}: {out} with {contents}", state, facts),
        f"largest difference of what is read back from ours, on two random images: {difference}",
        *(f"note: {remark}" for remark in remarks),
        transformers_usage(name, repository or str(out)),
    ]


def transformers_model(weights: Weights) -> tuple[nn.Module, list[str]]:
    """Build the model that Transformers has a class for. Returns (model, remarks).

    ValueError for a classifier with mean pooling.
    """
    remarks: list[str] = []
    if any(name.startswith("decoder") for name in weights.tensors):
        try:
            return load_mae(weights)
        except ValueError as error:
            remarks = [f"the decoder is left out: {error}"]
    model, report = build(weights)
    if getattr(model, "global_pool", "token") != "token":
        raise ValueError(
            f"{weights.what} pools the mean of all patches, and Transformers' classifier reads the class token: leave "
            "out --format transformers for a folder for timm"
        )
    return model, [*remarks, *report.remarks]


def check_reads(model: nn.Module, state: Tensors, folder: Path) -> str:
    """Read what was written. Returns the largest difference of its outputs from those of `model`, as text.

    state: the weights under MAE's names. ValueError if the outputs differ by more than rounding.
    """
    written = read(folder)
    assert written.tensors.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in written.tensors.items())
    return largest_difference(model, build(written)[0], "the folder's")


def transformers_usage(name: str, location: str) -> str:
    """Python code that loads an exported folder, or a repository of the Hub, with Transformers."""
    options = ", add_pooling_layer=False" if name == "ViTModel" else ""
    return f"""from transformers import AutoImageProcessor, {name}

processor = AutoImageProcessor.from_pretrained("{location}")
model = {name}.from_pretrained("{location}"{options}).eval()"""


# ------------------------------------------------------------------------------------------------- cards of folders


def describe_model(model: nn.Module, facts: Mapping[str, Any]) -> dict[str, str]:
    """The rows of the model card about the model itself. facts: see `known_facts`."""
    height, width = model.img_size
    head = {"output": f"logits of {num_outputs(model)} classes"} if is_classifier(model) else {}
    return head | {
        "parameters": f"{sum(value.numel() for value in model.state_dict().values()) / 1e6:.1f} M",
        "images": f"{model.in_chans} channels, {height} x {width} pixels, patches of {model.patch_size} x "
        f"{model.patch_size}",
        "input": describe_pixels(facts.get("pixels")),
        "pixel mean": ", ".join(f"{value:.6g}" for value in facts["mean"]),
        "pixel standard deviation": ", ".join(f"{value:.6g}" for value in facts["std"]),
    }


def write_card(
    folder: Path, weights: Weights, model: nn.Module, rows: Mapping[str, str], location: str, library: str, usage: str
) -> None:
    """Write the model card, and the record of all files in `folder`. rows, library, usage: see `model_card`.

    location: where the library will find the model; its last part is the title.
    """
    source = Path(weights.path)
    name = Path(location.rpartition(":")[2]).name
    card = model_card(name, rows, weights.info, source.parent, library, usage, is_classifier(model))
    (folder / CARD).write_text(card)
    record = {"source": source.name, "sha256": checkpoint.recorded_sha256(source), "code": code_version()}
    hashes = {file.name: checkpoint.sha256(file) for file in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps(record | {"files": hashes}, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------- for MAE's scripts


def export_mae(weights: Weights, out: Path) -> list[str]:
    """Export a pre-trained MAE or a classifier for MAE's scripts. Returns the lines that describe the file."""
    if out.suffix != ".pth":
        raise ValueError(f"--format mae writes a .pth, which is what MAE's scripts read, got --out {str(out)!r}")
    refuse_class_tokens(weights, "MAE's")
    has_head, remarks = weights.num_classes is not None, list[str]()
    if has_head:
        refuse_other_kinds(weights, "for MAE's scripts", "leave out --format mae for a folder for timm")
        kind, (model, _) = "classifier", build(weights)
        state, name = model.state_dict(), mae_name(model, None)
    else:
        if "decoder_embed.weight" in weights.tensors:
            raise ValueError(f"{weights.what} has MAE's names already")
        try:
            kind, (model, remarks) = "encoder and decoder", load_mae(weights)
        except ValueError as error:
            to = "to a .pth, which MAE's scripts can fine-tune" if weights.kind is PLAIN else "to a folder, for timm"
            raise ValueError(f"{error}; export its encoder with --format timm {to}") from error
        state, name = mae_weights(model), mae_name(model, model.decoder)
    with torch.inference_mode():
        output_of(model, random_images(model), has_head)  # FloatingPointError if it is not finite
    facts = known_facts(model, weights.info)
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, facts, {})
    return [describe(f"{kind} of {weights.path}: {out}", state, facts), name, *(f"note: {text}" for text in remarks)]


def load_mae(weights: Weights) -> tuple[models_mae_pr.MaskedAutoencoderViT, list[str]]:
    """Load a pre-trained model of MAE's framework. Returns (model, remarks). ValueError if MAE could not run it."""
    if not weights.settings.get("model", "mae_").startswith("mae_"):
        raise ValueError(f"{weights.what} is of another framework than MAE")
    model, settings = load_run(weights.path)
    if not model.predicts_pixels():
        raise ValueError(f"{weights.what} predicts other targets than pixels, and MAE's decoder predicts pixels")
    if model.decoder.aggregation is not None:
        raise ValueError(
            f"{weights.what} was trained with --throw_ratio {settings['throw_ratio']}: its decoder reconstructs thrown "
            "tokens by an aggregation, which MAE's decoder lacks"
        )
    if model.img_size[0] != model.img_size[1]:
        raise ValueError(f"{weights.what} is for images of {model.img_size} pixels, and MAE's are square")
    thrown = "tokens were thrown in training, so the decoder has seen fewer tokens than MAE gives it"
    return model, [thrown] if model.counts.num_thrown else []


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


def known_facts(model: nn.Module, info: CheckpointInfo) -> dict[str, Any]:
    """What is stored beside the weights, see `checkpoint.EXPORTED_FACTS`, as far as it is known.

    info: of the checkpoint. ValueError if the pixel statistics are unknown.
    """
    settings, in_chans = info.pixel_settings, model.in_chans
    found = known_statistics(settings, PixelFormat(in_chans, settings["pixels"] or RGB8.dtype))
    if found is None or {*map(len, found)} != {in_chans}:
        raise ValueError(
            f"the checkpoint does not hold the pixel mean and deviation of its {in_chans} channels, got "
            f"{settings['mean']} and {settings['std']}: give a checkpoint of a run that stores them"
        )
    facts = {"mean": found[0], "std": found[1], "pixels": settings["pixels"]}
    facts |= {"input_size": list(model.img_size), "crop_pct": info.settings.get("crop_pct")}
    facts["classes"] = info.classes if is_classifier(model) else None
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
        torch.save({"model": state, "meta": json.dumps(checkpoint.exported_info(facts).to_json())}, path)


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
        present = [name for name in (CONFIG, WEIGHTS, PROCESSOR, CARD) if (path / name).exists()]
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
    if push_to_hub is not None and (layout == "mae" or out.suffix):
        raise ValueError(
            f"--push_to_hub uploads a folder of --format timm or transformers, got --format {layout} and --out "
            f"{str(out)!r}: give --out a name without a suffix"
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
    write = export_transformers if layout == "transformers" else export_timm
    if push_to_hub is None:
        return write(read(source), out, None)
    api, name = open_hub(push_to_hub, overwrite)
    return [*write(read(source), out, name), push(api, name, out, private)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("export.py", description=__doc__)
    flag, boolean = parser.add_argument, argparse.BooleanOptionalAction
    flag("run", help="a checkpoint, or the folder of a run")
    flag("--out", required=True, help="write this file, .safetensors or .pth, or this folder if it has no suffix")
    flag("--format", default="timm", choices=("timm", "transformers", "mae"), help="names and layout of the weights")
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
