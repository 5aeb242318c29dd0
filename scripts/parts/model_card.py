"""The model card of exported weights: a README.md with the header that the Hugging Face Hub reads.

Everything that it says about the training is read from the checkpoint's meta and from the files beside the checkpoint.
Paths of this machine are left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import main_finetune
import main_pretrain
from util.run.checkpoint import CheckpointInfo, RunInfo
from util.run.folder import read_json, read_reports
from util.tables import markdown_table

PARSERS = {
    main_pretrain.PROGRAM: main_pretrain.get_args_parser,
    main_finetune.PROGRAM: main_finetune.get_args_parser,
}
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
    info: CheckpointInfo,
    folder: Path,
    library: str,
    usage: str,
    is_classifier: bool,
) -> str:
    """Returns the text of the card.

    name: title of the card. model: rows that describe the model. info: what the checkpoint says.
    folder: where the checkpoint lies. library, usage: the one that loads the weights, and Python code for it.
    is_classifier: whether the model is one, and not an encoder.
    """
    task = "image-classification" if is_classifier else "image-feature-extraction"
    training = training_rows(info, folder)
    text = CARD.format(library=library, task=task, name=name, usage=usage, model=table(model))
    text += table(training) if training else "The exported file does not say how it was trained."
    scores = find_scores(info.run, folder)
    if scores and info.run is not None and info.run.val_data is not None:
        rows = {"top-1": f"{scores['top1']:.2f} %"}
        if "top5" in scores:
            rows["top-5"] = f"{scores['top5']:.2f} %"
        data = info.run.val_data
        rows["images"] = f"{data.num_images}, fingerprint `{data.fingerprint}`"
        text += f"\n\n## Evaluation\n\n{table(rows)}"
    return f"{text}\n\n## Licence\n\n{LICENCE}\n"


def table(rows: Mapping[str, str]) -> str:
    return markdown_table(["", ""], rows.items(), left=2)


def training_rows(info: CheckpointInfo, folder: Path) -> dict[str, str]:
    """Returns what is known about the training, {name: text}. Empty for files of other projects.

    Its flags are those that change results.
    """
    run = info.run
    if run is None:
        return {}
    settings = info.settings
    rows = {
        "program": f"`{run.program}`",
        "recipe": f"`{settings['recipe']}`" if settings.get("recipe") else "none",
        "model": f"`{settings['model']}`",
        "length": f"{run.step} steps, {run.epoch:.4g} of {settings['epochs']} epochs",
        "total batch": str(settings["total_batch_size"]),
        "data": f"{run.data.num_images} images, fingerprint `{run.data.fingerprint}`",
    }
    if info.classes:
        rows["classes"] = str(len(info.classes))
    changes = PARSERS[run.program]().changes
    rows["flags"] = flags_text(settings, [name for name, change in changes.items() if change == "results"])
    for flag, fingerprint in run.files.items():
        rows[flag] = f"`{Path(settings[flag]).name}`, fingerprint `{fingerprint}`"
    loss = find_loss(run, folder)
    if loss is not None:
        rows["loss at the end"] = f"{loss:.4f}"
    if run.encoder is not None:
        rows["pre-trained encoder"] = f"`{Path(run.encoder.path).name}`, SHA-256 `{run.encoder.sha256}`"
    return rows | {"code": run.origin.code, "torch": run.torch}


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


def find_loss(run: RunInfo, folder: Path) -> float | None:
    """Returns the training loss of the last whole epoch up to the checkpoint, from the log beside it, or None."""
    reports = [report for report in read_reports(folder / "log.jsonl") if report["step"] <= run.step]
    losses = [report["epoch_loss"] for report in reports if "epoch_loss" in report]
    return losses[-1] if losses else None


def find_scores(run: RunInfo | None, folder: Path) -> dict[str, float] | None:
    """Returns top-1 and, with more than five classes, top-5 of a fine-tuned checkpoint in percent, or None.

    They are those in the checkpoint, or those of the same step in the results.json beside it.
    """
    if run is None:
        return None
    if run.val is not None:
        return run.val
    results = read_json(folder / "results.json")
    for name in ("last", "best"):
        if name in results and results[name]["step"] == run.step:
            return {key.removeprefix("val_"): value for key, value in results[name].items()}
    return None
