"""Three ways to see the peak memory of a call: CUDA's allocator, torch's CPU allocator, the process as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]  # computes and returns its outputs, over inputs that exist already


def peak_cuda_bytes(call: Call) -> int:
    """Most bytes that CUDA's caching allocator had handed out during the call, above the level before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - _nbytes(outputs)


def peak_allocated_bytes(call: Call) -> int:
    """Most bytes that torch's CPU allocator had handed out during the call: exact, and the same at every repeat.

    Counted from the allocations and frees that torch's profiler records. BLAS's own scratch is not in it.
    """
    with _quiet_stderr(), torch.profiler.profile(profile_memory=True) as profile:
        outputs = call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with _quiet_stderr():
            profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    level = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        level += change
        peak = max(peak, level)
    return max(0, peak - _nbytes(outputs))


def peak_rss_bytes(call: Call) -> int:
    """Growth of the process's peak resident memory during the call; run it in a process of its own.

    Sees all memory, in whole pages, and misses what fits into pages that the process has: trust it from some MB up.
    """
    reset = _reset_peak()
    before = _resident("VmRSS:")
    outputs = call()
    peak = _resident("VmHWM:") if reset else _max_rss()
    return max(0, peak - before - _nbytes(outputs))


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _reset_peak() -> bool:
    """Lets VmHWM start again from what is resident now, where the kernel allows that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux: a fresh process has its peak about where it stands
        return _max_rss()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps the profiler's start and stop notices, which it writes below Python, off the terminal."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
