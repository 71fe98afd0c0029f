"""The Hopper kernel through the library's own functions, on CPU tensors: only its launch is another."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashattn_lite import calls
from flashattn_lite import target as targets
from flashattn_lite.target import Target
from tests.gluon_on_torch.sources import Sources, launch, launch_as_one
from tests.starters import starters_run

MULTIPROCESSORS = 2
SEED = int(os.environ.get("LAW_SEED", "0"))  # other turns than the suite's


def on_torch(patch: pytest.MonkeyPatch, sources: Sources | None = None) -> None:
    """From here on CPU tensors are on a Hopper GPU, whose Gluon kernels run on PyTorch; each launch by other turns."""
    from flashattn_lite.kernels import attention_hopper_launch, backward_launch, hopper_config, merge_launch, start

    whole_row_tiles(patch)

    sources = sources or unchanged()
    seeds: Iterator[int] = itertools.count(1000 * SEED)

    def run(starter: start.Starter, args: tuple[object, ...]) -> None:
        kernel = starter.kernel.fn
        again = getattr(sources.load(kernel.__module__), kernel.__name__)
        if kernel.__name__ == "merge_kernel":
            launch_as_one(again, starter.grid[0], rows_of(args, kernel), args)
        else:
            launch(again, starter.grid[0], args, next(seeds))

    hopper = Target("cuda", 90, "sm_90 on PyTorch", multiprocessors=MULTIPROCESSORS)
    patch.setattr(targets, "of", lambda device: hopper)
    patch.setattr(calls, "_ready", {})
    patch.setattr(calls, "_gradients", {})
    patch.setattr(backward_launch, "why_not", lambda *_: ["only Gluon runs on PyTorch"])
    patch.setattr(hopper_config, "V_IN_PIECES", True)  # whatever Triton's version: the more general
    patch.setattr(merge_launch, "columns_of", lambda *_: 256)  # a row is one program's
    starters_run(patch, run)
    patch.setattr(attention_hopper_launch, "on", lambda device, launch, *args: launch(*args))
    counters = attention_hopper_launch.counters
    patch.setattr(counters, "next", lambda device: torch.zeros(1, dtype=torch.int32), raising=False)


def whole_row_tiles(patch: pytest.MonkeyPatch) -> None:
    """From here on none is dealt out, however few they are."""
    from flashattn_lite.kernels import attention_hopper_launch

    patch.setattr(attention_hopper_launch, "dealt", lambda problem, config, target: config)
    patch.setattr(calls, "_ready", {})


def rows_of(args: tuple[object, ...], kernel: Any) -> int:
    """A merge's, of a sequence and key/value head: a row is one program's."""
    named = dict(zip(inspect.signature(kernel).parameters, args, strict=True))
    return named["T"].GROUP * named["most_q"]


@functools.cache
def unchanged() -> Sources:
    return Sources()
