"""Tables of measurements: CSV files with one header row, unrounded numbers and empty fields for missing values."""

import csv
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one line per row. Keys of a row that are not in `columns` are left out."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: str | Path, columns: Iterable[str], text: Collection[str]) -> list[dict[str, Any]]:
    """Reads a file of `write_csv` into one dict per row.

    Values of the columns `text` are strings. All others are floats, or None for an empty field. Raises ValueError if
    the file has no rows or lacks one of the `columns`.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or set(columns) - set(rows[0]):
        raise ValueError(
            f"{str(path)!r} is no CSV of this script: it must hold rows with the columns {', '.join(columns)}"
        )
    return [{column: value if column in text else _number(value) for column, value in row.items()} for row in rows]


def _number(value: str) -> float | None:
    return float(value) if value else None


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, pad: bool = False) -> str:
    """Returns a Markdown table without a final newline. The first `left` columns are left-aligned, the others right.

    pad: fill the cells with spaces, so that the text itself reads as a table.
    """
    alignment = ["---" if column < left else "--:" for column in range(len(titles))]
    lines = [[str(cell) for cell in cells] for cells in (titles, alignment, *rows)]
    if pad:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines = [[cell.ljust(width) for cell, width in zip(cells, widths, strict=True)] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
