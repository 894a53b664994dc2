"""The results of placement.py as a picture for the docs.

    python benchmarks/plot_placement.py [--suffix gpu|avx512_core]

Each row is a model in a mode; dots are the sides' medians over the best side of the row, bars their quartiles.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
COLORS = {
    "eager fp32": "#9aa0a6", "compile fp32": "#4d5258", "eager native bf16": "#e0a458",
    "compile native bf16": "#c8781e", "to(bf16) compile": "#b0413e", "ours exact": "#6a9f7f", "ours fast": "#1f6f4a",
}  # fmt: skip


def main() -> None:
    """Read the results, draw, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suffix", default="", help="of the results file, after placement-")
    asked = parser.parse_args().suffix
    suffix = f"-{asked}" if asked else ""
    results = json.loads((FOLDER / f"results/placement{suffix}.json").read_text(encoding="utf-8"))
    rows = {name: row["sides"] for name, row in results["rows"].items() if row.get("sides")}
    figure = Figure(figsize=(10, 0.42 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for number, sides in enumerate(rows.values()):
        best = min(side["ms"] for side in sides.values())
        for name, color in COLORS.items():
            side = sides.get(name)
            if side is None or side["ms"] > 12 * best:
                continue
            at, is_ours = side["ms"] / best, name.startswith("ours")
            axes.plot([side["lower"] / best, side["upper"] / best], [number, number], color=color, lw=1, alpha=0.5)
            axes.plot(at, number, "D" if is_ours else "o", color=color, ms=7 if is_ours else 5, label=name)
    axes.set(
        yticks=range(len(rows)), yticklabels=list(rows), xscale="log", xlabel="time over the fastest side's median"
    )
    axes.set_xticks([1, 1.5, 2, 3, 5, 8], ["1", "1.5", "2", "3", "5", "8"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    machine = results["machine"]
    limits = "".join(f", {name}={limit}" for name, limit in machine.get("limits", {}).items())
    title = f"{machine['accelerator'] or machine['cpu']}, torch {machine['torch']}{limits}"
    axes.set_title(title, fontsize=9, loc="left")
    into = FOLDER.parent / f"docs/pictures/placement{suffix}.png"
    into.parent.mkdir(exist_ok=True)
    figure.savefig(into, dpi=110)
    print(f"written: {into.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
