"""What a launch through Triton's interpreter changes there, and that it is as before behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")
from triton.runtime import interpreter

from flashattn_lite.kernels.interpreter import interpreted


@pytest.mark.parametrize("debug", [False, True])
def test_overflow_is_asked_for_where_the_answer_is_used(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `debug` Triton computes and drops it."""
    options = replace(interpreter.interpreter_builder.options, debug=debug)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    assert options.sanitize_overflow
    with interpreted():
        assert interpreter.interpreter_builder.options == replace(options, sanitize_overflow=debug)
    assert interpreter.interpreter_builder.options is options


def test_all_is_as_before_behind_a_launch_that_fails() -> None:
    def launch() -> None:
        with interpreted():
            assert interpreter._patch_lang is not patch
            raise ZeroDivisionError

    options, patch = interpreter.interpreter_builder.options, interpreter._patch_lang
    with pytest.raises(ZeroDivisionError):
        launch()
    assert interpreter._patch_lang is patch
    assert interpreter.interpreter_builder.options is options
