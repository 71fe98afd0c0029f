"""Few query rows over many keys: what `attention` gives to decoding's kernels, and what a second call knows."""

from __future__ import annotations

import os
import random

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import decode
from flashattn_lite import target as targets
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.tuning_hopper import hopper_tile
from flashattn_lite.problem import Inputs, describe
from flashattn_lite.scores import visible
from flashattn_lite.testing import Case, assert_close_to_oracle
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import one_in
from tests.targets import H200
from tests.test_decode import cache, int32

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
WINDOW = (700 // (8 if INTERPRETING else 1), 0)


@pytest.mark.parametrize(
    ("sizes", "options"),
    one_in(
        2,
        [(1, 1100), (4, 2100)],
        [
            {"causal": True},
            {"softcap": 5.0, "sinks": True},
            {"causal": True, "q_start": 700},
            {"window": (300, 200), "q_start": 500},
            {"scale": -0.3, "kv_lens": True, "causal": True},
        ],
    ),
    ids=str,
)
def test_attention_splits_the_keys_of_few_rows(device, sizes, options):
    """`attention` gives few rows over many keys to the same kernels: every score feature, any alignment."""
    (tokens, keys), options = sizes, dict(options)
    heads_kv = 1 if INTERPRETING and tokens > 1 else 2
    q, k, v = cache(device, batch=2, heads=4 * heads_kv, heads_kv=heads_kv, rows=tokens, keys=keys, dtype=torch.float16)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 3, 4 * heads_kv, device=device)
    if options.pop("kv_lens", False):
        options["kv_lens"] = int32([1000, 3], device)
    out, lse = fa.attention(q, k, v, return_lse=True, **options)
    assert_close_to_oracle(out, lse, Case(q, k, v, **options))
    if device.type == "cuda" or INTERPRETING:
        assert fa.explain(q, k, v, **options).backend == "split"
        alone = fa.attention(q[1:], k[1:], v[1:], return_lse=True, **cut(options))
        assert_same_bits((out[1:], lse[1:]), alone, "the second of two sequences", None)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("group", "tokens", "dim"), [(4, 16, 128), (8, 4, 128), (40, 1, 64), (3, 20, 192)])
def test_up_to_64_rows_of_a_key_head_over_long_caches(device, group, tokens, dim, lengths):
    """One sequence is split, and has the bits that it has in a batch.

    Beyond 16 rows they share wgmma's tile, or one consumer's of the Hopper kernel.
    """
    if device.type != "cuda":
        pytest.skip("8k keys take long without a GPU, and the tiles there are others")
    sizes = {"batch": 3, "heads": 2 * group, "heads_kv": 2, "rows": tokens, "keys": 8192 + 40, "dim": dim}
    q, k, v = cache(device, **sizes, dtype=torch.bfloat16)
    options = {"causal": True} | ({"kv_lens": int32([8000, 5000, 3], device)} if lengths else {})
    by_hopper = targets.of(device).arch == 90 and dim > 64
    assert fa.explain(q, k, v, **options).backend == ("hopper" if by_hopper else "split")
    out, lse = fa.attention(q, k, v, **options, return_lse=True)
    assert_close_to_oracle(out, lse, Case(q, k, v, **options))
    second = {name: x[1:2] if name == "kv_lens" else x for name, x in options.items()}
    alone = fa.attention(q[1:2], k[1:2], v[1:2], **second, return_lse=True)
    assert_same_bits((out[1:2], lse[1:2]), alone, "the second of three sequences", None)


def some_mask(kind, batch, heads, tokens, keys, device):
    """Padding ahead of each sequence; a row a query; numbers for each head and query; one row of numbers for all."""
    if kind == "padding":
        first = torch.tensor([keys // 6, 7], device=device)
        return (torch.arange(keys, device=device) >= first[:, None])[:batch, None, None]
    generator = torch.Generator().manual_seed(1)
    shape = {"rows": (batch, 1, tokens, keys), "bias": (1, heads, tokens, keys), "numbers": (keys,)}[kind]
    numbers = torch.randn(shape, generator=generator).to(device)
    return numbers < 0.5 if kind == "rows" else numbers.masked_fill(numbers > 1, -torch.inf)


def masked(device, kind, tokens, keys):
    """(q, k, v, mask, what it hides [B, Hkv, G, L, S])."""
    heads_kv, keys = (1, keys // 8) if INTERPRETING else (2, keys)  # where splits are an eighth
    q, k, v = cache(device, batch=2, heads=4 * heads_kv, heads_kv=heads_kv, rows=tokens, keys=keys, dtype=torch.float16)
    mask = some_mask(kind, 2, 4 * heads_kv, tokens, keys, device)
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    return q, k, v, mask, hidden.expand(2, 4 * heads_kv, tokens, keys).unflatten(1, (heads_kv, 4))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window": WINDOW}], ids=str)
@pytest.mark.parametrize("kind", ["padding", "rows", "bias", "numbers"])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1100), (4, 2104)])
def test_masks_of_few_rows(device, tokens, keys, kind, options):
    """Split too: a model that generates from padded prompts, or into a static cache, has a mask in every step.

    What it hides from every row may hold anything.
    """
    few = not options if tokens == 1 else "window" in options and kind in ("rows", "bias")
    if INTERPRETING and not few:
        pytest.skip("each of these takes seconds in the interpreter")
    q, k, v, mask, hidden = masked(device, kind, tokens, keys)
    out, lse = fa.attention(q, k, v, mask=mask, return_lse=True, **options)
    assert_close_to_oracle(out, lse, Case(q, k, v, mask=mask, **options))
    if device.type == "cuda" or INTERPRETING:
        assert fa.explain(q, k, v, mask=mask, **options).backend == "split"
    nobody = hidden.all(2).all(2)
    k[nobody], v[nobody] = torch.nan, -torch.inf
    assert nobody.any() or kind == "bias"
    again = fa.attention(q, k, v, mask=mask, return_lse=True, **options)
    assert_same_bits(again, (out, lse), "keys that the mask hides from all", None)


@pytest.mark.parametrize(("kind", "tokens"), [("rows", 4), ("bias", 1), ("bias", 4)])
def test_what_a_mask_shows_to_some_rows_reaches_no_other(device, kind, tokens):
    q, k, v, mask, hidden = masked(device, kind, tokens, 2104)
    before = fa.attention(q, k, v, mask=mask)
    some = hidden.any(2).any(2) & ~hidden.all(2).all(2)
    key = int(some[0, 0].nonzero()[-1])
    v[0, 0, key] = torch.nan
    got = fa.attention(q, k, v, mask=mask)
    sees = torch.zeros(got.shape[:-1], dtype=torch.bool, device=device)
    sees[0, :4] = ~hidden[0, 0, :, :, key]
    assert torch.equal(got.isnan().all(-1), sees)
    torch.testing.assert_close(got[~sees], before[~sees], atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "columns", "kind"),
    [(1, columns, kind) for columns in (1104, 1105, 1106) for kind in ("bool", "half", "float")]
    + [(70, 1105, "bool"), (70, 1105, "half"), (70, 1106, "half")],  # each compiles for half a minute
)
def test_a_part_of_a_mask_gives_one_sequence_the_bits_that_it_has_in_a_batch(tokens, columns, kind):
    """Its rows begin anywhere, and another one at other addresses than the batch: in each of the kernels."""
    device = torch.device("cuda")
    backends = ("split",) if tokens == 1 else ("triton", "hopper")
    q, k, v = cache(device, batch=3, heads=4, heads_kv=2, rows=tokens, keys=1104, dim=64, dtype=torch.float16)
    wide = torch.randn(3, 1, tokens, columns, generator=torch.Generator().manual_seed(2)).to(device)
    mask = (wide > 0 if kind == "bool" else wide.half() if kind == "half" else wide)[..., :1104]
    running = [name for name in backends if not fa.explain(q, k, v, mask=mask).reasons[name]]
    assert running
    for backend in running:
        whole = fa.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        for i in range(3):
            alone = fa.attention(
                *(x[i : i + 1] for x in (q, k, v)), mask=mask[i : i + 1], return_lse=True, backend=backend
            )
            assert_same_bits(tuple(x[i : i + 1] for x in whole), alone, f"sequence {i} of {backend}", None)


def cut(options):
    return {name: x[1:] if name == "kv_lens" else x for name, x in options.items()}


def test_the_second_call_knows_the_first(device):
    """Its own tensors, lengths and table; no look at what a first call of this metadata was asked."""
    if device.type != "cuda":
        pytest.skip("on a CPU every call reads its lengths and its table")
    first, second = cache(device, batch=2), [x + 1 for x in cache(device, batch=2)]
    lens = int32([300, 20], device)
    want = fa.attention_decode(*second, lens[:].clone(), backend="tiled")
    for _ in range(3):
        fa.attention_decode(*first, int32([7, 7], device))
        # The other call's tensors, lengths or table would be off by some tenths; two backends differ by some eps.
        torch.testing.assert_close(fa.attention_decode(*second, lens), want, atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match="window"):
        fa.attention_decode(*first, lens, window=(-1, 0))
    q = first[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        fa.attention_decode(q, *first[1:], lens).sum().backward()


def test_function_transforms_of_decoding(device):
    """vmap runs a call for each; torch.func.grad gets the error that a backward pass gets."""
    q, k, v = (x.unsqueeze(1) for x in cache(device, batch=3))
    lens = int32([300, 7, 20], device).unsqueeze(1)
    each = [fa.attention_decode(*x) for x in zip(q, k, v, lens, strict=True)]
    assert torch.equal(torch.vmap(fa.attention_decode)(q, k, v, lens), torch.stack(each))
    table = torch.arange(3, device=device, dtype=torch.int32).view(3, 1, 1)
    pages = [x[:, 0, :, :256].contiguous() for x in (k, v)]  # one a sequence; all see all, each by its own table
    paged = lambda q, lens, table: fa.attention_decode(q, *pages, lens, block_table=table)
    each = [paged(*x) for x in zip(q, lens.clamp(max=256), table, strict=True)]
    assert torch.equal(torch.vmap(paged)(q, lens.clamp(max=256), table), torch.stack(each))
    with pytest.raises(NotImplementedError, match="attention_decode: has no gradient"):
        torch.func.grad(lambda q: fa.attention_decode(q, k[0], v[0], lens[0]).sum())(q[0])


def test_what_only_looks_equal_is_not_a_known_call():
    """1 == True and 1.0 == 1, and they hash alike: the door refuses a window of (70, True), known or not."""
    tensors = (*cache("cpu"), int32([7, 7], "cpu"), None, None)
    given = [
        (True, (70, 1), 1.0, None, "auto"),
        (True, (70, True), 1.0, None, "auto"),
        (True, (70, 1), 1, None, "auto"),
    ]
    assert len({decode._key(tensors, options) for options in given}) == 3


@pytest.mark.parametrize("seed", range(60))
def test_keys_seen_are_those_that_some_query_sees(seed):
    """As the reference would show them, from both ends."""
    rng = random.Random(seed)
    len_q, len_k = rng.randint(1, 9), rng.randint(1, 30)
    left, right = (rng.choice([None, 0, 3, 8]) for _ in range(2))
    q, k = (torch.zeros(1, 1, n, 16) for n in (len_q, len_k))
    problem = describe(Inputs(q, k, k), causal=False, q_start=rng.choice([None, 0, 5, 25]), window_left=left,
                       window_right=right, scale=1.0, softcap=None)  # fmt: skip
    end = len_k - len_q if problem.features.end_aligned else 0
    lo = problem.diag_lo + end if problem.features.left else None
    hi = problem.diag_hi + end if problem.features.right else None
    seen = int(visible(torch.arange(len_q), torch.arange(len_k), lo, hi).any(0).sum())
    assert problem.keys_seen == seen


@pytest.mark.parametrize(
    ("group", "rows", "keys", "options", "split"),
    [
        (1, 100, 8192, {"causal": True, "q_start": None}, 1024),
        (1, 100, 8192, {"causal": True, "q_start": 0}, 0),
        (1, 100, 8192, {"causal": True, "q_start": 3000}, 1024),
        (1, 100, 8192, {"causal": False, "q_start": None, "window_left": 500, "window_right": 0}, 0),
        (1, 100, 8192, {"causal": False, "q_start": None, "window_left": 4000, "window_right": 0}, 1024),
        (1, 200, 8192, {"causal": True, "q_start": None}, 2048),
        (1, 512, 4095, {"causal": True, "q_start": None}, 0),
        (1, 512, 4096, {"causal": True, "q_start": None}, 2048),
        (1, 513, 8192, {"causal": True, "q_start": None}, 4096),
        (1, 1025, 65536, {"causal": True, "q_start": None}, 0),
        (4, 32, 2048, {"causal": True, "q_start": None}, 512),  # one row tile of a key/value head
        (4, 33, 2048, {"causal": True, "q_start": None}, 1024),
        (4, 32, 2047, {"causal": True, "q_start": None}, 0),
    ],
    ids=str,
)
def test_the_hopper_kernel_splits_keys_that_are_seen(group, rows, keys, options, split):
    sizes = (2 * group, rows), (2, keys)
    q, k = (torch.zeros(1, heads, n, 64, dtype=torch.bfloat16, device="meta") for heads, n in sizes)
    options = {"window_left": None, "window_right": None, "scale": 1.0, "softcap": None} | options
    assert hopper_tile(describe(Inputs(q, k, k), **options)).split == split


@pytest.mark.parametrize(
    ("group", "tokens", "keys", "split"),
    [(4, 1, 15, False), (8, 2, 15, False), (8, 2, 16, True), (17, 1, 2047, False), (4, 16, 2047, False),
     (4, 16, 2048, True), (5, 13, 8192, False)],
)  # fmt: skip
def test_from_how_many_keys_on_few_rows_are_split(group, tokens, keys, split):
    """Rows of a key/value head decide, and a single sequence, so that a batch has its bits."""
    q, k = torch.zeros(1, group, tokens, 128), torch.zeros(1, 1, keys, 128)
    options = {"causal": True, "q_start": None, "window_left": None, "window_right": None, "scale": 1.0}
    problem = describe(Inputs(*(x.bfloat16() for x in (q, k, k))), softcap=None, **options)
    reasons = decode_launch.why_not_attention(problem, H200)
    assert (not reasons) is split, reasons
