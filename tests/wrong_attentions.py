"""Attentions with a bug in them that people make, which the testing kit's laws are handed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.reference import attention_reference, repeat_heads, visibility
from flashattn_lite.testing import Case

Change = Callable[[dict[str, Any]], None]


def changed(change: Change, right: Callable[..., Any] = attention_reference) -> Callable[..., Any]:
    """The definition, or another that is right, with its arguments tampered with."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        a = {"q": q, "k": k, "v": v, **options}
        change(a)
        return right(a.pop("q"), a.pop("k"), a.pop("v"), **a)

    return attention


def sketch(bug: str) -> Callable[..., Any]:
    """A naive attention as one writes it in ten lines, with one bug in it."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        names = ("causal", "q_start", "window", "mask", "kv_lens")
        seen = visibility(q, k, **{name: options[name] for name in names if name in options})
        scale, cap, mask = options.get("scale", q.shape[-1] ** -0.5), options.get("softcap"), options.get("mask")
        k, v = (repeat_heads(x, q.shape[1]).float() for x in (k, v))
        bias = 0.0 if mask is None or mask.dtype == torch.bool else mask.float()
        s = q.float() @ k.mT
        s = (s + bias) * scale if bug == "mask before scale" else s * scale
        if cap is not None:
            s = torch.tanh(s / cap) * cap
        if bug != "mask before scale":
            s = s + bias
        s = torch.where(seen, s, -1e9 if bug == "masked is -1e9" else -math.inf)
        m = s.new_zeros((*s.shape[:3], 1)) if not s.shape[-1] or bug == "no maximum" else s.amax(-1, keepdim=True)
        if bug == "maximum of all rows" and s.numel():
            m = s.amax().expand_as(m)
        m = m.masked_fill(m == -math.inf, 0.0)
        p = torch.exp(s - m)
        d = p.sum(-1, keepdim=True)
        if "sinks" in options:
            d = d + torch.exp(options["sinks"].float().view(1, -1, 1, 1) - m)
        out = p @ torch.where(seen.any(-2).unsqueeze(-1), v, 0.0)
        if bug == "not rescaled" and s.shape[-1] > 16:  # the sum of the first tile stays at that tile's maximum
            first = s[..., :16].amax(-1, keepdim=True)
            d = d + torch.where(first > -math.inf, torch.exp(s[..., :16] - first) - p[..., :16], 0.0).sum(
                -1, keepdim=True
            )
        safe = d.masked_fill(d == 0, 1.0)
        return (out / safe).to(q.dtype), (m + torch.log(d)).squeeze(-1)

    return attention


def on(result: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The definition, with its result tampered with."""
    return lambda *args, **options: result(*attention_reference(*args, **options))


def nan_where_nothing_is_seen(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.masked_fill(lse.unsqueeze(-1) == -math.inf, math.nan), lse


def spoiled(result: Callable[..., Any], right: Callable[..., Any] = attention_reference) -> Callable[..., Any]:
    """The same by `result(out, lse, arguments)`, which knows what it was asked."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return result(*right(q, k, v, **options), {"q": q, "k": k, "v": v, **options})

    return attention


def values_leak(out: Tensor, lse: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Every value has the weight 0 at least, which not all numbers stand."""
    return out + 0 * a["v"].sum(), lse


def queries_leak(out: Tensor, lse: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return out + 0 * a["q"].sum(), lse


def other_bits(when: Callable[[Tensor, Tensor], bool], slots: Any = slice(None)) -> Callable[..., Any]:
    """For `spoiled`: a millionth more in these slots of the batch, where q and k are such."""

    def result(out: Tensor, lse: Tensor, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if when(a["q"], a["k"]):
            out[slots] += 1e-6
        return out, lse

    return result


def one_sequence(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] == 1


def one_head(q: Tensor, k: Tensor) -> bool:
    return k.shape[1] == 1


class Tripled(torch.autograd.Function):
    """x itself, whose gradient comes out three times too large."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, grad: 3 * grad)


def not_multiplied_back(a: dict[str, Any]) -> None:
    """tanh(s / c) in place of c tanh(s / c)."""
    if a.get("softcap"):
        a.update(scale=a.get("scale", a["q"].shape[-1] ** -0.5) / a["softcap"], softcap=1.0)


def start(a: dict[str, Any], by: int) -> None:
    default = a["k"].shape[2] - a["q"].shape[2]
    a["q_start"] = (default if a.get("q_start") is None else a["q_start"]) + by


def as_if_contiguous(a: dict[str, Any]) -> None:
    dense = torch.empty(a["k"].shape).stride()
    if a["k"].untyped_storage().nbytes() >= a["k"].nbytes and a["k"].storage_offset() == 0:
        a["k"] = a["k"].as_strided(a["k"].shape, dense)


def window_right_off_by_one(a: dict[str, Any]) -> None:
    if a.get("window") and a["window"][1] is not None:
        a["window"] = (a["window"][0], a["window"][1] + 1)


def whole_tiles(a: dict[str, Any]) -> None:
    keep = max(a["k"].shape[2] // 16 * 16, min(16, a["k"].shape[2]))
    hidden = torch.arange(a["k"].shape[2]) >= keep
    a["mask"] = Case(a["q"], a["k"], a["v"], mask=a.get("mask")).hide(hidden).mask


def first_mask(a: dict[str, Any]) -> None:
    if a.get("mask") is not None and a["mask"].dim() == 4:
        a["mask"] = a["mask"][:1]


def lengths_as_they_come(a: dict[str, Any]) -> None:
    """Below 0 they hide nothing."""
    if a.get("kv_lens") is not None:
        a["kv_lens"] = a["kv_lens"].long().abs().clamp(max=2**31 - 1).int()


def longest_for_shortest(far: int) -> Change:
    """All lengths the other way round, where one of them is `far`."""

    def change(a: dict[str, Any]) -> None:
        if a.get("kv_lens") is not None and far in a["kv_lens"].tolist():
            a["kv_lens"] = a["k"].shape[2] - a["kv_lens"].clamp(0, a["k"].shape[2])

    return change


def last_length_ignored(a: dict[str, Any]) -> None:
    if a.get("kv_lens") is not None and len(a["kv_lens"]) > 1:
        a["kv_lens"] = torch.cat([a["kv_lens"][:-1], a["kv_lens"].new_full((1,), a["k"].shape[2])])


def a_start_of_few_bits(a: dict[str, Any]) -> None:
    if abs(a.get("q_start") or 0) > 2**20:
        a["q_start"] = 0


def sinks_that_are_numbers(a: dict[str, Any]) -> None:
    if a.get("sinks") is not None:
        a["sinks"] = a["sinks"].nan_to_num(neginf=0.0)


def heads_interleaved(a: dict[str, Any]) -> None:
    heads = a["q"].shape[1]
    for name in ("k", "v"):
        a[name] = a[name].repeat(1, heads // a[name].shape[1], 1, 1)
