"""Which parameters Muon trains."""

from collections.abc import Sequence
from typing import Any

from torch import nn


def split_matrices(groups: Sequence[dict[str, Any]], blocks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Splits parameter groups into the matrices of transformer `blocks`, for Muon, and all else, for its AdamW.

    Swin's tables of relative positions are no matrices. Muon's updates have the root mean square of AdamW's, so that
    both take the same learning rates.
    """
    matrices: set[nn.Parameter] = set()
    for block in blocks:
        matrices.update(layer.weight for layer in block.modules() if isinstance(layer, nn.Linear))
    split = []
    for group in groups:
        for is_matrix in (True, False):
            parameters = [parameter for parameter in group["params"] if (parameter in matrices) == is_matrix]
            if parameters:
                split.append({**group, "params": parameters, "use_fallback": not is_matrix})
    return split
