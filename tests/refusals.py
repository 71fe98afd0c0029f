"""What is asked of every call that must be refused: its words, and that it reaches no backend."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

# name -> call, error, its text: the whole of it where the value prints the same everywhere, else its telling start.
Refused = Mapping[str, tuple[Callable[[], Any], type[Exception], str]]

with warnings.catch_warnings(action="ignore"):  # torch: a prototype
    NESTED = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 3, 8)])


def refusal_tests(refused: Refused, door: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two tests: each call is refused in its words, and none comes to `door`, through which all launches go."""

    @pytest.mark.parametrize("name", refused)
    def refused_with_these_words(name: str) -> None:
        run, error, text = refused[name]
        with pytest.raises(error, match=re.escape(text)):
            run()

    def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
        reached: list[Any] = []
        monkeypatch.setattr(door, lambda *args: reached.append(args))
        for run, error, _ in refused.values():
            with pytest.raises(error):
                run()
        assert not reached

    return refused_with_these_words, nothing_is_launched
