"""Every number that README publishes is one of the committed results'."""

from __future__ import annotations

import re

from benchmarks import provenance, tables
from tests.test_published import H100, H200_TRITON_39, PAGE

README = (provenance.ROOT / "README.md").read_text(encoding="utf-8")


def between(values, digits=2):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_the_readme_has_the_results():
    text = README
    rows = tables.results()("attention")
    bf16, fp16 = (tables.attention_cells(rows, dtype) for dtype in ("bf16", "fp16"))

    cudnn, rival, ahead = tables.summary(bf16)
    assert f"{cudnn:.2f} of cuDNN, which is what torch picks there" in text
    assert f"and {rival:.2f} of the fastest rival of each shape" in text
    assert f"over {len(bf16)} shapes; in all of them ours is the fastest" in text
    assert ahead == len(bf16)
    assert {row["commit"] for row in rows} == set(re.findall(r"; commit (\w+)\) ours is", text))
    _, rival, ahead = tables.summary(fp16)
    assert f"float16: the fastest in {ahead} shapes of {len(fp16)}, by {rival - 1:.0%} in the mean" in text
    furthest = min(fp16, key=lambda key: tables.to_best(fp16[key]))
    assert furthest == ("128", "True", "512")
    assert f"head dim 128, causal, 512 keys ({tables.to_best(fp16[furthest]):.2f})" in text
    long, short = ([tables.to_cudnn(c) for key, c in bf16.items() if key[2] == length] for length in ("16384", "512"))
    assert f"By length: {between(long)} of cuDNN at 16k keys, {between(short)} at 512." in text
    to_fa3, to_fa4 = ([c["flashattn_lite"] / c[rival] for c in bf16.values()] for rival in ("fa3", "fa4"))
    assert f"By rival: {between(to_fa3)} of FlashAttention-3, {between(to_fa4)} of FlashAttention-4 (" in text
    fastest = {max(rivals, key=rivals.__getitem__) for rivals in map(tables.rivals, bf16.values())}
    assert fastest == {"sdpa-cudnn", "fa3", "fa4"}

    rows = tables.results(H100)("attention")
    cells = tables.attention_cells(rows, "bf16")
    cudnn, rival, ahead = tables.summary(cells)
    furthest = min(cells, key=lambda key: tables.to_best(cells[key]))
    assert furthest == ("256", "True", "512")
    assert {row["commit"] for row in rows} == set(re.findall(r"On an H100 \(commit (\w+)\) ", text))
    assert (
        f"{cudnn:.2f} of cuDNN, {rival:.2f} of the fastest of cuDNN, FlashAttention-3 and FlashAttention-4, "
        f"the fastest in {ahead}\n  shapes of {len(cells)}; least at head dim 256"
    ) in text
    assert f"causal, 512 keys ({tables.to_best(cells[furthest]):.2f})" in text

    rows = tables.results(H200_TRITON_39)("attention")
    cells = tables.attention_cells(rows, "bf16")
    cudnn, rival, ahead = tables.summary(cells)
    assert {row["triton"] for row in rows} == {"3.9.0"}
    assert {row["commit"] for row in rows} == set(re.findall(r"By Triton 3.9 \(commit (\w+)\)", text))
    assert f"{cudnn:.2f} of cuDNN and {rival:.2f} of the\n  faster of cuDNN and FlashAttention-3" in text
    assert f"the fastest in {ahead} shapes of {len(cells)}.\n" in text


def test_the_readme_has_the_backward():
    read = tables.results()
    rows = read("backward")
    cells_of = lambda rows: tables.speeds(rows, "tflops", "head_dim", "causal", "len_q")
    assert f"{tables.backward(rows)[-1].partition(' of ')[0]} of torch's flash backward in the mean of" in README
    cells = cells_of(rows).values()
    cudnn, fa3 = (f"{tables.geometric_mean(c['flashattn_lite'] / c[name] for c in cells):.2f}"
                  for name in ("sdpa-cudnn", "fa3"))  # fmt: skip
    assert f"in the mean of {len(cells)} shapes, {cudnn} of cuDNN's,\n  {fa3} of FlashAttention-3's" in README
    kinds = (read("backward_fp32"), "sdpa-efficient"), (read("backward_bias"), "flex")
    of, of_single, of_bias = ({row["commit"] for row in read(f"backward{kind}")} for kind in ("", "_fp32", "_bias"))
    assert of == set(re.findall(r"of FlashAttention-3's \(commit (\w+)\)\.", README))
    single, bias = (
        {dim: between([c["flashattn_lite"] / c[best] for key, c in cells_of(rows).items() if dim in ("", key[0])])
         for dim in dims} for (rows, best), dims in zip(kinds, (("64", "128", "256"), ("",)), strict=True)
    )  # fmt: skip
    of_flex = f"a bias that wants a gradient: {bias['']} of FlexAttention's, the fastest there"
    assert of_bias == set(re.findall(rf"{re.escape(of_flex)} \(commit (\w+)\)\.", README))
    told = f"In float32, of torch's: head dim 64 {single['64']}, 128 {single['128']},\n  256 {single['256']}"
    assert of_single == set(re.findall(rf"{re.escape(told)} \(commit (\w+)\)\.", README))


def test_the_readme_has_masks():
    rows = [row for row in tables.results()("shapes") if re.search("mask|padded|bias", row["shape"])]
    cells = tables.speeds(rows, "us", "shape").values()
    ours = between([min(tables.rivals(cell).values()) / cell["flashattn_lite"] for cell in cells])
    assert len(cells) == 6
    assert f"Masks of booleans or numbers: {ours} of torch's fastest at six shapes of models (commit " in README
    assert {row["commit"] for row in rows} == set(re.findall(r"at six shapes of models \(commit (\w+)\)\.", README))


def test_the_readme_has_packed_host_time_and_softmax():
    text = README
    read = tables.results()
    commit = {name: row["commit"] for name in ("host_time", "packed", "softmax") for row in read(name)}
    assert all(len({row["commit"] for row in read(name)}) == 1 for name in commit)
    full = tables.speeds(read("host_time"), "host_us", "op", "causal")["attention_forward", "False"]
    ours, torchs, fa3, flex = (f"{full[name]:.0f}" for name in ("flashattn_lite", "sdpa", "fa3", "flex"))
    assert f"One call takes {ours} µs of the host; torch's takes {torchs}, FlashAttention-3's {fa3}" in text
    assert f"FlexAttention's {flex} (commit {commit['host_time']})." in text
    ours, others, again = (
        between([cell[name] for cell in tables.speeds(read("first_call"), metric, "head_dim", "len_q").values()
                 if name in cell], digits=1)
        for name, metric in (("flashattn_lite", "first_s"), ("flex", "first_s"), ("flashattn_lite", "again_s"))
    )  # fmt: skip
    assert f"{ours} s where nothing is kept yet, FlexAttention's {others} s; the next process's {again} s\n" in text
    to_fa3, to_torch = ([cell["flashattn_lite"] / cell[rival] for cell in tables.packed_cells(read("packed")).values()]
                        for rival in ("fa3", "sdpa-varlen"))  # fmt: skip
    assert f"Packed sequences: {between(to_fa3)} of FlashAttention-3, {between(to_torch)} of torch's own kernel" in text
    assert f"of torch's own kernel (commit {commit['packed']})." in text
    shapes = {shape: [tables.to_best(cell, "copy") for cell in pair]
              for shape, pair in tables.bandwidths(read("softmax"), "softmax")}  # fmt: skip
    short = [pair for shape, pair in shapes.items() if (cols := int(shape.split(" x ")[1])) <= 16384 and cols % 2 == 0]
    up_to_16k = [ratio for pair in short for ratio in pair]
    long = ("8192 x 32768", "1024 x 131072", "16 x 1048576", "8192 x 50304", "8192 x 50257", "32768 x 4097")
    bf16, fp32 = zip(*(shapes[shape] for shape in long), strict=True)
    assert len(short) + len(long) == len(shapes)
    assert f"{between(up_to_16k)} up to 16k columns, {bf16[0]:.2f} (bf16) and {fp32[0]:.2f} (float32) at 32k" in text
    assert f"{bf16[1]:.2f} and {fp32[1]:.2f} at 128k, {bf16[2]:.1f} and {fp32[2]:.1f}\nat a million," in text
    assert f"a million, {bf16[3]:.2f} and {fp32[3]:.2f} at 50304 (GPT-2's vocabulary, padded)." in text
    to_copy = [cell["flashattn_lite"] / cell["copy"] for shape, pair in tables.bandwidths(read("softmax"), "softmax")
               if shape in long[4:] for cell in pair]  # fmt: skip
    assert f"have {between(to_copy)} of a copy's speed; over the fastest rival 8192 x 50257 {bf16[4]:.2f} and" in text
    assert f"and {fp32[4]:.2f}, 32768 x 4097 {bf16[5]:.2f} and {fp32[5]:.2f}." in text
    assert f"Softmax, over the fastest rival (commit {commit['softmax']}): " in text


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


def to_best(rows: list[dict[str, str]]) -> dict[str, float]:
    """By shape."""
    cells = tables.speeds(rows, "us", "shape").items()
    return {shape: min(tables.rivals(cell).values()) / cell["flashattn_lite"] for (shape,), cell in cells}


def test_the_readme_has_few_rows_over_many_keys():
    rows, on_h100 = (
        [row for row in read("shapes") if re.search("^(chunk|tokens)-", row["shape"])]
        for read in (tables.results(), tables.results(H100))
    )
    lengths, batches = ({int(row[name]) for row in rows} for name in ("len_q", "batch"))
    assert (min(lengths), max(lengths), max(batches)) == (4, 2048, 32)
    ratios, others = (list(to_best(table).values()) for table in (rows, on_h100))
    assert {row["shape"] for row in on_h100} <= {row["shape"] for row in rows}
    text = "4 to 2048 tokens over 2k to 128k keys of one to 32 sequences: "
    text += f"{between(ratios)} of the fastest rival, {tables.geometric_mean(ratios):.2f} in the mean of"
    text += f" {len(ratios)} shapes (commit {rows[0]['commit']}); on an H100 {between(others)}, "
    text += f"{tables.geometric_mean(others):.2f} in {len(others)} of these (commit {on_h100[0]['commit']})."
    assert f"- {text}" in " ".join(README.split())


def test_the_readme_has_few_row_tiles():
    text = "One image, one prompt of 128 to 2048 tokens: {} of the fastest rival at eight shapes (commit {}); "
    text += "on an H100 {} (commit {})."
    numbers = []
    for read in (tables.results(), tables.results(H100)):
        rows = [row for row in read("shapes") if re.search("^prompt|-x1$", row["shape"])]
        ratios = list(to_best(rows).values())
        assert len(ratios) == 8
        numbers += [between(ratios), rows[0]["commit"]]
    assert text.format(*numbers) in " ".join(README.split())


def test_the_readme_has_decoding():
    read, text = tables.results(), " ".join(README.split())
    commits = {row["commit"] for name in ("decode", "decode_mixed") for row in read(name)}
    assert commits == set(re.findall(r"Decoding, over the fastest rival \(commit (\w+)\):", text))
    best: dict[tuple[bool, str], list[float]] = {}
    for (batch, _, tokens), cell in tables.decode_cells(read("decode")).items():
        best.setdefault((batch == "1", tokens), []).append(tables.to_best(cell, "read"))
    alone, many = ({tokens: between(best[one, tokens]) for tokens in ("1", "16")} for one in (True, False))
    four = between(best[True, "4"] + best[False, "4"])
    assert f"One token of one sequence {alone['1']}, of 8 to 64 sequences {many['1']}; 4 tokens, as" in text
    assert f"has them, {four}; 16 tokens of one sequence {alone['16']}, in batches {many['16']}." in text
    (cell,) = tables.speeds([row for row in read("shapes") if row["shape"] == "token-padded"], "us", "shape").values()
    ratio = min(tables.rivals(cell).values()) / cell["flashattn_lite"]
    (commit,) = {row["commit"] for row in read("shapes")}
    assert f"need a mask with every token: {ratio:.2f} of torch for 8 sequences of 4k keys (commit {commit})." in text


def test_the_readme_says_what_unequal_lengths_gave():
    cells = tables.speeds(tables.results()("decode_mixed"), "us", "batch", "len_kv", "len_q")
    ours = "flashattn_lite"
    ratios = {
        tokens: [
            [cell[rival] / cell[form] for (*_, n), cell in cells.items() if n == tokens]
            for form, rival in ((ours, "fa3"), (f"{ours}-packed", "fa3-packed"))
        ]
        for tokens in ("1", "4", "16")
    }
    one, some = ([*ratios[tokens][0], *ratios[tokens][1]] for tokens in ("1", "4"))
    cached, packed = ratios["16"]
    text = " ".join(README.split())
    assert f"of FlashAttention-3: one token {between(one)} in a cache or packed, 4 tokens {between(some)}," in text
    assert f"16 tokens {between([*cached, *packed])}. In pages of" in text
    paged = [cell[f"{ours}-paged"] / cell[ours] for cell in cells.values()]
    assert f"In pages of 16 keys they take {between(paged)} of the time in a cache." in text
