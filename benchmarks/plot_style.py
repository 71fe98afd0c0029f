"""What all plots share: the colours and marks of the providers, axes, labels, and the file they end in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tables import thousands

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
    "flashattn_lite-triton": {"color": "#009e73", "marker": "o", "linewidth": 1.6, "linestyle": "--", "zorder": 4},
    "flashattn_lite": {"color": "#009e73", "marker": "o", "linewidth": 2.6, "zorder": 4},
}


class NothingToDraw(ValueError):
    """The CSV has no rows that this plot shows."""


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Sequence lengths, doubling."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, list(map(thousands, lengths)))
    axes.minorticks_off()
    axes.tick_params(labelbottom=True, labelleft=True, colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def line_style(provider: str) -> dict[str, Any]:
    return {"linewidth": 1.6, "markersize": 4.5, **STYLES[provider]}


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


def save(figure: Figure, out: Path, dpi: int = 150) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=dpi)
    plt.close(figure)
