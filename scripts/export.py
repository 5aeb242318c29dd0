"""Export a trained model: for timm, and with it for Transformers, or as a program that needs torch alone.

    python scripts/export.py output/prmim50_base --out prmim50_base
    python scripts/export.py output/prmim50_base --out encoder.safetensors
    python scripts/export.py output/segmentation --format torch --out model.pt2

The first argument is a checkpoint of this project or of a release, or the folder of a run (its newest intact checkpoint
is used). All weights are float32. Every file also holds the image size, the mean, the deviation and the type
of the pixels, and the classes and the evaluation view of a classifier. The programs of this project read them.

--format timm   The encoder of a pre-trained checkpoint or of a dense task, or a whole fine-tuned classifier. The
                BatchNorm of a linear probe is folded into its linear layer. The script prints the `timm.create_model`
                line that loads the result. It loads it once, and compares the features or logits with those of this
                project's model before anything is put in place.
    FOLDER      An --out without suffix becomes a folder in timm's layout for the Hugging Face Hub: config.json,
                model.safetensors and README.md. `AutoModel` and `AutoModelForImageClassification` of Transformers load
                it, too. For every encoder. `hf upload NAME FOLDER` shares it.
    FILE        A .safetensors, or a .pth that holds {"model": weights, "meta": JSON string}. For plain ViTs. MAE's
                scripts can fine-tune such a .pth, too; they ignore "meta". Normalise images with the printed mean and
                deviation: timm's defaults for these model names are different.
--format torch  A .pt2 file of torch.export for batches of any size: a classifier, a segmentation model, or an encoder,
                whose outputs are the features of all tokens. Images are [B, C, H, W] with the pixels of the run's files
                and the size of the model: the program normalises them. If the run had invalid pixels, images are
                float32, and NaN or the value of --nodata marks them. Logits of segmentation have the size of the
                images. A detector takes one image of at most its size. The file is compared with the model before it is
                put in place. Facts on images and classes are JSON in the file.
"""

import io
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from encoders import exported
from encoders.names import Tensors
from encoders.trained import Trained, load
from scripts.parts.export_facts import describe, known_facts, pixels_of
from scripts.parts.timm_models import (
    data_config,
    largest_difference,
    model_for_timm,
    timm_arguments,
    timm_weights,
)
from scripts.parts.torch_program import check_program, noise_images, program_of, write_program
from util.atomic import filled_folder, prepare_file, replaced_file
from util.code_version import code_version
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.files import checkpoint

TORCH_SUFFIX = ".pt2"
SUFFIXES = {"timm": ("", ".safetensors", ".pth"), "torch": (TORCH_SUFFIX,)}  # of --out; "" is a folder
CARD_TEXT = """---
library_name: timm
tags:
- timm
- masked-image-modeling
---
# {title}

```python
import timm

model = {usage}.eval()
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
    """Exports the encoder or the classifier for timm, as a file or as a folder. Returns the lines that describe it."""
    model, remarks = model_for_timm(trained)
    has_scales = out.suffix != ".pth" or getattr(model, "rotary", False)  # MAE's scripts read a .pth of other ViTs
    name, options = timm_arguments(model, has_scales)
    if out.suffix and not name.startswith("vit_"):
        raise ValueError(f"{trained.weights.label} is no plain ViT: give --out without a suffix, for a folder")
    facts = known_facts(model, trained)
    state = timm_weights(model, has_scales)
    contents = describe(model, state, facts)
    if out.suffix:
        usage = timm_call(name, **options, checkpoint_path=str(out))
        with replaced_file(out, durable=True) as temporary:
            write_weights(temporary, state, facts, {"timm": json.dumps({"model_name": name, **options})})
            difference = check_loads(model, name, **options, checkpoint_path=str(temporary))
    else:
        usage = timm_call(f"local-dir:{out}", pretrained=True)
        with filled_folder(out) as temporary:
            write_config(temporary / "config.json", model, name, options, facts)
            write_weights(temporary / "model.safetensors", state, facts, {})
            difference = check_loads(model, f"local-dir:{temporary}", pretrained=True)
            write_card(temporary / "README.md", trained, out.name, contents)
    return [
        f"{trained.weights.path}: {out}: {contents}",
        f"largest difference of timm's outputs from ours, on two random images: {difference:.1e}",
        *(f"note: {remark}" for remark in remarks),
        usage,
    ]


def timm_call(name: str, **options: Any) -> str:
    """The call of `timm.create_model` with these arguments, as Python source."""
    arguments = [repr(name)]
    for option, value in options.items():
        arguments.append(f"{option}={value!r}")
    return f"timm.create_model({', '.join(arguments)})"


def check_loads(model: nn.Module, name: str, **options: Any) -> float:
    """Loads what was written with timm. Returns the largest difference of its outputs from those of `model`.

    ValueError if they differ by more than rounding.
    """
    return largest_difference(model, timm.create_model(name, **options).eval())


def write_config(path: Path, model: nn.Module, name: str, options: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes the config.json of a folder for timm. name, options: see `timm_arguments`.

    `timm.models.save_for_hf` would put the number of classes into `model_args`, too, and Transformers, which passes it
    by itself, could not load the folder.
    """
    num_classes = options["num_classes"]
    model_args = {option: value for option, value in options.items() if option != "num_classes"}
    config = {
        "architecture": name,
        "num_classes": num_classes,
        "num_features": getattr(model, "num_features", model.embed_dim),
        "model_args": model_args,
        "pretrained_cfg": data_config(model, num_classes, facts),
    }
    if "classes" in facts:
        config["label_names"] = facts["classes"]
    path.write_text(json.dumps(config, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------- for torch


def export_torch(trained: Trained, out: Path) -> list[str]:
    """Exports a model as a program of torch.export. Returns the lines that describe the file."""
    program, facts = program_of(trained)
    model = trained.encoder
    pixels = pixels_of(model, facts)
    example, *batches = noise_images(program, model.img_size, pixels)
    contents = describe(model, program.state_dict(), facts)
    with replaced_file(out, durable=True) as temporary:
        write_program(temporary, program, example, facts)
        difference = check_program(temporary, program, batches)
    height, width = model.img_size
    shape = f"[B, {model.in_chans}, {height}, {width}]"
    if trained.task == "detection":
        shape = f"[1, {model.in_chans}, H <= {height}, W <= {width}]"
    images = f"{facts['input_dtype']} {shape} as in the files"
    return [
        f"{trained.weights.path}: {out}: {contents}",
        f"largest difference from the run's outputs: {difference:.1e}",
        *(f"note: {remark}" for remark in trained.remarks),
        f"torch.export.load({str(out)!r}).module()  # images {images} -> {facts['outputs']}",
    ]


# -------------------------------------------------------------------------------------------------------------- files


def write_weights(path: Path, state: Tensors, facts: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes the file that the suffix asks for. Both hold the facts, and .safetensors also the metadata.

    The libraries would report a full disk by errors of their own.
    """
    if path.suffix == ".pth":
        info = exported.exported_info(facts)
        content = {"model": state, "meta": json.dumps(info.to_json())}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(buffer.getbuffer())
        return
    texts = {name: json.dumps(value) for name, value in facts.items()}
    path.write_bytes(safetensors.torch.save(state, {"format": "pt", **metadata, **texts}))


def write_card(path: Path, trained: Trained, title: str, contents: str) -> None:
    """Writes the model card. Paths of this machine are left out."""
    source = Path(trained.weights.path)
    settings = {}
    for name, value in trained.weights.settings.items():
        if isinstance(value, str):
            value = Path(value).name
        settings[name] = value
    text = CARD_TEXT.format(
        title=title,
        usage=timm_call(f"local-dir:{title}", pretrained=True),
        contents=contents,
        source=source.name,
        sha256=checkpoint.recorded_sha256(source),
        code=code_version(),
        settings=json.dumps(settings, indent=1),
    )
    path.write_text(text)


def check_out(path: Path, layout: str, source: Path, overwrite: bool) -> None:
    """Raises ValueError if the file, or the folder if it has no suffix, cannot or should not be written."""
    if path.suffix not in SUFFIXES[layout]:
        suffixes = ", ".join(suffix or "none" for suffix in SUFFIXES[layout])
        raise ValueError(f"--out {str(path)!r}: the suffixes of --format {layout} are: {suffixes}")
    if not path.exists():
        prepare_file("--out", path)
    elif path.samefile(source):
        raise ValueError(f"--out {str(path)!r} is the checkpoint itself")
    elif path.is_dir() == bool(path.suffix):
        raise ValueError(f"--out {str(path)!r} exists: a file has a suffix, and a folder has none")
    elif not overwrite:
        raise ValueError(f"--out {str(path)!r} exists; give another name, or --overwrite")


def export(source: str | Path, out: str | Path, overwrite: bool = False, layout: str = "timm") -> list[str]:
    """Exports the model at `source`, see `encoders.trained.load`. Returns the lines that describe `out`."""
    out = Path(out)
    check_out(out, layout, checkpoint.find_checkpoint_file(source), overwrite)
    writers = {"timm": export_timm, "torch": export_torch}
    return writers[layout](load(source), out)


FLAGS = (
    Flag("run", help="a checkpoint, or the folder of a run", positional=True),
    Flag("out", help="write this file, .safetensors, .pth or .pt2, or this folder if it has no suffix", required=True),
    Flag("format", str, "timm", "what reads the result", choices=SUFFIXES),
    Flag("overwrite", bool, False, "replace --out if it exists; in a folder, the files that this script writes"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; `argv` replaces the command line."""
    parser = Parser("export.py", __doc__, *FLAGS)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # temporary files are removed
    with user_errors(parser):
        lines = export(args.run, args.out, args.overwrite, args.format)
    print("\n".join(lines))


if __name__ == "__main__":
    run_program(main, "export.py")
