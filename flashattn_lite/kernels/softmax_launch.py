"""Starting the softmax kernels: how rows lie, who takes which part of them, the launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashattn_lite import target as targets
from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.interpreter import interpreted
from flashattn_lite.kernels.series import Series
from flashattn_lite.kernels.softmax import normalise_kernel, softmax_kernel, stats_kernel, sweep_kernel
from flashattn_lite.kernels.start import (
    AS_WRITTEN,
    Plan,
    Starter,
    counters,
    current_stream,
    lasting_zeros,
    on,
    start_all,
)
from flashattn_lite.kernels.tuning import cdiv, power_of_two
from flashattn_lite.kernels.tuning_softmax import (
    VECTOR_BYTES,
    WORD_BYTES,
    RingTile,
    SoftmaxTile,
    ring_tile,
    softmax_tile,
    stats_tile,
)
from flashattn_lite.target import Target

try:
    from flashattn_lite.kernels.softmax_ring import ring_kernel
    from flashattn_lite.kernels.softmax_shape import RingShape
except Exception:  # Gluon changes between versions of Triton: without it the other kernels serve
    ring_kernel = None

ROW_DIMS = 3  # row dimensions that the kernels decode
PATIENCE = 256  # looks at others' parts, most of a microsecond each: far longer than neighbours differ. Not measured.
INTERPRETED = 5  # SMs of the interpreter: so few that programs which stay take several units
OFFLINE = 132  # SMs of an H100 or H200, where a plan is made without a GPU

Results = tuple[Tensor] | tuple[Tensor, Tensor]


class RowDim(NamedTuple):
    """A dimension of rows: how many, and how far apart they lie in the input and in the result, in elements."""

    size: int
    stride_x: int
    stride_y: int


class Rows(NamedTuple):
    """How rows lie in memory. `across`: neighbouring rows are closer to each other than a row's own elements are."""

    dims: list[RowDim]  # as few as describe the rows, or ROW_DIMS; a tile runs along the last
    across: bool
    single_strides: list[int]  # of dimensions of size 1: they address nothing, but show how a larger batch is aligned


def rows_of(x: Tensor, y: Tensor, dim: int) -> Rows:
    """The rows of x along dim, and of y, which has x's rank. Dimensions that are one in both tensors are joined."""
    dims = [RowDim(x.shape[i], x.stride(i), y.stride(i)) for i in range(x.dim()) if i != dim]
    nearest = min((d for d in dims if d.stride_x > 0), key=lambda d: (d.stride_x, -d.size), default=None)
    across = nearest is not None and nearest.stride_x < x.stride(dim)
    # The nearest stays even if its size is 1: a slice of a batch must be read as the batch is.
    kept = [d for d in dims if d.size != 1 or (across and d is nearest)]
    joined: list[RowDim] = []
    for d in sorted(kept, key=lambda d: (d.stride_x == 0, d.stride_x, d.stride_y), reverse=True):
        if joined and joined[-1][1:] == (d.size * d.stride_x, d.size * d.stride_y):
            joined[-1] = RowDim(joined[-1].size * d.size, d.stride_x, d.stride_y)
        else:
            joined.append(d)
    if not across:
        joined.sort(key=lambda d: d.size)
    joined = [RowDim(1, 0, 0)] * (ROW_DIMS - len(joined)) + joined
    return Rows(joined, across, [d.stride_x for d in dims if d.size == 1])


def unit_apart(strides: list[int], across: bool) -> tuple[list[int], bool]:
    """Strides of (outer, outer, inner row, column), 0 for the unit one (the kernel knows it), and if there is one."""
    at = 2 if across else 3
    unit = strides[at] == 1
    return [0 if unit and i == at else stride for i, stride in enumerate(strides)], unit


def plan(
    x: Tensor, results: Results, dim: int, target: Target | None = None, tile: SoftmaxTile | None = None
) -> list[Plan] | None:
    """What writes softmax(x) along dim into results (y,), or statistics into (m, l); None past ROW_DIMS.

    y has x's shape; m and l have x's shape with 1 at dim, are float32 and lie alike. No result is empty. The kernel and
    its tile follow from the row's length, dtype and layout and from the GPU, unless a tile is given. A plan serves one
    launch: an epoch is not used twice.
    """
    target = target or targets.of(x.device)
    (dims, across, single_strides), wants_softmax = rows_of(x, results[0], dim), len(results) == 1
    if len(dims) > ROW_DIMS:
        return None
    cols, y = x.shape[dim], results[0]
    x_strides, x_unit = unit_apart([*(d.stride_x for d in dims), x.stride(dim)], across)
    y_strides, y_unit = unit_apart([*(d.stride_y for d in dims), y.stride(dim)], across)
    vector = VECTOR_BYTES // x.element_size()
    divisible = [cols, *x_strides, *(y_strides if wants_softmax else []), *single_strides]
    divisible += [t.data_ptr() // t.element_size() for t in ((x, y) if wants_softmax else (x,))]
    # Not for rows across: there the width of a load, and with it the order of a sum, would depend on the batch. Nor 8
    # bytes: Triton asks whether an address is a multiple of 16, and would load row 0 and row 1 differently by itself.
    align = math.gcd(vector, *divisible) if cols and not across else 1
    align = vector if align == vector else math.gcd(align, WORD_BYTES // x.element_size())
    sms = processors(x, target)
    wide = align == vector
    in_ring = y_unit and x.dtype == y.dtype if wants_softmax else align == 1
    if tile is None and x_unit and not across and in_ring:
        rows = math.prod(d.size for d in dims)
        ring = ring_for(cols, x.element_size(), target, sms, wide=wide, stats=not wants_softmax, rows=rows)
        if ring:
            return [ring_launch(x, results, dims, cols, wide, ring, sms)]
    choose = softmax_tile if wants_softmax else stats_tile
    tile = tile or choose(cols, x.element_size(), target, across=across, wide=wide)
    tiles = dims[0].size * dims[1].size * cdiv(dims[-1].size, tile.rows)
    sizes = (dims[1].size, dims[-1].size)
    x_steps = tuple(stride // align for stride in x_strides)
    y_steps = tuple(stride // align for stride in y_strides)
    # Of sizes a kernel knows only what most calls share and what pays for every element.
    shape = {"COLS": tile.cols, "ALIGN": align, "FLAT": dims[0].size == dims[1].size == 1, "X_UNIT": x_unit}
    shape["WIDTH"] = 2 if x_unit and align > 1 and x.element_size() == 2 else 1
    halves = target.is_cuda(80)
    compares, lanes = {"BOTH": halves and shape["WIDTH"] == 2}, {"LANES": tile.lanes(across, align)}
    options: dict[str, Any] = {"num_warps": tile.num_warps, **AS_WRITTEN}
    if tile.registers and target.kind == "cuda":
        options["maxnreg"] = tile.registers
    if wants_softmax and tile.sweeps:
        args = (x, y, cols // align, *sizes, *x_steps, *y_steps)
        return [Plan(sweep_kernel, (tiles,), args, shape | compares | lanes | {"Y_UNIT": y_unit} | options)]
    splits, steps = tile.split(cols)
    units = tiles * splits
    shape |= {"ROWS": tile.rows, "EVEN": cols == splits * steps * tile.cols, "ACROSS": across}
    ahead, grid = programs_of(tile, units, sms if splits == 1 else 0)
    if wants_softmax and splits == steps == 1:
        args = (x, y, units, cols // align, *sizes, *x_steps, *y_steps)
        own = {"AHEAD": ahead, "Y_UNIT": y_unit}
        return [Plan(softmax_kernel, grid, args, shape | compares | own | options)]
    lengths = (units, cols // align, splits, steps)
    stats = parts_for(x, math.prod(d.size for d in dims)) if wants_softmax else results
    # Of one split the kernel looks at none of these: any address does.
    parts = (*parts_for(x, units * tile.rows), counts_for(x, tiles)) if splits > 1 else (stats[0],) * 3
    stats_strides = (dims[1].size * dims[2].size, dims[2].size, 1) if wants_softmax else [d.stride_y for d in dims]
    args = (x, *stats, *parts, *lengths, *sizes, *x_steps, *stats_strides)
    row = {"PARTS": power_of_two(splits), "AHEAD": ahead, "ONE": splits == steps == 1}
    row["EVEN"] = shape["EVEN"] and (across or tile.rows > 1 or not x_unit)  # else one kernel for all lengths
    launches = [Plan(stats_kernel, grid, args, shape | compares | lanes | row | options)]
    if wants_softmax:
        args = (x, y, *stats, *lengths, *sizes, *x_steps, *y_steps)
        launches.append(Plan(normalise_kernel, (units,), args, shape | {"Y_UNIT": y_unit} | options))
    return launches


def ring_for(
    cols: int, itemsize: int, target: Target, sms: int, *, wide: bool, stats: bool, rows: int
) -> RingTile | None:
    """The tile of ring_kernel for such rows; None where it does not serve, which does not follow from their number."""
    if not ring_kernel:
        return None
    many, own = (ring_tile(cols, itemsize, target, wide=wide, stats=stats, rows=count) for count in (None, rows))
    # Of a split row all units must have a place at once.
    has_room = lambda tile: tile is not None and tile.split(cols) <= max(1, tile.programs * sms)
    return (own if has_room(own) else many) if has_room(many) else None


def ring_launch(
    x: Tensor, results: Results, dims: list[RowDim], cols: int, wide: bool, tile: RingTile, sms: int
) -> Plan:
    """What writes softmax(x) into (y,), or its statistics into (m, l), by ring_kernel; wide: rows lie at 16 bytes."""
    y, stats = results[0], len(results) == 2
    splits = tile.split(cols)
    units = math.prod(d.size for d in dims) * splits
    vector = VECTOR_BYTES // x.element_size()
    lead_x, lead_y = (t.data_ptr() % VECTOR_BYTES // t.element_size() for t in (x, y))
    alike = all((d.stride_x - d.stride_y) % vector == 0 for d in dims if d.size != 1) and lead_x == lead_y
    strides = [d.stride_x for d in dims] + [d.stride_y for d in dims]
    lengths = (units, cols, splits, dims[1].size, dims[2].size)
    vectors_x = (lead_x + sum((d.size - 1) * d.stride_x for d in dims) + cols) // vector
    leads = (lead_x, 0 if stats else lead_y, vectors_x)
    args = (x, y, results[-1], *room_for(x, units, splits), *lengths, *strides, *leads)
    shape = RingShape(
        ITEMSIZE=x.element_size(),
        COLS=tile.cols,
        WARPS=tile.num_warps,
        SLOTS=tile.slots,
        LAG=tile.lag,
        PARTS=power_of_two(splits),
        PATIENCE=PATIENCE,
        CHUNKS=tile.chunks,
        EVEN=wide and cols == splits * tile.cols,
        BETWEEN=not wide,
        ALIKE=alike or stats,
        FLAT=dims[0].size == dims[1].size == 1,
        STATS=stats,
    )
    options: dict[str, Any] = {"num_warps": tile.num_warps, **AS_WRITTEN}
    if tile.registers:
        options["maxnreg"] = tile.registers
    programs = min(units, tile.programs * sms) if tile.programs else units
    return Plan(ring_kernel, (programs,), args, {"T": shape} | options)


def programs_of(tile: SoftmaxTile, units: int, sms: int) -> tuple[bool, tuple[int]]:
    """Whether programs stay and take one unit after the other, and the grid."""
    ahead = tile.programs > 0 and sms > 0
    return ahead, (min(units, tile.programs * sms) if ahead else units,)


def parts_for(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Room for the parts (m, l) of a launch, each 16-byte aligned."""
    both = x.new_empty(2, max(4, cdiv(count, 4) * 4), dtype=torch.float32)
    return both[0], both[1]


def sharing(x: Tensor) -> tuple[int, int] | None:
    """(device, stream) whose launches may share memory from call to call, since they follow one another.

    None where a launch needs its own: in a CUDA graph, which may be replayed on any stream, and in the interpreter.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return x.get_device(), current_stream(x.get_device())


_counts: dict[tuple[int, int], Tensor] = {}


def counts_for(x: Tensor, count: int) -> Tensor:
    """Zeros, int32, that the launch sets back to 0: kept from call to call, so that no call has to fill them."""
    key = sharing(x)
    if key is None:
        return torch.zeros(count, dtype=torch.int32, device=x.device)
    counts = _counts.get(key)
    if counts is None or counts.numel() < count:
        counts = lasting_zeros(max(1024, power_of_two(count)), torch.int32, x.device)
        _counts[key] = counts
    return counts


_words: dict[tuple[int, int], tuple[Tensor, Iterator[int]]] = {}


def room_for(x: Tensor, units: int, splits: int) -> tuple[Any, Tensor, int]:
    """(counter, words, epoch) for ring_kernel: a zero, and two words for each unit, none of which bears that epoch.

    Words are kept from call to call; epochs count up, and with the last of int32 new words begin. A captured launch
    finds zeros at each replay. Of rows that are one unit the kernel looks at neither: any address does.
    """
    if splits == 1:
        return x, x, 1
    key = sharing(x)
    if key is None:
        zeros = torch.zeros(2 * units + 1, dtype=torch.int64, device=x.device)
        return zeros[2 * units :].view(torch.int32), zeros, 1
    words, epochs = _words.get(key, (None, iter(())))
    epoch = next(epochs, None)
    if words is None or epoch is None or words.numel() < 2 * units:
        words, epoch = lasting_zeros(power_of_two(2 * units), torch.int64, x.device), 1
        _words[key] = words, iter(range(2, 1 << 31))
    return counters.next(x.device), words, epoch


def processors(x: Tensor, target: Target) -> int:
    """Programs that are on the GPU at once at the least, one an SM; 0 where that is not known."""
    if target.interpreting:
        return INTERPRETED
    if target.kind != "cuda":
        return 0
    return target.multiprocessors if x.is_cuda else OFFLINE


def launch(x: Tensor, results: Results, dim: int) -> None:
    """Fills results, as in `plan`. Rows that are spread over more than ROW_DIMS dimensions take several launches."""
    with torch.cuda.device(x.device) if x.is_cuda else interpreted():
        planned = plan(x, results, dim)
        for kernel, grid, args, kwargs in planned or ():
            kernel[grid](*args, **kwargs)
    if planned is None:
        for entry, own in entries(x, results, dim):
            launch(entry, own, entry.dim() - 1)


def entries(x: Tensor, results: Results, dim: int) -> Iterator[tuple[Tensor, Results]]:
    """Parts of x and of results, rows along the last dimension: one for each entry of the smallest dimension of rows.

    Not a copy of x, which would lie otherwise than a part of x does: a row's bits follow from how rows lie. That
    dimension's stride stays, and tells how rows of the whole are aligned.
    """
    dims, across, singles = rows_of(x, results[0], dim)
    fewest = min(range(len(dims) - across), key=lambda i: dims[i].size)  # not the one that a tile of rows runs along
    sizes = [*(1 for _ in singles), *(d.size for d in dims)]
    steps_x, steps_y = ([*singles, *(d[of] for d in dims)] for of in (1, 2))
    whole = x.as_strided([*sizes, x.shape[dim]], [*steps_x, x.stride(dim)])
    filled = [y.as_strided([*sizes, y.shape[dim]], [*steps_y, y.stride(dim)]) for y in results]
    entry = lambda t, i: t.narrow(len(singles) + fewest, i, 1)
    for i in range(dims[fewest].size):
        yield entry(whole, i), tuple(entry(y, i) for y in filled)


class Ready:
    """A launch that was planned, for others of the same metadata on a GPU: `tensors` come first in its arguments."""

    def __init__(self, launch: Plan, tensors: int) -> None:
        names, values = launch.kernel.arg_names, dict(launch.kwargs)
        known = dict(zip(names, launch.args, strict=False))
        units, splits = known.get("units", 0), known.get("splits", 1)
        fresh = 0  # arguments behind the tensors that each call brings anew
        self.room: Callable[..., tuple[Any, ...]] = lambda *tensors: ()
        unused = 3 - tensors  # of a softmax no sums are stored
        if "epoch" in known and splits == 1:
            fresh, self.room = 2 + unused, lambda x, *results: (x,) * (2 + unused)
        elif "epoch" in known:
            fresh, self.room = 3 + unused, lambda x, *results: (*(x,) * unused, *room_for(x, units, splits))
        elif splits > 1 and "m_parts_ptr" in known:
            parts = known["m_parts_ptr"].numel()
            fresh, self.room = 3, lambda x, *results: (*parts_for(x, parts), counts_for(x, units // splits))
        elif "m_parts_ptr" in known:
            fresh, self.room = 3, lambda x, m, l_i: (m, m, m)
        self.rest = (*launch.args[tensors + fresh :], *(values.pop(name) for name in names[len(launch.args) :]))
        self.start, self.series = Starter(launch.kernel, launch.grid[0], values), Series(self.launches)
        self.in_epochs = "epoch" in known and splits > 1  # a number that is another each time, which no series has

    def __call__(self, *tensors: Tensor) -> None:
        on(tensors[0].device, self.launch, *tensors)

    def launch(self, *tensors: Tensor) -> None:
        """On the current device."""
        given = (*tensors, *self.room(*tensors))
        if self.in_epochs:
            start_all(self.launches(*given))
        else:
            self.series(*given)

    def launches(self, *given: Any) -> list[Launch]:
        """Of tensors, and of room for them."""
        return [(self.start, (*given, *self.rest))]


class ReadyTwo:
    """Two launches likewise: statistics, in room of each call's own, and the softmax that they give."""

    def __init__(self, stats: Plan, normalise: Plan) -> None:
        self.stats, self.normalise = Ready(stats, 3), Ready(normalise, 4)
        self.rows = stats.args[1].numel()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        on(x.device, self._launch, x, y)

    def _launch(self, x: Tensor, y: Tensor) -> None:
        m, l_i = parts_for(x, self.rows)
        self.stats.launch(x, m, l_i)
        self.normalise.launch(x, y, m, l_i)


def prepare(x: Tensor, results: Results, dim: int) -> Ready | ReadyTwo | None:
    """What fills results for tensors of this metadata; None where one launch does not reach all rows."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        planned = plan(x, results, dim)
    if planned is None:
        return None
    return ReadyTwo(*planned) if len(planned) == 2 else Ready(planned[0], 1 + len(results))


def interpret(x: Tensor, results: Results, dim: int) -> None:
    """`launch` on CPU tensors, through Triton's interpreter, which truncates float32 to bfloat16 where a GPU rounds."""
    if results[0].dtype != torch.bfloat16:
        launch(x, results, dim)
        return
    wide = torch.empty_like(results[0], dtype=torch.float32)
    launch(x, (wide,), dim)
    results[0].copy_(wide)
