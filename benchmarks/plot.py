"""Draws results, from their CSV alone: python -m benchmarks.plot memory|attention [--csv CSV] [--out PNG]."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.provenance import RESULTS, ROOT, read_rows

Row = Mapping[str, str]
INK, GREY = "#333333", "#8c8c8c"
# Okabe and Ito's colours, told apart without red-green vision; ours is the strong one.
STYLES: dict[str, dict[str, Any]] = {
    "naive": {"color": "#d55e00", "marker": "s"},
    "torch": {"color": "#0072b2", "marker": "D"},
    "torch flash": {"color": "#56b4e9", "marker": "v"},
    "torch efficient": {"color": "#cc79a7", "marker": "^"},
    "torch cudnn": {"color": "#e69f00", "marker": "P"},
    "torch math": {"color": "#777777", "marker": "X"},
    "sdpa-cudnn": {"color": "#e69f00", "marker": "P"},
    "sdpa-flash": {"color": "#56b4e9", "marker": "v"},
    "sdpa-efficient": {"color": "#cc79a7", "marker": "^"},
    "flex": {"color": "#0072b2", "marker": "D"},
    "fa2": {"color": "#777777", "marker": "X"},
    "fa3": {"color": "#d55e00", "marker": "s"},
    "fa4": {"color": "#333333", "marker": "h"},
    "flashattn_lite-triton": {"color": "#009e73", "marker": "o", "linewidth": 2.6, "zorder": 4},
    "flashattn_lite": {"color": "#009e73", "marker": "o", "linewidth": 2.6, "zorder": 4},
}
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
    absent = sorted({f"{row['provider']}, {row['op']}, {row['len_q']} tokens" for row in rows if not row["median"]})
    if absent:
        notes.append("Absent (did not fit, or not served): " + "; ".join(absent) + ".")
    figure.text(0.01, 0.01, "\n".join(notes), fontsize=8, color="#666666", va="bottom", wrap=True)
    figure.tight_layout(rect=(0, 0.01 + 0.032 * len(notes), 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def memory_panel(axes: Axes, rows: Sequence[Row]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if not row["median"] or float(row["median"]) <= 0:
            continue
        point = int(row["len_q"]), float(row["median"])
        if row["metric"] == "peak_allocated_bytes":
            curves.setdefault(row["provider"], []).append(point)
        else:
            style = STYLES[row["provider"]]
            axes.plot(*point, marker=style["marker"], markersize=9, fillstyle="none", color=style["color"], alpha=0.7)
    for provider, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), **{"linewidth": 1.6, "markersize": 4.5, **STYLES[provider]})
    lengths = sorted({int(row["len_q"]) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    axes.set_xlabel("sequence length (queries = keys)")
    axes.yaxis.set_major_formatter(lambda value, _: bytes_as_text(value))
    axes.tick_params(labelleft=True, colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    labels: list[tuple[str, tuple[float, float], str]] = []
    for provider, points in curves.items():
        text = NAMES.get(provider, provider) + ("" if max(points)[0] == lengths[-1] else " (absent beyond)")
        labels.append((text, max(points), STYLES[provider]["color"]))
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


def label_ends(axes: Axes, labels: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Names the lines at their right ends, in their colours, moved up where they would touch."""
    axes.figure.canvas.draw()
    gap, scale = 13, 72 / axes.figure.dpi  # points between lines of text; points in a pixel
    taken = float("-inf")
    for text, end, color in sorted(labels, key=lambda label: label[1][1]):
        height = axes.transData.transform(end)[1] * scale
        taken = max(height, taken + gap)
        style: dict[str, Any] = {"color": color, "weight": "bold" if text == "flashattn_lite" else "normal"}
        style |= {"xytext": (8, taken - height), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(text, end, annotation_clip=False, **style)


def bytes_as_text(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


def attention(rows: Sequence[Row], out: Path) -> None:
    """TFLOP/s over sequence length, a panel for each head dim and mask, in bfloat16 where it was measured."""
    rows = [row for row in rows if row["metric"] == "tflops"]
    dtype = "bf16" if any(row["dtype"] == "bf16" for row in rows) else rows[0]["dtype"]
    rows = [row for row in rows if row["dtype"] == dtype]
    dims = sorted({int(row["head_dim"]) for row in rows})
    figure, panels = plt.subplots(2, len(dims), figsize=(4.4 * len(dims), 7.2), sharex=True, sharey=True, squeeze=False)
    for line, causal in enumerate(("False", "True")):
        for column, dim in enumerate(dims):
            chosen = [row for row in rows if row["causal"] == causal and int(row["head_dim"]) == dim]
            attention_panel(panels[line][column], chosen)
            panels[line][column].set_title(
                f"head dim {dim}, {'causal' if causal == 'True' else 'full'}", loc="left", color=INK, fontsize=11
            )
        panels[line][0].set_ylabel("TFLOP/s")
    panels[0][0].set_ylim(0, 1.05 * max(float(row["median"]) for row in rows))
    for axes in panels[1]:
        axes.set_xlabel("sequence length")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(f"Attention forward, {dtype}", x=0.01, ha="left", color=INK, fontsize=13)
    first = rows[0]
    note = (
        f"16k tokens in all, hidden size 2048; sustained, median of calls. {first['gpu']}, torch {first['torch']}, "
        f"triton {first['triton']}, commit {first['commit']}, {first['date']}."
    )
    figure.text(0.01, 0.01, note, fontsize=8, color="#666666", va="bottom")
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def attention_panel(axes: Axes, rows: Sequence[Row]) -> None:
    lengths = sorted({int(row["len_q"]) for row in rows})
    for provider in dict.fromkeys(row["provider"] for row in rows):
        points = sorted((int(row["len_q"]), float(row["median"])) for row in rows if row["provider"] == provider)
        style = {"linewidth": 1.6, "markersize": 4.5, **STYLES[provider]}
        axes.plot(*zip(*points, strict=True), label=provider, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.tick_params(labelbottom=True, labelleft=True, colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


PLOTS: dict[str, Callable[[Sequence[Row], Path], None]] = {"memory": memory, "attention": attention}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("name", choices=PLOTS)
    parser.add_argument("--csv", type=Path, help="default: the committed results of every device")
    parser.add_argument("--out", type=Path, help="default: docs/images/<name>-<device>.png")
    options = parser.parse_args(argv)
    for csv in [options.csv] if options.csv else sorted(RESULTS.glob(f"*/{options.name}.csv")):
        out = options.out or ROOT / "docs" / "images" / f"{options.name}-{csv.parent.name}.png"
        PLOTS[options.name](read_rows(csv), out)
        print(f"plot: {out}")


if __name__ == "__main__":
    main()
