"""The softmax kernels by themselves: what a launch plans, where it writes, and how far it reaches."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton")

from flashattn_lite import scaled_dot_product_attention
from flashattn_lite.kernels import softmax_launch as kernels
from flashattn_lite.softmax import online_softmax, softmax_stats
from flashattn_lite.target import Target
from tests.exhaustive import also
from tests.test_softmax import check_softmax, check_stats

SENTINEL = 7.0
HOPPER = Target("cuda", 90, "sm_90")


@pytest.fixture
def kernel_device(device: torch.device, interpreting: bool) -> torch.device:
    if device.type == "cpu" and not interpreting:
        pytest.skip("Triton runs on CPU tensors in its interpreter only (TRITON_INTERPRET=1)")
    return device


def sizes(x: torch.Tensor, dim: int) -> list[int]:
    return [d.size for d in kernels.rows_of(x, torch.empty_like(x), dim).dims if d.size > 1]


def test_row_dimensions_are_joined_where_both_tensors_allow() -> None:
    x = torch.zeros(2, 3, 4, 5, 6)
    assert sizes(x, 4) == [2 * 3 * 4 * 5]
    assert sizes(x, 0) == [3 * 4 * 5 * 6]
    assert sizes(x, 2) == [2 * 3, 5 * 6]
    assert sizes(x.permute(4, 2, 0, 3, 1), 0) == [2 * 3 * 4 * 5]
    assert sizes(x[:, :, :, ::2], 4) == [3, 2 * 3 * 4]
    assert sizes(x[:, :, :, :, None].expand(-1, -1, -1, -1, 8, -1), 5) == [8, 2 * 3 * 4 * 5]
    assert sizes(x[0, 0, 0, :, :, None].expand(-1, -1, 8), 0) == [8, 6]  # a tile runs along neighbours, not copies


def test_only_rows_that_are_nearer_than_elements_lie_across() -> None:
    """Neither a dimension of one entry that ends the shape, nor copies of a row."""
    x = torch.zeros(3, 40)
    across = lambda x, dim: kernels.rows_of(x, torch.empty_like(x), dim).across
    assert across(x, 0) and across(x[:, :1], 0)
    assert not (across(x, 1) or across(x[:, :, None], 1) or across(x[:, :, None].expand(-1, -1, 5), 1))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_row_alone_takes_the_kernel_of_its_batch(dim: int) -> None:
    x = torch.zeros(512, 512)
    alone = x.narrow(1 - dim, 0, 1)
    one, many = (kernels.plan(part, (torch.zeros_like(part),), dim)[0] for part in (alone, x))
    assert (one.kernel, one.kwargs) == (many.kernel, many.kwargs)


def test_more_than_three_row_dimensions_take_a_launch_for_each_entry_of_the_smallest() -> None:
    x = torch.zeros(4, 4, 4, 4, 8)
    assert kernels.plan(x[:, ::2, ::2, ::2, 1:], (torch.zeros(4, 2, 2, 2, 7),), 4) is not None
    x = x[::2, ::2, ::2, :3:2, 1:]
    y = torch.zeros(x.shape)
    assert kernels.plan(x, (y,), 4) is None
    parts = list(kernels.entries(x, (y,), 4))
    assert [kernels.plan(part, own, part.dim() - 1) is not None for part, own in parts] == [True, True]
    assert [part.storage_offset() for part, _ in parts] == [1, 1 + x.stride(0)]
    assert [own[0].storage_offset() for _, own in parts] == [0, y.stride(0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [0, 2, 4])
@pytest.mark.parametrize("pad", [0, 1])
def test_rows_over_many_dimensions_have_the_bits_of_their_parts(
    kernel_device: torch.device, dim: int, dtype: torch.dtype, pad: int
) -> None:
    """Over four that can't be joined; with pad, 16-byte addresses are some rows' only."""
    shape = [4, 6, 4, 4, 4]
    shape[dim] = 300
    room = torch.randn([*shape[:4], shape[4] + pad], generator=torch.Generator().manual_seed(dim))
    x = room.to(kernel_device, dtype)[..., : shape[4]]
    x = x[tuple(slice(None, None, 1 if i == dim else 2) for i in range(5))]
    assert kernels.plan(x, (torch.empty_like(x),), dim) is None
    check_softmax(x, dim)
    check_stats(x, dim)
    y, m_and_l = online_softmax(x, dim), [part.unsqueeze(dim) for part in softmax_stats(x, dim)]
    for i in set(range(5)) - {dim}:
        for at in (0, x.shape[i] - 1):
            part = x.narrow(i, at, 1)
            assert torch.equal(online_softmax(part, dim), y.narrow(i, at, 1))
            for own, whole in zip(softmax_stats(part, dim), m_and_l, strict=True):
                assert torch.equal(own.unsqueeze(dim), whole.narrow(i, at, 1))


def test_one_compiled_kernel_serves_all_lengths_of_a_tile() -> None:
    """A variant hangs on the tile, on whether it is full and on 16-byte access, not on the length or the batch."""
    variants = set()
    for rows, cols in ((1, 1000), (3, 1000), (64, 520), (5000, 1016)):
        x = torch.zeros(rows, cols, dtype=torch.float16)
        variants.add(tuple(kernels.plan(x, (x,), 1)[0].kwargs.items()))
    assert len(variants) == 1
    x = torch.zeros(3, 1001, dtype=torch.float16)
    assert [kernels.plan(y, (y,), 1)[0].kwargs["ALIGN"] for y in (x, x[:1], x[:, :1000], x[:1, :1000])] == [1, 1, 1, 1]


def test_one_compiled_kernel_serves_all_statistics_of_long_rows() -> None:
    """Full tiles or not: its mask is a comparison of int32."""
    m, variants = torch.zeros(2, 3, 1), set()
    for cols in (8200, 12288, 12296, 16384):
        (launch,) = kernels.plan(torch.zeros(3, cols, dtype=torch.float16), (m[0], m[1]), 1, HOPPER)
        variants.add(tuple(launch.kwargs.items()))
    assert len(variants) == 1


def started(ready: kernels.Ready | kernels.ReadyTwo, tensors: tuple[torch.Tensor, ...]) -> list[dict[str, object]]:
    """The arguments by name, compile-time ones too, of each launch of a prepared call."""
    seen, parts = [], (ready,) if isinstance(ready, kernels.Ready) else (ready.stats, ready.normalise)
    for part in parts:
        part.start = Noted(part.start, seen)
    ready(*tensors)
    return seen


class Noted:
    """A starter that only keeps its arguments, by name."""

    launcher = None

    def __init__(self, starter: kernels.Starter, seen: list[dict[str, object]]) -> None:
        self.grid, self.options, self.names, self.seen = starter.grid, starter.options, starter.kernel.arg_names, seen

    def __call__(self, args: tuple[object, ...]) -> None:
        self.seen.append(dict(zip(self.names, args, strict=True)) | self.options)


@pytest.mark.parametrize(
    ("op", "shape", "dim"),
    [
        ("softmax", (6, 1000), 1),
        ("softmax", (6, 2049), 1),
        ("softmax", (6, 2**22), 1),
        ("softmax", (2, 3, 2**21 + 1), 2),
        ("softmax", (2000, 40), 0),
        ("stats", (6, 1000), 1),
        ("stats", (6, 2**18), 1),
        ("stats", (6, 50257), 1),
    ],
)
def test_a_prepared_call_brings_every_argument_in_its_place(
    op: str, shape: tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the plan, but for the call's own tensors and for room that is fresh, of the same size."""
    monkeypatch.setattr(kernels, "on", lambda device, launch, *args: launch(*args))
    x = torch.zeros(shape)
    m = torch.zeros([1 if i == dim else n for i, n in enumerate(shape)])
    results = (torch.zeros_like(x),) if op == "softmax" else (m, m + 1)
    planned = kernels.plan(x, results, dim)
    ready = kernels.prepare(x, results, dim)
    assert planned is not None and ready is not None
    own = dict(zip(("x_ptr", "y_ptr") if op == "softmax" else ("x_ptr", "m_ptr", "l_ptr"), (x, *results), strict=True))
    other = {name: torch.ones_like(part) for name, part in own.items()}
    seen = started(ready, tuple(other.values()))
    assert len(seen) == len(planned) == (2 if x.numel() > 2**21 or dim == 0 else 1)
    for given, launch in zip(seen, planned, strict=True):
        expected = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.kwargs
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            if name in other:
                assert given[name] is other[name]
            elif isinstance(value, torch.Tensor):
                assert given[name].shape == value.shape
            else:
                assert given[name] == value
    if len(seen) == 2:  # one launch reads what the other wrote
        assert all(seen[0][name] is seen[1][name] for name in ("x_ptr", "m_ptr", "l_ptr"))


@pytest.mark.parametrize(
    ("cols", "across"),
    [*((cols, across) for cols in (0, 1, 45, 1100) for across in (False, True)), (33000, False), also(33000, True)],
)
def test_nothing_outside_the_result_is_written(kernel_device: torch.device, cols: int, across: bool) -> None:
    def strided() -> torch.Tensor:
        shape = (cols + 5, 9) if across else (9, cols + 5)
        whole = torch.full(shape, SENTINEL, device=kernel_device)
        return whole.T if across else whole

    x, y = torch.randn(9, cols + 5, device=kernel_device), strided()
    m, l_i = torch.full((2, 9), SENTINEL, device=kernel_device)
    if across:
        x = x.T.contiguous().T
    inside = (slice(2, 7), slice(3, 3 + cols))
    kernels.launch(x[inside], (y[inside],), 1)
    kernels.launch(x[inside], (m[2:7, None], l_i[2:7, None]), 1)
    torch.testing.assert_close(y[inside], torch.softmax(x[inside], 1))
    assert (m[2:7] == (x[inside].amax(1) if cols else -math.inf)).all()
    y[inside] = m[2:7] = l_i[2:7] = SENTINEL
    assert all((part == SENTINEL).all() for part in (y, m, l_i))


@pytest.mark.parametrize("strides", [(2**31, 1), (1, 2**31), (3, 2**30)])
def test_offsets_past_32_bits(kernel_device: torch.device, strides: tuple[int, int]) -> None:
    """Rows, and elements of a row, that lie 4 GiB apart and more; almost none of the memory is touched."""
    needed = 2 * (sum(stride * (size - 1) for stride, size in zip(strides, (2, 3), strict=True)) + 1)
    if kernel_device.type == "cuda" and torch.cuda.mem_get_info()[0] < needed + 2**30:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    storage = torch.empty(needed // 2, dtype=torch.float16, device=kernel_device)
    x = storage.as_strided((2, 3), strides)
    x.copy_(torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]]))
    y = torch.empty(2, 3, device=kernel_device)
    kernels.launch(x, (y,), 1)
    torch.testing.assert_close(y, torch.softmax(x.float(), 1))


@pytest.mark.parametrize("top", [63488, 65280, 65536, 66048, 2.0**24])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_where_neighbours_come_to_lie_far_apart(device: torch.device, dtype: torch.dtype, top: float) -> None:
    """Neighbours are 32 apart in float16 below 2^16; in bfloat16 256, then 512: all but the largest vanish."""
    if top > torch.finfo(dtype).max:
        pytest.skip("float16 ends at 65504")
    for sign in (1, -1):
        x = torch.full((3, 1000), sign * top, device=device, dtype=dtype)
        x[1, ::3] = torch.nextafter(x[1, ::3], torch.zeros_like(x[1, ::3]))
        x[2, 1:] = -sign * top
        check_softmax(x, 1)
        check_stats(x, 1)


@pytest.mark.parametrize("op", ["softmax", "stats"])
@pytest.mark.parametrize("shape", [(64, 512), (64, 4097), (8, 100000), (4, 200000)])
def test_a_prepared_call_keeps_no_tensor(op: str, shape: tuple[int, int]) -> None:
    """It would keep a pool of somebody's in use: what `lasting_zeros` is for."""
    x = torch.empty(shape, dtype=torch.bfloat16)
    results = (torch.empty_like(x),) if op == "softmax" else tuple(torch.empty(2, shape[0], 1))
    launches = kernels.plan(x, results, 1, Target("cuda", 90, "H100", multiprocessors=132))
    assert launches is not None
    ready = kernels.ReadyTwo(*launches) if len(launches) == 2 else kernels.Ready(launches[0], 1 + len(results))
    parts = (ready,) if isinstance(ready, kernels.Ready) else (ready.stats, ready.normalise)
    assert not any(isinstance(kept, torch.Tensor) for part in parts for kept in part.rest)


@pytest.mark.parametrize("function", [online_softmax, softmax_stats])
def test_the_public_functions_run_the_kernels(
    where_kernels_run: None, interpreting: bool, function: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not interpreting:
        pytest.skip("on a GPU a call that is known goes past this module")
    ran, interpret = [], kernels.interpret
    monkeypatch.setattr(kernels, "interpret", lambda *args: ran.append(args) or interpret(*args))
    function(torch.randn(3, 40))  # type: ignore[operator]
    assert len(ran) == 1


def test_threads_do_not_disturb_each_other(device):
    """Through the interpreter too, which keeps in globals what it is at."""
    inputs = [torch.randn(20 + i, 50, generator=torch.Generator().manual_seed(i)).to(device) for i in range(4)]
    both = lambda x: torch.cat([online_softmax(x), scaled_dot_product_attention(x, x, x)])
    expected = list(map(both, inputs))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(both, inputs), expected))
