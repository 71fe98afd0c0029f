"""Sustained timing on a GPU: warm until the card runs at its own pace, then time, with clock and energy beside it."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Timing:
    """Milliseconds of each timed call, and what the card did from the warm-up on (0 where it can't be read)."""

    milliseconds: list[float] = field(default_factory=list)
    megahertz: list[float] = field(default_factory=list)
    joules: float = 0.0
    seconds: float = 0.0
    calls: int = 0

    def add(self, other: Timing) -> None:
        self.milliseconds += other.milliseconds
        self.megahertz += other.megahertz
        self.joules += other.joules
        self.seconds += other.seconds
        self.calls += other.calls

    def quantile(self, share: float) -> float:
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    @property
    def watts(self) -> float:
        return self.joules / self.seconds if self.seconds else 0.0

    @property
    def joules_per_call(self) -> float:
        return self.joules / self.calls if self.calls else 0.0


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def sustained(call: Callable[[int], Any], warm_ms: float, timed_ms: float) -> Timing:
    """Times call(i), i = 0, 1, ... (to rotate inputs), after warm_ms of the same call; each call between two events."""
    once = _timed(call, 2)[-1]
    warm, timed = max(1, round(warm_ms / once)), max(5, round(timed_ms / once))
    with Meter() as meter:
        for i in range(warm):
            call(i)
        milliseconds = _timed(call, timed)
    return Timing(milliseconds, meter.megahertz, meter.joules, meter.seconds, warm + timed)


def _timed(call: Callable[[int], Any], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for i, (start, end) in enumerate(events):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return [max(start.elapsed_time(end), 1e-3) for start, end in events]


@functools.cache
def nvml(index: int) -> tuple[Any, Any]:
    """NVML and its handle of torch's GPU `index`, (None, None) where it can't be had. It takes a second to start."""
    try:
        import pynvml

        pynvml.nvmlInit()
        # Not by index: NVML counts the GPUs that CUDA_VISIBLE_DEVICES hides.
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except Exception:
        return None, None


class Meter:
    """Reads the SM clock (MHz, every few milliseconds) and the card's energy counter over a block, if NVML can be had.

    The counter, not the power reading, which is a mean over longer than a block.
    """

    PERIOD = 0.005  # seconds

    def __init__(self) -> None:
        self.megahertz: list[float] = []
        self.joules = self.seconds = 0.0
        self.done = threading.Event()
        self.nvml, self.gpu = nvml(torch.cuda.current_device())

    def __enter__(self) -> Meter:
        torch.cuda.synchronize()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.start = time.perf_counter(), self._energy()
        self.thread.start()
        return self

    def _energy(self) -> float:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu) / 1000 if self.nvml else 0.0

    def _run(self) -> None:
        while self.nvml is not None and not self.done.is_set():
            self.megahertz.append(float(self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM)))
            time.sleep(self.PERIOD)

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.seconds, self.joules = (
            now - then for now, then in zip((time.perf_counter(), self._energy()), self.start, strict=True)
        )
        self.done.set()
        self.thread.join()
