"""Draws results, from their CSV alone: python -m benchmarks.plot NAME [--csv CSV] [--out PNG]; NAMEs are in PLOTS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks import plot_attention, plot_bandwidth
from benchmarks.command import existing, parser_of
from benchmarks.plot_style import GREY, INK, STYLES, NothingToDraw, Row, label_ends, length_axis, line_style, save
from benchmarks.provenance import RESULTS, ROOT, read_rows

NAMES = {"naive": "naive softmax(QKᵀ)V", "torch": "torch SDPA"}


def memory(rows: Sequence[Row], out: Path) -> None:
    """Peak bytes over sequence length, a panel for each op, with slopes to compare with."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, panels = plt.subplots(1, len(ops), figsize=(5.6 * len(ops), 4.8), sharey=True, squeeze=False)
    for axes, op in zip(panels[0], ops, strict=True):
        memory_panel(axes, [row for row in rows if row["op"] == op])
        axes.set_title(op.replace("+", " + "), loc="left", color=INK, fontsize=11)
    panels[0][0].set_ylabel("peak memory above inputs and outputs")
    first = rows[0]
    shape = f"batch {first['batch']}, {first['heads_q']} heads, head dim {first['head_dim']}, {first['dtype']}"
    figure.suptitle("Peak memory of attention as the sequence grows", x=0.01, ha="left", color=INK, fontsize=13)
    notes = [f"{shape}. {first['gpu']}, torch {first['torch']}, commit {first['commit']}, {first['date']}."]
    if any(row["metric"] == "peak_rss_bytes" for row in rows):
        notes.append(
            "Lines: bytes handed out by torch's allocator. Hollow marks: growth of the process's resident memory."
        )
    absent = sorted(
        {f"{row['provider']}, {row['op']}, {row['len_q']} tokens" for row in rows if row["metric"] == "absent"}
    )
    if absent:
        notes.append("Absent (did not fit, or not served): " + "; ".join(absent) + ".")
    figure.text(0.01, 0.01, "\n".join(notes), fontsize=8, color="#666666", va="bottom", wrap=True)
    figure.tight_layout(rect=(0, 0.01 + 0.032 * len(notes), 1, 1))
    save(figure, out)


def memory_panel(axes: Axes, rows: Sequence[Row]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["metric"] == "absent" or float(row["median"]) <= 0:
            continue
        point = int(row["len_q"]), float(row["median"])
        if row["metric"] == "peak_allocated_bytes":
            curves.setdefault(row["provider"], []).append(point)
        else:
            style = STYLES[row["provider"]]
            axes.plot(*point, marker=style["marker"], markersize=9, fillstyle="none", color=style["color"], alpha=0.7)
    for provider, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), **line_style(provider))
    lengths = sorted({int(row["len_q"]) for row in rows})
    axes.set_yscale("log")
    length_axis(axes, lengths)
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.set_xlabel("sequence length (queries = keys)")
    axes.yaxis.set_major_formatter(lambda value, _: bytes_as_text(value))
    labels: list[tuple[str, tuple[float, float], str]] = []
    for provider, points in curves.items():
        text = NAMES.get(provider, provider) + ("" if max(points)[0] == lengths[-1] else " (absent beyond)")
        labels.append((text, (lengths[-1], max(points)[1]), STYLES[provider]["color"]))  # right of all curves
    for power, provider, text in ((1, "flashattn_lite", "∝ L"), (2, "naive", "∝ L²")):
        if provider in curves:
            labels.append((text, slope(axes, power, curves[provider], lengths[-1]), GREY))
    label_ends(axes, labels)


def slope(axes: Axes, power: int, points: Sequence[tuple[int, float]], last: int) -> tuple[float, float]:
    """A dashed line of that growth, as low as it stays clear above a curve; its right end."""
    first = min(points)[0]
    factor = 1.25 * max(value / length**power for length, value in points)
    end = last, factor * last**power
    axes.plot([first, last], [factor * first**power, end[1]], color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    return end


def bytes_as_text(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


# name -> the results it draws, and how
PLOTS: dict[str, tuple[str, Callable[[Sequence[Row], Path], None]]] = {
    "memory": ("memory", memory),
    "attention": ("attention", plot_attention.speed),
    "attention-ratio": ("attention", plot_attention.ratio),
    "softmax": ("softmax", plot_bandwidth.softmax),
    "decode": ("decode", plot_bandwidth.decode),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("plot", __doc__)
    parser.add_argument("name", choices=PLOTS)
    parser.add_argument("--csv", type=existing, help="default: what benchmarks/results has of every GPU and CPU")
    parser.add_argument("--out", type=Path, help="default: docs/images/<name>-<device>.png")
    options = parser.parse_args(argv)
    results, draw = PLOTS[options.name]
    for csv in [options.csv] if options.csv else sorted(RESULTS.glob(f"*/{results}.csv")):
        out = options.out or ROOT / "docs" / "images" / f"{options.name}-{csv.parent.name}.png"
        try:
            rows = read_rows(csv)
            if not rows or "metric" not in rows[0]:
                raise NothingToDraw("no column metric")
            draw(rows, out)
        except NothingToDraw as reason:
            if options.csv:
                parser.error(f"--csv: {csv} has {reason}")
            continue  # another device's results, measured in other units
        print(f"plot: {out}")


if __name__ == "__main__":
    main()
