"""Tables of measurements: CSV files with one header row, unrounded numbers and empty fields for missing values."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a header and one line per row. Keys of a row that are not in `columns` are left out."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    left: int = 1,
    pad: bool = False,
) -> str:
    """Returns a Markdown table without a final newline. The first `left` columns are left-aligned, the others right.

    pad: fill the cells with spaces, so that the text itself reads as a table.
    """
    alignment = ["---"] * left + ["--:"] * (len(titles) - left)
    lines = [list(titles), alignment]
    for row in rows:
        lines.append([str(cell) for cell in row])
    widths = [0] * len(titles)
    if pad:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for cells in lines:
        padded = []
        for cell, width in zip(cells, widths, strict=True):
            padded.append(cell.ljust(width))
        text.append(f"| {' | '.join(padded)} |")
    return "\n".join(text)
