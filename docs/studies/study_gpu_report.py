# ruff: noqa
# fmt: off
# mypy: ignore-errors
"""Tables of a study's CSV.  python study_gpu_report.py study.csv [--pilot pilot.csv]"""
import argparse, csv, math
from collections import defaultdict
ARMS = ("mae", "plain50", "progressive50", "prmim50")
PAIRS = (("plain50", "mae"), ("progressive50", "plain50"), ("prmim50", "mae"), ("prmim50", "progressive50"))
try:
    from scipy.stats import t as student
    quantile = lambda df: float(student.ppf(0.975, df))
except ImportError:
    TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201, 15: 2.131, 19: 2.093}
    quantile = lambda df: TABLE.get(df, 1.96 + 2.4 / df)


def read(path):
    """{(passes, batch): {outcome: {arm: {rate: {seed: value}}}}}, and the rows."""
    data, rows = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))), []
    for r in csv.DictReader(open(path, newline="")):
        rows.append(r)
        for outcome in ("frozen", "knn", "ridge", "finetuned", "loss"):
            if r[outcome] not in ("", None) and r["finite"] == "True" and math.isfinite(float(r[outcome])):
                data[float(r["passes"]), int(r["batch"])][outcome][r["arm"]][float(r["rate"])][int(r["seed"])] = float(r[outcome])
    return data, rows


def stats(values):
    n = len(values)
    mean = sum(values) / n
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else float("nan")
    return mean, sd / math.sqrt(n), n


def show_pairs(arms, rate_of, digits):
    for a, b in PAIRS:
        x, y = arms.get(a, {}).get(rate_of.get(a), {}), arms.get(b, {}).get(rate_of.get(b), {})
        seeds = sorted(set(x) & set(y))
        if not seeds:
            continue
        mean, se, n = stats([x[s] - y[s] for s in seeds])
        half = quantile(n - 1) * se if n > 1 else float("nan")
        mark = "*" if n > 1 and abs(mean) > half else " "
        print(f"    {a:>13} - {b:<13} {mean:+.{digits}f}  [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]{mark}  n={n}  sd {se * math.sqrt(n):.{digits}f}")


def draw(data, path):
    """Differences against the length: means with 95 % intervals, and every seed."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.rcParams["svg.hashsalt"] = "throwing at once"
    names = {"mae": "MAE", "plain50": "plain", "progressive50": "progressive", "prmim50": "PR-MIM"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for panel, (outcome, title) in zip(panels, (("finetuned", "fine-tuned"), ("frozen", "frozen: kNN and ridge"))):
        for number, (a, b) in enumerate((("plain50", "mae"), ("progressive50", "plain50"), ("prmim50", "mae"))):
            xs, means, halves = [], [], []
            for passes, batch in sorted(data):
                arms = data[passes, batch].get(outcome)
                if not arms:
                    continue
                x, y = arms[a][0.005], arms[b][0.005]
                gains = [x[s] - y[s] for s in sorted(x)]
                mean, se, n = stats(gains)
                at = passes * 2 ** (0.05 * (number - 1))
                xs.append(at), means.append(mean), halves.append(quantile(n - 1) * se)
                panel.plot([at] * n, gains, ".", color=f"C{number}", alpha=0.25)
            panel.errorbar(xs, means, halves, marker="o", capsize=2, color=f"C{number}", label=f"{names[a]} − {names[b]}")
        panel.axhline(0, color="black", linewidth=0.7)
        panel.set_xscale("log", base=2)
        panel.set_xticks([8, 16, 24, 32], ["8", "16", "24", "32"])
        panel.set_xlabel("passes over 50,000 images")
        panel.set_title(title)
    panels[0].set_ylabel("difference of top-1, points")
    panels[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    p = argparse.ArgumentParser()
    p.add_argument("csv")
    p.add_argument("--draw", help="draw the differences to this file")
    p.add_argument("--pilot", help="CSV of the pilot, whose means (frozen; nearest length) choose each arm's rate")
    p.add_argument("--by", default="frozen", help="outcome by which the pilot chooses")
    args = p.parse_args()
    data, rows = read(args.csv)
    if args.draw:
        draw(data, args.draw)
    pilot = read(args.pilot)[0] if args.pilot else {}
    print(f"{len(rows)} rows, {sum(r['finite'] != 'True' for r in rows)} not finite (left out)")
    for key in sorted(pilot):
        print(f"pilot, {key[0]:g} passes, batch {key[1]}:")
        for outcome in ("frozen", "finetuned"):
            for arm in ARMS:
                rates = pilot[key][outcome].get(arm, {})
                if rates:
                    print(f"    {outcome:9} {arm:>13}  " + "  ".join(f"{r:g}: {stats(list(v.values()))[0]:.2f}" for r, v in sorted(rates.items())))
    for passes, batch in sorted(data):
        best = {}
        if pilot:
            near = min(pilot, key=lambda k: (k[1] != batch, abs(math.log(k[0] / passes))))
            for arm, rates in pilot[near][args.by].items():
                best[arm] = max(rates, key=lambda r: stats(list(rates[r].values()))[0])
        for outcome in ("finetuned", "frozen", "knn", "ridge", "loss"):
            arms = data[passes, batch].get(outcome)
            if not arms:
                continue
            digits = 4 if outcome == "loss" else 2
            print(f"\n== {passes:g} passes, batch {batch}, {outcome}")
            for arm in ARMS:
                for rate, seeds in sorted(arms.get(arm, {}).items()):
                    mean, se, n = stats(list(seeds.values()))
                    print(f"    {arm:>13} rate {rate:<7g} {mean:.{digits}f} +- {se:.{digits}f}  n={n}{'  <- pilot' if best.get(arm) == rate else ''}")
            common = sorted(set.intersection(*[set(arms[a]) for a in arms]))
            for rate in common:
                print(f"  all arms with rate {rate:g}, 95 % t intervals:")
                show_pairs(arms, dict.fromkeys(ARMS, rate), digits)
            if best:
                print("  each arm with its best rate in the pilot: " + ", ".join(f"{a} {best[a]:g}" for a in ARMS if a in best))
                show_pairs(arms, best, digits)
            elif all(len(arms[a]) == 1 for a in arms) and len(common) != 1:
                print("  each arm with its own rate:")
                show_pairs(arms, {a: next(iter(arms[a])) for a in arms}, digits)


if __name__ == "__main__":
    main()
