"""Top-1 and top-5 accuracy, in results and in messages."""

from collections.abc import Mapping


def accuracies(top1: float, top5: float, num_classes: int) -> dict[str, float]:
    """Returns {"top1", "top5"}. With five classes or fewer every answer is in the top 5: it is left out."""
    if num_classes <= 5:
        return {"top1": top1}
    return {"top1": top1, "top5": top5}


def accuracy_text(scores: Mapping[str, float], prefix: str = "", digits: int = 2) -> str:
    """Returns, for example, "top-1 81.50 %, top-5 95.25 %". prefix: of the names in `scores`."""
    text = f"top-1 {scores[f'{prefix}top1']:.{digits}f} %"
    if f"{prefix}top5" in scores:
        text += f", top-5 {scores[f'{prefix}top5']:.{digits}f} %"
    return text
