"""Every law over random problems, asked of flashattn_lite.attention: the CPU path, Triton's interpreter, the GPU."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import pytest
import torch

import flashattn_lite
from flashattn_lite.testing import ALL_LAWS, PACKED_LAWS, Case, check, check_packed, matches_oracle
from flashattn_lite.testing.locality import batch_slot_is_irrelevant, head_slot_is_irrelevant
from flashattn_lite.testing.tensors import move
from tests.exhaustive import SEED, problems

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter takes about a millisecond for each tile and operation, so it gets small problems.
SIZES: dict[str, Any] = (
    {"max_batch": 2, "max_heads": 2, "max_len": 33, "max_dim": 33}
    if INTERPRETING
    else {"max_batch": 3, "max_heads": 2, "max_len": 70, "max_dim": 256}
)
PROBLEMS = problems(cpu=10, cuda=2, interpreted=3)
# The interpreter computes in numpy, which warns of the NaN that some problems hold on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
NAMED = pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.__name__)


def backends(device: torch.device) -> list[str]:
    """All that run there."""
    x = torch.zeros(1, 1, 1, 16, device=device)
    return [name for name, against in flashattn_lite.explain(x, x, x).reasons.items() if not against]


@NAMED
def test_law(law: Any, device: torch.device) -> None:
    check(flashattn_lite.attention, laws=[law], n=PROBLEMS[device.type], seed=SEED, device=device, **SIZES)


@pytest.mark.parametrize("law", PACKED_LAWS, ids=lambda law: law.__name__)
def test_packed_law(law: Any, device: torch.device) -> None:
    sizes = {"max_batch": 2, "max_heads": 1, "max_len": 17, "max_dim": 17} if INTERPRETING else {}
    check_packed(
        flashattn_lite.attention_varlen, laws=[law], n=PROBLEMS[device.type], seed=SEED, device=device, **sizes
    )


@NAMED
def test_float64_on_the_tiled_path(law: Any, device: torch.device) -> None:
    if device.type == "cuda" and law in (batch_slot_is_irrelevant, head_slot_is_irrelevant):
        pytest.skip("torch.bmm picks its kernel by the number of slots there, as tiled.py says")
    attention = functools.partial(flashattn_lite.attention, backend="tiled")
    check(attention, laws=[law], n=PROBLEMS[device.type], seed=SEED, device=device, dtypes=[torch.float64], **SIZES)


@pytest.mark.parametrize("length", [129, 257] if INTERPRETING else [127, 128, 129, 257])
def test_lengths_around_large_tiles(length: int, device: torch.device) -> None:
    """Longer than what hypothesis draws, in each backend that runs here."""
    generator = torch.Generator().manual_seed(length)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)
    for backend in backends(device):
        attention = functools.partial(flashattn_lite.attention, backend=backend)
        for options in ({}, {"causal": True}, {"window": (33, 2)}):
            q, k, v = draw(1, 2, 33 if INTERPRETING else length, 16), draw(1, 1, length, 16), draw(1, 1, length, 16)
            matches_oracle(attention, Case(q, k, v, **options, note=f"{backend}, {length} keys"))


@NAMED
def test_infinities_past_kv_lens(law: Any, device: torch.device) -> None:
    """A row that saw them would have scores of -inf and an out of NaN: no law may let it see them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).half() for n in (3, 5, 5))
    q[:, :, 0] = -1
    lens = torch.tensor([0], dtype=torch.int32)
    for length in (1, 0):
        k[:, :, length:], v[:, :, length:] = math.inf, math.inf
        for backend in backends(device):
            attention = functools.partial(flashattn_lite.attention, backend=backend)
            law(attention, move(Case(q, k, v, kv_lens=lens + length, note=backend), device))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "seed"), [*(("triton", seed) for seed in range(1, 6)), ("auto", 6), ("auto", 7)])
@NAMED
def test_law_at_gpu_sizes(law: Any, backend: str, seed: int) -> None:
    """More problems, each a kernel to compile, in parts that workers can share; lengths of several tiles.

    By "auto" also which kernel is chosen must not show in the bits. The Hopper kernel alone has its own file.
    """
    sizes = {"max_batch": 2, "max_heads": 4, "max_len": 257, "max_dim": 256}
    attention = functools.partial(flashattn_lite.attention, backend=backend)
    check(attention, laws=[law], n=PROBLEMS["cuda"], seed=seed, device="cuda", **sizes)
