"""Every number that docs/performance.md and docs/performance-elsewhere.md publish is one of the committed results'."""

from __future__ import annotations

import math

import pytest

from benchmarks import cpu_softmax, provenance, tables
from benchmarks.overview import H100, H200_TRITON_39

PAGE, ELSEWHERE = (
    (provenance.ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("performance", "performance-elsewhere")
)
CPU_LINES = {
    ("forward", "False"): "full",
    ("forward", "True"): "causal",
    ("forward+backward", "False"): "full, with gradients",
    ("forward+backward", "True"): "causal, with gradients",
}
PUBLISHED = [(PAGE, tables.results(), name) for name in tables.TABLES]
ON_H100 = ("attention", "decode", "decode_mixed", "softmax", "shapes", "backward", "backward_bias")
PUBLISHED += [(ELSEWHERE, H100, name) for name in ON_H100]
PUBLISHED += [(ELSEWHERE, H200_TRITON_39, name) for name in ("attention", "decode", "softmax")]


@pytest.mark.parametrize(("page", "read", "name"), PUBLISHED, ids=range(len(PUBLISHED)))
def test_published_tables_are_those_of_the_results(page, read, name):
    """Every line that the CSVs give stands in the page."""
    lines = tables.TABLES[name](read)
    assert len(lines) > 3
    assert not set(lines) - set(map(str.rstrip, page.splitlines()))


def test_the_aims_are_compared_with_the_results():
    lines = PAGE.partition("| aim | reached |")[2].partition("\n\n")[0].splitlines()[2:]
    reached = dict(line.strip("| ").split(" | ") for line in lines)
    rows = tables.results()("attention")
    bf16, fp16 = (tables.attention_cells(rows, dtype) for dtype in ("bf16", "fp16"))
    (_, mean, ahead), (_, mean_16, ahead_16) = map(tables.summary, (bf16, fp16))
    assert reached["attention: at or above the best rival in every cell"] == (
        f"bf16 {ahead} of {len(bf16)}, **fp16 {ahead_16} of {len(fp16)}** ({under(1, fp16)})"
    )
    assert ahead == len(bf16)
    assert reached["8% above the best rival in the mean"] == f"**bf16 {mean - 1:.1%}, fp16 {mean_16 - 1:.1%}**"
    short, short_16 = ({key: cell for key, cell in cells.items() if key[2] in ("512", "1024")}
                       for cells in (bf16, fp16))  # fmt: skip
    enough, enough_16 = (sum(tables.to_best(cell) >= 1.05 for cell in cells.values()) for cells in (short, short_16))
    assert reached["1.05 of the best rival at 512 and 1k keys"] == (
        f"**bf16 {enough} of 12** ({under(1.05, short)}), **fp16 {enough_16} of 12**"
    )
    aims = {("64", "True"): 1.24, ("64", "False"): 1.24, ("128", "True"): 1.25, ("128", "False"): 1.19,
            ("256", "True"): 1.22, ("256", "False"): 1.12}  # fmt: skip
    long = {key: tables.to_cudnn(bf16[*key, "16384"]) for key in aims}
    texts = [f"{long[key]:.3f}" if long[key] >= aim else f"**{long[key]:.3f}**" for key, aim in aims.items()]
    assert reached[
        "at 16k keys, of cuDNN: d64 1.24, d128 causal 1.25 and full 1.19, d256 causal 1.22 and full 1.12"
    ] == ("causal and full: d64 {} and {}, d128 {} and {}, d256 {} and {}".format(*texts))
    first = tables.results()("first_call")
    seconds = {(name, metric): [cell[name] for cell in tables.speeds(first, metric, "head_dim", "len_q").values()
                                if name in cell]
               for name in ("flashattn_lite", "flex") for metric in ("first_s", "again_s")}  # fmt: skip
    ranges = {key: f"{min(found):.1f} to {max(found):.1f}" for key, found in seconds.items()}
    assert reached["first call in 3 s"] == (
        f"**{ranges['flashattn_lite', 'first_s']} s**, {ranges['flashattn_lite', 'again_s']} in a "
        f"second process; FlexAttention {ranges['flex', 'first_s']} ([by machine](#first-call))"
    )
    softmax = dict(tables.bandwidths(tables.results()("softmax"), "softmax"))
    least = min(tables.to_best(cell, "copy") for pair in softmax.values() for cell in pair)
    assert reached["softmax: 0.98 of the best rival"] == f"every cell, least {least:.3f}"
    bf16, fp32 = (cell["flashattn_lite"] / cell["copy"] for cell in softmax["16 x 1048576"])
    assert reached["16 x 1048576: 0.90 of the copy"] == f"**bf16 {cut(bf16)}**, float32 {cut(fp32)}"
    assert bf16 < 0.9 <= fp32
    assert reached["statistics: 0.95 of a read"] == statistics_reached()
    decoding = tables.decode_cells(tables.results()("decode"))
    best = {key: tables.to_best(cell, "read") for key, cell in decoding.items()}
    assert {key for key, ratio in best.items() if key[2] != "16" and ratio < 1} == {
        ("1", "32768", "1"), ("16", "2048", "1"), ("64", "8192", "1")
    }  # fmt: skip
    assert {key for key, ratio in best.items() if key[2] == "16" and ratio < 1} == {
        ("4", "8192", "16"), ("8", "2048", "16")
    }  # fmt: skip
    assert reached["decoding: the best rival in every cell"] == (
        f"**{sum(ratio >= 1 for ratio in best.values())} of {len(best)}**; of one token "
        f"**1 x 32k {best['1', '32768', '1']:.2f}, 16 x 2k {best['16', '2048', '1']:.2f}, "
        f"64 x 8k {best['64', '8192', '1']:.2f}**, of sixteen **4 x 8k {best['4', '8192', '16']:.2f}, "
        f"8 x 2k {best['8', '2048', '16']:.2f}**"
    )
    alone = decoding["1", "8192", "1"]
    fastest = max(tables.rivals(alone, "read").values())
    assert reached["decoding: 1.3 of the best rival at 1 x 8k"] == (
        f"**{best['1', '8192', '1']:.2f}**; a read alone would be at {alone['read'] / fastest:.2f}"
    )
    of_a_read = {key: f"{cell['flashattn_lite'] / cell['read']:.2f}" for key, cell in decoding.items()}
    assert reached["decoding: 0.95 of a read from 8 x 8k up"] == (
        f"64 x 8k {of_a_read['64', '8192', '1']}; **8 x 8k {of_a_read['8', '8192', '1']}, "
        f"four tokens {of_a_read['8', '8192', '4']}, sixteen {of_a_read['8', '8192', '16']}**"
    )


def test_the_aims_are_compared_with_the_results_of_an_h100():
    lines = ELSEWHERE.partition("| aim | reached there |")[2].partition("\n\n")[0].splitlines()[2:]
    read = H100
    bf16, fp16 = (tables.attention_cells(read("attention"), dtype) for dtype in ("bf16", "fp16"))
    (_, mean, ahead), (_, mean_16, ahead_16) = map(tables.summary, (bf16, fp16))
    short, short_16 = (
        sum(tables.to_best(cell) >= 1.05 for key, cell in cells.items() if key[2] in ("512", "1024"))
        for cells in (bf16, fp16)
    )
    long = [f"{tables.to_cudnn(bf16[dim, causal, '16384']):.2f}" for dim in ("64", "128", "256")
            for causal in ("True", "False")]  # fmt: skip
    softmax = dict(tables.bandwidths(read("softmax"), "softmax"))
    least = min(tables.to_best(cell, "copy") for pair in softmax.values() for cell in pair)
    wide = [cell["flashattn_lite"] / cell["copy"] for cell in softmax["16 x 1048576"]]
    decoding = tables.decode_cells(read("decode"))
    best = {key: tables.to_best(cell, "read") for key, cell in decoding.items()}
    batch, keys, tokens = min(best, key=best.__getitem__)
    of_a_read = {key: f"{cell['flashattn_lite'] / cell['read']:.2f}" for key, cell in decoding.items()}
    assert dict(line.strip("| ").split(" | ") for line in lines) == {
        "attention: at or above the best rival in every cell": f"**bf16 {ahead} of 30, fp16 {ahead_16} of 30**",
        "8% above the best rival in the mean": f"**bf16 {mean - 1:.1%}, fp16 {mean_16 - 1:.1%}**",
        "1.05 of the best rival at 512 and 1k keys": f"**bf16 {short} of 12, fp16 {short_16} of 12**",
        "at 16k keys, of cuDNN": "causal and full: d64 {} and {}, d128 {} and {}, d256 {} and {}".format(*long),
        "softmax: 0.98 of the best rival": f"every cell, least {least:.3f}",
        "16 x 1048576: 0.90 of the copy": "bf16 {:.2f}, float32 {:.2f}".format(*wide),
        "decoding: the best rival in every cell": (
            f"**{sum(ratio >= 1 for ratio in best.values())} of {len(best)}, least {min(best.values()):.2f} "
            f"({batch} x {tables.thousands(int(keys))}, {tokens} tokens)**"
        ),
        "decoding: 1.3 of the best rival at 1 x 8k": f"**{best['1', '8192', '1']:.2f}**",
        "decoding: 0.95 of a read from 8 x 8k up": (
            f"8 x 8k {of_a_read['8', '8192', '1']}, 64 x 8k {of_a_read['64', '8192', '1']}; "
            f"**four tokens {of_a_read['8', '8192', '4']}, sixteen {of_a_read['8', '8192', '16']}**"
        ),
    }


def test_where_the_cpu_path_stands():
    rows = tables.results(provenance.RESULTS / "cpu")("attention")
    cells = tables.speeds(rows, "ms", "op", "causal", "len_q")
    lengths = sorted({int(length) for *_, length in cells} - {128})
    for (op, causal), name in CPU_LINES.items():
        of = [cells[op, causal, str(length)] for length in (*lengths, 128)]
        ratios = " | ".join(f"{cell['torch'] / cell['flashattn_lite']:.2f}" for cell in of)
        assert f"\n| {name} | {ratios} |\n" in PAGE
    all_of = [cell["torch"] / cell["flashattn_lite"] for cell in cells.values()]
    level = sum(ratio >= 1 for ratio in all_of)
    reached = f"**{level} of {len(all_of)} cells** ({min(all_of):.2f} to {max(all_of):.2f}, [table]("
    assert f"\n| CPU: no slower than torch | {reached}" in PAGE
    (commit,) = {row["commit"] for row in rows}
    assert f"one run at {commit} (`benchmarks/results/cpu/attention.csv`," in PAGE


def test_where_softmax_on_the_cpu_stands():
    rows = tables.results(provenance.RESULTS / "cpu")("softmax")
    assert "\n".join(cpu_softmax.table(rows)) in PAGE
    (commit,) = {row["commit"] for row in rows}
    assert f"(`benchmarks/results/cpu/softmax.csv`, one run at {commit}," in PAGE


def statistics_reached():
    """Of a read: rows at 16-byte addresses of many bytes, of few, and odd rows."""
    whole, odd, small = {}, {}, []
    for shape, pair in tables.bandwidths(tables.results()("softmax"), "softmax_stats"):
        rows_cols = [int(size) for size in shape.split(" x ")]
        for cell, dtype, itemsize in zip(pair, ("bf16", "float32"), (2, 4), strict=True):
            of_a_read = cell["flashattn_lite"] / cell["read"]
            if rows_cols[1] * itemsize % 16:
                odd[f"{shape} {dtype}"] = of_a_read
            elif math.prod(rows_cols) * itemsize < 64 << 20:
                small.append(of_a_read)
            else:
                whole[f"{shape} {dtype}"] = of_a_read
    ((below, least),) = ((name, ratio) for name, ratio in whole.items() if ratio < 0.95)
    ((above, enough),) = ((name, ratio) for name, ratio in odd.items() if ratio >= 0.95)
    odd = sorted(ratio for ratio in odd.values() if ratio < 0.95)
    return (
        f"where rows begin at 16-byte addresses, from 67 MB up, all but **{below} {least:.3f}**; of 4 to 34 MB "
        f"**{min(small):.2f} to {max(small):.2f}**; elsewhere **{cut(odd[0], 2)} to {cut(odd[-1], 2)}**, "
        f"{above} {cut(enough)}"
    )


def under(limit, cells):
    """The cells where we have less than that of the best rival."""
    few = ((*key, tables.to_best(cell)) for key, cell in cells.items() if tables.to_best(cell) < limit)
    return ", ".join(f"d{dim} {tables.kind(causal)} {length} {cut(ratio)}" for dim, causal, length, ratio in few)


def cut(ratio, digits=3):
    """Not rounded up to what it does not reach."""
    return f"{math.floor(ratio * 10**digits) / 10**digits:.{digits}f}"


def test_the_first_training_step_is_that_of_the_results():
    rows = tables.results()("first_step")
    (first,), (again,) = (tables.speeds(rows, name, "len_q").values() for name in ("first_s", "again_s"))
    ours, flex = ((first[name], again[name]) for name in ("flashattn_lite", "flex"))
    text = (
        f"of d{rows[0]['head_dim']} {rows[0]['len_q']} took {ours[0]:.1f} s, in a second process {ours[1]:.1f}, "
        f"FlexAttention's {flex[0]:.1f} and {flex[1]:.1f} (`first_step.csv`, {rows[0]['commit']}"
    )
    page = " ".join(PAGE.split())
    assert text in page
    assert f"a first training step {ours[0] / flex[0]:.1f} times as long" in PAGE
