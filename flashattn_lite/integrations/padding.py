"""Padding of a batch as numbers: where each sequence's keys end, or where they begin.

With those attention visits no keys that are padding, and reads no mask, which costs it half as much again, forward and
backward (docs/performance.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flashattn_lite.integrations.packing import attend_apart, may_read

# From so many elements of Q times keys on: with fewer a GPU is done by the mask before it has copied keys and values
# into one row, and the host has called for that. us on an H200 by the mask and so, 32 heads of 128, batch x queries x
# keys: 8 x 512 x 512 62 86, 4 x 256 x 4k 131 177, 4 x 1k x 4k 478 354, 8 x 2k x 2k 616 426; 12 heads of 64, 8 x 1k x 1k
# 55 91.
WORTH_COPIES = 1 << 35


class Padding(NamedTuple):
    """Which keys the sequences of a batch have: the first `ends`, or what comes behind padding; else all."""

    there: Tensor | None  # (B, S) of booleans; None: all are there
    ends: Tensor | None  # (B,) int32
    behind: Behind | None


class Behind(NamedTuple):
    """Padding and what comes behind it as packed sequences by turns, the former with no keys: its results are 0."""

    cu_seqlens_q: Tensor  # (2 B + 1,) int32
    cu_seqlens_k: Tensor
    kv_lens: Tensor  # (2 B,) int32
    keys: int  # of each row, at most: what lies behind them in a cache is not copied

    def is_worth_it(self, query: Tensor) -> bool:
        return query.numel() * self.keys >= WORTH_COPIES

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """(B, L, Hq, Dv); query, key, value (B, H, L or S, D)."""
        key, value = key[:, :, : self.keys], value[:, :, : self.keys]
        longest = {"max_seqlen_q": query.shape[2], "max_seqlen_k": self.keys}
        cu_seqlens = self.cu_seqlens_q, self.cu_seqlens_k
        return attend_apart(query, key, value, cu_seqlens, {"kv_lens": self.kv_lens, **longest, **options})


NOTHING_PADDED = Padding(None, None, None)


def padding_of(given: Tensor | None, first: int, count: int, room: int, before: int | None) -> Padding | None:
    """Of `count` keys from the `first` on; given (B, some) of booleans: whether one is there, none past its end.

    room: keys that a mask is of, with those behind that no query sees. before: how many come before the first query,
    where the last query sees the last of `count`; else None. Returns None where numbers can't say it, or nobody may
    look.
    """
    if given is None:
        return NOTHING_PADDED
    if not may_read(given):
        return None
    there = given[:, first : first + count]
    there = functional.pad(there, (0, count - there.shape[1]))
    changes = there[:, :-1] != there[:, 1:]
    # One look at the GPU for all of it.
    everything, falls, rises = torch.stack(
        [there.all(), (changes & there[:, :-1]).any(), (changes & there[:, 1:]).any()]
    ).tolist()
    if everything:
        return NOTHING_PADDED
    seen, there = there.sum(1, dtype=torch.int32), functional.pad(there, (0, room - count))
    if not rises:
        return Padding(there, seen, None)
    if falls or before is None:
        return None
    starts = count - seen
    padded = (starts - before).clamp(min=0)  # queries
    kv_lens = torch.stack([torch.zeros_like(seen), seen], 1).flatten()
    behind = Behind(by_turns(padded, count - before), by_turns(starts, count), kv_lens, count)
    return Padding(there, None, behind)


def by_turns(starts: Tensor, length: int) -> Tensor:
    """(2 B + 1,) int32: where in B rows of a length padding begins and what comes behind it, and the end."""
    rows = torch.arange(starts.shape[0] + 1, device=starts.device, dtype=torch.int32) * length
    return torch.cat([torch.stack([rows[:-1], rows[:-1] + starts], 1).flatten(), rows[-1:]])
