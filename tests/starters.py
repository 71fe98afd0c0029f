"""Launches that go elsewhere than to a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def starters_run(patch: pytest.MonkeyPatch, run: Callable[[Any, tuple[Any, ...]], object]) -> None:
    """From here on a start is `run(starter, args)`, args with descriptors; nothing is compiled ahead of it."""
    from flashattn_lite.kernels import start

    patch.setattr(start.Starter, "__call__", lambda starter, args: run(starter, starter.described(args)))
    patch.setattr(start, "compile_together", lambda launches: None)
