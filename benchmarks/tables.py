"""Results of one GPU as tables of docs/performance.md or docs/performance-elsewhere.md, from their CSV alone:

python -m benchmarks.tables [--results benchmarks/results/<GPU>]

A test compares the pages with what this prints, so that no number of these tables is anybody's but a measurement's.
What they say of several runs at once (aims, ratios of tables) is written by hand.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.command import existing, parser_of
from benchmarks.provenance import RESULTS, read_rows

OURS = "flashattn_lite"
SHORT = {
    "sdpa-cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4", "flex": "FlexAttention", "sdpa-flash": "torch's flash",
    "sdpa-efficient": "torch's efficient", "sdpa-varlen": "torch's varlen_attn", "sdpa-padded": "padded cuDNN",
    "sdpa-math": "torch's math", f"{OURS}-triton": "our portable kernel", "read": "a read",
}  # fmt: skip

Row = dict[str, str]
Speeds = dict[str, float]  # by provider
Cells = dict[tuple[str, ...], Speeds]  # by the values of some columns
Read = Callable[[str], Sequence[Row]]  # the rows of a CSV, by its name


def thousands(length: int) -> str:
    """A sequence length as it is said: 512, 8k."""
    return str(length) if length < 1024 else f"{length >> 10}k"


def speeds(rows: Iterable[Row], metric: str, *columns: str) -> Cells:
    """Medians of a metric, by cell and provider."""
    cells: Cells = defaultdict(dict)
    for row in rows:
        if row["metric"] == metric:
            cells[tuple(row[column] for column in columns)][row["provider"]] = float(row["median"])
    return cells


def rivals(cell: Speeds, *ceilings: str) -> Speeds:
    """All but our own providers and what only moves bytes."""
    return {name: speed for name, speed in cell.items() if not name.startswith(OURS) and name not in ceilings}


def to_best(cell: Speeds, *ceilings: str) -> float:
    return cell[OURS] / max(rivals(cell, *ceilings).values())


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def header(*names: str) -> list[str]:
    return [line(*names), line(*["---"] * len(names))]


def joined(cells: Iterable[Speeds], provider: str, between: str = " / ") -> str:
    """A provider's speeds in some cells, "-" where it is absent."""
    return between.join(f"{cell[provider]:.0f}" if provider in cell else "-" for cell in cells)


def ratios(cells: Iterable[Speeds], ceiling: str) -> str:
    return " / ".join(f"{cell[OURS] / cell[ceiling]:.2f}" for cell in cells)


def bold_below_1(ratio: float) -> str:
    text = "-" if math.isnan(ratio) else f"{ratio:.2f}"
    return f"**{text}**" if ratio < 1 else text


def kind(causal: str) -> str:
    return "causal" if causal == "True" else "full"


def attention(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s (ratio to cuDNN, to the best rival and which)."""
    lines = []
    for dtype in ("bf16", "fp16"):
        cells = attention_cells(rows, dtype)
        lengths = sorted({length for _, _, length in cells}, key=int)
        lines += header(dtype, *lengths)
        kinds = {key[:2] for key in cells}
        for dim, causal in sorted(kinds, key=lambda kind_of: (int(kind_of[0]), kind_of[1] == "False")):
            texts = []
            for length in lengths:
                cell = cells[dim, causal, length]
                best = max(rivals(cell), key=cell.__getitem__)
                both = f"{to_cudnn(cell):.2f}, {to_best(cell):.2f} {SHORT.get(best, best)}"
                texts.append(f"{cell[OURS]:.0f} ({both})")
            lines.append(line(f"d{dim} {kind(causal)}", *texts))
        cudnn, rival, ahead = summary(cells)
        lines.append(f"{cudnn:.3f} of cuDNN and {rival:.3f} of the best rival: {len(cells)} cells, ahead in {ahead}")
        dims = sorted({dim for dim, _, _ in cells}, key=int)
        by_length = [", ".join(means(cells, ratio, 2, lengths)) for ratio in (to_cudnn, to_best)]
        lines.append(f"By length {by_length[0]} of cuDNN, {by_length[1]} of the best rival")
        lines.append(f"By head dim {', '.join(means(cells, to_best, 0, dims))} of the best rival")
    return lines


def summary(cells: Cells) -> tuple[float, float, int]:
    """Of attention: the mean of cuDNN, that of the best rival, in how many cells nobody is faster."""
    cudnn, rival = (geometric_mean(map(ratio, cells.values())) for ratio in (to_cudnn, to_best))
    return cudnn, rival, sum(to_best(cell) >= 1 for cell in cells.values())


def means(cells: Cells, ratio: Callable[[Speeds], float], at: int, values: Sequence[str]) -> list[str]:
    """Geometric means of a ratio over the cells whose key has each of these values at a place."""
    return [f"{geometric_mean(ratio(cell) for key, cell in cells.items() if key[at] == v):.2f}" for v in values]


def attention_cells(rows: Sequence[Row], dtype: str) -> Cells:
    return speeds([row for row in rows if row["dtype"] == dtype], "tflops", "head_dim", "causal", "len_q")


def to_cudnn(cell: Speeds) -> float:
    return cell[OURS] / cell["sdpa-cudnn"]


def each(now: Cells, then: Cells, yardstick: str, providers: Iterable[str]) -> list[str]:
    """Ours to each of those who ran then, maybe in an earlier run: each over the yardstick of its own run."""
    by = SHORT[yardstick]
    lines = header("rival", f"theirs over {by}, mean", "ours over theirs, mean", "least", "most", "ahead in")
    for provider in sorted(providers):
        cells = [key for key in now if provider in then[key]]
        theirs = [then[key][provider] / then[key][yardstick] for key in cells]
        to_theirs = [now[key][OURS] / now[key][yardstick] / their for key, their in zip(cells, theirs, strict=True)]
        numbers = (geometric_mean(theirs), geometric_mean(to_theirs), min(to_theirs), max(to_theirs))
        ahead = f"{sum(ratio >= 1 for ratio in to_theirs)} of {len(cells)}"
        lines.append(line(SHORT.get(provider, provider), *(f"{number:.2f}" for number in numbers), ahead))
    return lines


def named(cells: Cells) -> set[str]:
    """All providers but ours, the portable kernel among them."""
    return {provider for cell in cells.values() for provider in cell} - {OURS}


def attention_each(read: Read) -> list[str]:
    cells = attention_cells(read("attention"), "bf16")
    return each(cells, cells, "sdpa-cudnn", named(cells))


def each_and_earlier(now: Cells, then: Cells, yardstick: str, *but: str) -> list[str]:
    """Those of the run, then those who were only in an earlier one."""
    earlier = each(now, then, yardstick, named(then) - named(now))
    return each(now, now, yardstick, named(now) - {*but}) + earlier[2:]


def packed_each(read: Read) -> list[str]:
    cells = packed_cells(read("packed"))
    return each(cells, cells, "fa3", named(cells) - {OURS})


def packed(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s causal, full (to the best other)."""
    cells = packed_cells(rows)
    shown = {"fa3": "FA3", "sdpa-padded": "padded"}
    lines = header("causal, full", "ours", *shown.values())
    for packing, dim in dict.fromkeys((packing, dim) for packing, dim, _ in cells):
        pair = [cells[packing, dim, causal] for causal in ("True", "False")]
        ours = ", ".join(f"{cell[OURS]:.0f} ({to_best(cell):.2f})" for cell in pair)
        name = re.sub(r"(\d+)x(\d+)", r"\1 x \2", packing)
        lines.append(line(f"{name}, d{dim}", ours, *(joined(pair, name, ", ") for name in shown)))
    return lines


def packed_cells(rows: Sequence[Row]) -> Cells:
    return speeds(rows, "tflops", "packing", "head_dim", "causal")


def softmax(rows: Sequence[Row]) -> list[str]:
    """GB/s, bf16 / fp32: softmax beside a copy, statistics beside a read."""
    ran = {row["provider"] for row in rows if row["metric"] == "gbps"}
    peers = {"quack": "Quack", "liger": "Liger", "torch.compile": "torch.compile", "torch": "torch"}
    shown = {name: text for name, text in peers.items() if name in ran}
    lines = header("bf16 / fp32", "copy", "ours", *shown.values(), "to the copy", "to the best peer")
    for shape, pair in bandwidths(rows, "softmax"):
        best = " / ".join(f"{to_best(cell, 'copy'):.2f}" for cell in pair)
        speeds_of = (joined(pair, name) for name in ("copy", OURS, *shown))
        lines.append(line(shape, *speeds_of, ratios(pair, "copy"), best))
    lines += header("bf16 / fp32", "read", "ours", "torch's amax", "to the read")
    for shape, pair in bandwidths(rows, "softmax_stats"):
        lines.append(line(shape, *(joined(pair, name) for name in ("read", OURS, "torch amax")), ratios(pair, "read")))
    return lines


def bandwidths(rows: Sequence[Row], op: str) -> Iterator[tuple[str, list[Speeds]]]:
    """(shape, its cells in bf16 and fp32)."""
    cells = speeds([row for row in rows if row["op"] == op], "gbps", "rows", "cols", "dtype")
    for shape in dict.fromkeys(key[:2] for key in cells):
        yield " x ".join(shape), [cells[*shape, dtype] for dtype in ("bf16", "fp32")]


def decode(rows: Sequence[Row]) -> list[str]:
    """GB/s of K and V read."""
    cells = decode_cells(rows)
    names = {"read": "read", OURS: "ours", f"{OURS}-paged": "paged", "sdpa-cudnn": "cuDNN", "fa3": "FA3",
             "sdpa-flash": "FA2 in torch", "flex": "flex"}  # fmt: skip
    shown = {name: text for name, text in names.items() if any(name in cell for cell in cells.values())}
    lines = header("batch x keys", *shown.values(), "to a read, to the best peer")
    for (batch, keys, tokens), cell in sorted(cells.items(), key=lambda item: tuple(map(int, item[0]))):
        name = f"{batch} x {thousands(int(keys))}" + ("" if tokens == "1" else f", {tokens} tokens")
        both = f"{cell[OURS] / cell['read']:.2f}, {to_best(cell, 'read'):.2f}"
        texts = (f"{cell[provider]:.0f}" if provider in cell else "-" for provider in shown)
        lines.append(line(name, *texts, both))
    return lines


def decode_cells(rows: Sequence[Row]) -> Cells:
    return speeds(rows, "gbps", "batch", "len_kv", "len_q")


def decode_each(read: Read) -> list[str]:
    now, then = (decode_cells(read(name)) for name in ("decode", "decode_peers"))
    return each_and_earlier(now, then, "read", "read", f"{OURS}-paged")


def decode_mixed(rows: Sequence[Row]) -> list[str]:
    """Microseconds a call; bold: FlashAttention-3 or torch is faster than what of ours has the same form."""
    cells = speeds(rows, "us", "batch", "len_kv", "len_q")
    names = {"read": "read", OURS: "ours", "fa3": "FA3", "sdpa": "SDPA", f"{OURS}-paged": "ours paged",
             f"{OURS}-packed": "ours packed", "fa3-packed": "FA3 packed"}  # fmt: skip
    lines = header("batch x up to", *names.values(), "to the best", "packed, to FA3")
    for (batch, room, tokens), cell in cells.items():
        name = f"{batch} x {thousands(int(room))}" + ("" if tokens == "1" else f", {tokens} tokens")
        ratios = min(cell["fa3"], cell["sdpa"]) / cell[OURS], cell["fa3-packed"] / cell[f"{OURS}-packed"]
        lines.append(line(name, *(f"{cell[each]:.1f}" for each in names), *(bold_below_1(ratio) for ratio in ratios)))
    return lines


def shapes(rows: Sequence[Row]) -> list[str]:
    """Microseconds a call. SDPA: the faster of torch's own choice and cuDNN; bold: somebody is faster than we are."""
    size_of = ("batch", "heads_q", "heads_kv", "len_q", "len_kv", "head_dim", "head_dim_v", "dtype", "causal")
    cells = speeds(rows, "us", "shape", *size_of)
    lines = header("shape", "batch x heads x length", "ours", "SDPA", "FA3", "to the best")
    for (name, batch, heads, heads_kv, len_q, len_kv, dim, dim_v, dtype, causal), cell in cells.items():
        size = f"{batch} x {heads if heads == heads_kv else f'{heads} / {heads_kv}'} x {len_q}"
        size += "" if len_q == len_kv else f" of {len_kv}"
        size += f", d{dim}" if dim == dim_v else f", ({dim}, {dim_v})"
        size += ("" if dtype == "bf16" else f", {dtype}") + (", causal" if causal == "True" else "")
        others = [[cell[name] for name in names if name in cell] for names in (("sdpa", "sdpa-cudnn"), ("fa3",))]
        texts = [f"{min(times):.1f}" if times else "-" for times in ([cell[OURS]], *others)]
        ratio = min(rivals(cell).values(), default=math.nan) / cell[OURS]
        lines.append(line(name, size, *texts, bold_below_1(ratio)))
    return lines


def models(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of whole models with ours and with what they have, and MiB beyond what lay there before."""
    times, memory = (speeds(rows, metric, "model", "op") for metric in ("ms", "peak_mib"))
    lines = header("model", "run", "ours", "theirs", "to theirs", "MiB, ours", "theirs")
    for (model, op), cell in times.items():
        (rival,) = rivals(cell)
        ratio, room = cell[rival] / cell[OURS], memory[model, op]
        run = op.replace("+compiled", ", compiled")
        ours, theirs = (f"{cell[name]:.1f}" for name in (OURS, rival))
        lines.append(line(model, run, ours, theirs, bold_below_1(ratio), f"{room[OURS]:.0f}", f"{room[rival]:.0f}"))
    return lines


def host_time(rows: Sequence[Row]) -> list[str]:
    """Microseconds of the host a call, full / causal where there are both."""
    cells = speeds(rows, "host_us", "op", "causal")
    names = (OURS, f"{OURS}-triton", "sdpa", "fa3", "flex", "torch")
    lines = header("call", "ours", "our portable kernel", "torch's SDPA", "FA3", "FlexAttention", "torch.softmax")
    for op in dict.fromkeys(op for op, _ in cells):
        pair = [cells[op, causal] for causal in ("False", "True") if (op, causal) in cells]
        shown = [{"sdpa-varlen": "sdpa"}.get(name, name) for name in pair[0]]
        pair = [dict(zip(shown, cell.values(), strict=True)) for cell in pair]
        texts = [joined(pair, name) if name in pair[0] else "" for name in names]
        lines.append(line(op.replace("_forward", ""), *texts))
    return lines


def backward(rows: Sequence[Row]) -> list[str]:
    """TFLOP/s of the backward (to torch's flash backward, to cuDNN's, to FlashAttention-3's)."""
    cells = speeds(rows, "tflops", "head_dim", "causal", "len_q")
    lengths = sorted({length for _, _, length in cells}, key=int)
    lines = header("bf16", *lengths)
    for dim, causal in dict.fromkeys(key[:2] for key in cells):
        texts = []
        for length in lengths:
            cell = cells[dim, causal, length]
            to_each = (f"{cell[OURS] / cell[rival]:.2f}" for rival in ("sdpa-flash", "sdpa-cudnn", "fa3"))
            texts.append(f"{cell[OURS]:.0f} ({', '.join(to_each)})")
        lines.append(line(f"d{dim} {kind(causal)}", *texts))
    means = (geometric_mean(cell[OURS] / cell[rival] for cell in cells.values())
             for rival in ("sdpa-flash", "sdpa-cudnn", "fa3"))  # fmt: skip
    of_flash, of_cudnn, of_fa3 = (f"{mean:.2f}" for mean in means)
    lines.append(f"{of_flash} of torch's flash backward, {of_cudnn} of cuDNN's, {of_fa3} of FA3's: {len(cells)} cells")
    return lines


def backward_beside(rows: Sequence[Row], title: str) -> list[str]:
    """TFLOP/s of the backward of everybody who was there, and ours to the best of them."""
    cells = speeds(rows, "tflops", "head_dim", "causal", "len_q")
    others = [name for name in next(iter(cells.values())) if name != OURS]
    lines = header(title, "ours", *(SHORT.get(name, name) for name in others), "to the best")
    for (dim, causal, length), cell in cells.items():
        name = f"d{dim} {kind(causal)} {length}"
        shown = (f"{cell[each]:.0f}" if each in cell else "-" for each in (OURS, *others))
        lines.append(line(name, *shown, f"{to_best(cell):.2f}"))
    return lines


def first_call(rows: Sequence[Row]) -> list[str]:
    """Seconds of a first call with nothing compiled and with what was kept, Triton's steps of ours, FlexAttention's."""
    calls = ("first_s", "again_s")
    steps = [name for name in dict.fromkeys(row["metric"] for row in rows) if name not in calls]
    found = {name: speeds(rows, name, "head_dim", "len_q") for name in (*calls, *steps)}
    shown = [(name, OURS) for name in found] + [(name, "flex") for name in calls]
    lines = header("causal", "first", "again", *(name.removesuffix("_s") for name in steps), "flex first", "flex again")
    for key in found["first_s"]:
        texts = (f"{found[name][key][who]:.1f}" if who in found[name][key] else "-" for name, who in shown)
        lines.append(line("d{} {}".format(*key), *texts))
    return lines


TABLES: dict[str, Callable[[Read], list[str]]] = {
    "attention": lambda read: attention(read("attention")),
    "attention_each": attention_each,
    "packed": lambda read: packed(read("packed")),
    "packed_each": packed_each,
    "softmax": lambda read: softmax(read("softmax")),
    "decode": lambda read: decode(read("decode")),
    "decode_each": decode_each,
    "decode_mixed": lambda read: decode_mixed(read("decode_mixed")),
    "shapes": lambda read: shapes(read("shapes")),
    "models": lambda read: models(read("models")),
    "models_padded": lambda read: models(read("models_padded")),
    "host_time": lambda read: host_time(read("host_time")),
    "first_call": lambda read: first_call(read("first_call")),
    "backward": lambda read: backward(read("backward")),
    "backward_fp32": lambda read: backward_beside(read("backward_fp32"), "float32"),
    "backward_bias": lambda read: backward_beside(read("backward_bias"), "bf16, with a bias"),
}


def results(folder: Path = RESULTS / "h200") -> Read:
    return lambda name: read_rows(folder / f"{name}.csv")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("tables", __doc__)
    parser.add_argument("--results", type=existing, default=RESULTS / "h200", help="a folder of CSVs: %(default)s")
    options = parser.parse_args(argv)
    if options.results.name == "cpu" or not any((options.results / f"{name}.csv").exists() for name in TABLES):
        parser.error(f"--results: {options.results} has no results of a GPU")
    for name, table in TABLES.items():
        try:
            lines = table(results(options.results))
        except FileNotFoundError as missing:
            lines = [f"no {missing.filename}"]
        print("\n".join((name, *lines, "")))


if __name__ == "__main__":
    main()
