"""Which cases of a test `make test` takes, and which only `make test-exhaustive` does.

For the minutes that CI has: most compile one tile more of a kernel. Of each kernel some stay, for each GPU family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def also(*values: Any) -> Any:
    """A case that only `make test-exhaustive` takes, and `pytest -m gpu`: of a kind that others have."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list:
    """All cases, those not chosen as `also` has them. A case is a value or, of several arguments, a tuple."""
    cases = list(cases)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, f"no cases: {unknown}"
    return [case if case in chosen else also(*(case if isinstance(case, tuple) else (case,))) for case in cases]
