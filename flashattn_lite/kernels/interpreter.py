"""What a launch through Triton's interpreter needs besides CPU tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def numpy_errors_off() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns where IEEE arithmetic gives an infinity or NaN as it should."""
    import numpy

    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # a maximum of NaN alone
        yield
