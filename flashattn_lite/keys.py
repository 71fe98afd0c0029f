"""What a call is known by: all that its launches depend on but addresses; of those, where they lie in 16 bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.problem import NUM_TENSORS
from flashattn_lite.target import takes_tf32

OFFSETS = 1 << 40  # what is larger is an address: as an offset it would be a terabyte
# What is decided about a problem without a window by how many keys there are, tiles, splits, and which kernel takes
# it, is decided at multiples of this.
STEP = 64
ALIGNED = 16  # Triton compiles numbers of whole multiples, and ones, apart, and those that int32 does not hold

Key = tuple[Any, ...]


def of_call(args: tuple[Any, ...]) -> Key:
    """Of a call's arguments.

    With types, since 1 == True; and with negation, which a view can leave to the dispatcher.
    """
    q, k, v, *optional = args[:NUM_TENSORS]
    options = args[NUM_TENSORS:]
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, type(q), type(k), type(v), q.is_neg() or k.is_neg() or v.is_neg(),
        place(q), place(k), place(v), options, *map(type, options),
    )  # fmt: skip
    key += tuple([x if x is None else metadata(x) for x in optional])
    # Whether float32 may be multiplied as TF32 is torch's setting, read when a call is prepared.
    return (*key, takes_tf32()) if q.dtype == torch.float32 else key


def of_gradients(args: tuple[Any, ...]) -> Key:
    """Of d_out, d_lse, out, lse, a call's arguments without the backend, and which gradients are needed."""
    tensors, options, needs = args[: 4 + NUM_TENSORS], args[4 + NUM_TENSORS : -1], args[-1]
    tf32 = tensors[4].dtype == torch.float32 and takes_tf32()
    return (options, *map(type, options), tuple(needs), tf32, *map(metadata, tensors))


def but_length(args: tuple[Any, ...]) -> Key | None:
    """The same for calls of which one's launches become another's by other numbers: of about as many keys.

    Of q, k, v and maybe a mask with a column for each key, and sinks; None for others.
    """
    q, k, v, mask, sinks, *others = args[:NUM_TENSORS]
    if k.dim() != 4 or v.dim() != 4 or any(x is not None for x in others):
        return None
    options, keys = args[NUM_TENSORS:], k.shape[2]
    if keys < STEP or v.shape[2] != keys or (mask is not None and mask.shape[3:] != (keys,)):
        return None
    tf32 = q.dtype == torch.float32 and takes_tf32()
    growing = [_alike(k, 2, k.stride()), _alike(v, 2, v.stride())]
    if mask is not None:  # a step along a dim of one entry is taken by nobody
        steps = (step if size > 1 else 0 for size, step in zip(mask.shape, mask.stride(), strict=True))
        growing.append(_alike(mask, 3, steps))
    return metadata(q), metadata(sinks), *growing, keys // STEP, -keys // STEP, options, *map(type, options), tf32


def _alike(x: Tensor, dim: int, steps: Iterable[int]) -> Key:
    """`metadata` but for the size along dim, and of strides what is compiled for them."""
    kinds = [(step % ALIGNED == 0, step * x.element_size() % ALIGNED == 0, min(step, 2), step >> 31) for step in steps]
    return *x.shape[:dim], *x.shape[dim + 1 :], *kinds, x.dtype, x.device, type(x), x.is_neg(), place(x)


def metadata(x: Tensor | None) -> Key | None:
    """What a launch depends on of a tensor."""
    return x if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg(), place(x))


def place(x: Tensor) -> int:
    """Where x lies in 16 bytes; -1: nowhere, as what stands for zeros or for a function of views, or has no elements.

    A slice of what lies nowhere has its offset for an address.
    """
    address = x.data_ptr()
    if address < OFFSETS and address in (0, x.storage_offset() * x.element_size()):
        return -1
    return address % 16
