"""Launches with tensor maps that were made before, through the installed Triton's launcher: no GPU needed."""

from __future__ import annotations

import functools
import itertools
import types
import weakref

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
nvidia = pytest.importorskip("triton.backends.nvidia.driver", reason="this Triton has no NVIDIA backend")
import flashattn_lite as fa  # noqa: E402
from flashattn_lite import calls  # noqa: E402
from flashattn_lite.kernels import attention_launch, descriptors, start  # noqa: E402
from flashattn_lite.kernels.tuning import TileConfig  # noqa: E402
from flashattn_lite.problem import Inputs, describe  # noqa: E402
from tests.targets import H200  # noqa: E402

GRID, STREAM, FIXED = (7, 1, 1), 11, ("function", (4, 1, 0), None, None, None)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
TILE = types.SimpleNamespace(BLOCK=64)


class Descriptor:
    """As Triton's, of a tensor's address."""

    padding, round_f32_to_tf32, element_strides, block_shape = "zero", False, None, [64, 64]

    def __init__(self, base):
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())


@pytest.fixture
def run(monkeypatch):
    """Triton's launcher of a kernel (pointer, two descriptors, tuple, number, constexpr); `seen`: its launches."""
    made, seen = itertools.count(), []

    def fill(address, *_):
        return f"map {next(made)} of {address}"

    utils = types.SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active = types.SimpleNamespace(utils=utils)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=active))
    described = "tensordesc<bf16[64, 64],#shared>"
    signature = dict(enumerate(["*bf16", described, described, ("i32", "*i32"), "i32", "constexpr"]))
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.launch = nvidia.wrap_handle_tensordesc(lambda *args: seen.append(args), signature, [META, META])
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.arg_annotations, launcher.kernel_signature, launcher.gsan_enabled = ["annotations"], b"signature", False
    launcher.seen, launcher.made = seen, made
    return launcher


def arguments(number=5):
    """What a launch brings; its second and third argument are descriptors to the kernel."""
    q, k, v = (torch.empty(3, 64) for _ in range(3))
    return q, k, v, (1, torch.empty(2)), number, TILE


def described():
    return descriptors.Descriptors(*(Descriptor(torch.empty(3, 64)) for _ in range(2)), first=1)


def found(run, args):
    return descriptors.found(run, FIXED, described(), GRID, STREAM, args)


def in_a_row(launch):
    *before, last = launch
    return [*before, *last] if isinstance(last, (list, tuple)) else list(launch)


def plainly(launch):
    """A launch in one row, maps by their addresses alone, tensors by theirs."""
    flat = [x.split(" of ")[1] if isinstance(x, str) and x.startswith("map") else x for x in in_a_row(launch)]
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat]


def alike(a, b):
    return len(a) == len(b) and all(x is y or (isinstance(x, (int, str)) and x == y) for x, y in zip(a, b, strict=True))


def test_a_launch_is_tritons_but_for_the_making_of_maps(run):
    """The same arguments in the same places, whatever changed; each address gets one map."""
    first = arguments()
    launcher = found(run, first)
    assert launcher is not None and run.seen == [] and next(run.made) == 2
    other = arguments(6)
    for args, stream in ((first, STREAM), (other, STREAM), (first, 12), (other, 13), (arguments(7), 14)):
        launcher(GRID, stream, args, [0])
        run(*GRID, stream, *FIXED, *described().of(args))
        ours, tritons = run.seen
        run.seen.clear()
        assert len(ours) == len(tritons) and alike(plainly(ours), plainly(tritons))
    # Three sets of two, after one that this test took; and Triton's own two at each of five launches.
    assert next(run.made) == 1 + 2 * 3 + 2 * 5


def test_maps_keep_no_tensor_alive(run):
    args = arguments()
    launcher = found(run, args)
    launcher(GRID, STREAM, args, [0])
    run.seen.clear()
    alive = [weakref.ref(x) for x in (*args[:3], args[3][1])]
    del args
    assert not any(reference() is not None for reference in alive)


def test_no_more_than_most_are_kept(run, monkeypatch):
    monkeypatch.setattr(descriptors, "MOST", 5)
    kept = [arguments() for _ in range(4)]
    launcher = found(run, kept[0])
    for args in kept:
        launcher(GRID, STREAM, args, [0])
        assert len(launcher.kept) <= 5
    addresses = [[str(x.data_ptr()) for x in args[1:3]] for args in kept]
    of_maps = lambda launch: [x for x in plainly(launch) if isinstance(x, str) and x.isdigit() and len(x) > 6]
    assert [of_maps(launch) for launch in run.seen] == addresses


def test_where_tritons_launcher_is_another_its_launches_are_its_own(run):
    args = arguments()
    for name, value in (("global_scratch_size", 8), ("profile_scratch_size", 8), ("gsan_enabled", True)):
        before = getattr(run, name)
        setattr(run, name, value)
        assert found(run, args) is None, name
        setattr(run, name, before)
    launch = run.launch
    for other in (print, lambda *args: None, lambda *args: launch(*args)):
        run.launch = other
        assert found(run, args) is None
    launcher = lambda *args: None
    run.launch = lambda *args: launcher(*args[:-1])  # hands on less
    assert found(run, args) is None
    run.launch = lambda *args: launcher(*(x.base if isinstance(x, Descriptor) else x for x in args))  # no maps
    assert found(run, args) is None
    assert run.seen == []


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("below", [True, False])
def test_a_starter_goes_below_where_it_can(run, below, maps, monkeypatch):
    """From the second launch on, which compiles nothing; the first is Triton's own (here it launches nothing).

    A profiler's hook sees what Triton's own launch would.
    """
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(start, "current_stream", {3: STREAM}.__getitem__)
    if not maps:
        signature = dict(enumerate(["*bf16", "*bf16", "*bf16", ("i32", "*i32"), "i32", "constexpr"]))
        c_function = functools.partial(lambda *args: run.seen.append(args))
        run.launch = nvidia.wrap_handle_tensordesc(c_function, signature, None)
    if not below:
        launch = run.launch
        run.launch = lambda *args: launch(*args)

    class Compiled:
        function, packed_metadata = FIXED[:2]

        def __getitem__(self, grid):
            return lambda *args, stream: run(*grid, stream, *FIXED, *args)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: Compiled()

    monkeypatch.setattr(Compiled, "run", run, raising=False)
    starter, args = start.Starter(Kernel(), GRID[0], {}, described() if maps else None), arguments()
    for _ in range(3):
        starter(args)
    run(*GRID, STREAM, *FIXED, *(described().of(args) if maps else args))
    with monkeypatch.context() as profiling:
        profiling.setattr(start, "hooked", lambda: True)
        starter(args)
    hooked = run.seen.pop()
    assert [type(x) for x in in_a_row(hooked)] == [type(x) for x in in_a_row(run.seen[-1])]
    assert alike(plainly(hooked), plainly(run.seen[-1]))
    assert (starter.launcher is not None) == below and len(run.seen) == 3
    first, again, tritons = (sum(isinstance(x, torch.Tensor) for x in in_a_row(launch)) for launch in run.seen)
    assert first == again == tritons - (1 if maps else 3)  # of q, and of k and v where they are pointers
    assert all(alike(plainly(ours), plainly(run.seen[-1])) for ours in run.seen)
    # Once, for the comparison and for the hook; or each time.
    assert next(run.made) == (0 if not maps else 6 if below else 8)


def test_a_kernel_without_descriptors_is_looked_at_once(run):
    """Decoding over a cache that grows starts the same kernel with a new grid, of new shapes, at each token."""
    run.launch = functools.partial(lambda *args: run.seen.append(args))
    first, second = arguments(), arguments(6)
    launcher = descriptors.found(run, FIXED, descriptors.Descriptors(), GRID, STREAM, first)
    assert launcher is not None and run.seen == []
    assert descriptors.found(run, FIXED, descriptors.Descriptors(), (9, 1, 1), 13, second) is launcher
    for grid, args in ((GRID, first), ((9, 1, 1), second)):
        launcher(grid, 13, args, [0, 1, 2])
        run(*grid, 13, *FIXED, *args)
        ours, tritons = run.seen[-2:]
        assert ours[:3] == grid and alike(plainly(ours), plainly(tritons))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "split"])
def test_the_launcher_of_this_triton_is_found(backend, monkeypatch):
    """Maps are made before, of other tensors at other addresses (decoding has none): the same bits."""
    capability = torch.cuda.get_device_capability()
    served = {"hopper": capability[0] == 9, "triton": capability >= (9, 0), "split": True}
    if torch.version.hip or not served[backend]:
        pytest.skip("no such kernel with tensor maps here")
    monkeypatch.setattr(calls, "_ready", {})
    lengths = (2 if backend == "split" else 300, 300, 300)
    inputs = [[torch.randn(2, 4, n, 64, device="cuda", dtype=torch.float16) for n in lengths] for _ in range(3)]
    first = [fa.attention(*qkv, causal=True, backend=backend) for qkv in inputs]
    (ready,) = calls._ready.values()
    starts = ready.run.starters if backend == "split" else [ready.run.start]
    assert all(isinstance(starter.launcher, descriptors.Launcher) for starter in starts)
    for qkv, out in zip(inputs, first, strict=True):
        assert torch.equal(fa.attention(*qkv, causal=True, backend=backend), out)


def test_descriptors_keep_nothing_and_each_launch_has_its_own():
    """Neither the tensors that they were made of, nor those of a launch, which may fail; two may be at it at once."""
    first, x, y = (torch.empty(3, 64) for _ in range(3))
    there = [weakref.ref(tensor) for tensor in (first, x)]
    kept = descriptors.Descriptors(Descriptor(first), first=1)
    before, one, after = kept.of(("q", x, 5))
    _, other, _ = kept.of(("q", y, 5))
    assert (before, after) == ("q", 5) and one.base is x and other.base is y and one.shape == [3, 64]
    with pytest.raises(ValueError, match="shorter"):
        kept.of(("q",))
    del first, x, one
    assert not any(reference() is not None for reference in there)


@pytest.mark.parametrize("which", ["k", "v"])
def test_both_keys_and_values_must_be_what_the_copy_engine_takes(which):
    """No GPU makes a descriptor of rows at odd addresses."""
    whole, odd = torch.zeros(1, 2, 40, 64).half(), torch.zeros(1, 2, 40, 70).half()[..., 1:65]
    k, v = (odd, whole) if which == "k" else (whole, odd)
    made = {}
    for name, inputs in (("whole", Inputs(whole, whole, whole)), ("odd", Inputs(whole, k, v))):
        none = dict.fromkeys(("q_start", "window_left", "window_right", "scale", "softcap"))
        problem = describe(inputs, causal=False, **none)
        config = TileConfig(64, 64, 4, 3)
        rows = torch.empty(1, 2, 40)
        call = attention_launch.Call(problem, inputs, torch.empty_like(whole), rows, H200, config)
        made[name] = bool(call.start.descriptors.blank)
    assert made == {"whole": True, "odd": False}
