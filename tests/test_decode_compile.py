"""The decoding kernels compile without a GPU, for every GPU family that we name, in pipelines and without spills."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from benchmarks.mistakes import mistakes  # noqa: E402
from benchmarks.offline import GPUS, compiled, usage  # noqa: E402
from flashattn_lite import decode  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels import decode_launch  # noqa: E402
from flashattn_lite.kernels.decode_splits import DecodeTile  # noqa: E402
from flashattn_lite.kernels.tuning import power_of_two  # noqa: E402
from flashattn_lite.problem import Inputs  # noqa: E402
from tests.exhaustive import also, quick  # noqa: E402

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Bytes of stack a thread, where not 0: what a chain's state waits in while a split is read, and cases with 255
# registers for two passes, of which the second is the rare careful one.
STACK_LIMIT = {
    "one token, long, apart": 8,  # of a merge, by Triton 3.9
    "one token, alone with a pair of chains": 16,  # by Triton 3.9 alone
    "paged, alone with a pair of chains": 16,  # the same
    "16 tokens": 96,
    "16 tokens, long": 96,
    "16 tokens, alone": 96,
    "4 tokens, few keys, alone": 32,
    "wide, few keys, alone": 8,
    "32 rows": 128,
    "everything": 32,  # by Triton 3.8 alone
    "wide": 16,
    "wide, 64 rows": 272,
    "float32": 8,
    "bias, one token": 64,
}
PROGRAMS = {
    "one token": 4,
    "one token, alone": 4,
    "one token, a pair of chains": 4,
    "one token, alone with a pair of chains": 4,
    "one token, splits apart": 4,
    "one token, long, apart": 4,
    "bias, one token": 4,
    "padding": 4,
    "packed, one token": 4,
    "paged": 4,
    "paged, alone with a pair of chains": 4,
    "4 tokens": 3,
    "paged, 4 tokens": 3,
    "wide, 64 rows": 1,
    "wide, few keys, alone": 1,
}  # of partial_kernel on an H200's multiprocessor, if not 2
# The others on sm_90 alone.
EVERYWHERE = ("one token", "one token, a pair of chains", "paged, few keys, alone", "everything", "wide")
# Each way through the kernels once. The long one is also compiled below, where lengths do not recompile.
QUICK = ("one token", "one token, a pair of chains", "one token, long, apart", "paged, alone with a pair of chains",
         "everything", "wide, 64 rows", "padding", "packed, few keys, alone")  # fmt: skip
# name: (query heads of 2 key heads, tokens, head dim, head dim of v, dtype, options)
CASES = {
    "one token": (8, 1, 128, 128, BF16, {"multiprocessors": 9}),
    "one token, alone": (8, 1, 128, 128, BF16, {"keys": 128}),
    "one token, a pair of chains": (8, 1, 128, 128, BF16, {"keys": 65536}),  # with room for more than FEW splits
    "one token, alone with a pair of chains": (8, 1, 128, 128, BF16, {"keys": 1024}),
    "one token, splits apart": (8, 1, 128, 128, BF16, {"keys": 512, "multiprocessors": 3}),
    "one token, long, apart": (8, 1, 128, 128, BF16, {"keys": 65536, "multiprocessors": 132}),
    "paged": (8, 1, 128, 128, BF16, {"paged": True}),
    "paged, alone with a pair of chains": (8, 1, 128, 128, BF16, {"paged": True, "keys": 1024}),
    "paged, 4 tokens": (8, 4, 128, 128, BF16, {"paged": True}),
    "4 tokens": (8, 4, 128, 128, BF16, {}),
    "16 tokens": (8, 16, 128, 128, BF16, {}),
    "16 tokens, alone": (8, 16, 128, 128, BF16, {"keys": 256}),
    "16 tokens, long": (8, 16, 128, 128, BF16, {"keys": 65536, "multiprocessors": 132}),
    "32 rows": (16, 4, 128, 128, BF16, {}),
    "16 tokens, paged": (8, 16, 64, 64, FP16, {"paged": True}),
    "few keys, alone": (8, 1, 128, 128, BF16, {"window": (300, None)}),
    "paged, few keys, alone": (8, 1, 128, 128, BF16, {"paged": True, "window": (300, None)}),
    "4 tokens, few keys, alone": (8, 4, 128, 128, BF16, {"window": (300, None)}),
    "wide, few keys, alone": (8, 4, 256, 256, BF16, {"window": (300, None)}),
    "everything": (8, 5, 80, 40, BF16, {"window": (1500, 3), "softcap": 30.0, "sinks": True, "paged": True}),
    "wide": (8, 4, 256, 256, FP16, {"window": (1500, None)}),
    "wide, 64 rows": (8, 16, 256, 256, FP16, {}),
    "unaligned": (8, 16, 33, 7, FP16, {}),
    "float32": (4, 2, 128, 128, FP32, {}),
    "padding": (8, 1, 128, 128, BF16, {"mask": "padding", "multiprocessors": 9}),
    "bias": (8, 4, 128, 128, BF16, {"mask": "bias"}),
    "bias, one token": (8, 1, 128, 128, BF16, {"keys": 512, "mask": "bias", "multiprocessors": 3}),
    "packed, one token": (8, 1, 128, 128, BF16, {"packed": True, "multiprocessors": 9}),
    "packed, 4 tokens": (8, 4, 128, 128, BF16, {"packed": True, "sinks": True, "window": (1500, None)}),
    "packed, few keys, alone": (8, 4, 128, 128, BF16, {"packed": True, "window": (300, None)}),
}


def packed(q: torch.Tensor) -> torch.Tensor:
    """(total, heads, dim) of as many sequences of one length."""
    return q.transpose(1, 2).flatten(0, 1)


def plans(gpu: str, heads: int, tokens: int, dim: int, dim_v: int, dtype: torch.dtype, options: dict) -> tuple:
    options = dict(options)
    batch, paged, keys = 2, options.pop("paged", False), options.pop("keys", 2048)
    in_one = options.pop("packed", False)
    target = replace(GPUS[gpu][1], multiprocessors=options.pop("multiprocessors", 1))
    q = torch.empty(batch, heads, tokens, dim, dtype=dtype)
    k, v = (torch.empty(5 if paged else batch, 2, 16 if paged else keys, d, dtype=dtype) for d in (dim, dim_v))
    shape = {"padding": (batch, 1, 1, keys), "bias": (1, heads, tokens, keys)}.get(options.pop("mask", ""))
    mask = None if shape is None else torch.zeros(shape, dtype=torch.bool if shape[1] == 1 else dtype)
    table = torch.zeros(batch, keys // 16, dtype=torch.int32) if paged else None
    sinks = torch.zeros(heads) if options.pop("sinks", False) else None
    left, right = options.pop("window", (None, None))
    lens = torch.tensor([512, 100], dtype=torch.int32)
    numbers = (True, left, right, 1 / math.sqrt(dim), options.pop("softcap", None))
    inputs, problem = decode.problem_of(q, k, v, lens, table, sinks, *numbers)
    if mask is not None:
        inputs = inputs._replace(mask=mask)
        problem = replace(problem, features=replace(problem.features, mask="bool" if shape[1] == 1 else "float"))
    out, lse = torch.empty(batch, heads, tokens, dim_v, dtype=dtype), torch.empty(batch, heads, tokens)
    if in_one:
        (q, k, v, out), cu = map(packed, (q, k, v, out)), [torch.tensor([0, n, 2 * n]).int() for n in (tokens, keys)]
        inputs = Inputs(q, k, v, None, sinks, None, *cu)
        features = replace(problem.features, kv_lens=False, varlen=True)
        problem, lse = replace(problem, features=features, promised_q=tokens), torch.empty(heads, batch * tokens)
    return decode_launch.plan(problem, inputs, out, lse, target, table=table)


def tile_of(launches: tuple) -> DecodeTile:
    """Of the first of these launches."""
    return next(x for x in launches[0][2] if isinstance(x, DecodeTile))


@pytest.mark.parametrize(
    ("gpu", "case"),
    quick(
        [(gpu, case) for gpu in GPUS for case in CASES if gpu == "sm_90" or case in EVERYWHERE],
        [(gpu, case) for gpu in GPUS for case in (QUICK if gpu == "sm_90" else ("one token", "everything"))],
    ),
)
def test_decode_compiles(gpu, case):
    launches = plans(gpu, *CASES[case])
    assert tile_of(launches).OWNS_PAIR is ("pair" in case)
    assert tile_of(launches).SEPARATE is ("apart" in case)
    assert tile_of(launches).ALONE is ("alone" in case)
    merged = [] if "alone" in case else [("merge_kernel", 16)]
    uncovered = [("uncovered_kernel", 4)] if "packed" in case else []
    expected = [("partial_kernel", PROGRAMS.get(case, 2)), *merged, *uncovered]
    for plan, (name, programs) in zip(launches, expected, strict=True):
        kernel = compiled(gpu, plan)
        assert kernel.metadata.shared <= SHARED[gpu]
        code = kernel.asm["amdgcn" if gpu == "gfx942" else "ptx"]
        assert name in code
        waits = gpu in ("sm_90", "sm_100") and len(launches) > 1
        assert ("griddepcontrol" in code) == waits
        if gpu == "sm_90":
            assert usage(kernel).stack <= STACK_LIMIT.get(case, 0)
            assert usage(kernel).blocks(gpu) >= programs  # by which a launch is taken to fill the GPU
            assert "wgmma" not in code or not mistakes(kernel)
            if name == "partial_kernel" and case not in ("unaligned", "float32"):
                assert_keys_and_values_are_copied_ahead(kernel)


def assert_keys_and_values_are_copied_ahead(kernel):
    """By 16 bytes at a time straight to shared memory, and never a plain load of K or V in their stead."""
    ptx = kernel.asm["ptx"]
    assert len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)) >= 16
    waits = [int(pending) for pending in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    assert max(waits) >= 2  # a tile's K and V stay under way while the one before is computed


# (OWNS_PAIR, SEPARATE, ALONE, TELLS) of what follows.
PARTIALS = {
    1: {(False, False, False, True), (True, False, False, True), (False, True, False, True),
        (False, False, True, False), (True, False, False, False)},
    16: {(False, False, False, True), (False, False, True, False), (False, False, False, False)},
}  # fmt: skip
# (splits of a state, splits that a merge looks at, the same of sequences with more than FEW), of what follows.
MERGES = {
    1: {(1, 16, 1, 0), (1, 32, 1, 0), (8, 32, 8, 0), (1, 32, 1, 128)},
    16: {(1, 16, 1, 0), (4, 16, 4, 0), (1, 16, 4, 128)},
}


@pytest.mark.parametrize("tokens", [1, also(16)])
def test_lengths_and_batch_do_not_recompile(tokens):
    """The same kernels serve all batches and capacities, but for one more where a program owns a pair of chains.

    And one where it has two splits that stay apart (test_decode_chains.py has when), one where nothing is left to
    merge, and one where programs are so many that they do not say that the merge may come. Merges differ by who folds
    chains, and by how many splits there may be, in powers of two.
    """
    partials: dict[tuple[bool, ...], set[str]] = {}
    merges: dict[tuple[int, ...], set[str]] = {}
    for batch, capacity in ((1, 100), (2, 70), (1, 5000), (1, 2000), (64, 8192), (60, 8000), (2, 2**20), (3, 2**20),
                            (3000, 4096), (3500, 4096)):  # fmt: skip
        q = torch.empty(batch, 8, tokens, 128, dtype=BF16, device="meta")
        k = torch.empty(batch, 2, capacity, 128, dtype=BF16, device="meta")
        lens = torch.empty(batch, dtype=torch.int32, device="meta")
        inputs, problem = decode.problem_of(q, k, k, lens, None, None, True, None, None, 0.1, None)
        out, lse = torch.empty_like(q), torch.empty(batch, 8, tokens, device="meta")
        target = replace(GPUS["sm_90"][1], multiprocessors=132)
        launches = decode_launch.plan(problem, inputs, out, lse, target)
        partial, *merge = (compiled("sm_90", plan).hash for plan in launches)
        tile = tile_of(launches)
        tells = launches[0][2][-3]
        partials.setdefault((tile.OWNS_PAIR, tile.SEPARATE, tile.ALONE, tells), set()).add(partial)
        if merge:
            merges.setdefault(launches[1][2][-8:-4], set()).update(merge)
    assert set(partials) == PARTIALS[tokens]
    assert set(merges) == MERGES[tokens]
    assert all(len(same) == 1 for same in (*partials.values(), *merges.values()))


@pytest.mark.parametrize(
    ("tokens", "keys", "window", "splits"),
    [(1, 1, None, 1), (1, 2048, None, 16), (1, 2049, None, 17), (1, 4096, None, 32), (1, 16384, None, 32),
     (1, 16385, None, 33), (1, 65536, None, 128), (1, 2**20, None, 128), (1, 2**20, 1000, 9),
     (16, 1, None, 1), (16, 2048, None, 8), (16, 4096, None, 16), (16, 8192, None, 16), (16, 8193, None, 17),
     (16, 2**16, None, 128), (16, 2**20, None, 128), (16, 2**20, 1000, 5)],
)  # fmt: skip
def test_room_for_the_splits_of_a_full_cache(tokens, keys, window, splits):
    """As `splits_of` counts them, wherever in a tile the first key lies.

    One token: 128 keys, from 4k on a 32nd of all, from 16k on 512, more from 64k on. Several: 256 keys, from 4k on a
    sixteenth, from 8k on 512, more from 64k on.
    """
    q = torch.empty(1, 8, tokens, 128, dtype=BF16, device="meta")
    k = torch.empty(1, 2, keys, 128, dtype=BF16, device="meta")
    lens = torch.empty(1, dtype=torch.int32, device="meta")
    inputs, problem = decode.problem_of(q, k, k, lens, None, None, True, window, None, 0.1, None)
    target = GPUS["sm_90"][1]
    tile = decode_launch.tile_of(problem, inputs, target, decode_launch.config_of(problem, inputs, target), 0)
    room = decode_launch.most_splits(problem, tile)
    assert room == splits
    seen = keys if window is None else window + tokens
    merged = replace(tile, LANES=power_of_two(room))  # room for no more splits than there can be changes none
    some = (n for n in [*range(1, 20000, 61), *range(20000, 200000, 617)] if n <= keys)
    for length in {seen, keys, *some, keys - 1, keys - 31} - {0}:
        lo = max(0, length - seen)
        tiles = -(-length // tile.BLOCK_N) - lo // tile.BLOCK_N
        assert -(-tiles // tiles_each(tiles, tile)) <= room
        assert tiles_each(tiles, merged) == tiles_each(tiles, tile)


def tiles_each(tiles: int, tile: DecodeTile) -> int:
    """Of a split, as `splits_of` counts them."""
    each = min(-(-tiles // tile.FEW), tile.LONG // tile.BLOCK_N)
    return max(each, tile.SPLIT // tile.BLOCK_N, -(-tiles // tile.LANES))
