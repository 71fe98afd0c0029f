"""One attention call as a value: the tensors and options that strategies draw, laws change, and oracles answer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from flashattn_lite.errors import show
from flashattn_lite.problem import Window
from flashattn_lite.reference import visibility

Attention = Callable[..., Any]  # the signature of flashattn_lite.attention, or the part of it that is tested
Result = tuple[Tensor, Any]  # (out, lse); lse is None where an attention has none to give

TENSORS = ("q", "k", "v")
OPTIONS = ("causal", "q_start", "window", "scale", "softcap", "mask", "sinks", "kv_lens")

Law = Callable[[Attention, Any], None]  # of a Case or a PackedCase


def tensors_of(case: Any) -> dict[str, Tensor]:
    return {name: x for name, x in vars(case).items() if isinstance(x, Tensor)}


def memory_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """All that x is a view of, one after the other, as numbers of a dtype: what lies in gaps and past its end too."""
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage())


def contiguous_copies(case: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """These tensors of a case, contiguous and at addresses of their own.

    Copies, always: `Tensor.contiguous` leaves the strides of dimensions of one entry as they are, and those may decide
    whether a kernel can copy rows 16 bytes at a time.
    """
    given = {name: getattr(case, name) for name in names}
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in given.items() if x is not None}


def needs(*features: str) -> Callable[[Law], Law]:
    """Marks a law with the features that it uses, besides those of its case."""

    def mark(law: Law) -> Law:
        law.needs = frozenset(features)  # type: ignore[attr-defined]
        return law

    return mark


class AnyCase:
    """What a dense and a packed case share."""

    seed: int

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults: an attention needs to know only those."""
        values = {name: getattr(self, name, None) for name in OPTIONS}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def generator(self) -> torch.Generator:
        """What a law draws with; on the CPU, so that every device sees the same numbers."""
        return torch.Generator().manual_seed(self.seed)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis prints a failing case with it


@dataclass(frozen=True, eq=False, repr=False)
class Case(AnyCase):
    """The arguments of one call of `attention`, as there. `seed` feeds what a law draws by itself."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    q_start: int | None = None
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    seed: int = 0
    note: str = ""  # how the numbers and strides were made

    def map_kv(self, change: Callable[[Tensor], Tensor]) -> Case:
        """The same change made to k and v."""
        return self.replace(k=change(self.k), v=change(self.v))

    def visible(self) -> Tensor:
        """(B, Hq, L, S) bool."""
        seeing = {name: getattr(self, name) for name in ("causal", "q_start", "window", "mask", "kv_lens")}
        return visibility(self.q, self.k, **seeing)

    @property
    def factor(self) -> float:
        """The scale, default filled in."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    def sequence(self, b: int) -> Case:
        """Sequence b of the batch, alone; views, so strides stay."""
        one = slice(b, b + 1)
        mask, kv_lens = self.mask, self.kv_lens
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[one]
        kv_lens = None if kv_lens is None else kv_lens[one]
        return self.replace(q=self.q[one], k=self.k[one], v=self.v[one], mask=mask, kv_lens=kv_lens)

    def head(self, h: int) -> Case:
        """Key/value head h with its query heads, alone; views."""
        heads = slice(h * self.group, (h + 1) * self.group)
        mask = self.mask
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = mask[..., heads, :, :]
        sinks = None if self.sinks is None else self.sinks[heads]
        one = self.map_kv(lambda x: x[:, h : h + 1])
        return one.replace(q=self.q[:, heads], mask=mask, sinks=sinks)

    def keys(self, index: Any) -> Case:
        """The keys of an index or slice; what else depends on their positions is the caller's."""
        mask = self.mask
        if mask is not None and mask.dim() and mask.shape[-1] > 1:
            mask = mask[..., index]
        return self.map_kv(lambda x: x[:, :, index]).replace(mask=mask)

    def hide(self, hidden: Tensor) -> Case:
        """More keys hidden: `hidden` is bool, broadcastable to (B, Hq, L, S)."""
        if self.mask is None:
            return self.replace(mask=~hidden)
        if self.mask.dtype == torch.bool:
            return self.replace(mask=self.mask & ~hidden)
        return self.replace(mask=torch.where(hidden, -math.inf, self.mask))

    def float_mask(self) -> Tensor:
        """The mask as a float one, at least float32."""
        if self.mask is None:
            return torch.zeros(1, 1, dtype=torch.float32, device=self.q.device)
        if self.mask.dtype == torch.bool:
            return torch.zeros_like(self.mask, dtype=torch.float32).masked_fill(~self.mask, -math.inf)
        return self.mask.to(torch.promote_types(self.mask.dtype, torch.float32))

    def as_mask(self) -> Case:
        """The same visibility said by a mask of full shape alone."""
        hidden = ~self.visible()
        return self.hide(hidden).replace(causal=False, window=None, q_start=None, kv_lens=None)

    def contiguous(self) -> Case:
        return self.replace(**contiguous_copies(self, (*TENSORS, "mask")))

    def integer(self, low: int, high: int, salt: int = 0) -> int:
        """An integer of [low, high], the same for the same seed and salt."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * (salt + 1))
        return int(torch.randint(low, high + 1, (), generator=generator))

    def __repr__(self) -> str:
        parts = [f"{name}={_show(getattr(self, name))}" for name in TENSORS]
        parts += [f"{name}={_show(value)}" for name, value in self.options().items()]
        return f"Case({', '.join(parts)}, seed={self.seed}, {self.note or 'made by hand'})"


@dataclass(frozen=True, eq=False, repr=False)
class PackedCase(AnyCase):
    """The arguments of one call of `attention_varlen`; shapes and meaning as there."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool = False
    q_start: int | None = None
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    seed: int = 0
    note: str = ""

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows of q and of k that belong to each sequence."""
        bounds = [cu.tolist() for cu in (self.cu_seqlens_q, self.cu_seqlens_k)]
        rows, keys = ([slice(a, b) for a, b in itertools.pairwise(x)] for x in bounds)
        return list(zip(rows, keys, strict=True))

    def sequence(self, b: int) -> PackedCase:
        """Sequence b alone, still packed; views, so strides stay."""
        rows, keys = self.sequences()[b]
        cu_q, cu_k = (torch.stack([x.new_tensor(0), x[b + 1] - x[b]]) for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        kv_lens = None if self.kv_lens is None else self.kv_lens[b : b + 1]
        one = self.replace(q=self.q[rows], k=self.k[keys], v=self.v[keys], kv_lens=kv_lens)
        return one.replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    def dense(self, b: int) -> Case:
        """Sequence b as a dense case of batch 1."""
        rows, keys = self.sequences()[b]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (self.q[rows], self.k[keys], self.v[keys]))
        options = self.options()
        if self.kv_lens is not None:
            options["kv_lens"] = self.kv_lens[b : b + 1]
        return Case(q, k, v, **options, seed=self.seed, note=self.note)

    def __repr__(self) -> str:
        names = (*TENSORS, *self.options())
        lens = f"cu_seqlens_q={self.cu_seqlens_q.tolist()}, cu_seqlens_k={self.cu_seqlens_k.tolist()}"
        parts = [f"{name}={_show(getattr(self, name))}" for name in names]
        return f"PackedCase({', '.join(parts)}, {lens}, seed={self.seed}, {self.note or 'made by hand'})"


def _show(value: object) -> str:
    """Tensors by shape, dtype and strides, because strides are half of the bugs; small integer tensors by value."""
    if not isinstance(value, Tensor):
        return show(value)
    if value.dtype == torch.int32 and value.numel() <= 8:
        return str(value.tolist())
    return f"{tuple(value.shape)} {show(value.dtype)} strides {value.stride()}"
