"""Draws the softmax results, from their CSV alone: python -m benchmarks.plot_softmax [--csv CSV] [--out PNG]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.plot import INK, Row
from benchmarks.provenance import RESULTS, ROOT, read_rows

# Okabe and Ito's colours, told apart without red-green vision; ours is the strong one, yardsticks are grey.
COLORS = {
    "flashattn_lite": "#009e73",
    "torch": "#0072b2",
    "torch.compile": "#56b4e9",
    "liger": "#e69f00",
    "quack": "#cc79a7",
    "torch amax": "#0072b2",
    "copy": "#bbbbbb",
    "read": "#bbbbbb",
}
TITLES = {"softmax": "softmax, one read and one write", "softmax_stats": "softmax_stats, one read"}


def softmax(rows: Sequence[Row], out: Path) -> None:
    """GB/s of each provider as bars, a group for each shape, a panel for each op and dtype."""
    rows = [row for row in rows if row["metric"] == "gbps"]
    ops, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype"))
    size = 12, 3.2 * len(ops) * len(dtypes)
    figure, panels = plt.subplots(len(ops) * len(dtypes), 1, figsize=size, sharey=True, squeeze=False)
    pairs = [(op, dtype) for op in ops for dtype in dtypes]
    for axes, (op, dtype) in zip(panels[:, 0], pairs, strict=True):
        panel(axes, [row for row in rows if (row["op"], row["dtype"]) == (op, dtype)])
        axes.set_title(f"{TITLES.get(op, op)}, {dtype}", loc="left", color=INK, fontsize=11)
    first = rows[0]
    note = (
        f"Median of calls, inputs rotated past the L2 cache. {first['gpu']}, torch {first['torch']}, "
        f"triton {first['triton']}, commit {first['commit']}, {first['date']}."
    )
    figure.text(0.01, 0.005, note, fontsize=8, color="#666666", va="bottom")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def panel(axes: Axes, rows: Sequence[Row]) -> None:
    shapes, providers = (
        list(dict.fromkeys(values)) for values in ([shape_of(row) for row in rows], [row["provider"] for row in rows])
    )
    width = 0.84 / len(providers)
    for number, provider in enumerate(providers):
        values = {shape_of(row): float(row["median"]) for row in rows if row["provider"] == provider}
        at = [i + (number - (len(providers) - 1) / 2) * width for i, shape in enumerate(shapes) if shape in values]
        heights = [values[shape] for shape in shapes if shape in values]
        axes.bar(at, heights, 0.92 * width, color=COLORS.get(provider, INK), label=provider)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylabel("GB/s")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.62, 1.0), ncols=len(providers), frameon=False, fontsize=8)


def shape_of(row: Row) -> str:
    return f"{row['rows']} x {row['cols']}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_softmax", description=__doc__)
    parser.add_argument("--csv", type=Path, help="default: the committed results of every device")
    parser.add_argument("--out", type=Path, help="default: docs/images/softmax-<device>.png")
    options = parser.parse_args(argv)
    for csv in [options.csv] if options.csv else sorted(RESULTS.glob("*/softmax.csv")):
        out = options.out or ROOT / "docs" / "images" / f"softmax-{csv.parent.name}.png"
        softmax(read_rows(csv), out)
        print(f"plot: {out}")


if __name__ == "__main__":
    main()
