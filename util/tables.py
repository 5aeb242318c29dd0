"""Tables of measurements as CSV: one header row, unrounded numbers, an empty field where there is no value."""

import csv


def write_csv(path, columns, rows):
    """rows: dicts; keys that are no column are left out."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path, columns, text):
    """-> dicts with floats, or None where empty, but in the columns `text`; ValueError where the file is not of this kind."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or set(columns) - set(rows[0]):
        raise ValueError(f"{str(path)!r} is no CSV of this script: it must hold rows with the columns {', '.join(columns)}")
    return [{k: v if k in text else float(v) if v else None for k, v in row.items()} for row in rows]
