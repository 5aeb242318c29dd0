"""Export a trained model for timm or Transformers, under MAE's names, or as a program that needs torch alone.

    python scripts/export.py output/prmim50_base --out prmim50_base
    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/mae --format transformers --out vit_mae
    python scripts/export.py output/mae --format mae --out mae_full.pth
    python scripts/export.py output/segmentation --format torch --out model.pt2

The first argument is a checkpoint of this project or of a release, or the folder of a run (its newest intact checkpoint
is used). All weights are float32. Every file also holds the image size, the mean, the deviation and the type
of the pixels, and the classes and the evaluation view of a classifier. The programs of this project read them.

--format timm   The encoder of a pre-trained checkpoint or of a dense task, or a whole fine-tuned classifier. The
                BatchNorm of a linear probe is folded into its linear layer. The script prints the `timm.create_model`
                line that loads the result. It loads it once, and compares the features or logits with those of this
                project's model before anything is put in place.
    FOLDER      An --out without suffix becomes a folder in timm's layout for the Hugging Face Hub: config.json,
                model.safetensors and README.md. For every encoder. `hf upload NAME FOLDER` shares it.
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
--format torch  A .pt2 file of torch.export for batches of any size: a classifier, a segmentation model, or an encoder,
                whose outputs are the features of all tokens. Images are [B, C, H, W] with the pixels of the run's files
                and the size of the model: the program normalises them. If the run had invalid pixels, images are
                float32, and NaN or the value of --nodata marks them. Logits of segmentation have the size of the
                images. The file is compared with the model in a process without this project before it is put in
                place. Facts on images and classes are JSON in the file.
"""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_mae_pr
from encoders import classifiers
from encoders.kinds import PLAIN
from encoders.load import Weights, build, read
from encoders.names import Tensors
from encoders.trained import Trained, load
from framework import rename_prefixes
from frameworks import registry
from frameworks.registry import load_run
from scripts.parts.export_facts import describe, known_facts, pixels_of
from scripts.parts.timm_models import (
    data_config,
    is_classifier,
    largest_difference,
    model_for_timm,
    output_of,
    random_images,
    timm_arguments,
    timm_weights,
)
from scripts.parts.torch_program import CHECKED, EXAMPLES, check_program, program_of, random_pixels, write_program
from scripts.parts.transformers_models import (
    note_on_crop,
    processor_config,
    transformers_class,
    transformers_config,
    transformers_names,
)
from util.atomic import filled_folder, replaced_file
from util.code_version import code_version
from util.run.cli import Parser, prepare_file, run_program, user_errors
from util.run.files import exported, search
from util.text import close_to

TORCH_SUFFIX = ".pt2"
SUFFIXES = (".safetensors", ".pth", TORCH_SUFFIX)
FORMATS = ("timm", "transformers", "mae", "torch")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
PROCESSOR = "preprocessor_config.json"  # for Transformers alone
CARD_TEXT = """---
library_name: {library}
tags:
- {library}
- masked-image-modeling
---
# {title}

```python
{usage}
```

{contents}

Exported from `{source}`, SHA-256 `{sha256}`, by code {code}. Settings of its training:

```json
{settings}
```

Licence: not stated yet. Add it here, and as `license: ...` in the header, before you share the weights.
"""


# ------------------------------------------------------------------------------------------------------------ for timm


def export_timm(trained: Trained, out: Path) -> list[str]:
    """Export the encoder or the classifier for timm, as a file or as a folder. Returns the lines that describe it."""
    if out.suffix == TORCH_SUFFIX:
        raise ValueError(f"a {TORCH_SUFFIX} is written by --format torch, got --out {str(out)!r}")
    weights = trained.weights
    if out.suffix:
        refuse_other_kinds(weights, "to a single file", "give --out without a suffix for a folder")
    model, remarks = model_for_timm(trained)
    name, options = timm_arguments(model)
    facts = known_facts(model, weights.info)
    state = timm_weights(model)
    contents = describe(model, state, facts)
    if out.suffix:
        usage = timm_call(name, **options, checkpoint_path=str(out))
        with replaced_file(out, durable=True) as temporary:
            write_weights(temporary, state, facts, {"timm": json.dumps({"model_name": name, **options})})
            difference = check_loads(model, name, **options, checkpoint_path=str(temporary))
    else:
        usage = timm_call(f"local-dir:{out}", pretrained=True)
        config = data_config(model, weights.settings, facts["mean"], facts["std"])
        with filled_folder(out) as temporary:
            write_config(temporary, name, options, config, facts.get("classes"))
            write_weights(temporary / WEIGHTS, state, facts, {})
            difference = check_loads(model, f"local-dir:{temporary}", pretrained=True)
            public_usage = f"import timm\n\nmodel = {timm_call(f'local-dir:{out.name}', pretrained=True)}.eval()"
            write_card(temporary, weights, out.name, "timm", public_usage, contents)
    return [
        f"{weights.path}: {out}: {contents}",
        f"largest difference of timm's outputs from ours, on two random images: {difference}",
        *(f"note: {remark}" for remark in remarks),
        usage,
    ]


def refuse_other_kinds(weights: Weights, where: str, advice: str) -> None:
    """Raise ValueError for encoders that are not plain ViTs. where, advice: for the message."""
    if weights.kind is not PLAIN:
        raise ValueError(
            f"{weights.what} holds {weights.kind.name}: only plain ViTs can be exported {where}, which are those of "
            f"MAE, MFF, LocalMIM, TEC and CrossMAE; {advice}"
        )


def refuse_class_tokens(weights: Weights, whose: str) -> None:
    """Raise ValueError for several class tokens. whose: encoders, which have one."""
    if weights.kind is PLAIN and weights.sizes.get("num_cls_tokens", 1) > 1:
        raise ValueError(
            f"{weights.what} has {weights.sizes['num_cls_tokens']} class tokens, and {whose} have one: use --format "
            "timm, whose register tokens are the others"
        )


def timm_call(name: str, **options: Any) -> str:
    """The call of `timm.create_model` with these arguments, as Python source."""
    arguments = [quoted(name)]
    for option, value in options.items():
        arguments.append(f"{option}={quoted(value)}")
    return f"timm.create_model({', '.join(arguments)})"


def quoted(value: Any) -> str:
    """The value as Python source, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


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
    folder: Path,
    name: str,
    options: Mapping[str, Any],
    config: dict[str, Any],
    classes: list[str] | None,
) -> None:
    """Write timm's config.json. timm writes it together with untrained weights, which are then replaced."""
    untrained = timm.create_model(name, pretrained_cfg=config, **options)
    model_config = {}
    if classes:
        model_config["label_names"] = classes
    try:
        timm.models.save_for_hf(
            untrained, folder, model_config=model_config, model_args=dict(options), safe_serialization=True
        )
    except SafetensorError as error:  # of the untrained weights
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    except RuntimeError as error:  # timm does not find a huggingface_hub that it can use
        raise ValueError(f"timm {timm.__version__} cannot write its config.json: {error}") from error


# ---------------------------------------------------------------------------------------------------- for Transformers


def export_transformers(weights: Weights, out: Path) -> list[str]:
    """Export a model for Transformers, as a folder. Returns the lines that describe it."""
    if out.suffix:
        raise ValueError(f"--format transformers writes a folder: give --out without a suffix, got {str(out)!r}")
    refuse_other_kinds(weights, "for Transformers", "leave out --format transformers for a folder for timm")
    refuse_class_tokens(weights, "Transformers' ViTs")
    model, remarks = transformers_model(weights)
    facts = known_facts(model, weights.info)
    if isinstance(model, models_mae_pr.MaskedAutoencoderViT):
        state = mae_weights(model)
    else:
        state = timm_weights(model)
    class_name = transformers_class(model)
    contents = f"{class_name}; {describe(model, state, facts)}"
    config = transformers_config(model, facts.get("classes"), weights.settings.get("mask_ratio"))
    with filled_folder(out) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (temporary / PROCESSOR).write_text(json.dumps(processor_config(model, facts), indent=2) + "\n")
        write_weights(temporary / WEIGHTS, transformers_names(state, class_name), facts, {})
        difference = check_reads(model, state, temporary)
        usage = transformers_usage(class_name, out.name)  # no path of this machine
        write_card(temporary, weights, out.name, "transformers", usage, contents)
    return [
        f"{weights.path}: {out}: {contents}",
        f"largest difference of what is read back from ours, on two random images: {difference}",
        *(f"note: {remark}" for remark in [*remarks, *note_on_crop(model, facts)]),
        transformers_usage(class_name, str(out)),
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
            remarks.append(f"the decoder is left out: {error}")
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
    assert all(torch.equal(value, state[name]) for name, value in written.tensors.items())
    read_back, _ = build(written)
    return largest_difference(model, read_back)


def transformers_usage(class_name: str, location: str) -> str:
    """Python code that loads an exported folder, or a repository of the Hub, with Transformers."""
    options = ""
    if class_name == "ViTModel":
        options = ", add_pooling_layer=False"
    return f"""from transformers import AutoImageProcessor, {class_name}

processor = AutoImageProcessor.from_pretrained("{location}")
model = {class_name}.from_pretrained("{location}"{options}).eval()"""


# ------------------------------------------------------------------------------------------------- for MAE's scripts


def export_mae(weights: Weights, out: Path) -> list[str]:
    """Export a pre-trained MAE or a classifier for MAE's scripts. Returns the lines that describe the file."""
    if out.suffix != ".pth":
        raise ValueError(f"--format mae writes a .pth, which is what MAE's scripts read, got --out {str(out)!r}")
    refuse_class_tokens(weights, "MAE's")
    remarks: list[str] = []
    if weights.num_classes is not None:
        refuse_other_kinds(weights, "for MAE's scripts", "leave out --format mae for a folder for timm")
        model, _ = build(weights)
        state = model.state_dict()
    else:
        try:
            model, remarks = load_mae(weights)
        except ValueError as error:
            raise ValueError(f"{error}; export its encoder with --format timm") from error
        state = mae_weights(model)
    with torch.inference_mode():
        output_of(model, random_images(model), is_classifier(model))  # FloatingPointError if it is not finite
    facts = known_facts(model, weights.info)
    with replaced_file(out, durable=True) as temporary:
        write_weights(temporary, state, facts, {})
    return [f"{weights.path}: {out}: {describe(model, state, facts)}", *(f"note: {remark}" for remark in remarks)]


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
    remarks = []
    if model.counts.num_thrown:
        remarks.append("tokens were thrown in training, so the decoder has seen fewer tokens than MAE gives it")
    return model, remarks


def mae_weights(model: models_mae_pr.MaskedAutoencoderViT) -> Tensors:
    """The model's state dict under the names of MAE's full releases: the inverse of `load_official`."""
    official = {ours: theirs for theirs, ours in models_mae_pr.OFFICIAL_NAMES.items()}
    return rename_prefixes(model.state_dict(), official)


# ------------------------------------------------------------------------------------------------------- for torch


def export_torch(trained: Trained, out: Path) -> list[str]:
    """Export a model as a program of torch.export. Returns the lines that describe the file."""
    if out.suffix != TORCH_SUFFIX:
        raise ValueError(f"--format torch writes a {TORCH_SUFFIX}, got --out {str(out)!r}")
    program, facts = program_of(trained)
    model = trained.encoder
    pixels = pixels_of(model, facts)
    example = random_pixels(EXAMPLES, model.img_size, pixels, program)
    batches = [random_pixels(count, model.img_size, pixels, program) for count in CHECKED]
    contents = describe(model, program.state_dict(), facts)
    with replaced_file(out, durable=True) as temporary:
        write_program(temporary, program, example, facts)
        difference = check_program(temporary, program, batches)
    height, width = model.img_size
    images = f"{facts['input_dtype']} [B, {model.in_chans}, {height}, {width}] as in the files"
    return [
        f"{trained.weights.path}: {out}: {contents}",
        f"largest difference from the run's outputs, in batches of {CHECKED[0]} and {CHECKED[1]} images: {difference}",
        *(f"note: {remark}" for remark in trained.remarks),
        f"torch.export.load({quoted(str(out))}).module()  # images {images} -> {facts['outputs']}",
    ]


# -------------------------------------------------------------------------------------------------------------- files


def write_weights(path: Path, state: Tensors, facts: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write the file that the suffix asks for. Both hold the facts, and .safetensors also the metadata.

    The libraries would report a full disk by errors of their own.
    """
    path.unlink(missing_ok=True)  # a temporary file, which only its owner can read
    if path.suffix == ".pth":
        info = exported.exported_info(facts)
        content = {"model": state, "meta": json.dumps(info.to_json())}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(buffer.getbuffer())
        return
    texts = {name: json.dumps(value) for name, value in facts.items()}
    texts = {"format": "pt", **metadata, **texts}
    path.write_bytes(safetensors.torch.save(state, texts))


def write_card(folder: Path, weights: Weights, title: str, library: str, usage: str, contents: str) -> None:
    """Write the model card. usage: Python code that loads the model. Paths of this machine are left out."""
    source = Path(weights.path)
    settings = {}
    for name, value in weights.settings.items():
        if isinstance(value, str):
            value = Path(value).name
        settings[name] = value
    text = CARD_TEXT.format(
        library=library,
        title=title,
        usage=usage,
        contents=contents,
        source=source.name,
        sha256=search.recorded_sha256(source),
        code=code_version(),
        settings=json.dumps(settings, indent=1),
    )
    (folder / CARD).write_text(text)


def check_out(path: Path, source: Path, overwrite: bool) -> None:
    """Raise ValueError if the file, or the folder if it has no suffix, cannot or should not be written."""
    if path.suffix and path.suffix not in SUFFIXES:
        raise ValueError(f"--out {str(path)!r} must end in {' or '.join(SUFFIXES)}, or have no suffix for a folder")
    if not path.exists():
        prepare_file("--out", path)
        return
    if path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    if path.is_dir() == bool(path.suffix):
        raise ValueError(f"--out {str(path)!r} exists: a file has a suffix, and a folder has none")
    if not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")


def export(source: str | Path, out: str | Path, overwrite: bool = False, layout: str = "timm") -> list[str]:
    """Export the weights at `source`, see `encoders.load.read`. Returns the lines that describe `out`."""
    source = search.find_checkpoint_file(source)
    out = Path(out)
    if not source.is_file():
        raise ValueError(f"no checkpoint at {str(source)!r}: give the path of a file or the folder of a run")
    check_out(out, source, overwrite)
    weights = read(source)
    refuse_unknown_model(weights)
    if layout == "transformers":
        return export_transformers(weights, out)
    if layout == "mae":
        return export_mae(weights, out)
    writers = {"timm": export_timm, "torch": export_torch}
    return writers[layout](load(source), out)


def refuse_unknown_model(weights: Weights) -> None:
    """Raise ValueError for a model that another version of the code has made: its outputs may mean something else."""
    name = weights.settings.get("model")
    if name is None or name in registry.MODELS or name in classifiers.MODELS:
        return
    version = ""
    if weights.info.run is not None:
        version = f", {weights.info.run.origin.code}"
    raise ValueError(
        f"{str(weights.path)!r} was made as {name!r}, which this code does not know{close_to(name, registry.MODELS)}: "
        f"export it with the version that has written it{version}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = Parser("export.py", description=__doc__)
    flag = parser.add_argument
    flag("run", help="a checkpoint, or the folder of a run")
    flag("--out", required=True, help="write this file, .safetensors, .pth or .pt2, or this folder if it has no suffix")
    flag("--format", default="timm", choices=FORMATS, help="what reads the result")
    flag(
        "--overwrite",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="replace --out if it exists; in a folder, the files that this script writes",
    )
    args = parser.parse_args(argv)
    with user_errors(parser):
        lines = export(args.run, args.out, args.overwrite, args.format)
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main, "export.py")
