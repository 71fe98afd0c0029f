"""What the producer tells the consumers of the Hopper kernel: which rows a tile holds, and which keys it visits.

A task is worked out once, by the producer, and travels as 16 words of shared memory: the divisions in it would cost
each consumer some 600 cycles a tile, as much as two key tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn_lite.kernels.decode_splits import splits_of, visible_keys
from flashattn_lite.kernels.device.bounds import clamp_sequence, tile_start, visited_tiles
from flashattn_lite.kernels.device.integers import divided
from flashattn_lite.kernels.gluon_names import reinterpret

FAST, REDO, PLUS, MINUS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # what to do with a tile
REPORT, END = gl.constexpr(-1), gl.constexpr(-2)  # messages that are no tile
CLEAN, EXACT = gl.constexpr(0x7FC00001), gl.constexpr(0x7FC00002)  # marks in lse: NaN that no arithmetic makes
LISTED = gl.constexpr(512)  # tiles between two looks at the marks
ROWS = gl.constexpr(64)  # rows of a consumer: wgmma's M


class Sizes(NamedTuple):
    """What a launch is made of; heads are query heads, or key/value heads where they are packed."""

    num_m: Any  # tasks of a head: its row tiles, each as often as there are parts, or chains of them
    heads: Any  # of a batch entry
    all_heads: Any  # of the batch
    section: Any  # heads that are worked on together
    early: Any  # heads in such sections; those behind them are one more
    rows_q: Any
    rows_k: Any
    diag_lo: Any
    diag_hi: Any
    num_tiles: Any
    row_tiles: Any  # of a head


class Barriers(NamedTuple):
    """On which shared memory changes hands: full, from TMA to consumers; empty, from consumers to the producer."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    cleaned: Any


class Task(NamedTuple):
    """One row tile: where it lies, and the tiles of keys it visits."""

    b: Any
    head: Any
    first: Any  # its first query position
    start_q: Any  # the sequence's first row in memory
    len_q: Any
    len_k: Any
    diag_lo: Any
    diag_hi: Any
    count: Any  # tiles of keys, 1 at least: a row that sees nothing must be written too
    edges: Any  # of them to be taken with care, see visited_tiles
    before: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    part: Any  # of the keys; 0 where there is but one; with FOLDS see `part_of`
    start_k: Any  # its first row in memory, which the producer keeps to itself


class Span(NamedTuple):
    """A row tile, and all keys of its sequence."""

    b: Any
    head: Any
    first: Any
    start_q: Any
    len_q: Any
    start_k: Any
    len_k: Any
    diag_lo: Any
    diag_hi: Any
    first_tile: Any  # of the keys that the sequence's rows see
    each: Any  # tiles of a part
    past: Any  # the part behind the last that is this block's; not past `part` where the sequence has none for it


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that each turn after ARRIVALS. All of them must be in use to the end.

    Memory of one that nobody waits on would be given to something else, and hardware writes a barrier's state into it
    whenever it likes, as long as it has not been invalidated (PTX ISA, mbarrier.inval).
    """
    all_of = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(all_of.index(i), count=ARRIVALS)
    return all_of


@gluon.jit
def place(tile, sizes, F: gl.constexpr):
    """(batch, head, row tile) of a tile number: heads section by section, long causal rows of a section first."""
    first, end, section = tile * 0, sizes.early, sizes.section
    if F.right and not F.varlen and tile >= sizes.early * sizes.num_m:
        first, end, section = sizes.early, sizes.all_heads, sizes.all_heads - sizes.early
        tile -= sizes.early * sizes.num_m
    before = tile // (section * sizes.num_m) * section
    rest = tile - before * sizes.num_m
    first += before
    width = gl.minimum(section, end - first)
    block_m = rest // width
    head = first + rest - block_m * width
    if F.right:
        block_m = sizes.num_m - 1 - block_m
    b = head // sizes.heads
    return b, head - b * sizes.heads, block_m


@gluon.constexpr_function
def may_be_empty(F, T):
    """Whether a task may have nothing to do: its rows, or part of the keys, are past the end of a sequence.

    Of such a part no state is left: the merge knows.
    """
    return F.varlen or (F.kv_lens and T.PARTIAL)


@gluon.jit
def span_of(tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """(the row tile of a tile number, its part of the keys where that is the number's too, the first with FOLDS)."""
    b, head, block_m = place(tile, sizes, F)
    len_q, len_k, diag_lo, diag_hi = sizes.rows_q, sizes.rows_k, sizes.diag_lo, sizes.diag_hi
    start_q, start_k, part = b * 0, b * 0, b * 0
    if T.PARTIAL:
        part, block_m = divided(block_m, sizes.row_tiles)  # those that share keys are neighbours
    if F.varlen:
        cu_q, cu_k = args.cu_seqlens_q_ptr + b, args.cu_seqlens_k_ptr + b
        start_q, len_q = clamp_sequence(gl.load(cu_q), gl.load(cu_q + 1), len_q)
        start_k, len_k = clamp_sequence(gl.load(cu_k), gl.load(cu_k + 1), len_k)
    seen_lo, seen_hi, len_k, diag_lo, diag_hi = visible_keys(args.kv_lens_ptr, b, len_q, len_q, len_k,
                                                           diag_lo, diag_hi, F)  # fmt: skip
    first_tile, each, past = b * 0, b * 0, b * 0 + 1
    if T.SPLIT > 0:
        first_tile, tiles, each = splits_of(seen_lo, seen_hi, T)
        part *= T.OWNED
        past = gl.minimum((tiles + each - 1) // each, part + T.OWNED * T.CHAINS)
        if not may_be_empty(F, T):
            past = gl.maximum(past, part + 1)
    first = block_m * (ROWS * T.WARPGROUPS // T.PACK)
    return Span(b, head, first, start_q, len_q, start_k, len_k, diag_lo, diag_hi, first_tile, each, past), part


@gluon.jit
def task_of(span, part, second, F: gl.constexpr, T: gl.constexpr):
    """The task of a row tile and a part of its keys; `second`: see `part_of`."""
    start_k, len_k, diag_lo, diag_hi = span.start_k, span.len_k, span.diag_lo, span.diag_hi
    if T.SPLIT > 0:
        start_k = (span.first_tile + part * span.each) * T.BLOCK_N
        len_k = gl.minimum(gl.maximum(len_k - start_k, 0), span.each * T.BLOCK_N)
        diag_lo -= start_k
        diag_hi -= start_k
    first = span.first
    POSITIONS: gl.constexpr = ROWS * T.WARPGROUPS * T.DEALT // T.PACK
    if T.DEALT > 1:
        first = first // POSITIONS * POSITIONS
    last = gl.minimum(first + POSITIONS, span.len_q)
    count, edges, before, lo, full_lo, full_hi = visited_tiles(first, last, len_k, diag_lo, diag_hi, T.BLOCK_N, F)
    count, edges = gl.maximum(count, 1), gl.maximum(edges, 1)
    if T.FOLDS:
        part += (span.past - 1 - part + second * T.LANES) * T.LANES
    return Task(span.b, span.head, span.first, span.start_q, span.len_q, len_k, diag_lo, diag_hi, count, edges, before,
                lo, full_lo, full_hi, part, start_k)  # fmt: skip


@gluon.jit
def locate(tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The task of a tile number; with FOLDS that of the first part."""
    span, part = span_of(tile, sizes, args, F, T)
    return task_of(span, part, 0, F, T)


@gluon.jit
def part_of(task, T: gl.constexpr):
    """(a task's part of the keys, how many come behind it, 1 if it has been done again once), with FOLDS.

    In one word, because a message has room for no more.
    """
    return task.part % T.LANES, task.part // T.LANES % T.LANES, task.part // (T.LANES * T.LANES)


@gluon.jit
def state_of(task, T: gl.constexpr):
    """Which of the states of its rows a task leaves: its part's, with FOLDS its chain's."""
    if T.FOLDS:
        return part_of(task, T)[0] // T.CHAIN
    else:
        return task.part


@gluon.jit
def no_task(number):
    """What goes with a message that is about no row tile; of a number only the type counts."""
    zero = number * 0
    return Task(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)


@gluon.jit
def past_empty(tile, sizes, args, F: gl.constexpr, T: gl.constexpr):
    """The tile number if there is something to do, else the first behind it of which that may be so."""
    span, part = span_of(tile, sizes, args, F, T)
    if F.varlen:
        POSITIONS: gl.constexpr = ROWS * T.WARPGROUPS // T.PACK
        empty, present = span.first >= span.len_q, (span.len_q + POSITIONS - 1) // POSITIONS
    else:
        empty, present = part >= span.past, (span.past + T.OWNED - 1) // T.OWNED * sizes.row_tiles
    # Heads of a section are a sequence's, so that theirs are neighbours; not so of the last, see `sections`.
    before = tile // (sizes.section * sizes.num_m) * sizes.section
    past = sizes.num_m
    if F.right:  # they come first
        past -= present
    past = before * sizes.num_m + past * gl.minimum(sizes.section, sizes.early - before)
    return gl.where(empty, gl.where(tile < sizes.early * sizes.num_m, past, tile + 1), tile)


@gluon.constexpr_function
def first_keys_early(F, T):
    """Whether key block 0 is the second tile of a visit, so that a row may settle before all edges are taken."""
    return not T.SETTLES_AT_ONCE and F.right and not F.left and F.mask == ""


@gluon.jit
def key_start(i, task, F: gl.constexpr, T: gl.constexpr):
    """First key of the i-th tile: edges from the right end on, but for `first_keys_early`, then whole tiles."""
    edge = task.edges - 1 - i
    if first_keys_early(F, T):  # the rightmost edge, block 0, the others from the right on
        edge = gl.where(i == 1, 0, gl.minimum(edge + 1, task.edges - 1))
    at = gl.where(i < task.edges, edge, i)
    return tile_start(at, task.edges, task.before, task.lo, task.full_lo, task.full_hi, task.count - task.edges,
                      T.BLOCK_N)  # fmt: skip


@gluon.jit
def entry_of(task, F: gl.constexpr):
    """The batch entry in memory: packed sequences lie behind one another in one."""
    if F.varlen:
        return task.b * 0
    else:
        return task.b


@gluon.jit
def heads_of(task, T: gl.constexpr):
    """(key/value head, place in its group) of a task."""
    if T.PACK > 1:
        return task.head, task.head * 0
    else:
        return task.head // T.GROUP, task.head % T.GROUP


@gluon.jit
def rows_of(offs_r, task, w, T: gl.constexpr):
    """(position, query head, exists) of rows offs_r of consumer w."""
    first = task.first + w * (ROWS // T.PACK)
    if T.PACK > 1:
        pos = first + offs_r // T.PACK
        in_group = offs_r % T.PACK
        return pos, task.head * T.GROUP + in_group, (pos < task.len_q) & (in_group < T.GROUP)
    else:
        pos = first + offs_r
        return pos, task.head + offs_r * 0, pos < task.len_q


@gluon.jit
def lse_pointers(lse, task, head, pos, F: gl.constexpr, T: gl.constexpr):
    """lse = (pointer, (batch stride, head stride)); PARTIAL: where m is."""
    if T.PARTIAL:
        return lse[0] + state_rows(lse, task, head, pos, T)
    else:
        at = entry_of(task, F).to(gl.int64) * lse[1][0] + head.to(gl.int64) * lse[1][1]
        return lse[0] + at + (task.start_q + pos)


@gluon.jit
def state_rows(lse, task, head, pos, T: gl.constexpr):
    """Numbers of rows in [B, Hkv, states, G, L], as decode_merge.py reads them; lse[1]: strides of B and Hkv."""
    at = task.b.to(gl.int64) * lse[1][0] + (head // T.GROUP).to(gl.int64) * lse[1][1]
    return at + state_of(task, T).to(gl.int64) * (T.GROUP * task.len_q) + (head % T.GROUP * task.len_q + pos)


@gluon.jit
def q_slot(n_tile, w: gl.constexpr, T: gl.constexpr):
    """(buffer, phase) of the Q of consumer w of the n-th row tile."""
    if T.Q_SLOTS == T.WARPGROUPS:
        return w, n_tile & 1
    else:
        use = n_tile * T.WARPGROUPS + w
        return use % T.Q_SLOTS, use // T.Q_SLOTS & 1


@gluon.jit
def stage(it, T: gl.constexpr):
    """(buffer, phase) of the it-th tile of keys that a block takes. Unsigned, because signed takes twice the steps."""
    use = it.to(gl.uint32)
    return (use % T.STAGES).to(gl.int32), (use // T.STAGES & 1).to(gl.int32)


@gluon.jit
def next_stage(at, phase, it, T: gl.constexpr):
    """`stage` of it + 1, from that of it where it is carried."""
    if T.CARRIED != "kv":
        return stage(it + 1, T)
    elif T.STAGES & (T.STAGES - 1) == 0:
        return (at + 1) & (T.STAGES - 1), phase ^ ((at + 1) // T.STAGES)
    else:
        last = at == T.STAGES - 1
        return gl.where(last, 0, at + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def send(message, task, n_message, talk):
    """Tells every consumer a message and its task."""
    slot, slot_full, slot_empty = talk[0], talk[1], talk[2]
    at = n_message % 2
    mbarrier.wait(slot_empty.index(at), ((n_message // 2) & 1) ^ 1)
    word = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [1], [0]))
    words = gl.where(word == 0, message, 0)
    for i in gl.static_range(15):
        words = gl.where(word == i + 1, task[i], words)
    slot.index(at).store(words)
    mbarrier.arrive(slot_full.index(at), count=1)
    return n_message + 1


@gluon.jit
def receive(n_message, talk):
    """The next (message, task) of the producer."""
    slot, slot_full, slot_empty = talk[0], talk[1], talk[2]
    at = n_message % 2
    mbarrier.wait(slot_full.index(at), (n_message // 2) & 1)
    first = at * 16
    words = reinterpret(slot, gl.int32, [2 * 16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    message, task = word(words, first), Task(
        word(words, first + 1), word(words, first + 2), word(words, first + 3), word(words, first + 4),
        word(words, first + 5), word(words, first + 6), word(words, first + 7), word(words, first + 8),
        word(words, first + 9), word(words, first + 10), word(words, first + 11), word(words, first + 12),
        word(words, first + 13), word(words, first + 14), word(words, first + 15), first * 0,
    )  # fmt: skip
    mbarrier.arrive(slot_empty.index(at), count=1)
    return message, task


@gluon.jit
def word(words, at):
    """One word of shared memory, as each thread's scalar."""
    return gl.max(words.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
