"""README's table of speeds: for each kind of work our speed over the fastest rival's, from the committed CSVs alone.

python -m benchmarks.overview

A test compares README with what this prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import tables
from benchmarks.command import parser_of
from benchmarks.provenance import RESULTS
from benchmarks.tables import OURS, Cells, Row

H200, H100, H200_TRITON_39 = (tables.results(RESULTS / name) for name in ("h200", "h100-80gb-hbm3", "h200-triton-3.9"))


class Work(NamedTuple):
    name: str
    rows: Sequence[Row]  # of one run
    ratios: Iterable[float]  # our speed over that of the fastest rival, by cell


def by_speed(cells: Cells, *ceilings: str) -> list[float]:
    return [tables.to_best(cell, *ceilings) for cell in cells.values()]


def by_time(cells: Cells) -> list[float]:
    return [min(tables.rivals(cell).values()) / cell[OURS] for cell in cells.values()]


def forward() -> Iterator[Work]:
    for read, dtype, name in (
        (H200, "bf16", "forward, bf16"),
        (H200, "fp16", "forward, fp16"),
        (H100, "bf16", "forward, bf16, on an H100"),
        (H200_TRITON_39, "bf16", "forward, bf16, by Triton 3.9, FA4 absent"),
    ):
        rows = read("attention")
        yield Work(name, rows, by_speed(tables.attention_cells(rows, dtype)))
    rows = H200("packed")
    yield Work("packed sequences", rows, by_speed(tables.packed_cells(rows)))
    for kind, name in (
        ("mask|padded|bias", "masks of booleans or numbers"),
        ("^prompt|-x1$", "one image, or one prompt of 128 to 2048 tokens"),
        ("^(chunk|tokens)-", "4 to 2048 tokens over 2k to 128k keys"),
    ):
        rows = [row for row in H200("shapes") if re.search(kind, row["shape"])]
        yield Work(name, rows, by_time(tables.speeds(rows, "us", "shape")))


def decoding() -> Iterator[Work]:
    rows = H200("decode")
    cells = tables.decode_cells(rows)
    for tokens, name in (("1", "decoding, one token"), ("4", "decoding, 4 tokens"), ("16", "decoding, 16 tokens")):
        yield Work(name, rows, by_speed({key: cell for key, cell in cells.items() if key[2] == tokens}, "read"))
    rows = H200("decode_mixed")
    mixed = tables.speeds(rows, "us", "batch", "len_kv", "len_q").values()
    ratios = [min(cell["fa3"], cell["sdpa"]) / cell[OURS] for cell in mixed]
    ratios += [cell["fa3-packed"] / cell[f"{OURS}-packed"] for cell in mixed]
    yield Work("decoding, unequal lengths", rows, ratios)


def whole_models() -> Iterator[Work]:
    rows = [row for row in H200("models") if row["metric"] == "ms"]
    for ops, name in (
        (["forward"], "forward"),
        (["forward+compiled"], "compiled"),
        (["train", "train+compiled"], "training"),
    ):
        some = [row for row in rows if row["op"] in ops]
        yield Work(f"whole models, {name}", some, by_time(tables.speeds(some, "ms", "op", "model")))


def others() -> Iterator[Work]:
    rows = H200("softmax")
    ratios = [tables.to_best(cell, "copy") for _, pair in tables.bandwidths(rows, "softmax") for cell in pair]
    yield Work("softmax", [row for row in rows if row["op"] == "softmax"], ratios)
    for name, title in (
        ("backward", "backward, bf16"),
        ("backward_fp32", "backward, float32"),
        ("backward_bias", "backward with a bias that wants a gradient"),
    ):
        rows = H200(name)
        yield Work(title, rows, by_speed(tables.speeds(rows, "tflops", "head_dim", "causal", "len_q")))


def lines() -> list[str]:
    table = tables.header("work", "mean", "least to most", "ahead in", "commit")
    for work in (*forward(), *decoding(), *whole_models(), *others()):
        ratios = list(work.ratios)
        least, most = (tables.bold_below_1(ratio) for ratio in (min(ratios), max(ratios)))
        ahead = f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}"
        (commit,) = {row["commit"] for row in work.rows}
        mean = tables.bold_below_1(tables.geometric_mean(ratios))
        table.append(tables.line(work.name, mean, f"{least} to {most}", ahead, commit))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser_of("overview", __doc__).parse_args(argv)
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
