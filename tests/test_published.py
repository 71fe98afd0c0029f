"""Every number that docs/performance.md publishes is one of the committed results'."""

from __future__ import annotations

import re

import pytest

from benchmarks import provenance, tables

PAGE = (provenance.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
H100 = provenance.RESULTS / "h100-80gb-hbm3"
H100_TRITON_39 = provenance.RESULTS / "h100-80gb-hbm3-triton-3.9"
PUBLISHED = [(tables.results(), name) for name in tables.TABLES]
ON_H100 = ("attention", "decode", "decode_mixed", "softmax", "shapes", "backward", "backward_bias")
PUBLISHED += [(tables.results(H100), name) for name in ON_H100]
PUBLISHED += [(tables.results(H100_TRITON_39), name) for name in ("attention", "decode", "softmax")]


@pytest.mark.parametrize(("read", "name"), PUBLISHED)
def test_published_tables_are_those_of_the_results(read, name):
    """Every line that the CSVs give stands in the page."""
    lines = tables.TABLES[name](read)
    assert len(lines) > 3
    assert not set(lines) - set(map(str.rstrip, PAGE.splitlines()))


def test_the_aims_are_compared_with_the_results():
    lines = PAGE.partition("| aim | reached |")[2].partition("\n\n")[0].splitlines()[2:]
    reached = dict(line.strip("| ").split(" | ") for line in lines)
    rows = tables.results()("attention")
    bf16, fp16 = (tables.attention_cells(rows, dtype) for dtype in ("bf16", "fp16"))
    (_, mean, ahead), (_, mean_16, ahead_16) = map(tables.summary, (bf16, fp16))
    assert reached["attention: at or above the best rival in every cell"] == (
        f"**bf16 {ahead} of 30** ({under(1, bf16)}), **fp16 {ahead_16} of 30** ({under(1, fp16)})"
    )
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
    softmax = dict(tables.bandwidths(tables.results()("softmax"), "softmax"))
    least = min(tables.to_best(cell, "copy") for pair in softmax.values() for cell in pair)
    assert reached["softmax: 0.98 of the best rival"] == f"every cell, least {least:.3f}"
    bf16, fp32 = (cell["flashattn_lite"] / cell["copy"] for cell in softmax["16 x 1048576"])
    assert reached["16 x 1048576: 0.90 of the copy"] == f"**bf16 {bf16:.2f}, float32 {fp32:.3f}**"
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


def test_attention_was_measured_again():
    text, rows = " ".join(PAGE.split()), tables.results()("attention_again")
    assert {row["commit"] for row in rows} == set(re.findall(r"H200 \((\w+), `attention_again.csv`\)", text))
    bf16, fp16 = (tables.attention_cells(rows, dtype) for dtype in ("bf16", "fp16"))
    (cudnn, rival, ahead), (cudnn_16, rival_16, ahead_16) = map(tables.summary, (bf16, fp16))
    assert (
        f"bf16 {cudnn:.3f} of cuDNN and {rival:.3f} of the better of the two, ahead in {ahead} cells of {len(bf16)}, "
        f"fp16 {cudnn_16:.3f} and {rival_16:.3f}, {ahead_16} ({under(1, fp16)}); "
        f"d128 causal 16k {tables.to_cudnn(bf16['128', 'True', '16384']):.2f} of cuDNN, "
        f"d256 causal 16k {tables.to_cudnn(bf16['256', 'True', '16384']):.2f}." in text
    )
    before = tables.attention_cells(tables.results()("attention"), "bf16")
    led = [cell["fa4"] / max(cell["sdpa-cudnn"], cell["fa3"]) - 1 for cell in before.values()]
    led = [lead for lead in led if lead > 0]
    assert f"FA4 is the best rival in {['no', 'one', 'two', 'three', 'four'][len(led)]} bf16 cells" in text
    assert f"by {100 * min(led):.1f} to {max(led):.1%}." in text


def test_odd_rows_were_measured_again():
    text, rows = " ".join(PAGE.split()), tables.results()("softmax_odd")
    assert {row["commit"] for row in rows} == set(re.findall(r"H200 \((\w+), `softmax_odd.csv`\)", text))
    shares = [
        " / ".join(f"{cell[tables.OURS] / cell[ceiling]:.2f}" for cell in pair)
        for op, ceiling in (("softmax", "copy"), ("softmax_stats", "read"))
        for _, pair in tables.bandwidths(rows, op)
    ]
    softmax = "of a copy: 8192 x 50257 {}, 32768 x 4097 {}; of a read, statistics: {}, {} (bf16 / float32)."
    assert softmax.format(*shares) in text


def test_the_aims_are_compared_with_the_results_of_an_h100():
    lines = PAGE.partition("| aim | reached there |")[2].partition("\n\n")[0].splitlines()[2:]
    read = tables.results(H100)
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


def under(limit, cells):
    """The cells where we have less than that of the best rival."""
    few = ((*key, tables.to_best(cell)) for key, cell in cells.items() if tables.to_best(cell) < limit)
    return ", ".join(f"d{dim} {tables.kind(causal)} {length} {ratio:.3f}" for dim, causal, length, ratio in few)
