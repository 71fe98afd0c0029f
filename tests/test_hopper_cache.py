"""Decoding by the Hopper kernel: more rows than decoding's kernels are for, over a cache or its pages."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

import flashattn_lite as fa
from benchmarks.offline import compiled, usage
from flashattn_lite import decode, decode_backends
from flashattn_lite.kernels import attention_hopper_launch, tuning_parts
from flashattn_lite.testing import DECODE_LAWS, Case, assert_close_to_oracle, check_decode
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import SEED, also
from tests.targets import H200
from tests.test_decode import cache, int32, pages_of
from tests.test_hopper import HALVES, PROBLEMS, hopper, take_parts

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are left to decoding's kernels come to this one, too, and few keys are several parts."""
    take_parts(monkeypatch, True, few_rows=True)
    monkeypatch.setattr(tuning_parts, "fewest_rows", lambda problem: 0)


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("law", DECODE_LAWS, ids=lambda law: law.__name__)
def test_law(law: Any, hopper_device: torch.device) -> None:
    sizes = {"max_batch": 2, "max_heads": 4, "max_len": 600, "max_dim": 256}
    check_decode(hopper(fa.attention_decode), laws=[law], n=PROBLEMS[hopper_device.type], seed=SEED,
                 device=hopper_device, dtypes=HALVES, **sizes)  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "dtype", "group", "options"),
    [
        (128, torch.bfloat16, 4, {}),
        (96, torch.float16, 4, {"window": (400, 0), "softcap": 20.0}),
        (256, torch.bfloat16, 4, {}),
        also(64, torch.float16, 8, {"window": (400, 0)}),
    ],
    ids=str,
)
def test_pages_and_room_do_not_show(dim, dtype, group, options, hopper_device, monkeypatch):
    """Of sequences that have many parts, few, no key; who takes the parts follows from the room for them."""
    on_gpu = hopper_device.type == "cuda"
    lens, rooms = ([6000, 300, 0, 16], (6016, 40_000)) if on_gpu else ([500, 130, 0, 16], (512, 1600))
    if not on_gpu:
        if dim == 256:
            pytest.skip("takes long without a GPU; the laws have such heads")
        take_parts(monkeypatch, True, few_rows=True)
        monkeypatch.setattr(tuning_parts, "FOLDED", 0.8)
    held, results = int32(lens, hopper_device), []
    q, k, v = cache(hopper_device, batch=4, heads=2 * group, heads_kv=2, rows=16, keys=lens[0], dim=dim, dtype=dtype)
    q[:2, :, 3] *= 40  # scores that grow: rows that are done again
    call = functools.partial(fa.attention_decode, **options, return_lse=True, backend="hopper")
    for room, sizes in zip(rooms, ((16, 128), (64,)), strict=True):
        wider = [torch.full((4, 2, room, dim), math.nan, dtype=dtype, device=hopper_device) for _ in (k, v)]
        for x, kept in zip(wider, (k, v), strict=True):
            for b, count in enumerate(lens):
                x[b, :, :count] = kept[b, :, :count]
        results.append(call(q, *wider, held))
        for size in sizes:
            *pages, table = pages_of(*wider, size)
            table[torch.arange(table.shape[1], device=hopper_device) * size >= held[:, None]] = -7
            results.append(call(q, *pages, held, block_table=table))
    for result in results[1:]:
        assert_same_bits(result, results[0], f"of {dim} columns", None)
    assert_close_to_oracle(*results[0], Case(q, k, v, causal=True, kv_lens=held, **options))


@pytest.mark.gpu
@pytest.mark.hopper
def test_lengths_and_tables_change_between_replays():
    """Of a captured graph: a sequence gets longer, others shorter, pages move."""
    q, k, v = cache("cuda", batch=3, heads=8, heads_kv=2, rows=16, keys=4096, dim=128, dtype=torch.bfloat16)
    held, (*pages, table) = int32([4096, 17, 900], "cuda"), pages_of(k, v)
    fa.attention_decode(q, *pages, held, block_table=table, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.attention_decode(q, *pages, held, block_table=table, backend="hopper")
    for lens in ([1, 4096, 0], [3000, 64, 4096], [4096, 4096, 4096]):
        order = torch.randperm(len(pages[0]), device="cuda")
        for x in pages:
            x.copy_(torch.empty_like(x).index_copy_(0, order, x))
        table.copy_(order[table.long()])
        held.copy_(int32(lens, "cuda"))
        graph.replay()
        assert torch.equal(out, fa.attention_decode(q, k, v, held, backend="hopper"))


@pytest.mark.parametrize(
    ("heads", "rows", "dim", "dtype", "chosen"),
    [
        ((32, 8), 16, 128, torch.bfloat16, "hopper"),
        ((32, 8), 5, 256, torch.float16, "hopper"),
        ((32, 1), 1, 128, torch.bfloat16, "hopper"),
        ((32, 8), 4, 128, torch.bfloat16, "triton"),  # 16 rows
        ((32, 8), 16, 64, torch.bfloat16, "triton"),
        ((64, 8), 16, 64, torch.bfloat16, "hopper"),
        ((32, 8), 16, 128, torch.float32, "triton"),
        ((32, 8), 16, 90, torch.float16, "triton"),  # no whole 16-byte pieces
    ],
)
@pytest.mark.parametrize("keys", [64, 8192])
def test_which_kernel_takes_a_cache(heads, rows, dim, dtype, chosen, keys):
    """Neither the batch nor the room decides: a row's bits would tell."""
    q, k = (torch.empty(1, n, size, dim, dtype=dtype) for n, size in zip(heads, (rows, keys), strict=True))
    given = (True, None, None, 1.0, None)
    inputs, problem = decode.problem_of(q, k, k, int32([keys], "cpu"), None, None, *given)
    reasons = {backend.name: backend.why_not(problem, inputs, H200) for backend in decode_backends.BACKENDS}
    assert next(name for name, why in reasons.items() if not why) == chosen


def test_why_not_says_for_how_many_rows_it_is(hopper_device):
    q, k, v = cache(hopper_device, heads=4, rows=8, dim=128, dtype=torch.bfloat16)
    with pytest.raises(fa.BackendError, match=r"of head dims 128 and 128 it is for 17 or more query rows per "):
        fa.attention_decode(q, k, v, int32([300, 20], hopper_device), backend="hopper")


@pytest.mark.skipif(INTERPRETING, reason="the same without TRITON_INTERPRET=1")
@pytest.mark.parametrize(("batch", "heads", "page"), [also(1, 32, 16), (16, 32, 16), also(8, 64, 0)])
def test_registers_hold_what_finds_pages(batch, heads, page):
    """Parts as tasks; two chains that one block takes; chains of dealt row tiles."""
    q = torch.empty(batch, heads, 16, 128, dtype=torch.bfloat16)
    k = torch.empty(batch * 4096 // page, 8, page, 128, dtype=q.dtype) if page else q.new_empty(batch, 8, 4096, 128)
    table = torch.empty(batch, 4096 // page, dtype=torch.int32) if page else None
    inputs, problem = decode.problem_of(q, k, k, int32([0] * batch, "cpu"), table, None, True, None, None, 0.1, None)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    plan = attention_hopper_launch.plan(problem, inputs, out, lse, H200, table=table)
    assert page == plan[2][-1].PAGE
    assert usage(compiled("sm_90", plan)).stack <= 64
