"""Tensors for attention problems: hostile numbers, masks of every shape, strides of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.testing.case import Case, PackedCase, memory_of, tensors_of

LAYOUTS = (
    "contiguous",
    "rows before heads",
    "slice of a longer tensor",
    "padded rows",
    "every other element",
    "padded entries",  # of the first dimension
)
HIDDEN = "scores below float32"
NUMBERS = ("normal", "large logits", "extreme", "subnormal", "constant rows", "one outlier", "one NaN query", HIDDEN)


def make_numbers(
    kind: str, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v turned hostile. Values stay below 65504: un-normalised sums must fit in float32."""
    if kind == "large logits":
        return q * 30, k * 10, v
    if kind == "extreme":
        q, k, v = (torch.where(torch.rand(x.shape, generator=rng) < 0.02, x.sign() * 65504, x) for x in (q, k, v))
    if kind == "subnormal":
        return q, k * torch.finfo(dtype).tiny, v * torch.finfo(dtype).tiny / 4
    if kind == "constant rows":
        return q[..., :1].expand_as(q), k[..., :1].expand_as(k), v
    if kind == "one outlier" and k.numel():
        k[:, :, int(torch.randint(0, k.shape[2], (), generator=rng))] *= 100
    if kind == "one NaN query" and q.numel():
        q[:, -1, int(torch.randint(0, q.shape[2], (), generator=rng)), 0] = math.nan
    if kind == HIDDEN and k.numel():
        # A run of keys whose products float32 takes for -inf, as far as the dtype has such numbers.
        far = min(1e20, torch.finfo(dtype).max)
        first, last = sorted(torch.randint(0, k.shape[2] + 1, (2,), generator=rng).tolist())
        q[..., 0], k[..., 0], k[:, :, first:last, 0] = far, 0, -far
    return q, k, v


def scales_for(kind: str, scales: Sequence[float]) -> Sequence[float]:
    """Those that numbers of a kind are for: another sign of the scale would make what is hidden infinite."""
    return [scale for scale in scales if kind != HIDDEN or scale > 0]


def make_packed_numbers(
    kind: str, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`make_numbers` of packed sequences [total, H, D]: an outlier is one key of all heads, of one sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    q, k, v = (x[0].transpose(0, 1) for x in make_numbers(kind, q, k, v, dtype, rng))
    return q, k, v


def make_mask(plan: dict[str, Any], full: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """A mask broadcastable to `full`; of its rows about one in eight sees nothing."""
    shape = [size if kept else 1 for size, kept in zip(full, plan["full"], strict=True)]
    while plan["drop"] and shape and shape[0] == 1:
        shape.pop(0)
    seen = torch.rand(shape, generator=rng) < plan["seen"]
    if shape:
        seen &= torch.rand((*shape[:-1], 1), generator=rng) > 1 / 8
    if plan["kind"] == "bool":
        return seen
    float_dtype = torch.float32 if plan["kind"] == "float32" else dtype
    bias = (2 * torch.randn(shape, generator=rng)).to(float_dtype)
    if plan["far"]:
        bias = bias.masked_fill(torch.rand(shape, generator=rng) < 0.2, torch.finfo(float_dtype).min)
    return bias.masked_fill(~seen, -math.inf)


def poison_unseen(case: Case, value: float) -> Case:
    """Keys that no row sees, in any head that shares them, hold `value`."""
    batch, heads_kv, len_k = case.k.shape[:3]
    if not case.q.shape[2]:
        return case
    unseen = ~case.visible().any(2).view(batch, heads_kv, case.group, len_k).any(2)
    return case.map_kv(lambda x: x.masked_fill(unseen.unsqueeze(-1), value))


def poison_unseen_packed(case: PackedCase, value: float) -> PackedCase:
    """`poison_unseen` of each packed sequence."""
    k, v = case.k.clone(), case.v.clone()
    for b, (_, keys) in enumerate(case.sequences()):
        own = poison_unseen(case.dense(b), value)
        k[keys], v[keys] = own.k[0].transpose(0, 1), own.v[0].transpose(0, 1)
    return case.replace(k=k, v=v)


# ---- memory -------------------------------------------------------------------------------------------------------


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides. Memory between them holds NaN (in bool masks True): a stray read shows."""
    if layout == "rows before heads" and x.dim() >= 3:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "padded entries" and x.dim() >= 2:
        return lay_out(x.reshape(x.shape[0], math.prod(x.shape[1:])), "padded rows").unflatten(1, x.shape[1:])
    grow, take = [0, 0], [slice(None), slice(None)]
    if layout == "slice of a longer tensor" and x.dim() >= 2:
        grow, take = [3, 0], [slice(1, x.shape[-2] + 1), slice(None)]
    elif layout == "padded rows" and x.dim() >= 2:
        grow, take = [0, 5], [slice(None), slice(0, x.shape[-1])]
    elif layout == "every other element" and x.dim() >= 2:
        grow, take = [0, x.shape[-1]], [slice(None), slice(0, None, 2)]
    if grow == [0, 0]:
        return x.contiguous()
    shape = (*x.shape[:-2], x.shape[-2] + grow[0], x.shape[-1] + grow[1])
    room = torch.full(shape, True if x.dtype == torch.bool else math.nan, dtype=x.dtype, device=x.device)
    view = room[..., take[0], take[1]]
    view.copy_(x)
    return view


def move(case: Any, device: torch.device) -> Any:
    """To the device with all strides kept, which `Tensor.to` does not promise for tensors with gaps."""
    if device.type == "cpu":
        return case
    return case.replace(**{name: _move(x, device) for name, x in tensors_of(case).items()})


def _move(x: Tensor, device: torch.device) -> Tensor:
    return memory_of(x, x.dtype).to(device).as_strided(x.shape, x.stride(), x.storage_offset())
