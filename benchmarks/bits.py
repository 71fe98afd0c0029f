"""Whether two results are the same to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """A NaN equals a NaN."""
    for x, y in zip(got, want, strict=True):
        equal = torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0)) and torch.equal(x.isnan(), y.isnan())
        assert equal, f"{what}: {int((x != y).sum())} of {x.numel()} elements differ"
