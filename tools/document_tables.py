"""Writes the published numbers of `scripts/parts/paper_tables.py` into the tables of the documents.

    python tools/document_tables.py            # names the documents whose tables are out of date
    python tools/document_tables.py --write

A table lies between the comments `<!-- published NAME -->` and `<!-- end of NAME -->`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import FINETUNE_RECIPES
from scripts.parts.paper_tables import COUNTED_FLOPS, OTHER_EVALUATION, TABLES, published_costs, published_top1
from util.run.cli import Parser
from util.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
# Lines of the table of frameworks: recipes of PR-MIM.
FRAMEWORKS = (
    "prmim50_vit_base_300ep",
    "prmim50_vit_base_800ep",
    "prmim50_vit_large_100ep",
    "prmim50_vit_large_800ep",
    "mff_prmim50_vit_base_800ep",
    "simmim_prmim30_vit_base_100ep",
    "simmim_prmim30_vit_base_800ep",
    "localmim_prmim65_vit_base_100ep",
    "greenmim_prmim50_swin_base_100ep",
    "greenmim_prmim50_swin_large_100ep",
    "tec_prmim50_vit_base_300ep",
    "crossmae_prmim50_vit_base_400ep",
    "crossmae_prmim50_vit_base_800ep",
    "crossmae_prmim50_vit_large_800ep",
    "crossmae_prmim50_vit_huge_800ep",
)
# Lines of the table of fine-tuning recipes: (title, beginning of the names). What is left is of small runs.
FINETUNED = {
    "MAE, plain, PR-MIM, CrossMAE": "finetune_vit_",
    "the last blocks alone": "partial",
    "linear probing": "linprobe_vit_",
    "iNaturalist": "inat",
    "MFF": "mff_",
    "SimMIM": "simmim_",
    "LocalMIM": "localmim_",
    "TEC": "tec_",
    "GreenMIM": "greenmim_",
    "AMT": "amt_",
}

EVALUATED = {
    "schedules": ["ImageNet-1K, fine-tuned"],
    "frameworks": ["ImageNet-1K, fine-tuned"],
    "robustness": ["the same: ImageNet-C (mCE, lower is better)", "-A", "-R", "-Sketch"],
    "inaturalist": ["iNaturalist 2018", "2019"],
}


def ratio(value: float | None, digits: int) -> str:
    """Returns a cost relative to throwing nothing, without the leading zero; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}".removeprefix("0")


def flops(recipe: str) -> tuple[str, str]:
    """Returns the cells (published, counted) of a recipe's FLOPs. The choice of the thrown tokens costs nothing."""
    counted = re.sub(r"_\d+ep$", "", recipe).replace("progressive", "prmim").replace("furthest", "plain")
    return ratio(published_costs(recipe).get("flops"), 2), ratio(COUNTED_FLOPS.get(counted), 3)


def arms_of(recipe: str) -> list[str]:
    """Returns the recipes without throwing and with plain reconstruction, and `recipe`, which is that of PR-MIM."""
    full = re.sub(r"prmim\d+_", "" if "_prmim" in recipe else "mae_", recipe)
    return [full, recipe.replace("prmim", "plain"), recipe]


def readme() -> str:
    """ViT-B after 100, 300 and 800 epochs."""
    titles = ["", "ρ_d", "100 epochs", "300 epochs", "800 epochs", "FLOPs, published", "FLOPs, counted"]
    rows = [["MAE", "0", *(published_top1(f"mae_vit_base_{epochs}ep") for epochs in (100, 300, 800)), "1", "1"]]
    for label, arm in (("plain partial reconstruction", "plain50"), ("PR-MIM", "prmim50")):
        numbers = [published_top1(f"{arm}_vit_base_{epochs}ep") for epochs in (100, 300, 800)]
        rows.append([label, ".5", *numbers, *flops(f"{arm}_vit_base_100ep")])
    return markdown_table(titles, rows)


def ablation() -> str:
    """Returns the ablations, with one line for each arm."""
    titles = ["recipe", "ρ_d .25 / .50 / .65", "FLOPs, published", "counted"]
    rows = [["`mae_vit_base_100ep`", published_top1("mae_vit_base_100ep"), "1", "1"]]
    for arm in ("plain", "progressive", "furthest", "prmim"):
        recipes = [f"{arm}{percent}_vit_base_100ep" for percent in (25, 50, 65)]
        costs = [" / ".join(cells) for cells in zip(*map(flops, recipes), strict=True)]
        numbers = " / ".join(str(published_top1(recipe)) for recipe in recipes)
        rows.append([f"`{arm}…_vit_base_100ep`", numbers, *costs])
    return markdown_table(titles, rows)


def frameworks() -> str:
    """All other rows of PR-MIM."""
    titles = ["recipe of PR-MIM", "ρ_d 0", "plain", "PR-MIM", "FLOPs, published", "counted"]
    rows = []
    for recipe in FRAMEWORKS:
        numbers = [published_top1(arm) or "–" for arm in arms_of(recipe)]
        rows.append([f"`{recipe}`", *numbers, *flops(recipe)])
    return markdown_table(titles, rows)


def methods() -> str:
    """Returns the comparison with AMT."""
    table = TABLES["methods"]
    titles = ["the paper's comparison with AMT", "recipe", "top-1, published", "FLOPs, counted"]
    rows = []
    for row in table.rows:
        rows.append([row.label, f"`{row.pretrain}`", *row.numbers, flops(row.pretrain)[1]])
    return f"{markdown_table(titles, rows, left=2)}\n\n{table.note}"


def finetuned() -> str:
    """Returns the fine-tuning recipes of each pre-training."""
    lines = {title: [name for name in FINETUNE_RECIPES if name.startswith(start)] for title, start in FINETUNED.items()}
    lines["small runs"] = [name for name in FINETUNE_RECIPES if name not in sum(lines.values(), [])]
    rows = [[title, ", ".join(f"`{name}`" for name in names)] for title, names in lines.items()]
    return markdown_table(["encoder", "recipe"], rows, left=2)


def evaluations(*tables: str, prefix: str = "") -> list[list[str]]:
    """Returns what is published for a framework's ViT-B after 800 epochs: one line for each of the paper's tables."""
    arms, lines = arms_of(f"{prefix}prmim50_vit_base_800ep"), []
    for name in tables:
        table = TABLES[name]
        rows = {row.pretrain: row for row in table.rows}
        recipes = list(dict.fromkeys(rows[arms[0]].finetune.values()))
        filled = len(rows[arms[0]].finetune)  # the other columns are costs
        what = " / ".join(EVALUATED.get(name) or list(table.columns)[:filled])
        numbers = [" / ".join(rows[arm].numbers[:filled]) for arm in arms]
        lines.append([what, ", ".join(f"`{recipe}`" for recipe in recipes), *numbers])
    return lines


def evaluated(lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(["after 800 epochs", "recipe", "ρ_d 0", "plain .5", "PR-MIM .5"], lines, left=2)


def others(*recipes: str) -> str:
    """What others report for further recipes of evaluation."""
    lines = []
    for recipe in recipes:
        numbers, source = OTHER_EVALUATION[recipe]
        lines.append(f"- `{recipe}`: {source}" + ("" if numbers == "-" else f": {numbers}"))
    return "\n".join(lines)


WRITERS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"main result": readme},
    "docs/pretrain.md": {"ablation": ablation, "frameworks": frameworks, "methods": methods},
    "docs/finetune.md": {
        "recipes": finetuned,
        "evaluations": lambda: evaluated(
            evaluations("schedules", "robustness", "inaturalist")
            + evaluations("frameworks", "robustness", "inaturalist", prefix="mff_")
        ),
    },
    "docs/segmentation.md": {
        "ADE20K": lambda: (
            f"{evaluated(evaluations('ade20k'))}\n\n{others('ade20k_upernet_vit_base_mae', 'ade20k_linear_vit_base')}"
        )
    },
    "docs/detection.md": {
        "COCO": lambda: f"{evaluated(evaluations('coco'))}\n\n{others('coco_mask_rcnn_vit_base_mae')}"
    },
}


def rewrite(name: str) -> tuple[str, str]:
    """Returns (text, text with new tables) of a document. ValueError if a marker is missing."""
    text = new = (ROOT / name).read_text(encoding="utf-8")
    for table, write in WRITERS[name].items():
        begin, end = f"<!-- published {table} -->", f"<!-- end of {table} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{name} must hold the markers {begin} and {end} once")
        before, rest = new.split(begin)
        new = f"{before}{begin}\n{write()}\n{end}{rest.split(end)[1]}"
    return text, new


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; `argv` replaces the command line. Returns 1 if a document was out of date."""
    parser = Parser("document_tables.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables")
    args = parser.parse_args(argv)
    stale = False
    for name in WRITERS:
        text, new = rewrite(name)
        if text != new:
            stale = not args.write
            print(f"{name}: {'written' if args.write else 'out of date'}")
            if args.write:
                (ROOT / name).write_text(new, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
