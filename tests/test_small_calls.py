"""The calls that compute-sanitizer watches (benchmarks.small_calls) go the ways that their names say, on an H200."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
from benchmarks import small_calls
from flashattn_lite import calls
from flashattn_lite import target as targets
from flashattn_lite.kernels import attention_hopper_launch, attention_launch, backward_launch, decode_launch
from flashattn_lite.kernels.decode_splits import DecodeTile
from flashattn_lite.kernels.hopper_shape import HopperTile
from tests.starters import starters_run
from tests.targets import H200

# What a name begins or ends with: its first kernel, and what holds for that one's tile.
WAYS = {
    "whole": ("attention_hopper_kernel", lambda T: T.DEALT == 1 and not T.SPLIT),
    "dealt out": ("attention_hopper_kernel", lambda T: T.DEALT > 1),
    "parts": ("attention_hopper_kernel", lambda T: T.SPLIT and not T.FOLDS),
    "folded": ("attention_hopper_kernel", lambda T: T.FOLDS and T.ALONE),
    "two chains": ("attention_hopper_kernel", lambda T: T.FOLDS and T.CHAINS == 2),
    "a mask by TMA": ("attention_hopper_kernel", lambda T: T.MASK_COPIED),
    "one token": ("partial_kernel", lambda T: T.OWNS_PAIR),
    "window": ("partial_kernel", lambda T: T.ALONE),
    "4 tokens": ("partial_kernel", lambda T: not T.ALONE),
    "packed few rows": ("partial_kernel", lambda T: not T.ALONE),
    "cache": ("", lambda T: T.PAGE == 0),
    "pages": ("", lambda T: T.PAGE == 16),
    "gradients": ("attention_hopper_kernel", lambda T: True),
}


@pytest.fixture
def launches(monkeypatch):
    """(kernel, arguments) of what is launched, which nothing runs."""
    launched = []
    monkeypatch.setattr(targets, "of", lambda device: H200)
    monkeypatch.setattr(calls, "_ready", {})
    monkeypatch.setattr(calls, "_gradients", {})
    run = lambda starter, args: launched.append((starter.kernel.fn.__name__, args))
    starters_run(monkeypatch, run)
    for module in (attention_hopper_launch, attention_launch, backward_launch, decode_launch):
        monkeypatch.setattr(module, "on", lambda device, launch, *args: launch(*args))
    zero = lambda device: torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(attention_hopper_launch.counters, "next", zero, raising=False)
    return launched


@pytest.mark.parametrize("name", [name for name in small_calls.CALLS if "softmax" not in name])
def test_a_call_goes_the_way_of_its_name(name, launches):
    small_calls.CALLS[name]("cpu", False)
    kernel, args = launches[0]
    if "float32" in name or name == "odd head dim":
        assert kernel == "attention_kernel"
        assert name.startswith("gradients") == any("parts" in kernel for kernel, _ in launches)
        return
    tile = next(x for x in args if isinstance(x, HopperTile | DecodeTile))
    ways = [way for text, way in WAYS.items() if name.startswith(text) or name.endswith(text)]
    assert ways and all(kernel.startswith(known) and holds(tile) for known, holds in ways)
    assert name.startswith("gradients") == any("backward" in kernel for kernel, _ in launches)


def test_calls_are_made_twice(monkeypatch, capsys):
    made = []
    monkeypatch.setitem(small_calls.CALLS, "whole, 64", lambda *args: made.append(args))
    small_calls.main(["--device", "cpu", "--calls", "whole, 64"])
    assert made == [("cpu", False), ("cpu", True)]
    assert capsys.readouterr().out == "whole, 64\n"


OTHERS = [name for name in small_calls.CALLS if name.startswith(("softmax", "gradients, mask"))]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_call_is_one_that_the_library_takes(name, again):
    """Those whose launches are not looked at above, or not all; by torch."""
    small_calls.CALLS[name]("cpu", again)
