"""Every number that README publishes is one of the committed results'."""

from __future__ import annotations

import re

from benchmarks import overview, provenance, tables
from tests.test_published import PAGE

README = (provenance.ROOT / "README.md").read_text(encoding="utf-8")


def between(values, digits=2):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_the_readme_has_the_overview():
    assert README.partition("| work |")[2].partition("\n\n")[0] == "\n".join(overview.lines()).removeprefix("| work |")
    text, cells = " ".join(README.split()), tables.attention_cells(tables.results()("attention"), "bf16")
    cudnn, rival, ahead = tables.summary(cells)
    fastest = {max(rivals, key=rivals.__getitem__) for rivals in map(tables.rivals, cells.values())}
    assert fastest == {"sdpa-cudnn", "fa3", "fa4"} and ahead == len(cells)
    told = f"the bf16 forward is {rival:.2f} of the fastest of cuDNN, FlashAttention-3 and FlashAttention-4 in the mean"
    assert f"{told} of {len(cells)} shapes, and ahead in all of them" in text
    assert f"on an H200 unless a row says otherwise: {rival:.2f} is {rival - 1:.0%} faster" in text
    assert f"it is {cudnn:.2f} of cuDNN, which is what torch's function picks there." in text
    dims, _, lengths = map(set, zip(*cells, strict=True))
    assert (dims, min(map(int, lengths)), max(map(int, lengths))) == ({"64", "128", "256"}, 512, 16384)
    assert {row["triton"] for row in overview.H200_TRITON_39("attention")} == {"3.9.0"}


def test_the_readme_has_the_hosts_time():
    read = tables.results()
    commits = [{row["commit"] for row in read(name)} for name in ("host_time", "first_call")]
    text = " ".join(README.split())
    full = tables.speeds(read("host_time"), "host_us", "op", "causal")["attention_forward", "False"]
    ours, torchs, fa3, flex = (f"{full[name]:.0f}" for name in ("flashattn_lite", "sdpa", "fa3", "flex"))
    told = f"A call takes {ours} µs of the host, torch's {torchs}, FlashAttention-3's {fa3}, FlexAttention's {flex} "
    assert commits[0] == set(re.findall(re.escape(told) + r"\(commit (\w+)\)\.", text))
    ours, others, again = (
        between([cell[name] for cell in tables.speeds(read("first_call"), metric, "head_dim", "len_q").values()
                 if name in cell], digits=1)
        for name, metric in (("flashattn_lite", "first_s"), ("flex", "first_s"), ("flashattn_lite", "again_s"))
    )  # fmt: skip
    told = f"{ours} s where nothing is kept yet, FlexAttention's {others} s; the next process's {again} s (commit "
    assert commits[1] == set(re.findall(re.escape(told) + r"(\w+);", text))


def test_peak_memory_is_that_of_the_results():
    rows = tables.results()("memory")
    peaks = {op: {row["provider"]: float(row["median"]) / 2**20 for row in rows
                  if row["metric"] == "peak_allocated_bytes" and (row["op"], row["len_q"]) == (op, "32768")}
             for op in ("forward", "forward+backward")}  # fmt: skip
    assert round(peaks["forward"]["naive"] / 2**10) == 64
    assert "naive" not in peaks["forward+backward"]
    ours, both = peaks["forward"]["flashattn_lite"], peaks["forward+backward"]
    names = ("flashattn_lite", "torch cudnn", "torch efficient", "torch flash")
    lite, cudnn, efficient, flash = (f"{both[name]:.0f}" for name in names)
    (commit,) = {row["commit"] for row in rows}
    page, readme = (" ".join(text.split()) for text in (PAGE, README))
    assert f"commit {commit}): the forward takes its lse, {ours:.0f} MiB at 32k tokens, where naive" in page
    assert f"backward take {lite} MiB, torch's cuDNN backward {cudnn}, its efficient one {efficient}, its" in page
    assert f"its flash backward {flash}." in page
    assert f"commit {commit}) the forward takes {ours:.0f} MiB, forward and backward take {lite}, where" in readme
    assert f"torch's cuDNN backward takes {cudnn} and its flash backward {flash}" in readme
