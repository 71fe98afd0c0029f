"""Tile shapes of the softmax kernels, by columns, element size and layout, each with the measurement that chose it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from flashattn_lite.kernels.tuning import SHARED_RESERVED, cdiv, power_of_two, shared_bytes
from flashattn_lite.target import Target


@dataclass(frozen=True)
class SoftmaxTile:
    """Rows and columns of a softmax tile, warps, registers a thread at most (0: the compiler's choice).

    A unit is `steps` tiles of a row, or more where its parts would pass MOST_PARTS. `programs`: as many on each SM stay
    there and take unit after unit, the next one's elements on their way; 0: a program for each unit. `sweeps`: one
    program goes over a row of several tiles twice.
    """

    rows: int
    cols: int
    num_warps: int
    registers: int = 0
    steps: int = 1
    programs: int = 0
    sweeps: bool = False

    def lanes(self, across: bool, align: int) -> int:
        """Threads that share a row in the layout that Triton gives a tile, which runs along neighbours first."""
        if across:
            return max(1, min(32 * self.num_warps // self.rows, self.cols))
        return min(32 * self.num_warps, self.cols // align)

    def split(self, cols: int) -> tuple[int, int]:
        """(splits, steps): how many programs share a row of that many columns, and the tiles that each takes."""
        tiles = max(1, cdiv(cols, self.cols))
        steps = max(min(self.steps, tiles), cdiv(tiles, MOST_PARTS // self.rows))
        return cdiv(tiles, steps), steps


@dataclass(frozen=True)
class RingTile:
    """Columns of a slot of ring_kernel, warps, slots of the ring, units that lie between one and its output.

    A unit is taken in so many chunks. `programs`: as in SoftmaxTile, but of 0 none looks ahead.
    `spare`: columns by which a unit is shorter than its slot, of rows between 16-byte addresses. `registers`: as there.
    """

    cols: int
    num_warps: int
    slots: int = 1
    lag: int = 0
    programs: int = 0
    chunks: int = 1
    spare: int = 0
    registers: int = 0

    def split(self, cols: int) -> int:
        """How many units a row of that many columns is."""
        return cdiv(cols, self.cols - self.spare)

    def fit(self, slots: int, itemsize: int, target: Target) -> int:
        """How many programs with so many slots have a place on an SM."""
        turned = 4 * self.cols // self.chunks if self.spare else 0  # a float32 sum for each place in a chunk
        taken = slots * self.cols * itemsize + turned + RING_STATES + SHARED_RESERVED
        return (shared_bytes(target) + SHARED_RESERVED) // taken


AnyTile = TypeVar("AnyTile", SoftmaxTile, RingTile)

VECTOR_BYTES = 16  # the widest load of a thread
WORD_BYTES = 4  # of ring_kernel's words, and what else is loaded at once of rows between such addresses, if it can be
MOST_PARTS = 4096  # parts that one program merges, all its rows together: 16 KiB of m and 16 of l
NEIGHBOURS = 32  # rows that lie side by side in memory and share a tile: 64 bytes of float16, two sectors
# All that follows: H200, short runs, GB/s of one read and one write (statistics: of one read), bf16 / fp32. "Stay":
# `programs` > 0. Entries marked * were measured with the form before, of half as many instructions again.
# Shorter rows share a tile of so many elements. 2^20 x 32: 3715 / 3850 with 1024 and a warp, 3519 / 3784 with four
# times both.
# Statistics, 32768 x 1024, 131072 x 512 and 2^19 x 64: bf16 3154, 3236, 2439, fp32 3758, 3966, 2780; twice the elements
# and half the programs 3022, 3105, 2277, 3728, 3925, 2607; more of either in some better, in others worse.
SHORT_COLUMNS = 1024
SHORT, STATS_SHORT = SoftmaxTile(1, SHORT_COLUMNS, 1), SoftmaxTile(1, SHORT_COLUMNS, 1, programs=24)
# Tiles of whole rows by bytes an element and by columns, a power of two; rows of more than the last are split. Of 2048
# columns not measured.
LONGEST_WHOLE = 1 << 15
WHOLE = {
    2: {
        2048: SoftmaxTile(1, 2048, 4),
        4096: SoftmaxTile(1, 4096, 8),  # 4096 rows: 3125; 3102 with 4 warps, 3048 stay; a copy 3231
        8192: SoftmaxTile(1, 8192, 8),  # * 16384 rows: 4004; 3420 with 16, 3669 stay
        16384: SoftmaxTile(1, 16384, 8),  # * 8192 rows: 3718; 3591 with 16, 3722 stay. 128 rows: 957, 975 with 16
        # 8192 rows: 3863; 3424 do not stay, 3870 with 32; a copy 4145
        32768: SoftmaxTile(1, 32768, 16, 128, programs=1),
    },
    4: {
        2048: SoftmaxTile(1, 2048, 4),
        4096: SoftmaxTile(1, 4096, 4),  # 4096 rows: 3558; 3554 with 8 warps; a copy 3676
        8192: SoftmaxTile(1, 8192, 16),  # * 16384 rows: 4079; 4043 with 8, 3770 stay
        16384: SoftmaxTile(1, 16384, 16),  # * 8192 rows: 4055; 4058 with 8, 3843 stay. 128 rows: 1481, 1489 with 8
        32768: SoftmaxTile(1, 32768, 16),  # 8192 rows: 4171; * 4130 with 32; a copy 4233
    },
}
# Rows between 16-byte addresses where the ring does not serve. Up to WHOLE_BETWEEN columns they are tiles of whole rows
# all the same; longer ones are swept, in tiles by bytes an element and by columns, a power of two, and those longer
# still take two launches. Of a copy, bf16 / fp32: 4097 columns 0.72 / 0.94 (torch 0.29 / 0.58, whole rows 0.35 / 0.68),
# 8193 0.72 / 0.87 (0.24 / 0.44, 0.27 / 0.50), bf16 30523, 50257 and 131073 0.66, 0.60 and 0.51 (0.42, 0.55, 0.43); with
# 4096 columns and 16 or 8 warps 0.63, 0.57 and 0.48, with 8192 and 32 0.48, 0.51 and 0.50. Eviction hints of both
# kinds: level or less.
WHOLE_BETWEEN = 2048
SWEEP = {
    2: {
        4096: SoftmaxTile(1, 1024, 4, sweeps=True),
        16384: SoftmaxTile(1, 2048, 4, sweeps=True),
        1 << 18: SoftmaxTile(1, 8192, 16, 64, sweeps=True),
    },
    4: {
        4096: SoftmaxTile(1, 1024, 4, sweeps=True),
        8192: SoftmaxTile(1, 2048, 4, sweeps=True),
        16384: SoftmaxTile(1, 4096, 8, sweeps=True),
        1 << 18: SoftmaxTile(1, 8192, 16, sweeps=True),  # 50257: 0.69; 0.75 with twice both, too many for an AMD GPU
    },
}
# Where Gluon and cp.async serve, ring_kernel takes the place of some of these. Rows that are one unit and lie 16-byte
# aligned, by bytes an element and by columns, a power of two. 8192 x 32768: 4060; softmax_kernel 3876 in that run, 16
# warps, two programs an SM 4085 with 1 / l in the exponent, 3723 stay; a copy 4185.
RING_WHOLE = {(2, 32768): RingTile(32768, 8, chunks=8)}
# Rows that are split, by bytes an element: the first tile of which as many programs have a place. Of a copy, 2048 x
# 2^16, 1024 x 2^17, 128 x 2^19, 64 x 2^18 and 16 x 2^20: bf16 0.96, 0.96, 0.94, 0.80 and 0.72, fp32 0.98, 0.98, 0.96,
# 0.92 and 0.90. Units of other sizes, bf16: 10240 columns 0.95, 0.97, 0.95, 0.81, 0.78; 9216, four slots, lag 2, three
# programs 0.94, 0.95, 0.94, 0.83, 0.78; fp32: 4096 0.97, 0.98, 0.96, 0.91, 0.86; 4608, six slots, lag 4 0.99, 0.99,
# 0.97, 0.91, 0.89; 5632 0.97, 0.98, 0.96, 0.92, 0.90. A unit's copy begun when the one before has landed, or numbers
# drawn a step early: level to 4% less. The rest in GB/s at 2^17, bf16, of 4011: lag 2 3903; seven slots, lag 3 or 4
# 3939, 3949; lag 1 with four slots 3608; 8 warps 3743; units of 8 KiB 3696, of 32 KiB 3753. When each program had an
# equal share of the units: bf16 3716 for 3917, fp32 3884 for 4000. The next look at parts sent out before the output
# instead of after it: bf16 3830 and, in 8 chunks, 4014, fp32 4111; at 2^20 2542 and 3080 for 2635 and 3277.
RING_SPLIT = {
    2: (RingTile(8192, 4, slots=6, lag=3, programs=2, chunks=4),),
    4: (
        RingTile(5120, 4, slots=5, lag=3, programs=2, chunks=5),
        RingTile(4096, 4, slots=6, lag=3, programs=2, chunks=4),
    ),
}
# Longer rows, by bytes an element, and the columns past which. bf16, 16 x 2^20, of a copy: 0.83; in four chunks 0.81.
RING_LONG = {2: (1 << 19, RingTile(8192, 4, slots=4, lag=2, programs=3, chunks=8))}
# Of so few units another schedule, by bytes an element, of which no bit depends: bf16, 64 x 2^18 0.85 of a copy for
# 0.80; 1024 x 2^17 0.94 for 0.96.
RING_FEW = {2: (4096, {"slots": 4, "lag": 2, "programs": 3})}
# Rows that are one unit of as many chunks as they fill, by bytes an element: columns up to which so many warps and
# registers a thread do. Between 16-byte addresses, of a copy, bf16: 1537 columns 0.94 with these, 4097 0.95, 8193 0.95,
# 16387 0.95, 30523 0.94, 50257 0.93 (swept 0.70, 0.74, 0.75, 0.58, 0.65, 0.63; torch 0.42, 0.29, 0.24, 0.34, 0.43,
# 0.55); twice the warps 0.69, 0.79, 0.69, 0.93, 0.81, 0.64; half of them, 4097 to 30523: 0.90, 0.94, -, 0.86. fp32:
# 4097 0.98 (swept 0.90), 8193 0.95 (0.89), 16387 0.95 (0.79); 1537 0.97, by softmax_kernel 0.99.
RING_CHUNKS = {
    2: ((2040, 1, 64), (4600, 2, 64), (9208, 4, 64), (17400, 4, 96), (34808, 8, 64), (51200, 8, 96)),
    4: ((5116, 8, 48), (9212, 8, 64), (26620, 16, 64)),
}
CHUNKS = (3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 21, 25, 30)  # that a row may be: for each number a kernel is compiled
RING_BETWEEN_PAST = {2: 1024, 4: 2048}  # columns past which rows between 16-byte addresses are
# And of rows at 16-byte addresses those that fill no more than FILLED of a power of two, past so many columns. Of a
# copy, bf16, 1152, 2560, 5120, 11008 and 20480 columns: 0.98, 0.99, 0.98, 0.97, 0.96, in tiles of a power of two 0.94,
# 0.93, 0.96, 0.96, 0.90; 1536, 3072, 6144 and 12288 0.98, 0.98, 0.97, 0.96, in such tiles 1.00, 0.99, 1.00, 0.97. fp32:
# 20480 0.97 for 0.85; 5120, 11008 0.97, 0.97 for 0.98, 0.98. Past LONGEST_WHOLE all that fit: bf16, 50304, split 0.85.
RING_CHUNKS_PAST, FILLED = {2: 1024, 4: 16384}, 11 / 16
# Longer ones, split. bf16, 60001, 131073 and 1000001 columns: 0.79, 0.80, 0.74 (swept 0.60, 0.52, -); six slots, lag 3
# and two programs 0.65, 0.66, 0.66, with four chunks 0.54, 0.54, -; three slots, lag 1 and four programs 0.81, 0.80,
# 0.71; units of twice the size, three slots, lag 1 0.79, 0.74, -. fp32, 50257, 131073 and 1000001: 0.93, 0.92, 0.75;
# six slots and two programs 0.89, 0.88, 0.79; by copies of 4 bytes 0.85, 0.83, -.
RING_BETWEEN_SPLIT = {
    2: RingTile(8192, 4, slots=4, lag=2, programs=3, chunks=8, registers=168),
    4: RingTile(4096, 4, slots=4, lag=2, programs=3, chunks=8, registers=168),
}
# Statistics of rows that lie at no address of 16 bytes, nor of two elements, where a row is one unit. To a read, bf16:
# 1537 columns 0.74, 4097 0.90, 8193 0.92, 16387 0.91, 30523 0.88, 50257 0.81; fp32 4097 0.94, 16387 0.89. With a second
# slot for the row that comes, 4097: 0.72. Split, by programs of which the last merges all parts, 50257: 0.76, 16 x
# (2^20 + 1) 0.72. Rows of pairs, bf16, 1538, 4098, 12290, 30522 and 50258 columns: 0.78, 0.92, 0.84, 0.86, 0.82, by
# stats_kernel 0.89, 0.90, 0.91, 0.91, 0.88.
STATS_RING_CHUNKS = {
    2: ((2040, 1, 48), (4344, 1, 96), (8696, 2, 96), (17400, 4, 96), (30712, 4, 128), (51192, 8, 96)),
    4: ((4604, 4, 64), (9212, 4, 96)),
}
RING_STATES = 512  # bytes beside the ring by which up to 16 warps exchange their states
# Statistics by the columns up to which a tile of whole rows serves; STATS beyond. To a read, bf16 / fp32.
STATS_WHOLE = {
    # 4096 x 4096 1.05 / 1.00, 16384 x 2048 1.00; 1.04 / 1.00 and 0.97 where 20 stay
    4096: SoftmaxTile(1, 1024, 1, steps=4),
    # 5120 and 8192 columns 1.01 / 1.00 and 1.00 / 1.00; with tiles of 4096 and 4 warps 0.89 / 0.99 and 1.01 / 1.01, of
    # 1024 and one 1.05 / 0.99 and 1.00 / 1.00, but 128 x 8192 8.2 us for 7.0
    8192: SoftmaxTile(1, 2048, 2, steps=4),
    # 11008, 20480 and 32768 columns bf16 1.01, 1.00, 0.99; 0.85, 0.97, 1.00 with tiles of 8192, 128 x 16384 6.4 us for
    # 7.4
    32768: SoftmaxTile(1, 4096, 4, steps=8),
    # 50304 and 65536 columns bf16 0.97, 0.99; 0.98, 0.98 with registers as the compiler wants them, 0.95, 0.97 in units
    # of four tiles of 4096, 0.97, 0.95 in one of as many as there are, which has 64 rows in 13.1 us for 8.9
    65536: SoftmaxTile(1, 8192, 8, 64, steps=8),
    # 1024, 256 and 64 x 131072 bf16 0.97, 0.98, 1.10; 0.95, 0.90, 1.11 in units of four tiles of 4096, 0.99, 0.97, 0.85
    # with tiles of 8192. fp32 1.00, -, 0.95; 1.00, -, 1.01 and 1.00, -, 0.75
    1 << 17: SoftmaxTile(1, 16384, 16, 64, steps=8),
}
# Longer rows, and between 16-byte addresses those past LONGEST_WHOLE. 64 x 2^18, 128 x 2^19, 16 x 2^20 bf16 0.98, 0.94,
# 0.96; with tiles of 8192 in units of 16 0.84, 0.98, 0.83.
STATS = SoftmaxTile(1, 4096, 4, steps=4)
# fp32, by the columns past which: 16 x 2^20 0.94; with four steps 0.92.
STATS_LONG = {4: (1 << 17, SoftmaxTile(1, 4096, 4, steps=8))}
# Of rows that lie side by side, each element with an address of its own in registers: 512 columns whole. More are read
# twice: 16384 x 1024 1171 / 1846; 1048 / 1809 with tiles of 128, 676 / 1316 read once by programs that wait.
WHOLE_ACROSS = 16384  # elements; 256 x 65536: 1833 / 3130 with 8 warps, 1824 / 3057 with 16
STATS_ACROSS = SoftmaxTile(NEIGHBOURS, 64, 4, steps=8)
SHORT_ACROSS = 4096  # elements of a tile of shorter rows that lie side by side: 32 in each of 128 threads
INTERPRETED = {False: 8192, True: 128}  # whole and split alike, by across: small, so that small tests enter both


def softmax_tile(cols: int, itemsize: int, target: Target, *, across: bool, wide: bool) -> SoftmaxTile:
    """The tile of a softmax: of whole rows, of rows that are swept, or of both of two launches.

    wide: rows lie at 16-byte addresses. A function of a row's length, element size and layout and of the GPU: never of
    the number of rows.
    """
    block = power_of_two(cols)
    if across:
        return tile_across(block, target, stats=False)
    if block <= SHORT_COLUMNS:
        return short_tile(SHORT, block)
    whole = serving(WHOLE[itemsize], block, longest_whole(target) if wide else WHOLE_BETWEEN)
    return whole or serving(SWEEP[itemsize], block) or stats_tile(cols, itemsize, target, across=False, wide=wide)


def stats_tile(cols: int, itemsize: int, target: Target, *, across: bool, wide: bool) -> SoftmaxTile:
    """The tile of statistics; a function of the same things."""
    block = power_of_two(cols)
    if across:
        return tile_across(block, target, stats=True)
    if block <= (SHORT_COLUMNS if wide else SHORT_COLUMNS // 2):
        return short_tile(STATS_SHORT, block)
    # Between 16-byte addresses, to a read, bf16 / fp32: 100001 columns 0.80 / 0.95, 50257 - / 0.94; with tiles of 8192
    # elements 0.69 / 0.93 and - / 0.89.
    longest = INTERPRETED[False] if target.interpreting else None if wide else LONGEST_WHOLE
    tile = serving(STATS_WHOLE, block, longest)
    if tile is None:
        tile = of_length(cols, itemsize, STATS, STATS_LONG)
        tile = replace(tile, cols=INTERPRETED[False]) if target.interpreting else tile
    return tile if wide else replace(tile, cols=tile.cols // 2, steps=tile.steps * 2)


def short_tile(tile: SoftmaxTile, block: int) -> SoftmaxTile:
    """As many elements, of rows of so many columns."""
    return replace(tile, rows=tile.cols // block, cols=block)


def longest_whole(target: Target) -> int:
    """Columns of the longest rows that one program has whole."""
    return INTERPRETED[False] if target.interpreting else LONGEST_WHOLE


def serving(tiles: dict[int, SoftmaxTile], block: int, longest: int | None = None) -> SoftmaxTile | None:
    """The first tile of a table by columns that so many fit, none past `longest`."""
    return next((tile for most, tile in tiles.items() if block <= most <= (longest or most)), None)


def of_length(cols: int, itemsize: int, tile: AnyTile, longer: dict[int, tuple[int, AnyTile]]) -> AnyTile:
    """That tile, or the other that `longer` has for rows of such elements past so many columns."""
    limit, other = longer.get(itemsize, (cols, tile))
    return other if cols > limit else tile


def ring_tile(
    cols: int, itemsize: int, target: Target, *, wide: bool, stats: bool = False, rows: int | None = None
) -> RingTile | None:
    """The tile of ring_kernel, with as many programs an SM as fit; None: rows are another's.

    wide: rows lie at 16-byte addresses. A function of a row's length, element size and layout and of the GPU: of the
    number of rows (None: many) only the schedule, slots, lag and programs, which no bit depends on.
    """
    if not target.is_cuda(80) or (stats and wide) or (not wide and cols <= RING_BETWEEN_PAST[itemsize]):
        return None
    block, vector = power_of_two(cols), VECTOR_BYTES // itemsize
    tile: RingTile | None
    if not wide:
        tile = chunked_tile(cols, itemsize, target, vector, STATS_RING_CHUNKS if stats else RING_CHUNKS)
        if tile is None and not stats:
            tile = replace(RING_BETWEEN_SPLIT[itemsize], spare=vector)
    elif cols > LONGEST_WHOLE:
        tile = chunked_tile(cols, itemsize, target, 0, RING_CHUNKS)
        if tile is None:
            tiles = RING_SPLIT[itemsize]
            tile = next((t for t in tiles if t.fit(t.slots, itemsize, target) >= t.programs), tiles[-1])
            tile = of_length(cols, itemsize, tile, RING_LONG)
            most, schedule = RING_FEW.get(itemsize, (0, {}))
            tile = replace(tile, **schedule) if rows and rows * tile.split(cols) <= most else tile
    elif RING_CHUNKS_PAST[itemsize] < cols <= FILLED * block:
        tile = chunked_tile(cols, itemsize, target, 0, RING_CHUNKS)
    else:
        tile = RING_WHOLE.get((itemsize, block))
    if tile is None:
        return None
    fit = {n: tile.fit(n, itemsize, target) for n in range(tile.slots, 0, -1)}
    # A shorter ring rather than fewer programs, as long as the copy of a unit is on its way.
    slots = next((n for n in fit if n > tile.lag + 1 and fit[n] >= tile.programs), tile.slots)
    return replace(tile, slots=slots, programs=min(tile.programs, fit[slots])) if fit[slots] else None


def chunked_tile(
    cols: int, itemsize: int, target: Target, spare: int, tiles: dict[int, tuple[tuple[int, int, int], ...]]
) -> RingTile | None:
    """A tile of whole rows of such a table, if two have a place on an SM."""
    for most, num_warps, registers in tiles[itemsize]:
        if cols <= most:
            chunk = 32 * num_warps * VECTOR_BYTES // itemsize
            chunks = next(count for count in CHUNKS if cols + spare <= count * chunk)
            tile = RingTile(chunks * chunk, num_warps, chunks=chunks, spare=spare, registers=registers)
            if tile.fit(1, itemsize, target) >= 2:
                return tile
    return None


def tile_across(block: int, target: Target, *, stats: bool) -> SoftmaxTile:
    """Of rows that lie side by side, of up to so many columns."""
    whole = INTERPRETED[True] if target.interpreting else STATS_ACROSS.cols if stats else WHOLE_ACROSS // NEIGHBOURS
    if block > whole:
        return STATS_ACROSS
    rows = max(NEIGHBOURS, SHORT_ACROSS // block)
    return SoftmaxTile(rows, block, max(rows * block // 1024, 4), programs=5 if stats else 0)
