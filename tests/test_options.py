"""What a type checker is told of the calls is what they take: each option, of its type, and what comes back."""

from __future__ import annotations

import inspect
from importlib.resources import files
from typing import Any, get_overloads, get_type_hints

import pytest
from torch import Tensor

import flashattn_lite as fa
from flashattn_lite import options

CALLS = [(fa.attention, options.Dense), (fa.attention_varlen, options.Packed), (fa.attention_decode, options.Cached)]
named = pytest.mark.parametrize(("call", "told"), CALLS, ids=lambda x: x.__name__)


@named
def test_every_option_is_told(call: Any, told: Any) -> None:
    hints = get_type_hints(call)
    taken = {p.name: hints[p.name] for p in inspect.signature(call).parameters.values() if p.kind == p.KEYWORD_ONLY}
    assert taken.pop("return_lse") is bool
    assert get_type_hints(told) == taken
    assert not told.__required_keys__


@named
def test_what_comes_back_follows_from_return_lse(call: Any, told: Any) -> None:
    names = [p.name for p in inspect.signature(call).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    results = []
    for overload in get_overloads(call):
        parameters = inspect.signature(overload).parameters
        assert [p.name for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD] == names
        assert parameters["options"].annotation == f"Unpack[{told.__name__}]"
        hints = get_type_hints(overload)
        results.append((str(hints["return_lse"]).removeprefix("typing."), hints["return"]))
    pair = tuple[Tensor, Tensor]
    assert results == [("Literal[False]", Tensor), ("Literal[True]", pair), ("<class 'bool'>", Tensor | pair)]


def test_a_type_checker_may_look() -> None:
    """PEP 561: without this file users' checkers take everything of ours for Any."""
    assert files("flashattn_lite").joinpath("py.typed").is_file()
