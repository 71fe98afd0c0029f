"""Bars of GB/s by shape and provider: softmax and decoding, which move bytes and compute little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.plot_style import INK, STYLES, NothingToDraw, Row, save
from benchmarks.tables import thousands

YARDSTICK = "#c4c4c4"
COLORS = {
    "flashattn_lite-paged": "#7fceb8",
    "torch": "#0072b2",
    "torch.compile": "#56b4e9",
    "liger": "#e69f00",
    "quack": "#cc79a7",
    "torch amax": "#0072b2",
    "copy": YARDSTICK,
    "read": YARDSTICK,
}
TITLES = {"softmax": "softmax, one read and one write", "softmax_stats": "softmax_stats, one read"}


def softmax(rows: Sequence[Row], out: Path) -> None:
    """A panel for each op and dtype, a group for each shape."""
    title = lambda row: f"{TITLES.get(row['op'], row['op'])}, {row['dtype']}"
    draw(rows, out, title, lambda row: f"{row['rows']} x\n{row['cols']}")  # in one line neighbours would touch


def decode(rows: Sequence[Row], out: Path) -> None:
    """A panel for one token and one for several; a group for each batch, number of keys and of query tokens."""
    shape = lambda row: (
        f"{row['batch']} x {thousands(int(row['len_kv']))}"
        + (f"\n{row['len_q']} tokens" if row["len_q"] != "1" else "")
    )
    heads = lambda row: f"decoding, {row['heads_q']} query heads, {row['heads_kv']} key heads of {row['head_dim']}"
    tokens = lambda row: "one token" if row["len_q"] == "1" else "several tokens"
    draw(rows, out, lambda row: f"{heads(row)}, {row['dtype']}, {tokens(row)}: K and V read", shape)


def draw(rows: Sequence[Row], out: Path, title: Callable[[Row], str], shape: Callable[[Row], str]) -> None:
    rows = [row for row in rows if row["metric"] == "gbps"]
    if not rows:
        raise NothingToDraw("no row of metric gbps")
    titles = list(dict.fromkeys(title(row) for row in rows))
    figure, panels = plt.subplots(len(titles), 1, figsize=(11, 3.1 * len(titles) + 0.4), squeeze=False)
    for axes, text in zip(panels[:, 0], titles, strict=True):
        panel(axes, [row for row in rows if title(row) == text], shape)
        axes.set_title(text, loc="left", color=INK, fontsize=11)
    first = rows[0]
    commits = {row["commit"]: row["op"] for row in rows}  # one, unless each op had a run of its own
    of = ", ".join(commits if len(commits) == 1 else (f"{commit} ({op})" for commit, op in commits.items()))
    note = (
        f"Median of calls, inputs rotated past the L2 cache. {first['gpu']}, torch {first['torch']}, "
        f"triton {first['triton']}, commit {of}, {first['date']}."
    )
    figure.text(0.01, 0.005, note, fontsize=8, color="#666666", va="bottom")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, out)


def panel(axes: Axes, rows: Sequence[Row], shape: Callable[[Row], str]) -> None:
    shapes, providers = (
        list(dict.fromkeys(values)) for values in ([shape(row) for row in rows], [row["provider"] for row in rows])
    )
    width = 0.84 / len(providers)
    for number, provider in enumerate(providers):
        values = {shape(row): float(row["median"]) for row in rows if row["provider"] == provider}
        at = [i + (number - (len(providers) - 1) / 2) * width for i, name in enumerate(shapes) if name in values]
        color = COLORS.get(provider) or STYLES.get(provider, {"color": INK})["color"]
        axes.bar(at, [values[name] for name in shapes if name in values], 0.92 * width, color=color, label=provider)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_ylabel("GB/s")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
