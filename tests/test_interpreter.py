"""What a launch through Triton's interpreter changes there, and that it is as before behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl
from triton.language.core import block_type, tensor
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
            assert replaced() != before
            raise ZeroDivisionError

    def replaced() -> list[object]:
        init = block_type.__init__, tensor.__init__
        return [interpreter._patch_lang, interpreter._get_np_dtype, *init, interpreter.interpreter_builder.options]

    before = replaced()
    with pytest.raises(ZeroDivisionError):
        launch()
    assert all(now is then for now, then in zip(replaced(), before, strict=True))


def test_what_is_remembered_is_what_triton_says() -> None:
    """Of each type, twice: pointers and blocks of them, shapes that a constexpr says, scalars."""
    shapes = [[16], [32], [4, 8], [8, 4], [tl.constexpr(16)]]
    elements = [tl.float16, tl.bfloat16, tl.int1, tl.uint32, tl.pointer_type(tl.float16), tl.pointer_type(tl.float32)]

    def said() -> list[object]:
        blocks = [block_type(element, shape) for element in elements for shape in shapes]
        values = [tensor(number, type) for number, type in enumerate([*elements, *blocks])]
        kept = [{**vars(value), "shape": [int(x) for x in value.shape], "numel": int(value.numel)} for value in values]
        return [kept, [vars(block) for block in blocks], list(map(interpreter._get_np_dtype, [*elements, *blocks]))]

    expected = said()
    with interpreted():
        assert said() == expected
        assert said() == expected
