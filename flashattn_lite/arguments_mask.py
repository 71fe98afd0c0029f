"""The door of masks: bool or float, broadcastable to [B, Hq, L, S]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashattn_lite.arguments import FLOAT_DTYPES, check_device, check_strided
from flashattn_lite.errors import type_error, value_error


def check_mask(mask: object, q: Tensor, len_k: int) -> None:
    """Bool or float, broadcastable to [B, Hq, L, S]."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise type_error("mask", "must be a torch.Tensor or None", mask, mask_remedy(mask))
    if is_causal_bias(mask):
        remedy = "Pass causal=True, with q_start=0 for the upper left."
        raise type_error("mask", "must hold its values", f"a {type(mask).__name__}", remedy)
    check_strided("mask", mask)
    if mask.dtype != torch.bool and mask.dtype not in FLOAT_DTYPES:
        rule = "dtype must be bool (True = visible) or a float that is added"
        raise type_error("mask", rule, mask, mask_remedy(mask))
    check_device("mask", mask, q)
    check_mask_shape("mask", mask.shape, (*q.shape[:3], len_k), "(batch, heads_q, len_q, len_k)", mask)


def check_mask_shape(name: str, shape: Sequence[int], full: Sequence[int], axes: str, given: Tensor | None) -> None:
    """`shape`: of the mask that is asked about, `given`: the mask as the caller has it."""
    # By == and not by `in`, which does not find the symbols of a compiler that traces.
    pairs = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) <= len(full) and all(have == want or have == 1 for have, want in pairs):
        return
    remedy = "Make each of its dimensions 1 or as large as that, and none more."
    if len(full) == 4 and shape == (full[0], full[3]):
        remedy = f"For one row of keys per sequence pass {name}[:, None, None, :]."
    elif len(full) == 4 and shape == (full[0], *full[2:]):
        remedy = f"For one mask per sequence pass {name}[:, None]."
    raise value_error(name, f"must be broadcastable to {axes} = {tuple(full)}", given, remedy)


def mask_remedy(mask: object) -> str:
    """What to do about a mask that is no tensor, or of a dtype that no mask has."""
    if type(mask).__name__ == "BlockMask":  # FlexAttention's: which blocks to visit, and a function
        return "Make a bool tensor of its mask_mod with torch.nn.attention.flex_attention.create_mask."
    if not isinstance(mask, Tensor):
        return "Convert it with torch.as_tensor."
    integers = not (mask.is_floating_point() or mask.is_complex())
    return "Pass .bool() if 1 means visible; as floats they would be added." if integers else "Cast it first."


def is_causal_bias(mask: object) -> bool:
    """Whether it is a torch.nn.attention.bias.CausalBias: a tensor of nothing, whose meaning is in its attributes."""
    return (type(mask).__module__, type(mask).__name__) == ("torch.nn.attention.bias", "CausalBias")
