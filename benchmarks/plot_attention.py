"""Attention forward drawn from its CSV: speed, and speed as a ratio to cuDNN, over sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.plot_style import GREY, INK, NothingToDraw, Row, length_axis, line_style, plt, save

YARDSTICK = "sdpa-cudnn"  # what torch itself chooses on an H200
LEGEND = 5  # names in a line
FLOOR = 0.45  # ratios from here up are drawn: the differences that matter lie around 1
Curves = Mapping[str, Sequence[tuple[int, float]]]  # provider -> (length, value), rising


def speed(rows: Sequence[Row], out: Path) -> None:
    """TFLOP/s, a panel for each head dim and mask, in bfloat16 where it was measured."""
    draw(rows, out, "Attention forward, TFLOP/s", "TFLOP/s", relative=False)


def ratio(rows: Sequence[Row], out: Path) -> None:
    """The same, as a ratio to cuDNN in the same cell of the same run; cells without cuDNN are left out."""
    draw(rows, out, "Attention forward, speed as a ratio to cuDNN's", "ratio to cuDNN", relative=True)


def draw(rows: Sequence[Row], out: Path, title: str, unit: str, relative: bool) -> None:
    rows = [row for row in rows if row["metric"] == "tflops"]
    if not rows:
        raise NothingToDraw("no row of metric tflops")
    dtype = "bf16" if any(row["dtype"] == "bf16" for row in rows) else rows[0]["dtype"]
    rows = [row for row in rows if row["dtype"] == dtype]
    dims = sorted({int(row["head_dim"]) for row in rows})
    # As wide as a page of documentation, so that it is shown at its own size and type.
    figure, panels = plt.subplots(2, len(dims), figsize=(3.3 * len(dims), 6.6), sharex=True, sharey=True, squeeze=False)
    drawn: dict[str, object] = {}
    below: dict[str, list[float]] = {}
    for line, causal in enumerate(("False", "True")):
        for axes, dim in zip(panels[line], dims, strict=True):
            curves = curves_of([r for r in rows if r["causal"] == causal and int(r["head_dim"]) == dim])
            for provider, points in (relative_to(YARDSTICK, curves) if relative else curves).items():
                if relative and max(value for _, value in points) < FLOOR:
                    below.setdefault(provider, []).extend(value for _, value in points)
                    continue
                (drawn[provider],) = axes.plot(*zip(*points, strict=True), **line_style(provider))
            length_axis(axes, sorted({int(row["len_q"]) for row in rows}))
            kind = "causal" if causal == "True" else "full"
            axes.set_title(f"head dim {dim}, {kind}", loc="left", color=INK, fontsize=10)
            if relative:
                axes.axhline(1.0, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        panels[line][0].set_ylabel(unit, color=INK, fontsize=9)
    panels[0][0].set_ylim(bottom=FLOOR if relative else 0)
    for axes in panels[1]:
        axes.set_xlabel("sequence length", color=INK, fontsize=9)
    figure.suptitle(f"{title} ({dtype})", x=0.01, ha="left", color=INK, fontsize=12)
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0.965), "ncols": LEGEND}
    figure.legend(drawn.values(), drawn, frameon=False, fontsize=9, **place)
    first = rows[0]
    note = (
        f"16k tokens in all, hidden size 2048; sustained, median of calls. {first['gpu']}, torch {first['torch']}, "
        f"triton {first['triton']}, commit {first['commit']}, {first['date']}."
    )
    for provider, values in below.items():
        note += f"\nBelow the axis: {provider}, {min(values):.2f} to {max(values):.2f}."
    figure.text(0.01, 0.01, note, fontsize=7.5, color="#666666", va="bottom")
    figure.tight_layout(rect=(0, 0.03 + 0.018 * len(below), 1, 0.985 - 0.03 * -(-len(drawn) // LEGEND)))
    save(figure, out)


def curves_of(rows: Sequence[Row]) -> Curves:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(row["provider"], []).append((int(row["len_q"]), float(row["median"])))
    return {provider: sorted(points) for provider, points in curves.items()}


def relative_to(yardstick: str, curves: Curves) -> Curves:
    """The others' curves over the yardstick's, at the lengths that both have."""
    base = dict(curves.get(yardstick, ()))
    over = {
        provider: [(length, value / base[length]) for length, value in points if length in base]
        for provider, points in curves.items() if provider != yardstick
    }  # fmt: skip
    return {provider: points for provider, points in over.items() if points}
