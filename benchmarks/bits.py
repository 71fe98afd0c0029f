"""Whether two results are the same to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashattn_lite.testing.results import differ


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], what: str) -> None:
    """A NaN equals a NaN."""
    for x, y in zip(got, want, strict=True):
        count = int(differ(x, y).sum())
        assert count == 0, f"{what}: {count} of {x.numel()} elements differ"
