"""Tensors as the attention kernels take them: strides, what the tensor copy engine accepts, the score arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashattn_lite.problem import AttentionProblem, Inputs
from flashattn_lite.state import LOG2E

VECTOR = 16  # bytes that one load takes at most


class ScoreArgs(NamedTuple):
    """Run-time values that score features need; None where the feature is off. Travels as one kernel argument."""

    scale_log2: Any
    softcap: Any
    mask_ptr: Any
    mask_strides: Any
    sinks_ptr: Any
    kv_lens_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    table_ptr: Any
    table_stride: Any


def score_args(problem: AttentionProblem, inputs: Inputs, table: Tensor | None = None) -> ScoreArgs:
    table = None if table is None else in_rows(table)
    mask = None if inputs.mask is None else expanded_mask(problem, inputs.mask)
    return ScoreArgs(
        scale_log2=problem.scale * LOG2E,
        softcap=problem.softcap,
        mask_ptr=mask,
        mask_strides=None if mask is None else mask_strides(mask),
        # A few numbers each: the one kind of input that is copied when it is not contiguous.
        sinks_ptr=contiguous(inputs.sinks),
        kv_lens_ptr=contiguous(inputs.kv_lens),
        cu_seqlens_q_ptr=contiguous(inputs.cu_seqlens_q),
        cu_seqlens_k_ptr=contiguous(inputs.cu_seqlens_k),
        table_ptr=table,
        table_stride=None if table is None else table.stride(0),
    )


def contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def in_rows(table: Tensor) -> Tensor:
    """The table, its rows in one piece: a number a page, as small as lengths and sinks."""
    return table if table.stride(1) == 1 else table.contiguous()


def packing(inputs: Inputs) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(cu_seqlens_q, cu_seqlens_k, rows of q, rows of k) of packed sequences; of others nothing."""
    if inputs.cu_seqlens_q is None:
        return None, None, 0, 0
    return contiguous(inputs.cu_seqlens_q), contiguous(inputs.cu_seqlens_k), inputs.q.shape[0], inputs.k.shape[0]


def strides(x: Tensor, packed: bool) -> tuple[int, ...]:
    """(batch, head, row, dim) strides; packed tensors are [row, head, dim] and have one batch."""
    return (0, x.stride(1), x.stride(0), x.stride(2)) if packed else x.stride()


def lse_strides(lse: Tensor, packed: bool) -> tuple[int, int]:
    """(batch, head) strides; its rows are contiguous."""
    return (0, lse.stride(0)) if packed else (lse.stride(0), lse.stride(1))


def sizes(x: Tensor, packed: bool) -> list[int]:
    """[batch, head, row, dim] sizes, as `strides`."""
    return [1, x.shape[1], x.shape[0], x.shape[2]] if packed else list(x.shape)


def steps(x: Tensor) -> list[int]:
    """Strides of all dimensions but the last, with those that lead from a dimension's only entry to the next one's.

    So that a sequence or head, alone, gets the code that it gets among its neighbours: another may sum in another
    order. But a step of one element, as DLPack gives to such dimensions, leads nowhere.
    """
    return [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1 or stride != 1]


def vectorised(x: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes and is a whole number of them."""
    whole = all(size * x.element_size() % VECTOR == 0 for size in (*steps(x), x.shape[-1]))
    return whole and x.stride(-1) == 1 and x.data_ptr() % VECTOR == 0


def expanded_mask(problem: AttentionProblem, mask: Tensor) -> Tensor:
    """[B, Hq, L, S] of a mask; a bool one in bytes."""
    return in_bytes(mask.expand(problem.batch, problem.heads_q, problem.len_q, problem.len_k))


def in_bytes(mask: Tensor) -> Tensor:
    """A mask as kernels read it."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def mask_strides(mask: Tensor) -> tuple[int, ...]:
    """Of an expanded mask; 0 along dimensions of one entry, where a row that does not exist steps as well."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True))


def varies(problem: AttentionProblem, mask: Tensor | None, dim: int) -> bool:
    """Whether there is a mask that has more than one entry along a dimension of [B, Hq, L, S]."""
    return mask is not None and mask_strides(expanded_mask(problem, mask))[dim] != 0


def rows_differ(problem: AttentionProblem, mask: Tensor | None, heads: int) -> bool:
    """Whether there is a mask that may differ between the queries of as many neighbouring query heads."""
    return varies(problem, mask, 2) or (heads > 1 and varies(problem, mask, 1))


def mask_align(problem: AttentionProblem, mask: Tensor | None, most: int = VECTOR) -> int:
    """Keys of a mask that one load may take: a power of two up to `most` and 16 bytes, of which addresses are known.

    So many lie side by side, and divide the number of keys and the address of every row. Strides along dimensions of
    one entry count too, as in `steps`.
    """
    if mask is not None:
        mask, itemsize = expanded_mask(problem, mask), mask.element_size()
        keys = min(most, VECTOR // itemsize)
        divided = (*mask.stride()[:-1], mask.shape[-1])
        while keys > 1 and mask.stride(-1) == 1:
            if mask.data_ptr() % (keys * itemsize) == 0 and all(step % keys == 0 for step in divided):
                return keys
            keys //= 2
    return 1


def takes_tma(x: Tensor, heads_packed: bool = False) -> bool:
    """The tensor copy engine takes rows of contiguous elements at 16-byte addresses, and no empty tensor.

    x is [batch, head, row, dim] or, packed, [row, head, dim]. A step of 0 is taken where a tile has one entry of the
    dimension: it has several rows, and with `heads_packed` may have several heads (where 0 was not tried).
    """
    several = (0 if x.dim() == 3 else 2, *([1] if heads_packed else []))
    if any(x.stride(dim) == 0 for dim in several):
        return False
    aligned = all(0 <= step * x.element_size() < 2**40 and step * x.element_size() % VECTOR == 0 for step in steps(x))
    return aligned and x.stride(-1) == 1 and x.data_ptr() % VECTOR == 0 and x.numel() > 0


def tma_strides(sizes: list[int], steps: tuple[int, ...], itemsize: int) -> list[int]:
    """Strides for a descriptor: any legal one will do where there is one entry."""
    legal = VECTOR // itemsize
    return [*(step if size > 1 else legal for size, step in zip(sizes[:-1], steps[:-1], strict=True)), 1]
