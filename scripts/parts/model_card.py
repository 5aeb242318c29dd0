"""The model card of exported weights: a README.md with the header that the Hugging Face Hub reads.

Everything that it says about the training is read from the checkpoint's meta and from the files beside the checkpoint.
Paths of this machine are left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from util.run.folder import read_json, read_reports
from util.tables import markdown_table

# Settings that the card names as flags, beside those that belong to one framework.
METHOD_FLAGS = ["mask_ratio", "throw_ratio", "progressive", "sampling"]
METHOD_FLAGS += ["aggregation", "kernel_size", "applies_to", "norm_pix_loss"]
FINETUNE_FLAGS = ["trainable_blocks", "global_pool", "optimizer", "layer_decay", "drop_path", "aa", "color_jitter"]
FINETUNE_FLAGS += ["smoothing", "reprob", "mixup", "cutmix"]
SCHEDULE_FLAGS = ["lr", "min_lr", "warmup_epochs", "weight_decay", "betas"]
SCHEDULE_FLAGS += ["clip_grad", "crop_scale", "seed", "precision"]
CARD = """---
library_name: {library}
pipeline_tag: {task}
tags:
- {library}
- {task}
- masked-image-modeling
---
# {name}

```python
{usage}
```

## Model

{model}

## Training

"""
LICENCE = "Not stated yet. Add it here, and as `license: ...` in the header of this file, before you share the weights."


def model_card(
    name: str,
    model: Mapping[str, str],
    meta: Mapping[str, Any],
    folder: Path,
    framework_flags: Sequence[str],
    library: str,
    usage: str,
    is_classifier: bool,
) -> str:
    """Returns the text of the card.

    name: title of the card. model: rows that describe the model. meta: what the checkpoint says about its run, or {}.
    folder: where the checkpoint lies. framework_flags: names of settings that belong to frameworks. library, usage: the
    one that loads the weights, and Python code for it. is_classifier: whether the model is one, and not an encoder.
    """
    task = "image-classification" if is_classifier else "image-feature-extraction"
    training = training_rows(meta, folder, framework_flags)
    text = CARD.format(library=library, task=task, name=name, usage=usage, model=table(model))
    text += table(training) if training else "The exported file does not say how it was trained."
    if scores := find_scores(meta, folder):
        rows = {"top-1": f"{scores['top1']:.2f} %"}
        if "top5" in scores:
            rows["top-5"] = f"{scores['top5']:.2f} %"
        facts = meta["val_data"]
        rows["images"] = f"{facts['num_images']}, fingerprint `{facts['fingerprint']}`"
        text += f"\n\n## Evaluation\n\n{table(rows)}"
    return f"{text}\n\n## Licence\n\n{LICENCE}\n"


def table(rows: Mapping[str, str]) -> str:
    return markdown_table(["", ""], rows.items(), left=2)


def training_rows(meta: Mapping[str, Any], folder: Path, framework_flags: Sequence[str]) -> dict[str, str]:
    """Returns what is known about the training, {name: text}. Empty for files of other projects."""
    if not meta.get("settings") or "step" not in meta:
        return {}
    settings = meta["settings"]
    rows = {
        "program": f"`{meta['program']}`",
        "recipe": f"`{settings['recipe']}`" if settings.get("recipe") else "none",
        "model": f"`{settings['model']}`",
        "length": f"{meta['step']} steps, {meta['epoch']:.4g} of {settings['epochs']} epochs",
        "total batch": str(settings["total_batch_size"]),
        "data": f"{meta['data']['num_images']} images, fingerprint `{meta['data']['fingerprint']}`",
    }
    if meta.get("classes"):
        rows["classes"] = str(len(meta["classes"]))
    own, common = (METHOD_FLAGS, framework_flags) if "mask_ratio" in settings else (FINETUNE_FLAGS, ())
    rows["method" if "mask_ratio" in settings else "fine-tuning"] = flags_text(settings, (*own, *common))
    rows["optimisation"] = flags_text(settings, SCHEDULE_FLAGS)
    loss = find_loss(meta, folder)
    if loss is not None:
        rows["loss at the end"] = f"{loss:.4f}"
    if meta.get("encoder"):
        encoder = meta["encoder"]
        rows["pre-trained encoder"] = f"`{Path(encoder['path']).name}`, SHA-256 `{encoder['sha256']}`"
    return rows | {"code": meta["origin"]["code"], "torch": meta["torch"]}


def flags_text(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the settings of these names that are not None as command-line flags. A path is cut to its last part."""
    words = []
    for name in names:
        value = settings.get(name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (list, tuple)):
            words.append(f"--{name} {' '.join(map(str, value))}")
        elif value is not None:
            words.append(f"--{name} {Path(value).name if isinstance(value, str) else value}")
    return f"`{' '.join(words)}`"


def find_loss(meta: Mapping[str, Any], folder: Path) -> float | None:
    """Returns the training loss of the last whole epoch up to the checkpoint, from the log beside it, or None."""
    reports = [report for report in read_reports(folder / "log.jsonl") if report["step"] <= meta["step"]]
    losses = [report["epoch_loss"] for report in reports if "epoch_loss" in report]
    return losses[-1] if losses else None


def find_scores(meta: Mapping[str, Any], folder: Path) -> dict[str, float] | None:
    """Returns top-1 and, with more than five classes, top-5 of a fine-tuned checkpoint in percent, or None.

    They are those in the checkpoint, or those of the same step in the results.json beside it.
    """
    if "val" in meta:
        return meta["val"]
    results = read_json(folder / "results.json")
    for name in ("last", "best"):
        if name in results and results[name]["step"] == meta.get("step"):
            return {key.removeprefix("val_"): value for key, value in results[name].items()}
    return None
