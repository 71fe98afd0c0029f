"""Launches handed to the driver for other numbers, too: those of a cache that grows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the launches are Triton's")
from flashattn_lite.kernels import series
from tests.test_series import FUNCTION, Driver, driver, maps, starter  # noqa: F401

STEPS = ("i32", "constexpr", "i64")
SIGNATURES = {
    FUNCTION: {"q": "*fp32", "end": "*fp32", "steps": STEPS, "none": "constexpr", "length": "i32", "stays": "i32"},
    FUNCTION + 1: {"length": "i32", "steps": STEPS, "q": "*fp32", "end": "*fp32", "stays": "i32"},
}
SIZES = {FUNCTION: [8, 8, 4, 8, 4, 4, 8, 8], FUNCTION + 1: [4, 4, 8, 8, 8, 4, 8, 8]}


def kernel(maps, function):  # noqa: F811
    start = starter(maps, (7, 1, 1))
    start.compiled.function, start.compiled.src.signature = function, SIGNATURES[function]
    return start


def test_numbers_that_are_given_are_put_in(driver, maps, monkeypatch):  # noqa: F811
    """Two kernels take them, in an order of their own; what equals one of them by chance stays."""
    start, other = kernel(maps, FUNCTION), kernel(maps, FUNCTION + 1)

    def of_its_own(act):
        def acting(*args):
            driver.sizes = next(SIZES[x] for x in args if x in SIZES)
            return act(*args)

        return acting

    driver_of_both = of_its_own(driver.ask), of_its_own(lambda *args: Driver.launch(driver, *args))
    monkeypatch.setattr(series, "cuda_driver", lambda: driver_of_both)
    monkeypatch.setattr(series, "start_all", maps.launched.append)

    def launches(q, numbers):
        (steps, none), length = numbers.steps, numbers.length
        return [(start, (q, q[2:], steps, none, length, 77)), (other, (length, steps, q, q[2:], 77))]

    run = series.Series(launches)
    of = lambda step, length: series.Numbers.of(((step, 1, 2**33 + step), None), length)
    assert of(77, 9).flat == (77, 1, 2**33 + 77, 9)
    run(torch.zeros(4), of(77, 9))
    assert len(maps.launched) == 1
    for step, length in [(77, 9), (5, 77), (6, 8), (77, 9)]:
        driver.seen.clear()
        run(q := torch.zeros(4), of(step, length))
        tensors, steps = [q.data_ptr(), q.data_ptr() + 8], [step, 2**33 + step]
        want = [[*tensors, *steps, length, 77, 0, 0], [length, *steps, *tensors, 77, 0, 0]]
        assert [words for *_, words in driver.seen] == want
    assert len(maps.launched) == 1
