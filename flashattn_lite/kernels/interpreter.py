"""What a launch through Triton's interpreter needs besides CPU tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager


def numpy_errors_off() -> AbstractContextManager[object]:
    """The interpreter computes with NumPy, which warns where IEEE arithmetic gives an infinity or NaN as it should."""
    import numpy

    return numpy.errstate(all="ignore")
