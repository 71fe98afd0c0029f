"""What a mask of transformers hides, in numbers told beside it: kernels then skip what they would read hidden.

A padded batch has a mask that is causal, too, and a layer with a window has one from a prompt of that length on: all
L x S pairs of booleans. Who knows where the mask ends before and behind each query visits those keys alone; and where
nothing else is hidden, the mask is not read at all, nor made (`lazy_mask.py`; compiled code drops what nobody reads).

Bounds are told to the mask as an attribute, so they go where it goes, through a compiler too, and no further.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashattn_lite.integrations.lazy_mask import Band, LazyMask, counting_versions
from flashattn_lite.integrations.packing import Sequences, may_read, sequences_of
from flashattn_lite.integrations.padding import Padding, padding_of

ON_META = {"device": "meta", "attention_mask": None}  # of no memory, and of a batch of which nothing is padded
NAME = "_flashattn_lite_bounds"  # of a mask: what is cut out of it, or made of it, has none


class Bounds(NamedTuple):
    """Of a mask (B, 1, L, S): it hides key j from query i unless i + q_start - left <= j <= i + q_start + right."""

    q_start: int
    left: int | None
    right: int | None
    padding: Padding | None  # what else it hides; None: not known, or told by sequences
    sequences: Sequences | None  # which it keeps apart
    version: int | None  # of the mask: whoever writes into it makes another; None in compiled code, which can't ask

    def fits(self, query: Tensor) -> bool:
        """Whether what it says of sequences of a batch, if it does, is of these (B, Hq, L, D)."""
        there = None if self.padding is None else self.padding.there
        return there is None or there.shape[0] == query.shape[0]

    def options(self) -> dict[str, Any]:
        """For `attention`."""
        kv_lens = None if self.padding is None else self.padding.ends
        return {"q_start": self.q_start, "window": (self.left, self.right), "kv_lens": kv_lens}


def mask_with_bounds(make: Callable[..., Tensor | None], config: Any, options: dict[str, Any]) -> Tensor | None:
    """The mask that `make` makes of these options, with its bounds if they are known; made later where they are all.

    make(**others): with other options in the place of some of these.
    """
    described = asked(config, options)
    if described is None:
        return make()
    band, whole, sequences = described
    q_start, _, right = band
    first, room, padding = options.get("kv_offset", 0), options.get("kv_length", 0), None
    if whole:
        end = q_start + options["q_length"]  # behind the last query's own key
        count, before = (end, q_start) if right == 0 and q_start >= 0 and end <= room else (room, None)
        padding = padding_of(options.get("attention_mask"), first, count, room, before)
    if not may_be_lazy() or (padding is None and sequences is None):
        with counting_versions():
            mask = make()
    # Where a flag says all, transformers makes none: on no device in particular it costs nothing to ask.
    elif padding is not None and padding.there is None and make(**ON_META, q_offset=q_start + first) is None:
        return None
    else:
        shape = options["batch_size"], 1, options["q_length"], room
        number = None if sequences is None else sequences.number
        there = None if padding is None else padding.there
        mask = LazyMask(shape, options.get("device", "cpu"), band, number, there)
    if mask is not None:
        setattr(mask, NAME, Bounds(*band, padding, sequences, version_of(mask)))
    return mask


def asked(config: Any, options: dict[str, Any]) -> tuple[Band, bool, Sequences | None] | None:
    """Of the mask that transformers makes of these options, if there is one: what of it is known.

    (q_start, left, right); whether that is all that it hides, but for padding; which sequences it keeps apart.

    Source: transformers 5.24, create_causal_mask and create_(bidirectional_)sliding_window_..., for what options mean.
    Before 5.8 they say otherwise where queries begin: not known.
    """
    q_start, kv_start = options.get("q_offset"), options.get("kv_offset", 0)
    if options.get("q_length", 1) == 1 or q_start is None:
        return None
    if isinstance(q_start, Tensor):  # of a static cache
        if not may_read(q_start):
            return None
        q_start = int(q_start)
    local: Any = options.get("local_size")
    chunk, padding = getattr(config, "attention_chunk_size", None), options.get("attention_mask")
    windowed = local is not None and chunk is None and local == getattr(config, "sliding_window", None)
    sequences = None
    # Where transformers might leave causality, or no more than a window, to a flag, that is what the mask says, and a
    # layer's window or chunk.
    if options.get("allow_is_causal_skip", True):
        if local is None and not causal(options.get("mask_function")):
            return None
        left, right = local - 1 if windowed else None, 0
    elif options.get("allow_is_bidirectional_skip") and (
        windowed or (local is None and unmasked(options.get("mask_function")))
    ):
        left = right = local
    elif padding is None and (number := packed(options.get("mask_function"), local)) is not None and may_read(number):
        left, right, sequences = None if local is None else local - 1, 0, sequences_of(number)
    else:
        return None
    return (q_start - kv_start, left, right), sequences is None and (windowed or local is None), sequences


def may_be_lazy() -> bool:
    """Whether what is made here is for those alone who are told of it: code that is compiled is not."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())


def causal(function: Any) -> bool:
    """Whether a mask function is causality and no more."""
    from transformers.masking_utils import causal_mask_function

    return function is causal_mask_function


def unmasked(function: Any) -> bool:
    """Whether a mask function hides nothing."""
    from transformers.masking_utils import bidirectional_mask_function

    return function is bidirectional_mask_function


def packed(function: Any, window: int | None) -> Tensor | None:
    """(B, L) numbers of the sequences that a mask function keeps apart, if it is that, causality and a window alone.

    It goes by positions, which within a sequence count its tokens; not in older releases (5.17). transformers'
    functions enclose all of that.
    """
    parts: tuple[Any, ...] = enclosed(function, "and_masks", "mask_functions") or ()
    if len(parts) != 2:
        return None
    within = enclosed(parts[0], "remap_positions_for_packed_sequence", "mask_function") or parts[0]
    if window is not None:
        of_window: tuple[Any, ...] = enclosed(within, "and_masks", "mask_functions") or ()
        if len(of_window) != 2 or enclosed(of_window[0], "sliding_window_overlay", "sliding_window") != window:
            return None
        within = of_window[1]
    number: Tensor | None = enclosed(parts[1], "packed_sequence_mask_function", "packed_sequence_mask")
    return number if causal(within) else None


def enclosed(function: Any, maker: str, name: str) -> Any:
    """What a mask function has of its maker in transformers' masking_utils; None: of another, or not to be asked."""
    if torch.compiler.is_compiling() or getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    if not function.__qualname__.startswith(f"{maker}.<locals>."):
        return None
    return inspect.getclosurevars(function).nonlocals.get(name)


def of(mask: Tensor | None, len_q: int, len_k: int) -> Bounds | None:
    """What was told of this mask, if it still is that one."""
    bounds: Bounds | None = getattr(mask, NAME, None)
    if mask is None or bounds is None or mask.shape[-2:] != (len_q, len_k):
        return None
    if torch.compiler.is_compiling() and isinstance(mask, LazyMask):
        # Which sequences are packed would be compiled into it.
        return bounds if mask.plain is None and bounds.sequences is None else None
    return bounds if version_of(mask) == bounds.version else None


def version_of(mask: Tensor) -> int | None:
    """How often somebody has written into the mask."""
    return None if torch.compiler.is_compiling() else mask._version
