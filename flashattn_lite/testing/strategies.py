"""Hypothesis strategies for attention problems: hypothesis draws a small plan, a seeded generator makes the numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flashattn_lite.testing.case import Case, PackedCase
from flashattn_lite.testing.tensors import (
    LAYOUTS,
    NUMBERS,
    lay_out,
    make_mask,
    make_numbers,
    make_packed_numbers,
    move,
    poison_unseen,
    poison_unseen_packed,
    scales_for,
)

# What a problem may use. "strides": anything but contiguous tensors; "hostile": numbers that break careless softmaxes;
# "poison": NaN and inf in keys that no row sees; "lse", "gradients": what laws may ask for.
OPTIONS = ("gqa", "causal", "q_start", "window", "scale", "softcap", "mask", "sinks", "kv_lens")
FEATURES = frozenset((*OPTIONS, "lse", "gradients", "strides", "hostile", "poison"))
POISONS = (None, math.nan, math.inf)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 0, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 129, 191, 255, 256, 257)
HEAD_DIMS = (16, 1, 2, 3, 8, 15, 17, 32, 33, 64, 65, 80, 96, 127, 128, 192, 256)


def cases(
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
    features: Collection[str] = FEATURES,
    max_batch: int = 3,
    max_heads: int = 4,
    max_len: int = 70,
    max_dim: int = 256,
) -> st.SearchStrategy[Case]:
    """Attention problems of every shape and option, small by default.

    Args:
        device: where the tensors end up; numbers are drawn on the CPU, so they are the same everywhere.
        dtypes: of q, k, v. The first is the simplest, to which examples shrink.
        features: which options may be used, a subset of FEATURES.
        max_batch, max_heads, max_len, max_dim: batch 0 to 3, key heads and group 1 to 4, L and S 0 to 70 and D and Dv
            1 to 256 by default; sizes at which tiles begin and end come up most.

    Example:
        >>> import hypothesis
        >>> @hypothesis.given(cases(max_len=33))
        ... def test_mine(case):
        ...     assert case.k.shape[2] <= 33
    """
    return _cases(torch.device(device), tuple(dtypes), frozenset(features), max_batch, max_heads, max_len, max_dim)


@st.composite
def _cases(
    draw: st.DrawFn,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    features: frozenset[str],
    max_batch: int,
    max_heads: int,
    max_len: int,
    max_dim: int,
) -> Case:
    batch, seed = draw(st.sampled_from([*range(1, max_batch + 1), 0])), draw(st.integers(0, 2**31 - 1))
    heads_kv = draw(st.integers(1, max_heads))
    heads_q = heads_kv * (draw(st.integers(1, max_heads)) if "gqa" in features else 1)
    len_q, len_k, dim, dim_v = (draw(x) for x in (_length(max_len), _length(max_len), _dim(max_dim), _dim(max_dim)))
    dtype = draw(st.sampled_from(dtypes))
    numbers = draw(st.sampled_from(NUMBERS)) if "hostile" in features else "normal"
    options = draw(_options(features, len_q, len_k, numbers))
    mask_plan = draw(_mask_plan()) if "mask" in features and draw(st.booleans()) else None
    layouts = [draw(st.sampled_from(LAYOUTS)) if "strides" in features else LAYOUTS[0] for _ in range(4)]
    shared = draw(st.integers(0, 7)) if "strides" in features else 7  # 0: one cache for the batch, 1: for all heads
    poison = draw(st.sampled_from(POISONS)) if "poison" in features and shared > 1 else None

    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads_q, len_q, dim, generator=rng)
    k, v = (torch.randn(batch, heads_kv, len_k, d, generator=rng) for d in (dim, dim_v))
    q, k, v = (x.to(dtype) for x in make_numbers(numbers, q, k, v, dtype, rng))
    mask = None if mask_plan is None else make_mask(mask_plan, (batch, heads_q, len_q, len_k), dtype, rng)
    options |= _drawn_tensors(options, heads_q, [len_k] * batch, dtype, rng)
    case = Case(q, k, v, **options, mask=mask, seed=seed)
    if poison is not None:
        case = poison_unseen(case, poison)
    if shared <= 1 and batch:
        case = case.map_kv(lambda x: x.narrow(shared, 0, 1).expand_as(x))  # stride 0
    else:
        case = case.replace(k=lay_out(case.k, layouts[1]), v=lay_out(case.v, layouts[2]))
    case = case.replace(q=lay_out(case.q, layouts[0]), mask=None if mask is None else lay_out(mask, layouts[3]))
    return move(case, device).replace(note=_note(numbers, poison))


@st.composite
def packed_cases(
    draw: st.DrawFn,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
    features: Collection[str] = FEATURES,
    max_batch: int = 4,
    max_heads: int = 3,
    max_len: int = 40,
    max_dim: int = 128,
) -> PackedCase:
    """Packed sequences for `attention_varlen`, of lengths 0 to max_len each; arguments as `cases`."""
    batch, seed = draw(st.integers(0, max_batch)), draw(st.integers(0, 2**31 - 1))
    heads_kv = draw(st.integers(1, max_heads))
    heads_q = heads_kv * (draw(st.integers(1, max_heads)) if "gqa" in features else 1)
    lens = [[draw(_length(max_len)) for _ in range(batch)] for _ in range(2)]
    dim, dim_v, dtype = draw(_dim(max_dim)), draw(_dim(max_dim)), draw(st.sampled_from(tuple(dtypes)))
    numbers = draw(st.sampled_from(NUMBERS)) if "hostile" in features else "normal"
    options = draw(_options(frozenset(features), max_len, max_len, numbers))
    layouts = [draw(st.sampled_from(LAYOUTS)) if "strides" in features else LAYOUTS[0] for _ in range(3)]
    poison = draw(st.sampled_from(POISONS)) if "poison" in features else None

    rng = torch.Generator().manual_seed(seed)
    shapes = ((sum(lens[0]), heads_q, dim), (sum(lens[1]), heads_kv, dim), (sum(lens[1]), heads_kv, dim_v))
    q, k, v = (torch.randn(shape, generator=rng) for shape in shapes)
    q, k, v = make_packed_numbers(numbers, q, k, v, dtype, rng)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in lens)
    options |= _drawn_tensors(options, heads_q, lens[1], dtype, rng)
    case = PackedCase(q.to(dtype), k.to(dtype), v.to(dtype), cu_q, cu_k, **options, seed=seed)
    if poison is not None:
        case = poison_unseen_packed(case, poison)
    q, k, v = (lay_out(x, layout) for x, layout in zip((case.q, case.k, case.v), layouts, strict=True))
    return move(case.replace(q=q, k=k, v=v), torch.device(device)).replace(note=_note(numbers, poison))


def _note(numbers: str, poison: float | None) -> str:
    return f"{numbers} numbers" if poison is None else f"{numbers} numbers, unseen keys hold {poison}"


# ---- plans --------------------------------------------------------------------------------------------------------


def _length(longest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([n for n in LENGTHS if n <= longest]), st.integers(0, longest))


def _dim(largest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([n for n in HEAD_DIMS if n <= largest]), st.integers(1, largest))


@st.composite
def _options(draw: st.DrawFn, features: frozenset[str], len_q: int, len_k: int, numbers: str) -> dict[str, Any]:
    """Each option at its default half of the time; sinks and kv_lens as plans, which `_drawn_tensors` fills in."""
    side = st.one_of(st.none(), st.integers(0, max(len_k, 1)))
    values: dict[str, st.SearchStrategy[Any]] = {
        "causal": st.just(True),
        "q_start": st.integers(-len_q - 1, len_k + 1),
        "window": st.tuples(side, side),
        "scale": st.sampled_from(scales_for(numbers, (1.0, 0.3, -0.5, 0.0))),
        "softcap": st.sampled_from((30.0, 5.0, 0.5)),
        "sinks": st.sampled_from((1.0, 20.0)),
        "kv_lens": st.just(True),
    }
    return {name: draw(x) for name, x in values.items() if name in features and draw(st.booleans())}


def _drawn_tensors(
    options: dict[str, Any], heads_q: int, lens_k: list[int], dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Tensor]:
    tensors = {}
    if "sinks" in options:
        tensors["sinks"] = (torch.randn(heads_q, generator=rng) * options["sinks"]).to(dtype)
    if "kv_lens" in options:
        tensors["kv_lens"] = (torch.rand(len(lens_k), generator=rng) * (torch.tensor(lens_k) + 1)).to(torch.int32)
    return tensors


def _mask_plan() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(("bool", "float", "float32")),
            "full": st.tuples(*[st.booleans()] * 4),  # which of (B, Hq, L, S) the mask has; 1 elsewhere
            "drop": st.booleans(),  # leading dimensions of 1
            "seen": st.sampled_from((0.7, 0.1, 0.98, 0.0)),
            "far": st.booleans(),  # a float mask's lowest number, where some users mean -inf
        }
    )
