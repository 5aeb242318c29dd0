"""Count what decoders of several depths cost: multiply-adds of the forward pass of one image of 224 px.

    python tools/decoder_costs.py                                  # prints a Markdown table
    python tools/decoder_costs.py --models mae_vit_base_patch16 --depths 8 12

Nothing is computed: the models are built on the meta device. Numbers in brackets are relative to a decoder of the same
depth that throws nothing. The last column is the cost of a row at rho_d .5, relative to a decoder of half the depth
that throws nothing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from main_pretrain import MODELS, build_model, parse_args
from util.costs import forward_gmac
from util.run.cli import Parser, run_program, user_errors
from util.tables import markdown_table

THROW_RATIOS = (0.0, 0.25, 0.5, 0.65)


def count_gmac(model: str, decoder_depth: int, throw_ratio: float, progressive: bool = True) -> float:
    """The multiply-adds of the forward pass of one image, in 10^9."""
    argv = ["--model", model, "--decoder_depth", str(decoder_depth), "--throw_ratio", str(throw_ratio)]
    settings = vars(parse_args(argv)[1]) | {"progressive": progressive}
    return forward_gmac(settings, build_model)[0]


def rows_of(model: str, depths: Sequence[int]) -> list[list[str]]:
    """The cells of one model's rows, one row for each depth."""
    rows, full = [], {depth: count_gmac(model, depth, 0.0) for depth in depths}
    for depth in depths:
        thrown = [count_gmac(model, depth, ratio) for ratio in THROW_RATIOS[1:]]
        plain = count_gmac(model, depth, 0.5, progressive=False)
        rows.append([model, str(depth), f"{full[depth]:.2f}"])
        rows[-1] += [f"{gmac:.2f} ({gmac / full[depth]:.3f})" for gmac in thrown] + [f"{plain:.2f}"]
        rows[-1].append(f"{thrown[1] / full[depth // 2]:.3f}" if depth // 2 in full else "–")
    return rows


def make_parser() -> Parser:
    """The flags of this script."""
    parser = Parser("decoder_costs.py", description=__doc__)
    names = ("mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14")
    parser.add_argument("--models", nargs="+", default=names, choices=MODELS, help="models with MAE's decoder")
    parser.add_argument("--depths", nargs="+", type=int, default=(8, 16, 32), help="blocks of the decoder")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; `argv` replaces the command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    titles = ["model", "decoder blocks", *(f"ρ_d {ratio:g}" for ratio in THROW_RATIOS), "plain, .5"]
    titles.append("ρ_d .5 to half the depth")
    with user_errors(parser):
        print(markdown_table(titles, [row for model in args.models for row in rows_of(model, args.depths)]))


if __name__ == "__main__":
    run_program(main, "decoder_costs.py")
