"""The Hopper kernel on packed sequences: whole groups of rows and parts of them, and tiles that do not last long."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite.reference import attention_reference
from flashattn_lite.testing.results import assert_same_bits
from tests.exhaustive import one_in

LENGTHS = {  # one long among many short and empty ones
    "cpu": [64, 0, 1, 200, 63, 0, 0, 3, 17, 65],
    "cuda": [64, 0, 1, 700, 63, 65, 128, 0, 0, 3, 320, *[17] * 40, 192],
}
SEEN = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 20)}}
HEADS = [(4, 4, 64), (6, 2, 128), (2, 1, 256), (5, 1, 96)]  # of q, of k and v; the head dim
OPTIONS = {"max_seqlen_q": 700, "max_seqlen_k": 700, "backend": "hopper", "return_lse": True}
REPEATS = {"cpu": (1, 5), "cuda": (50, 20)}  # times so many launches behind one another


def packed(heads, heads_kv, dim, device):
    """(q, k, v, cu_seqlens)"""
    lengths = LENGTHS[device.type]
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda count: torch.randn(sum(lengths), count, dim, device=device, generator=generator).bfloat16()
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return draw(heads), draw(heads_kv), draw(heads_kv), cu


@pytest.mark.parametrize(("sizes", "seen"), one_in(2, HEADS, SEEN), ids=str)
def test_sequences_of_every_length(sizes, seen, hopper_device):
    options, (q, k, v, cu) = SEEN[seen], packed(*sizes, hopper_device)
    v[cu[4] - 30, 0, 5] = math.inf  # rows of the long one that see it are done again
    out, lse = fa.attention_varlen(q, k, v, cu, cu, **options, **OPTIONS)
    for begin, end in itertools.pairwise(cu.tolist()):
        if begin < end:
            one = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
            expected, exact = attention_reference(*(x.double() for x in one), return_lse=True, **options)
            # bfloat16 rounds out and P by half an ulp each, of numbers up to 4
            torch.testing.assert_close(out[begin:end].transpose(0, 1)[None].double(), expected, atol=2**-6, rtol=2**-7)
            # lse: a sum of up to 700 float32, some tens of eps
            torch.testing.assert_close(lse[None, :, begin:end].double(), exact, atol=1e-5, rtol=1e-6)


def test_short_tiles_repeat_to_the_bit(hopper_device):
    """Tiles of one or two key tiles, Q in registers: the next Q lands while this one has only just been read."""
    q, k, v, cu = packed(6, 2, 128, hopper_device)
    first = fa.attention_varlen(q, k, v, cu, cu, window=(100, 20), **OPTIONS)
    times, launches = REPEATS[hopper_device.type]
    for _ in range(times):
        for again in [fa.attention_varlen(q, k, v, cu, cu, window=(100, 20), **OPTIONS) for _ in range(launches)]:
            assert_same_bits(again, first, "a repeat", None)


@pytest.mark.parametrize("promised", [100, None])
def test_a_sequence_has_its_bits_beside_a_longer_one(promised, hopper_device):
    """Alone it could pack query heads of a K/V head into its row tile, with the longer one it could not."""
    generator = torch.Generator(hopper_device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, 128, device=hopper_device, generator=generator).bfloat16()
    q, k, v = draw(160, 8), draw(600, 2), draw(600, 2)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=hopper_device) for x in ([0, 60, 160], [0, 300, 600]))
    options = {"causal": True, "max_seqlen_q": promised, "max_seqlen_k": 300, "backend": "hopper", "return_lse": True}
    among = fa.attention_varlen(q, k, v, cu_q, cu_k, **options)
    alone = fa.attention_varlen(q[:60], k[:300], v[:300], cu_q[:2], cu_k[:2], **options)
    assert_same_bits(alone, (among[0][:60], among[1][:, :60]), "alone", None)
