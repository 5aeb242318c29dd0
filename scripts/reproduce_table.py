"""Print the commands behind a table of the paper, or the results of finished runs beside the published numbers.

    python scripts/reproduce_table.py kernels --launcher "torchrun --nproc_per_node 8" > kernels.sh
    IMAGENET=/data/imagenet bash -eu kernels.sh
    python scripts/reproduce_table.py kernels --collect

The rows are those of docs/published.csv. The commands take the data from variables: IMAGENET, INAT, ADE20K, COCO,
IMAGENET_A, _C, _R and _SKETCH, and TEACHER, a checkpoint of iBOT's ViT-B/16. Started again, they go on; one whose run
is finished ends at once. Measured accuracies are those of the last epoch.
"""

import csv
import shlex
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import RECIPES
from util.flag import Flag
from util.run.cli import Parser
from util.run.exits import run_program, user_errors
from util.run.files.json_files import STATE, read_json
from util.tables import markdown_table

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "published.csv"
NOT_OF_THE_PAPER = ("other pre-training", "other evaluation", "counted here")  # further tables of the file
# {beginning of a recipe that evaluates: (its program, the variable of its data)}; "" fits all others.
PROGRAMS = {
    "ade20k": ("downstream/segmentation/main_segmentation.py", "ADE20K"),
    "coco": ("downstream/detection/main_detection.py", "COCO"),
    "inat": ("main_finetune.py", "INAT"),
    "mff_inat": ("main_finetune.py", "INAT"),
    "": ("main_finetune.py", "IMAGENET"),
}
Row = dict[str, str]


def read_published() -> list[Row]:
    """Returns the rows of docs/published.csv: a published number each."""
    with open(PUBLISHED, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def commands_of(row: Row, root: Path) -> Iterator[list[str]]:
    """Yields the commands that lead to a number, as words: pre-training, evaluation, its evaluation on a test set."""
    recipe = row["pretrain"]
    folder = root / recipe
    command = ["main_pretrain.py", "--recipe", recipe, "--data_path", "$IMAGENET", "--output_dir", str(folder)]
    if str(RECIPES[recipe]["model"]).startswith("tec_"):
        command += ["--teacher", "$TEACHER"]
    yield command
    tuned = folder / row["evaluate"]
    program, data = next(found for start, found in PROGRAMS.items() if row["evaluate"].startswith(start))
    command = [program, "--recipe", row["evaluate"], "--finetune", str(folder), "--data_path", f"${data}"]
    yield [*command, "--output_dir", str(tuned)]
    if row["measure"].startswith("imagenet_"):
        test_set = row["measure"]
        command = ["main_finetune.py", "--eval", "--eval_set", test_set, "--resume", str(tuned)]
        yield [*command, "--data_path", f"${test_set.upper()}", "--output_dir", str(tuned / test_set)]


def quoted(word: str) -> str:
    """Returns a word for the shell, which is to fill in variables."""
    if word.startswith("$"):
        return f'"{word}"'
    return shlex.quote(word)


def measured(row: Row, root: Path) -> Any:
    """Returns the number of a finished run; "" if there is none."""
    folder = root / row["pretrain"] / row["evaluate"]
    if row["measure"].startswith("imagenet_"):
        if row["measure"] == "imagenet_c":
            return read_json(folder / "imagenet_c" / "imagenet_c.json").get("imagenet_c", {}).get("mce", "")
        results = read_json(folder / row["measure"] / "results.json")
        return results.get("last", {}).get("val_top1", "")
    if read_json(folder / STATE).get("state") != "finished":
        return ""
    return read_json(folder / "results.json").get("last", {}).get(f"val_{row['measure']}", "")


def get_args_parser() -> Parser:
    names = [name for name in dict.fromkeys(row["table"] for row in read_published()) if name not in NOT_OF_THE_PAPER]
    return Parser(
        "reproduce_table.py",
        __doc__,
        Flag("tables", help=", ".join(names), positional=True, choices=names, nargs="+", metavar="TABLE"),
        Flag("rows", str, "*", "only rows of pre-training recipes like 'prmim*'", metavar="GLOB"),
        Flag("output_dir", Path, Path("output/tables"), "folder of all runs"),
        Flag("launcher", str, "python", "the words before each program"),
        Flag("collect", bool, False, "print published and measured numbers instead"),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = get_args_parser()
    args = parser.parse_args(argv)
    rows = []
    for row in read_published():
        if row["evaluate"] and row["table"] in args.tables and fnmatchcase(row["pretrain"], args.rows):
            rows.append(row)
    with user_errors(parser):
        if not rows:
            raise ValueError(f"--rows {args.rows!r} matches no recipe of {', '.join(args.tables)}")
    if args.collect:
        cells = []
        for row in rows:
            names = (row[name] for name in ("table", "row", "pretrain", "column", "published"))
            number = measured(row, args.output_dir)
            if isinstance(number, float):
                number = f"{number:.2f}"
            cells.append([*names, number])
        print(markdown_table(["table", "row", "recipe", "column", "published", "measured"], cells, left=4))
        for row in rows:
            if row["note"]:
                print(f"\n{row['table']}: {row['note']}")
        return
    lines = []
    for row in rows:
        for command in commands_of(row, args.output_dir):
            lines.append(f"{args.launcher} {' '.join(quoted(word) for word in command)}")
    print("\n".join(dict.fromkeys(lines)))


if __name__ == "__main__":
    run_program(main, "reproduce_table.py")
