"""Which cases of a test `make test` takes, which only `make test-exhaustive` does, how many problems a law is asked.

For the minutes that CI has: most compile one tile more of a kernel, or ask of two values together what others ask of
each. Of each kernel some stay, for each GPU family, and of each thing that a test varies each value.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from tests.conftest import INTERPRETING

SEED = int(os.environ.get("LAW_SEED", "0"))  # other problems than the suite's


def problems(cpu: int, cuda: int, interpreted: int = 1) -> dict[str, int]:
    """How many random problems a law is asked, by device: few where each compiles kernels of its own.

    LAW_PROBLEMS asks for another number everywhere: 60 after a change of a kernel, say.
    """
    asked = os.environ.get("LAW_PROBLEMS")
    return {"cpu": int(asked or (interpreted if INTERPRETING else cpu)), "cuda": int(asked or cuda)}


def also(*values: Any) -> Any:
    """A case that only `make test-exhaustive` takes, and `pytest -m gpu`: of a kind that others have."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list:
    """All cases, those not chosen as `also` has them. A case is a value or, of several arguments, a tuple."""
    cases = list(cases)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, f"no cases: {unknown}"
    return [case if case in chosen else also(*(case if isinstance(case, tuple) else (case,))) for case in cases]


def one_in(n: int, *axes: Collection[Any]) -> list:
    """All cases of a product, of which `quick` chooses one in n: the places of its values have a sum that n divides.

    So each value is in some of them, with others of each other axis.
    """
    places = itertools.product(*(range(len(axis)) for axis in axes))
    cases = list(itertools.product(*axes))
    chosen = [case for case, place in zip(cases, places, strict=True) if sum(place) % n == 0]
    for values, axis in zip(zip(*chosen, strict=True), axes, strict=True):
        assert all(value in values for value in axis), f"a value of {axis} is in no case"
    return quick(cases, chosen)


def once(test: Callable[..., None]) -> Callable[..., None]:
    """A test of what stands ahead of the kernels: the interpreter's run has it in `make test-exhaustive` alone."""
    return pytest.mark.exhaustive(test) if INTERPRETING else test


def case_once(*values: Any) -> Any:
    """A case of such a test."""
    return also(*values) if INTERPRETING else pytest.param(*values)
