"""What counts as a number: one of Python, of NumPy, or of a compiler that traces and may not know it yet."""

from __future__ import annotations

import math
from numbers import Integral, Rational, Real
from typing import Any

import torch

FAR_OUT = 2**62  # as far out as an integer may be in an op's 64 bits
SYMBOLS = (torch.SymFloat, torch.SymInt)  # a compiler's numbers, which are not to be compared


def plain(x: Any) -> Any:
    """A number that compares with Python's floats: as a float, or if it is exact (Python's integers, say) as it is."""
    return x if isinstance(x, Rational) else float(x)


def is_number(x: object) -> bool:
    """A real number of Python, of a compiler that traces, or of NumPy."""
    return isinstance(x, (int, float, *SYMBOLS, Real)) and not isinstance(x, bool)


def is_int(x: object) -> bool:
    """An integer of Python, of a compiler that traces, or of NumPy."""
    x = from_array(x)
    return isinstance(x, (int, torch.SymInt, Integral)) and not isinstance(x, bool)


def is_numpys(x: object) -> bool:
    """An array or a number of NumPy, which need not be imported for it."""
    return type(x).__module__ == "numpy"


def from_array(x: Any) -> Any:
    """A NumPy array of no dimension, as compilers make of NumPy's numbers (1 / np.sqrt(64), say), as a number.

    So they do in code that they then leave to Python, too. What else it is, as it is; a window's sides one by one.
    """
    if isinstance(x, (tuple, list)) and any(map(is_numpys, x)):
        return tuple(map(from_array, x))
    array = is_numpys(x) and not isinstance(x, Real)
    return x.item() if array and getattr(x, "shape", None) == () else x


def unless_known(condition: Any) -> bool:
    """A comparison of a number; of one that a compiler does not know yet (`.item()` of what it traces), True."""
    traced = torch.compiler.is_compiling() and not is_numpys(condition)
    if not traced and not isinstance(condition, torch.SymBool):
        return bool(condition)  # but in an op's fake torch 2.11 does not say that it compiles
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def negative(x: Any) -> bool:
    """Whether an integer is below 0; of one that a compiler does not know yet, False."""
    return not unless_known(x >= 0)


def is_finite(x: Any) -> bool:
    """Of one that a compiler does not know yet, True: it can't even ask whether it is below infinity.

    So what asks next is what breaks the graph there, as torch's own function does.
    """
    if torch.compiler.is_compiling():
        most = torch.finfo(torch.float32).max
        return unless_known(x >= -most) and unless_known(x <= most)
    return bool(-math.inf < x < math.inf)


def as_int(x: Any) -> Any:
    """An integer of any kind as Python's; what else it is (None, a compiler's symbol) as it is."""
    x = from_array(x)
    return int(x) if isinstance(x, Integral) else x


def as_int64(x: Any) -> Any:
    """`as_int`, kept in an op's 64 bits; what is further out is as far as can be, and kernels clamp much earlier."""
    whole = as_int(x)
    return max(-FAR_OUT, min(FAR_OUT, whole)) if isinstance(whole, int) else whole


def diagonals_as_int64(q_start: Any, left: Any, right: Any) -> tuple[Any, Any, Any]:
    """q_start and a window's sides likewise, so that start - left and start + right stay what they are, or as far out.

    Each by itself kept in 64 bits, two that are further out would give a diagonal between them.
    """
    start, left, right = as_int(q_start), as_int(left), as_int(right)
    near = FAR_OUT // 2
    known = [x for x in (start, left, right) if isinstance(x, int)]
    if not all(unless_known(-near <= x) and unless_known(x <= near) for x in known):
        whole = start or 0
        kept = lambda x: max(-near, min(near, x))
        start = start if start is None else kept(whole)
        left = left if left is None else kept(whole) - kept(whole - left)
        right = right if right is None else kept(whole + right) - kept(whole)
    return start, left, right
