"""What the benchmarks compute besides times: ratios, the profile's rows, the reasons of what is absent."""

from __future__ import annotations

import csv
import functools
import importlib.util
import statistics
from contextlib import contextmanager

import pytest
import torch

from benchmarks import (
    attention,
    backward,
    cpu,
    cpu_softmax,
    decode,
    decode_mixed,
    host_calls,
    host_time,
    packed,
    packed_providers,
    provenance,
    providers,
    tables,
)

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib draws")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton compiles")


def test_what_cannot_be_had_is_absent_with_its_reason():
    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file\nand a second line")

    made, absent = providers.importable({"works": lambda: 1, "broken": broken})
    assert made == {"works": 1}
    assert absent == {"broken": "ImportError: libcudart.so.12: cannot open shared object file"}
    assert providers.in_a_line(ValueError()) == "ValueError: "


@pytest.mark.parametrize("name", ["flashattn_lite", "sdpa-flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_providers_compute_the_same(name, causal):
    """On the CPU; those that need a GPU are checked by the benchmark before it times them."""
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    provider = providers.PROVIDERS[name]()
    with provider.setting():
        out = provider.call(q, k, v, causal)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize("name", ["flashattn_lite", "sdpa-flash"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_checked_before_they_are_timed(name, causal):
    qkv = tuple(torch.randn(2, 2, 30, 16) for _ in range(3))
    maker, d_out = backward.of(providers.PROVIDERS[name]()), torch.randn(2, 2, 30, 16)
    with maker.setting():
        right, wrong = (maker.make(qkv, d_out, c)() for c in (causal, not causal))
    exact = backward.exact_gradients(qkv, d_out, causal)
    assert backward.relative_error(right, exact) < 1e-6
    assert backward.relative_error(wrong, exact) > 0.1


@pytest.mark.parametrize("name", ["flashattn_lite", "sdpa-math"])
def test_gradients_of_a_bias_are_summed_over_the_batch(name):
    given = *(torch.randn(3, 2, 30, 16) for _ in range(3)), torch.randn(1, 2, 30, 30)
    maker, d_out = backward.with_bias()[name], torch.randn(3, 2, 30, 16)
    with maker.setting():
        grads = maker.make(given, d_out, False)()
    exact = backward.exact_gradients(given, d_out, False)
    assert backward.relative_error(grads, exact) < 1e-6
    assert backward.relative_error([*grads[:3], grads[3] / 3], exact) > 0.1


PACKING = packed_providers.pack((3, 1, 7), "cpu")


@pytest.mark.parametrize("name", ["flashattn_lite", "sdpa-padded"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_providers_compute_the_same(name, causal):
    """On the CPU too: each sequence by itself."""
    qkv = tuple(torch.randn(11, 2, 16) for _ in range(3))
    provider = packed_providers.PACKED[name]()(PACKING)
    out = provider.unlay(provider.call(*map(provider.lay, qkv), causal))
    for mine, *heads in zip(*(x.transpose(0, 1).split(PACKING.lengths, 1) for x in (out, *qkv)), strict=True):
        torch.testing.assert_close(mine, torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal))


def test_who_mixes_sequences_is_wrong():
    """And who sees the future: the check looks at each sampled sequence alone."""
    qkv = tuple(torch.randn(11, 2, 16) for _ in range(3))
    sample = packed.sampled(PACKING.lengths)
    assert [tuple(head.shape) for head in sample(qkv[0])] == [(3, 16)] * 2 + [(7, 16)] * 2  # the longest is the last

    def error(packing, causal):
        out = packed_providers.PACKED["flashattn_lite"]()(packing).call(*qkv, causal)
        return attention.relative_error(out, qkv, True, sample)

    assert error(PACKING, True) < 1e-6
    assert error(PACKING, False) > 0.1
    assert error(packed_providers.pack((3, 8), "cpu"), True) > 0.1


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", ["flashattn_lite", "flashattn_lite-paged", "flashattn_lite-packed", "sdpa"])
def test_decoding_of_unequal_lengths_is_the_same_for_all(name, tokens):
    data = decode_mixed.make_data(3, 48, tokens, "cpu")
    assert len(set(data.lens.tolist())) == 3
    out = decode_mixed.PROVIDERS[name]()(data)
    assert decode_mixed.relative_error(out, data) < 4 * torch.finfo(torch.bfloat16).eps
    out[-1, -1] = out[0, 0]
    assert decode_mixed.relative_error(out, data) > 0.1


def test_cells_of_decoding_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    """By the driver of both benchmarks: sizes from a cell's name, reasons of who is absent, rows after each cell."""
    monkeypatch.setattr(decode, "row_provenance", lambda device: provenance.row_provenance("cpu"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen = []

    def measure(cell, sizes, absent):
        if seen:
            assert len(provenance.read_rows(tmp_path / "rows.csv")) == 3
            raise KeyboardInterrupt
        seen.append(sizes)
        absent["fa3"] = "wrong"
        return [{**cell, "provider": "flashattn_lite", "metric": "us", "median": "7"}], ["flashattn_lite 7 us"]

    with pytest.raises(KeyboardInterrupt):
        decode.run(["2x48x4", "8x64"], {"fa4": "not here"}, tmp_path / "rows.csv", measure)
    assert seen == [(2, 48, 4)]
    gone, ours, wrong = provenance.read_rows(tmp_path / "rows.csv")
    assert (gone["provider"], gone["metric"], gone["median"], gone["batch"]) == ("fa4", "absent", "not here", "")
    assert [ours[name] for name in ("batch", "len_kv", "len_q", "median")] == ["2", "48", "4", "7"]
    assert (wrong["provider"], wrong["metric"], wrong["median"], wrong["batch"]) == ("fa3", "absent", "wrong", "2")
    assert "batch 2, 48 keys, 4 tokens: flashattn_lite 7 us\n  absent: fa3: wrong" in capsys.readouterr().out


def test_what_packed_sequences_cost():
    assert packed.flop_of((2, 3), heads=5, head_dim=7, causal=False) == 4 * 5 * 7 * (2 * 2 + 3 * 3)
    assert packed.flop_of((2, 3), heads=5, head_dim=7, causal=True) == 2 * 5 * 7 * (2 * 2 + 3 * 3)


def test_packings_are_as_long_as_they_say():
    """The mixed one is the same every time, as the docstring describes it, and has a long tail."""
    assert {sum(lengths) for lengths in packed.PACKINGS.values()} == {16384}
    lengths = packed.mixed()
    assert lengths == packed.PACKINGS["mixed"] == packed.mixed()
    middle, longest = statistics.median(lengths), max(lengths)
    assert f"{len(lengths)} sequences of {min(lengths)} to {longest} tokens, median {middle}" in packed.__doc__
    assert longest >= 8 * middle


@needs_matplotlib
def test_ratios_are_taken_cell_by_cell():
    from benchmarks.plot_attention import relative_to

    curves = {"sdpa-cudnn": [(512, 200.0), (1024, 400.0)], "a": [(512, 100.0), (1024, 600.0), (2048, 1.0)]}
    assert relative_to("sdpa-cudnn", curves) == {"a": [(512, 0.5), (1024, 1.5)]}
    assert relative_to("not measured", curves) == {}


def drawn(name, csv_file, out):
    from benchmarks import plot

    plot.main([name, "--csv", str(csv_file), "--out", str(out)])
    return out.read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.parametrize("name", ["attention", "attention-ratio"])
def test_the_committed_results_can_be_drawn(name, tmp_path):
    from benchmarks import plot

    assert drawn(name, provenance.RESULTS / "h200" / f"{plot.PLOTS[name][0]}.csv", tmp_path / "plot.png")


@needs_matplotlib
@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("softmax", [{"op": op, "rows": 4, "cols": 8, "dtype": "bf16"} for op in ("softmax", "softmax_stats")]),
        ("decode", [{"op": "attention_decode", "batch": 1, "heads_q": 32, "heads_kv": 8, "len_q": n, "len_kv": 8192,
                     "head_dim": 128, "dtype": "bf16"} for n in (1, 4)]),
    ],
)  # fmt: skip
def test_what_the_bandwidth_benchmarks_write_can_be_drawn(name, cells, tmp_path):
    """Of providers that no plot has heard of too; one that is absent has no bar."""
    from benchmarks import softmax

    common = provenance.row_provenance("cpu")
    rows = [
        {**common, **cell, "provider": provider, "metric": "gbps", "median": 100 + number}
        for cell in cells for number, provider in enumerate(("flashattn_lite", "read", "somebody else"))
    ]  # fmt: skip
    rows.append({**common, **cells[0], "provider": "quack", "metric": "absent", "median": "ModuleNotFoundError"})
    provenance.write_rows(tmp_path / "rows.csv", rows, softmax.columns())
    assert drawn(name, tmp_path / "rows.csv", tmp_path / "plot.png")


def test_the_profile_is_of_the_cells_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "profile_cells", lambda *args: asked.append(args))
    cells = ["--dtypes", "bf16", "--head-dims", "64", "--lengths", "512", "1024", "--out", str(tmp_path / "a.csv")]
    attention.main(["--profile", *cells])
    every = [("bf16", 64, causal, length) for causal in (True, False) for length in (512, 1024)]
    assert asked == [("sm_90", every, tmp_path / "a.csv")]
    attention.main(["--profile", "sm_80", *cells[:-2]])  # not where the results of another GPU are
    assert asked[1] == ("sm_80", every, provenance.RESULTS / "sm_80" / "attention_profile.csv")


@needs_triton
def test_the_profile_has_a_row_for_each_kernel(tmp_path):
    attention.profile_cells("sm_90", [("bf16", 64, False, length) for length in (64, 128)], tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["provider"], row["causal"], row["tile"], row["blocks_per_sm"]) for row in rows] == [
        ("flashattn_lite", "False", "64x64", "3"),
        ("flashattn_lite-triton", "False", "128x64", "2"),
    ]  # one tile serves both lengths
    assert all(0 < int(row["registers"]) <= 255 and int(row["shared_bytes"]) <= 227 << 10 for row in rows)


def test_a_table_by_hand():
    cell = {"packing": "2x3", "head_dim": "64", "metric": "tflops"}
    rows = [
        {**cell, "causal": causal, "provider": provider, "median": median}
        for causal, medians in (("True", ("300", "200", "50", "60")), ("False", ("8", "10", "2", "3")))
        for provider, median in zip(("flashattn_lite", "fa3", "flex", "sdpa-padded"), medians, strict=True)
    ]
    assert tables.packed(rows)[-1] == "| 2 x 3, d64 | 300 (1.50), 8 (0.80) | 200, 10 | 60, 3 |"


def test_those_of_an_earlier_run_are_compared_through_cudnn():
    """Twice cuDNN's speed now, on a card at half of its pace; they had 1.6 of it: we are at 1.25 of theirs."""
    now = {("a",): {"flashattn_lite": 100.0, "sdpa-cudnn": 50.0}}
    then = {("a",): {"flashattn_lite": 1.0, "sdpa-cudnn": 100.0, "fa4": 160.0, "flex": 400.0}}
    assert tables.each(now, then, "sdpa-cudnn", {"flex", "fa4"})[2:] == [
        "| FA4 | 1.60 | 1.25 | 1.25 | 1.25 | 1 of 1 |",
        "| FlexAttention | 4.00 | 0.50 | 0.50 | 0.50 | 0 of 1 |",
    ]


def test_a_result_is_checked_outside_of_its_providers_setting(monkeypatch):
    """A backend of torch's that was chosen takes no float64, which is what the result is checked with."""
    inside = []

    @contextmanager
    def setting():
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    check = host_time.check
    monkeypatch.setattr(host_time, "check", lambda *args: check(*args) if not inside else 1 / 0)
    absent = {}
    call = providers.PROVIDERS["flashattn_lite"]().call
    qkv = [torch.randn(2, 2, 16, 8) for _ in range(3)]
    kind = host_calls.Calls("attention_forward", tuple(qkv), {}, host_calls.exact_dense, causal=True)
    found = host_time.subjects({"ours": providers.Provider(call, setting)}, kind, absent)
    assert [subject.name for subject in found] == ["ours"] and not absent


def test_busy_processes_end_with_what_they_are_for():
    with cpu.busy(1) as others:
        assert [other.poll() for other in others] == [None]
    assert all(other.poll() for other in others)


@pytest.mark.parametrize("wrong", ["out", "gradients"])
def test_the_cpu_benchmark_finds_what_is_wrong(wrong, monkeypatch):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    right = lambda q, k, v, causal: sdpa(q, k, v, is_causal=causal)
    others = {
        "out": lambda q, k, v, causal: sdpa(q, k, v),
        "gradients": lambda q, k, v, causal: right(q, k, v, causal).detach() + 0 * (q + k + v),
    }
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    cpu.check(q, k, v, True)
    monkeypatch.setattr(cpu, "PROVIDERS", {"torch": right, "other": others[wrong]})
    with pytest.raises(AssertionError, match="other is wrong by"):
        cpu.check(q, k, v, True)


@pytest.mark.parametrize("wrong", [1.0, 1.00001, float("nan")])
def test_the_cpu_benchmark_of_softmax_finds_what_is_wrong(wrong, monkeypatch):
    monkeypatch.setattr(cpu_softmax, "CELLS", [(20, 50)])
    function = lambda x: torch.softmax(x, -1) * wrong
    monkeypatch.setattr(cpu_softmax, "OPS", {"softmax": {"flashattn_lite": function, "torch": function}})
    if wrong == 1.0:
        metrics = ["relative_error", "relative_error", "ms", "ms"]
        assert [row["metric"] for row in cpu_softmax.measure_all()] == 2 * metrics
    else:
        with pytest.raises(ArithmeticError, match="softmax 20 x 50 float32: wrong by"):
            list(cpu_softmax.measure_all())


def test_every_call_whose_host_time_is_taken_is_right_and_a_wrong_one_is_not_timed(monkeypatch):
    """On the CPU: eager, with gradients and in compiled code."""
    monkeypatch.setattr(host_calls, "COLUMNS", 64)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_time, "WARM", 1)
    ops = set()
    for calls in host_calls.every("cpu"):
        names = [name for name in ("flashattn_lite", "sdpa", "torch") if name in calls.makers]
        absent, made = {}, {name: calls.makers[name]() for name in names}
        assert [subject.name for subject in host_time.subjects(made, calls, absent)] == names and not absent
        ops.add(calls.op)
    assert ops > {
        "attention_forward+mask+compiled",
        "attention_decode+compiled",
        "online_softmax",
        "attention_varlen_forward+grad",
    }
    wrong = providers.Provider(lambda x, _: x)
    assert host_time.subjects({"wrong": wrong}, calls, absent) == [] and "wrong: relative error" in absent["wrong"]
