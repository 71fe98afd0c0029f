"""Packed sequences of few query rows, as max_seqlen_q promises: decoding's kernels cut their keys too."""

from __future__ import annotations

import functools
import os
from itertools import pairwise
from typing import Any

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.attention_hopper_launch import REGISTERS
from flashattn_lite.kernels.tuning_decode import FEW_KEYS_SPLITS, TELLING
from flashattn_lite.kernels.tuning_hopper import PACKED_ROWS, hopper_tile
from flashattn_lite.problem import UNPROMISED, Inputs, describe
from flashattn_lite.testing import PACKED_LAWS, PackedCase, assert_close_to_oracle, check_packed
from flashattn_lite.testing.results import assert_same_bits, run_packed
from tests.exhaustive import one_in, problems
from tests.targets import H200

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# Splits in the interpreter have 32 keys or more, on a GPU 128 or 256: few, some, and so many that these are longer.
KEYS = (700, 0, 90, 20000) if torch.cuda.is_available() else (70, 0, 33, 200)
TOKENS = {1: (1, 0, 1, 1), 4: (2, 1, 4, 3)}  # by max_seqlen_q
PROBLEMS = problems(cpu=10, cuda=3, interpreted=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, sinks": {"causal": True, "sinks": True},
    "window": {"window": (60, 0), "softcap": 5.0},
    "window ahead, lengths": {"window": (150, 3), "q_start": 40, "kv_lens": True},
}


def table(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def drawn(device, tokens, keys=KEYS, dim=64, dim_v=None, heads=4, dtype=torch.float16, **options) -> PackedCase:
    generator = torch.Generator().manual_seed(len(tokens))
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device)
    q, k, v = draw(sum(tokens), heads, dim), draw(sum(keys), 2, dim), draw(sum(keys), 2, dim_v or dim)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 3, heads, device=device)
    if options.pop("kv_lens", False):
        options["kv_lens"] = torch.tensor([n // 2 + 1 for n in keys], dtype=torch.int32, device=device)
    return PackedCase(q, k, v, table(tokens, device), table(keys, device), **options)


def promised(most: int, backend: str = "auto"):
    """attention_varlen of sequences that have up to so many rows."""
    return lambda *args, **options: fa.attention_varlen(*args, max_seqlen_q=most, backend=backend, **options)


def split(device: torch.device) -> str:
    """The backend that is meant, where it runs."""
    return "split" if device.type == "cuda" or INTERPRETING else "auto"


@pytest.mark.parametrize(("most", "name"), one_in(2, TOKENS, OPTIONS))
@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [(64, 64, torch.float16), (128, 128, torch.bfloat16), (80, 40, torch.bfloat16), (256, 256, torch.float16),
     (33, 7, torch.float16), (64, 64, torch.float32)],
    ids=str,
)  # fmt: skip
def test_each_sequence_is_right_and_has_the_bits_that_it_has_alone(device, name, most, dim, dim_v, dtype):
    if device.type == "cpu" and (dim != 64 or dtype != torch.float16):
        pytest.skip("slow in the interpreter, and without it another path, which has tests of its own")
    if device.type == "cuda" and dim != 128 and name in ("full", "window"):
        pytest.skip("compiling them all takes long, and they differ in the score features alone")
    case = drawn(device, TOKENS[most], dim=dim, dim_v=dim_v, dtype=dtype, **OPTIONS[name])
    out, lse = run_packed(promised(most, split(device)), case)
    assert_same_bits(run_packed(promised(most), case), (out, lse), "by the choice of 'auto'", case)
    for b, (rows, _) in enumerate(case.sequences()):
        assert_close_to_oracle(out[rows].transpose(0, 1)[None], lse[:, rows][None], case.dense(b))
        if b in (0, 3):
            alone = run_packed(promised(most), case.sequence(b))
            assert_same_bits(alone, (out[rows], lse[:, rows]), f"sequence {b} alone", case)


@pytest.mark.parametrize("law", PACKED_LAWS, ids=lambda law: law.__name__)
def test_law(law, device):
    """Over short sequences, with gradients: more rows than the problem promises here would go to another kernel."""

    told = functools.partial(fa.attention_varlen, max_seqlen_q=5, max_seqlen_k=5)
    sizes = {"max_batch": 2, "max_heads": 1, "max_dim": 17} if INTERPRETING else {}
    check_packed(told, laws=[law], n=PROBLEMS[device.type], device=device, max_len=5, **sizes)


def test_where_nothing_is_promised_the_longest_sequence_chooses_no_kernel(device):
    """Then it is measured, and what is measured changes with the neighbours."""
    case = drawn(device, (2, 40, 1), keys=(70, 33, 200), causal=True)
    out, lse = run_packed(fa.attention_varlen, case)
    for b in (0, 2):
        rows, _ = case.sequences()[b]
        alone = run_packed(fa.attention_varlen, case.sequence(b))
        assert_same_bits(alone, (out[rows], lse[:, rows]), f"sequence {b} alone", case)


@pytest.mark.parametrize("most", TOKENS)
def test_a_sequence_alone_has_the_bits_of_dense_attention(device, most):
    """Where the keys are not few, which packed sequences do not say."""
    if device.type == "cpu" and not INTERPRETING:
        pytest.skip("the tiled path takes other tiles")
    case = drawn(device, (most, most), keys=(KEYS[0], KEYS[-1]), causal=True)
    out, lse = run_packed(promised(most), case)
    for b, (rows, _) in enumerate(case.sequences()):
        dense = case.dense(b)
        expected = fa.attention(dense.q, dense.k, dense.v, causal=True, backend="split", return_lse=True)
        packed = out[rows].transpose(0, 1)[None], lse[:, rows][None]
        assert_same_bits(packed, expected, f"sequence {b}, packed", case)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_what_is_longer_than_promised_reads_as_0_past_that(device, backend):
    """On a GPU nobody reads the table; a CPU refuses it."""
    if device.type != "cuda":
        pytest.skip("the values are checked here")
    case = drawn(device, (2, 7, 1), keys=(700, 5000, 3), causal=True)
    whole, exact = run_packed(promised(7, "triton"), case)
    out, lse = run_packed(promised(3, backend), case)
    left = torch.tensor([0, 1, 2, 3, 4, 9], device=device)
    torch.testing.assert_close(out[left], whole[left], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse[:, left], exact[:, left], atol=1e-4, rtol=0)
    assert bool((out[5:9] == 0).all()) and bool((lse[:, 5:9] == -torch.inf).all())


@pytest.mark.gpu
def test_wrong_tables_stay_inside_the_tensors():
    """No access outside, and what they leave alone is right."""
    case = drawn(torch.device("cuda"), (2, 3), keys=(700, 300))
    expected, _ = run_packed(promised(3), case)
    for values in ([0, 2, 2**31 - 1], [-7, 2, 5], [0, 2, -(2**31)]):
        wrong = torch.tensor(values, dtype=torch.int32, device="cuda")
        out, _ = run_packed(promised(3), case.replace(cu_seqlens_q=wrong))
        assert torch.equal(out[:2], expected[:2])
        keys = wrong * 1
        keys[1:2] = 700
        out, _ = run_packed(promised(3), case.replace(cu_seqlens_k=keys))
        assert torch.equal(out[:2], expected[:2])
    for short in (0, 64, 400):  # fewer keys promised than there are: these are not seen
        tables = case.cu_seqlens_q, case.cu_seqlens_k
        out = fa.attention_varlen(case.q, case.k, case.v, *tables, max_seqlen_q=3, max_seqlen_k=short)
        lens = torch.tensor([min(short, 700), min(short, 300)], dtype=torch.int32, device="cuda")
        assert torch.equal(out, run_packed(promised(3), case.replace(kv_lens=lens))[0])


def problem_of(tokens, keys, most_q, most_k=None, group=4, **options):
    q, k = torch.empty(sum(tokens), 2 * group, 128).bfloat16(), torch.empty(sum(keys), 2, 128).bfloat16()
    inputs = Inputs(q, k, k, cu_seqlens_q=table(tokens), cu_seqlens_k=table(keys))
    rest = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "softcap": None} | options
    return inputs, describe(inputs, scale=1.0, max_seqlen_q=most_q, max_seqlen_k=most_k, **rest)


@pytest.mark.parametrize(
    ("group", "most", "reason"),
    [
        (4, None, "by max_seqlen_q, which counts as 97 or more where it is not given; here 388"),
        (1, UNPROMISED, "here 97"),
        (4, 4, ""),
        (4, 5, "for 1 to 16 query rows per key/value head by max_seqlen_q, which"),
        (4, 6, "here 24"),
        (16, 1, ""),
        (17, 1, "here 17"),
        (4, 0, "here 0"),
    ],
)
def test_who_is_taken(group, most, reason):
    """By what is promised alone: a row's bits must not follow from how many rows the others have."""
    for tokens in ((), (1,), (1, 0, 1), (1,) * 100):
        _, problem = problem_of(tokens, (9,) * len(tokens), most, group=group)
        reasons = decode_launch.why_not_attention(problem, H200)
        assert len(reasons) == bool(reason)
        assert not reason or reason in reasons[0]


@pytest.mark.parametrize(("most", "pack"), [(None, 1), (17, 4), (32, 4), (64, 4), (65, 1), (100, 1)])
def test_query_heads_are_packed_by_what_is_promised_alone(most, pack):
    """By the Hopper kernel, whose row tiles then have other rows: a row's bits must not follow from its neighbours."""
    for tokens in ((17,), (60,), (60, 64), (20, 100, 300)):
        if most is None or max(tokens) <= most:
            args = problem_of(tokens, (300,) * len(tokens), most, causal=False)[1]
            assert hopper_tile(args).pack == pack, (tokens, hopper_tile(args))


def test_unpromised_rows_are_few_to_no_tile():
    assert 64 * max(consumers for consumers, _ in REGISTERS) < UNPROMISED * PACKED_ROWS


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("most", [1, 4])
def test_the_tile_follows_from_the_promised_rows_alone(most, window):
    """Not from how many sequences there are, nor from how many rows or keys they have or are promised to have."""
    seen = {
        decode_launch.config_of(problem, inputs, H200)
        for tokens, keys, most_k in [((1,), (9,), None), ((1, 1), (9, 9000), 9000), ((1,) * 90, (50,) * 90, 50)]
        for inputs, problem in [problem_of(tokens, keys, most, most_k, window_left=window)]
    }
    assert len(seen) == 1
    assert (seen.pop().splits == FEW_KEYS_SPLITS) is (window is not None)


@pytest.mark.parametrize(("most_k", "pairs"), [(8192, True), (9000, True), (9200, False), (16384, False)])
def test_pairs_of_chains_are_for_batches_that_fill_their_room(most_k, pairs):
    """Of these lengths the host knows the sum, and so whether programs that own two chains would be alike."""
    assert call_of(64, 1, 8192, most_k).tile.OWNS_PAIR is pairs


def call_of(batch: int, tokens: int, keys: int, most_k: int) -> decode_launch.Call:
    """So many sequences of 32 query and 8 key heads on an H200, without memory."""
    q = torch.empty(batch * tokens, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch * keys, 8, 128, dtype=torch.bfloat16, device="meta")
    cu = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    inputs = Inputs(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu)
    rest = {"q_start": None, "window_left": None, "window_right": None, "softcap": None}
    problem = describe(inputs, causal=True, scale=1.0, max_seqlen_q=tokens, max_seqlen_k=most_k, **rest)
    return decode_launch.Call(problem, inputs, q, torch.empty(32, batch * tokens, device="meta"), H200)


@pytest.mark.parametrize(
    ("batch", "tokens", "keys", "partial", "merge"),
    [(64, 1, 2048, True, True), (64, 4, 2048, True, False), (2048, 1, 64, False, None), (16, 1, 64, True, None)],
)
def test_many_programs_do_not_say_that_the_next_launch_may_come(batch, tokens, keys, partial, merge):
    """The launch for rows that no sequence covers, behind the merge, or where there is none, behind the first."""
    call = call_of(batch, tokens, keys, keys)
    assert (call.partial.grid[0] <= TELLING) is call.behind[-3] is partial
    assert (merge is None) is (call.merge is None)
    assert call.merge is None or (call.merge.start.grid[0] <= TELLING) is call.merge.behind[-3] is merge


@pytest.mark.gpu
def test_repeats_in_a_graph_with_other_tables():
    """A captured call reads the tables anew: other lengths, other results, the same as outside the graph."""
    device = torch.device("cuda")
    case = drawn(device, (1, 1, 1), keys=(700, 300, 4000), causal=True)
    options = {"causal": True, "max_seqlen_q": 1, "max_seqlen_k": 5000}
    call = lambda: fa.attention_varlen(case.q, case.k, case.v, case.cu_seqlens_q, case.cu_seqlens_k, **options)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for keys in ((700, 300, 4000), (1, 4990, 9), (5000, 0, 0)):
        case.cu_seqlens_k.copy_(table(keys))
        graph.replay()
        assert torch.equal(out, call())
        for b, (start, end) in enumerate(pairwise([0, *torch.tensor(keys).cumsum(0).tolist()])):
            dense = (x[start:end].transpose(0, 1)[None].float() for x in (case.k, case.v))
            expected = fa.attention(case.q[b][None, :, None].float(), *dense)
            torch.testing.assert_close(out[b].float(), expected[0, :, 0], atol=2e-3, rtol=0)


@pytest.mark.parametrize(("keys", "q_start"), [((0, 0), None), ((3, 5), -100)], ids=["no keys", "all are hidden"])
def test_where_nobody_sees_a_key_no_launch_lacks_the_one_it_waits_for(keys, q_start):
    """A dependent launch reads the table ahead of its wait: the one before it must have waited for who wrote that."""
    q, k = torch.zeros(8, 4, 64).half(), torch.zeros(sum(keys), 4, 64).half()
    inputs = Inputs(q, k, k, cu_seqlens_q=table((1, 7)), cu_seqlens_k=table(keys))
    problem = describe(inputs, causal=True, q_start=q_start, window_left=None, window_right=None, scale=None,
                       softcap=None, max_seqlen_q=8, max_seqlen_k=8)  # fmt: skip
    call = decode_launch.Call(problem, inputs, torch.empty(8, 4, 64).half(), torch.empty(4, 8), H200)
    assert [x.kernel.fn.__name__ for x in call.starters] == ["partial_kernel", "uncovered_kernel"]
    assert all(x.grid[0] > 0 for x in call.starters) and "launch_pdl" not in call.partial.options
