"""Masks in transformers: joined with a bias or with what else hides keys; of the keys that a model's indexer chose."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_lite.arguments import readable
from flashattn_lite.errors import not_implemented, value_error

OF_THIS = "Pass what the layer's own indexer chose for these queries."


def joined(mask: Tensor | None, kept: Tensor) -> Tensor | None:
    """A mask, or none, that hides what is not kept, of booleans, too."""
    return mask & kept if mask is not None and mask.dtype == torch.bool else biased(kept, mask)


def biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """What a mask hides and a bias adds, as one mask."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias


def chosen_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, indices: Tensor | None, block_indices: Tensor | None
) -> Tensor | None:
    """(B, 1 or Hq, L, S) of booleans: True for the keys that were chosen; None where nothing chose.

    indices: (B, L, count), keys for all heads (DeepSeek-V3.2). block_indices: (B, groups, L, count), whole blocks of
    keys for each group of neighbouring heads (MiniMax-M3); how long one is the module's indexer says. What is below 0
    stands for no key.
    """
    if indices is None and block_indices is None:
        return None
    batch, heads, len_q, _ = query.shape
    len_k = key.shape[2]
    mask = None
    if indices is not None:
        if indices.dim() != 3 or indices.shape[:2] != (batch, len_q):
            raise value_error("indices", f"must be (B, L, count) with (B, L) = {(batch, len_q)}", indices, OF_THIS)
        mask = marked("indices", indices, len_k).unsqueeze(1)
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if not isinstance(size, int):
            remedy = 'Load the model with attn_implementation="sdpa", or "eager" where it has none.'
            raise not_implemented("block_indices", "the module's indexer must say its block_size", size, remedy)
        shape = block_indices.shape
        if len(shape) != 4 or (shape[0], shape[2]) != (batch, len_q) or heads % shape[1]:
            relation = f"must be (B, groups of {heads} heads, L, count) with (B, L) = {(batch, len_q)}"
            raise value_error("block_indices", relation, block_indices, OF_THIS)
        of_groups = marked("block_indices", block_indices, -(-len_k // size)).repeat_interleave(size, -1)[..., :len_k]
        of_heads = of_groups.repeat_interleave(heads // shape[1], 1)
        mask = of_heads if mask is None else mask & of_heads
    return mask


def seen_or_mean(out: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """out (B, Hq, L, Dv); in rows that see no key the mean of all values, as hidden scores of the lowest number have.

    MiniMax-M3 hides keys that way, and what padding's rows give is not idle there: its indexer looks at padding too.
    """
    seen = mask if mask.dtype == torch.bool else mask != float("-inf")
    mean = value.mean(2, keepdim=True).repeat_interleave(out.shape[1] // value.shape[1], 1)
    return torch.where(seen.any(-1, keepdim=True), out, mean)


def marked(name: str, indices: Tensor, count: int) -> Tensor:
    """(..., count) of booleans: True where indices (..., some) point; those below 0 point nowhere."""
    if readable(indices) and bool((indices >= count).any()):
        raise value_error(name, f"must be below {count}", int(indices.max()), OF_THIS)
    before = indices.new_zeros(*indices.shape[:-1], count + 1, dtype=torch.bool)
    return before.scatter(-1, indices.long().clamp(min=-1) + 1, True)[..., 1:]
