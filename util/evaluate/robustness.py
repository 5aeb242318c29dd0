"""The published test sets of ImageNet classifiers, ImageNet-A, -R, -Sketch and -C, and ImageNet-C's mean error."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from util.text import shorten

RESULTS = "imagenet_c.json"  # apart from results.json, which the next evaluation replaces
EVAL_SETS = ("imagenet_a", "imagenet_r", "imagenet_sketch", "imagenet_c")
RESTRICTED = ("imagenet_a", "imagenet_r")  # their authors choose predictions from the 200 classes of the set

# AlexNet's error on each corruption, averaged over severities: Hendrycks and Dietterich (ICLR 2019), with the digits
# of the table in their repository.
ALEXNET_ERRORS = dict(
    gaussian_noise=0.886428,
    shot_noise=0.894468,
    impulse_noise=0.922640,
    defocus_blur=0.819880,
    glass_blur=0.826268,
    motion_blur=0.785948,
    zoom_blur=0.798360,
    snow=0.866816,
    frost=0.826572,
    fog=0.819324,
    brightness=0.564592,
    contrast=0.853204,
    elastic_transform=0.646056,
    pixelate=0.717840,
    jpeg_compression=0.606500,
)
SEVERITIES = (1, 2, 3, 4, 5)


def find_folders(eval_set: str, root: str) -> dict[str, Path]:
    """Returns the folders of a set, each of which holds class folders named by wnids, by name.

    ImageNet-C has ROOT/<corruption>/<severity>, the other sets ROOT itself. ValueError if one of them is missing.
    """
    if eval_set != "imagenet_c":
        return {eval_set: Path(root)}
    folders = {}
    for corruption in ALEXNET_ERRORS:
        for severity in SEVERITIES:
            folders[f"{corruption}/{severity}"] = Path(root, corruption, str(severity))
    missing = [name for name, folder in folders.items() if not folder.is_dir()]
    if missing:
        raise ValueError(f"--data_path {root!r} lacks {len(missing)} of ImageNet-C's 75 folders: {shorten(missing)}")
    return folders


def wnids_of(eval_set: str = "imagenet") -> list[str]:
    """Returns the wnids of ImageNet-1k in the order of a classifier's logits, or those of ImageNet-A or -R."""
    path = files("timm.data") / "_info" / f"{eval_set}_synsets.txt"
    return sorted(path.read_text().split())


def find_columns(eval_set: str, classes: Sequence[str], wnids: Sequence[str]) -> list[int] | None:
    """Returns the logits from which predictions on a set are chosen; None for all.

    classes: of the folder. wnids: of the classifier. ValueError if the folder has not the classes of the set.
    """
    expected = wnids
    if eval_set in RESTRICTED:
        expected = wnids_of(eval_set)
    odd = (set(classes) ^ set(expected)) | (set(expected) - set(wnids))
    if odd:
        raise ValueError(
            f"--eval_set {eval_set}: --data_path or the classifier has other classes: {shorten(sorted(odd))}"
        )
    if eval_set not in RESTRICTED:
        return None
    return [wnids.index(wnid) for wnid in classes]


def corruption_errors(errors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns CE, mCE and un-normalised errors in percent. errors: of each corruption at severities 1 to 5, in [0, 1].

    CE_c = mean_s E_cs / AlexNet's mean_s E_cs. mCE is the mean over the 15 corruptions (Hendrycks and Dietterich,
    ICLR 2019).
    """
    means = {}
    ce = {}
    for corruption, alexnet_error in ALEXNET_ERRORS.items():
        mean = sum(errors[corruption]) / len(errors[corruption])
        means[corruption] = 100 * mean
        ce[corruption] = 100 * mean / alexnet_error
    return {
        "mce": sum(ce.values()) / len(ce),
        "mean_error": sum(means.values()) / len(means),
        "ce": ce,
        "errors": means,
    }


def summarise(parts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns the errors of ImageNet-C once the scores of all folders are there. parts: {folder's name: scores}."""
    errors: dict[str, list[float]] = {}
    for corruption in ALEXNET_ERRORS:
        names = [f"{corruption}/{severity}" for severity in SEVERITIES]
        if not parts.keys() >= set(names):
            return {}
        errors[corruption] = [1 - parts[name]["top1"] / 100 for name in names]
    return corruption_errors(errors)
