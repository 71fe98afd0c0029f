"""What the first call of several kernels compiles: all at once, and nothing that fails there is lost or lasts."""

from __future__ import annotations

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl  # noqa: E402

from benchmarks.offline import GPUS, attention_problem, offline  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels import backward_launch, compiling  # noqa: E402
from flashattn_lite.kernels import start as starting  # noqa: E402
from flashattn_lite.kernels.compiling import compile_together, no_garbage_collected  # noqa: E402
from flashattn_lite.kernels.start import Starter, start_all  # noqa: E402

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
WAIT = 20  # seconds


@pytest.fixture
def on_sm_90(monkeypatch, tmp_path):
    """As on a GPU that is there, with nothing kept of what was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_met", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with offline("sm_90"):
        yield


@pytest.fixture
def launches(on_sm_90):
    """Of three kernels that nobody has compiled, with their arguments; the last of a grid with no block."""

    def kernel(X, N: tl.constexpr):
        tl.store(X, N)

    x = torch.zeros(1)
    return [(Starter(triton.jit(kernel), blocks, {"num_warps": 1}), (x, n)) for n, blocks in ((3, 1), (4, 2), (5, 0))]


def compilers(monkeypatch, compile):
    """Makes Triton compile by that, for kernels that were never called."""
    monkeypatch.setattr(triton.compiler, "compile", compile)


def known(start):
    """How many compiled kernels a launch would find."""
    return sum(len(cache[0]) for cache in start.kernel.device_caches.values())


def test_they_are_compiled_side_by_side(launches, monkeypatch):
    compile, met = triton.compiler.compile, threading.Barrier(2, timeout=WAIT)

    def meet(*args, **kwargs):
        met.wait()
        return compile(*args, **kwargs)

    compilers(monkeypatch, meet)
    compile_together(iter(launches))
    assert [known(start) for start, _ in launches] == [1, 1, 0]
    compilers(monkeypatch, None)
    for start, args in launches[:2]:  # found: not compiled again
        assert "st.global" in start.kernel.warmup(*args, grid=start.grid, **start.options).asm["ptx"]


@pytest.fixture
def asked(monkeypatch):
    """What is asked of threads, which do none of it: starters with their arguments."""
    found = []

    class Pool(contextlib.nullcontext):
        def submit(self, compile, *launch):
            found.append(launch)

    monkeypatch.setattr(compiling, "ThreadPoolExecutor", lambda: Pool(Pool()))
    return found


def test_what_was_met_is_not_asked_for_again(launches, asked):
    """As by a cache that is a key longer at each call: other numbers, the same kernels. Nor is a single new one."""
    compile_together(launches)
    (start, (_, n)), (other, args), _ = launches
    assert asked == launches[:2]
    compile_together([(Starter(start.kernel, 7, {"num_warps": 1}), (torch.ones(8), n)), (other, args)])
    compile_together([(start, (torch.zeros(1).half(), n)), (other, args)])
    assert len(asked) == 2


@pytest.mark.parametrize("change", ["value", "dtype", "options", "device"])
def test_other_code_is_another_form(launches, asked, monkeypatch, change):
    compile_together(launches)
    if change == "device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    warps = {"num_warps": 2 if change == "options" else 1}
    x = torch.zeros(1, dtype=torch.float16 if change == "dtype" else torch.float32)
    others = [(Starter(start.kernel, 1, warps), (x, n + 10 * (change == "value"))) for start, (_, n) in launches[:2]]
    compile_together(others)
    assert asked == [*launches[:2], *others]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_if_it_was(launches, monkeypatch, enabled):
    """Not while threads compile: see `no_garbage_collected`."""
    compile, seen = triton.compiler.compile, []

    def look(*args, **kwargs):
        seen.append(gc.isenabled())
        return compile(*args, **kwargs)

    compilers(monkeypatch, look)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        compile_together(launches)
        assert seen == [False, False] and gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_garbage_waits_for_the_last_of_those_who_compile():
    before, (one, other) = gc.isenabled(), (no_garbage_collected(), no_garbage_collected())
    gc.enable()
    try:
        with contextlib.ExitStack() as stays:
            one.__enter__()
            stays.enter_context(other)
            one.__exit__(None, None, None)
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


def test_what_fails_is_told_by_the_launch(launches, monkeypatch):
    compile = triton.compiler.compile

    def refuse(src, *args, **kwargs):
        if 3 in src.constants.values():
            raise RuntimeError("no code for 3")
        return compile(src, *args, **kwargs)

    compilers(monkeypatch, refuse)
    compile_together(launches)
    (failing, args), (other, _), _ = launches
    assert (known(failing), known(other)) == (0, 1)
    with pytest.raises(RuntimeError, match="no code for 3"):
        failing.kernel.warmup(*args, grid=failing.grid, **failing.options)


def test_nothing_is_asked_of_threads_that_can_not_start(launches, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    compile_together(launches)
    assert [known(start) for start, _ in launches] == [0, 0, 0]


def test_a_backward_is_compiled_whose_descriptors_are_taken_back(on_sm_90, monkeypatch):
    """Which happens before a thread has looked at them, unless it is quick: here none is, until all were asked for."""
    asked, pool, seen = threading.Event(), ThreadPoolExecutor, []
    waits = {"initializer": asked.wait, "initargs": (WAIT,)}
    monkeypatch.setattr(compiling, "ThreadPoolExecutor", lambda: pool(2, **waits))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: seen.append(told["cache_hit"]))
    inputs, problem = attention_problem(24, 24, torch.bfloat16, 64, 4, False, False, False, "", (None, None), {})
    out, lse = torch.empty(1, 4, 64, 24, dtype=torch.bfloat16), torch.empty(1, 4, 64)
    call = backward_launch.Call(problem, inputs, out, (True, True, True, False, False), GPUS["sm_90"][1])

    def launches():
        yield from call.launches(inputs, out, lse, out, lse, *call.allocate(inputs, lse))
        asked.set()

    assert any(side.tile.TMA for side in call.sides)
    compile_together(launches())
    assert seen == [False] * 5


def test_a_call_compiles_before_it_starts(monkeypatch):
    """Once, and where there is more than one kernel."""

    class Fake:
        def __init__(self, name, blocks):
            self.name, self.grid, self.compiled = name, (blocks, 1, 1), None

        def __call__(self, args):
            self.compiled = True
            seen.append(self.name + args[0])

    seen = []
    monkeypatch.setattr(starting, "compile_together", lambda launches: seen.append(len(launches)))
    empty, first, last = Fake("empty", 0), Fake("first", 2), Fake("last", 1)
    for round in "ab":
        start_all([(empty, round), (first, round), (last, round)])
    assert seen == [2, "firsta", "lasta", "firstb", "lastb"]
    start_all([(Fake("alone", 1), "c")])
    assert seen[5:] == ["alonec"]


def test_every_starter_asks_for_code_as_written():
    """Else Triton 3.9 warns whoever calls, and its next version may decide otherwise."""
    assert Starter(None, 1, {"num_warps": 4}).options == {"num_warps": 4, "enable_fp_fusion": False}
