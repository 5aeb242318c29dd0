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
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    if not rows or set(columns) - set(rows[0]):
        raise ValueError(
            f"{str(path)!r} is no CSV of this script: it must hold rows with the columns {', '.join(columns)}"
        )
    for row in rows:
        for column in row.keys() - set(text):
            row[column] = _number(row[column])
    return rows


def _number(value: str) -> float | None:
    if not value:
        return None
    return float(value)


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, pad: bool = False) -> str:
    """Returns a Markdown table without a final newline. The first `left` columns are left-aligned, the others right.

    pad: fill the cells with spaces, so that the text itself reads as a table.
    """
    alignment = ["---"] * left + ["--:"] * (len(titles) - left)
    table: list[list[str]] = []
    for cells in (titles, alignment, *rows):
        table.append([str(cell) for cell in cells])
    if pad:
        for column in range(len(titles)):
            width = max(len(cells[column]) for cells in table)
            for cells in table:
                cells[column] = cells[column].ljust(width)
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join(lines)
