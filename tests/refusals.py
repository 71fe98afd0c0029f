"""What is asked of every call that must be refused: its words, and that it reaches no backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Refused = Mapping[str, tuple[Callable[[], Any], type[Exception], str]]  # name -> call, error, a part of its text


def assert_words(refused: Refused, name: str) -> None:
    run, error, text = refused[name]
    with pytest.raises(error, match=re.escape(text)):
        run()


def assert_nothing_is_launched(refused: Refused, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are checked before the op: a refused call never comes to `door`, through which all launches go."""
    reached: list[Any] = []
    monkeypatch.setattr(door, lambda *args: reached.append(args))
    for run, error, _ in refused.values():
        with pytest.raises(error):
            run()
    assert not reached
