"""Starting the Hopper attention kernel: when it fits, its arguments, the launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32, uint8
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn_lite.errors import show
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.attention_hopper import attention_hopper_kernel
from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.descriptors import Descriptors
from flashattn_lite.kernels.hopper_config import HopperConfig, pieces, pieces_of_pages, pieces_of_v
from flashattn_lite.kernels.hopper_shape import HopperTile
from flashattn_lite.kernels.hopper_tasks import ROWS
from flashattn_lite.kernels.merge_launch import Merge
from flashattn_lite.kernels.operands import (
    expanded_mask,
    lse_strides,
    mask_align,
    mask_strides,
    rows_differ,
    score_args,
    sizes,
    strides,
    takes_tma,
    tma_strides,
    varies,
)
from flashattn_lite.kernels.series import Series
from flashattn_lite.kernels.start import Address, Plan, Starter, counters, on
from flashattn_lite.kernels.tuning import cdiv
from flashattn_lite.kernels.tuning_dealt import dealt
from flashattn_lite.kernels.tuning_decode import DecodeConfig, Splits
from flashattn_lite.kernels.tuning_hopper import LAST_TILES, hopper_tile
from flashattn_lite.kernels.tuning_parts import FEW_PARTS, ONE_TILE_PARTS, split_of, with_chains
from flashattn_lite.kernels.uncovered import Uncovered
from flashattn_lite.problem import AttentionProblem, Inputs, too_long
from flashattn_lite.target import Target

LIMITS = {torch.float16: 65504.0, torch.bfloat16: 2.0**64}  # of l_i; bfloat16's leaves acc room for a large V
DTYPES = {torch.float16: float16, torch.bfloat16: bfloat16, torch.float32: float32, torch.uint8: uint8}
MOST_TASKS = 1 << 29  # row tiles, each in as many parts as there are: producers tell of them in int32, by fours
# A thread at launch, by (consumers, blocks a multiprocessor): what its 64 Ki registers allow.
REGISTERS = {(1, 1): 168, (1, 2): 128, (1, 3): 80, (2, 1): 168, (3, 1): 128}


def why_not(problem: AttentionProblem, inputs: Inputs) -> list[str]:
    """Reasons why this kernel can't take the problem on a Hopper GPU; empty if it can."""
    reasons = too_long(problem)
    if problem.dtype not in LIMITS:
        reasons.append(f"it computes float16 and bfloat16, not {show(problem.dtype)}")
    if min(problem.batch, problem.len_q, problem.len_k) == 0:
        reasons.append("there is nothing to compute: no sequence, no query or no key")
    parts = ONE_TILE_PARTS if split_of(problem) else 1
    tasks = problem.batch * problem.heads_q * cdiv(problem.len_q, ROWS.value) * parts
    if tasks >= MOST_TASKS:
        reasons.append(f"it counts fewer than {MOST_TASKS} tiles of {ROWS.value} rows; these may be {tasks}")
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if x.numel() == 0:
            reasons.append(f"{name} is empty: there is nothing to copy")
        elif x.shape[-1] % 8 or not takes_tma(x, heads_packed=name == "q"):
            reasons.append(
                f"the tensor copy engine needs rows of whole 16-byte pieces, at 16-byte addresses: {name} of head dim "
                f"{x.shape[-1]}, strides {tuple(x.stride())}, address % 16 = {x.data_ptr() % 16} is not"
            )
    return reasons


def config_of(problem: AttentionProblem, inputs: Inputs, target: Target) -> HopperConfig:
    """The tile that a launch takes: of the table's, by the mask's kind, in parts or chains of them, or dealt out."""
    mask_bytes = None
    if inputs.mask is not None and not varies(problem, inputs.mask, 2):
        mask_bytes = 0
    elif inputs.mask is not None and by_tma(expanded_mask(problem, inputs.mask)):
        mask_bytes = inputs.mask.element_size()
    config = hopper_tile(problem, mask_bytes)
    if config.split:
        config = with_chains(problem, config, target)
    return config if config.folds else dealt(problem, config, target)


def tile_of(problem: AttentionProblem, mask: Tensor | None, config: HopperConfig, page: int = 0) -> HopperTile:
    """What the kernel is compiled for. page: keys of one; 0: they lie in one piece."""
    of_qk, of_v = pieces(problem.head_dim), pieces_of_v(problem.head_dim_v)
    if problem.cache:
        of_qk, of_v = pieces_of_pages(of_qk), pieces_of_pages(of_v)
    o_width = min(config.o_width, of_v[1])
    if config.split and not config.alone:
        o_width //= 2  # those of a state leave in float32, in as many bytes
    leaves = math.prod(of_v) // o_width
    o_slots = max(slots for slots in range(1, config.o_slots + 1) if leaves % slots == 0)
    if config.folds_in_room:
        # What leaves does so by the room of float32 acc.
        o_slots = leaves * (2 * config.chains if config.alone else 1)
    return HopperTile(
        WARPGROUPS=config.warpgroups,
        DEALT=config.dealt,
        BLOCK_N=config.block_n,
        PAGE=page,
        STAGES=config.stages,
        Q_SLOTS=config.q_slots or config.warpgroups,
        HEAD_DIM_V=problem.head_dim_v,
        PIECES=of_qk[0],
        BLOCK_D=of_qk[1],
        V_PIECES=of_v[0],
        BLOCK_DV=of_v[1],
        GROUP=problem.group,
        PACK=config.pack,
        Q_HELD=config.q_held,
        O_WIDTH=o_width,
        O_SLOTS=o_slots,
        APART=config.apart,
        CARRIED=config.carried,
        TURNS=config.turns,
        SPLIT=config.split,
        FEW=FEW_PARTS,
        LONG=config.long,
        LANES=config.parts,
        CHAIN=config.chain,
        CHAINS=config.chains,
        FOLDS=config.folds,
        FOLDS_IN_ROOM=config.folds_in_room,
        ALONE=config.alone,
        SETTLES_AT_ONCE=problem.dtype == torch.bfloat16,
        MASK_ROWS=rows_differ(problem, mask, config.pack),
        MASK_ALIGN=mask_align(problem, mask, 4),
        MASK_COPIED=config.mask_copied,
        LIMIT=LIMITS[problem.dtype],
    )


class Call:
    """A problem ready to run: `call(inputs, out, lse)` fills out and lse, for all tensors of the same metadata.

    inputs.k and inputs.v are pages where there is a table.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        target: Target,
        config: HopperConfig | None = None,
        table: Tensor | None = None,
    ) -> None:
        config = config or config_of(problem, inputs, target)
        page = 0 if table is None else inputs.k.shape[2]
        self.problem, self.tile = problem, tile_of(problem, inputs.mask, config, page)
        tile, packed = self.tile, problem.features.varlen
        heads = problem.heads_kv if tile.PACK > 1 else problem.heads_q
        self.merge = merge_of(problem, inputs, tile, out, lse, target) if tile.PARTIAL else None
        states = self.merge.parts if self.merge else 1
        steps = (*strides(out, packed)[:3], *lse_strides(lse, packed))
        if self.merge:  # to l from m; states; of a batch entry's and a key/value head's states
            rows = states * problem.group * problem.len_q
            steps = (self.merge.state_sizes[1], states, 0, problem.heads_kv * rows, rows)
        row_tiles = cdiv(problem.len_q, tile.BLOCK_M // tile.PACK)
        num_m = row_tiles * states
        num_tiles = num_m * problem.batch * heads
        rows_q, rows_k = (inputs.q.shape[0], inputs.k.shape[0]) if packed else (problem.len_q, problem.len_k)
        self.numbers = (
            *(*steps, num_m, heads, problem.batch * heads, *sections(problem, heads, num_m, target), rows_q, rows_k),
            *(problem.diag_lo, problem.diag_hi, num_tiles, row_tiles),
        )
        rows = [ROWS.value // tile.PACK, tile.PACK]
        leaves = [*rows, tile.O_WIDTH]
        copied_keys = min(page or tile.BLOCK_N, tile.BLOCK_N)
        copied = (of_mask(expanded_mask(problem, inputs.mask), tile),) if tile.MASK_COPIED else ()
        descriptors = Descriptors(
            by_group(inputs.q, tile.GROUP, [*rows, tile.BLOCK_D], packed),
            by_head(inputs.k, [copied_keys, tile.BLOCK_D], packed),
            by_head(inputs.v, [copied_keys, tile.BLOCK_DV], packed),
            of_states(problem, out, states, leaves) if self.merge else by_group(out, tile.GROUP, leaves, packed),
            *copied,
        )
        # Where no tensor belongs to the scores, theirs are the same for all launches.
        self.scores = score_args(problem, inputs) if all(x is None for x in (*inputs[3:], table)) else None
        options = {"num_warps": 4, "maxnreg": REGISTERS[tile.WARPGROUPS, config.blocks]}
        blocks = min(target.multiprocessors * config.blocks, num_tiles)
        self.start = Starter(attention_hopper_kernel, blocks, options, descriptors)
        self.uncovered = Uncovered(problem, inputs, target, follows=True) if packed else None
        self.series = Series(self.launches)

    def arguments(
        self, inputs: Inputs, table: Tensor | None, out: Tensor, lse: Tensor, counter: Tensor | Address
    ) -> tuple[Any, ...]:
        """In parts, acc and m come in the place of out and lse."""
        mask = expanded_mask(self.problem, inputs.mask) if self.tile.MASK_COPIED else None
        scores = self.scores or score_args(self.problem, inputs, table)
        given = (*inputs[:3], out, mask, out, lse, counter)
        return (*given, *self.numbers, scores, self.problem.features, self.tile)

    def __call__(self, inputs: Inputs, out: Tensor, lse: Tensor, table: Tensor | None = None) -> None:
        on(out.device, self._launch, inputs, out, lse, table)

    def _launch(self, inputs: Inputs, out: Tensor, lse: Tensor, table: Tensor | None = None) -> None:
        room = self.merge.room(out) if self.merge else None
        self.series(*inputs, table, out, lse, room, counters.next(out.device))

    def launches(self, *given: Any) -> list[Launch]:
        """Of inputs, a table, out, lse, room for states and a counter."""
        *tensors, table, out, lse, room, counter = given
        inputs = Inputs(*tensors)
        # What comes behind reads lengths while this launch runs: those that must be copied are copied ahead of it.
        states, behind = (lse, lse, out), []
        if self.merge:
            states = self.merge.states(room)
            merged = self.merge.arguments(inputs, out, lse, states, self.problem.len_k)
            behind = [(self.merge.start, merged)]
        elif self.uncovered:
            behind = [(self.uncovered.start, self.uncovered.arguments(inputs, out, lse))]
        return [(self.start, self.arguments(inputs, table, states[2], states[0], counter)), *behind]


def prepare(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target, table: Tensor | None = None
) -> Call:
    """What fills out and lse for tensors of this metadata."""
    return Call(problem, inputs, out, lse, target, table=table)


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: HopperConfig | None = None,
    table: Tensor | None = None,
) -> Plan:
    """The first launch, to look at or to compile."""
    call = Call(problem, inputs, out, lse, target, config, table)
    counter = torch.zeros(1, dtype=torch.int32, device=out.device)
    if call.merge:
        lse, _, out = call.merge.states(call.merge.room(out))
    return call.start.plan(call.arguments(inputs, table, out, lse, counter))


def merge_of(
    problem: AttentionProblem, inputs: Inputs, tile: HopperTile, out: Tensor, lse: Tensor, target: Target
) -> Merge:
    """The launch behind one that takes the keys in parts."""
    splits = Splits(tile.SPLIT, tile.FEW, tile.LONG)
    config = DecodeConfig(
        tile.BLOCK_M, tile.BLOCK_N, splits, 4, 1, tile.LANES, chain=tile.CHAIN, columns=(128, 128, 128)
    )
    merged = decode_launch.tile_of(problem, inputs, target, config, 0)
    parts, own = decode_launch.most_splits(problem, merged), tile.CHAIN if tile.FOLDS else 1
    return Merge(problem, merged, cdiv(parts, own), parts, (own, own), config, out, lse, target)


def sections(problem: AttentionProblem, heads: int, num_m: int, target: Target) -> tuple[int, int]:
    """(how many of the kernel's heads are worked on at a time, how many in such sections; the rest are one more).

    Those of one K/V head: what runs at the same time then reads as few K and V as can be. Causal row tiles are not
    equally long: the last heads are one section, so that its long ones come first and short ones end the launch. Of
    packed sequences the heads of one, whatever its length: `past_empty` counts on it.
    """
    if problem.features.varlen:
        return heads, problem.batch * heads
    last = max(1, LAST_TILES * target.multiprocessors // num_m) if problem.features.right else 0
    return heads // problem.heads_kv, max(0, problem.batch * heads - last)


def by_head(x: Tensor, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, head, row, dim] tiles of one head; reads 0 outside."""
    shape = sizes(x, packed)
    return _descriptor(x, shape, strides(x, packed), [1, 1, *block])


def by_group(x: Tensor, group: int, block: list[int], packed: bool) -> TensorDescriptor:
    """[batch, key/value head, row, head of the group, dim] tiles; reads 0 outside, writes nothing there."""
    (batch, heads, rows, dim), (step_b, step_h, step_m, step_d) = sizes(x, packed), strides(x, packed)
    shape = [batch, heads // group, rows, group, dim]
    return _descriptor(x, shape, (step_b, step_h * group, step_m, step_h, step_d), [1, 1, *block])


def of_states(problem: AttentionProblem, like: Tensor, states: int, block: list[int]) -> TensorDescriptor:
    """[batch, key/value head and state, row, head of the group, dim] tiles of what decode_merge.py reads as acc."""
    rows, group, dim = problem.len_q, problem.group, problem.head_dim_v
    shape = [problem.batch, problem.heads_kv * states, rows, group, dim]
    steps = (shape[1] * group * rows * dim, group * rows * dim, dim, rows * dim, 1)
    base = like.new_empty(1, dtype=torch.float32)  # of the kind that is put in its place at each launch
    return _descriptor(base, shape, steps, [1, 1, *block])


def by_tma(mask: Tensor) -> bool:
    """Whether the copy engine takes tiles of an expanded mask [B, Hq, L, S] whose rows differ."""
    _, _, step_m, step_n = mask_strides(mask)
    return takes_tma(mask) and step_m != 0 and step_n == 1 and mask.dtype in DTYPES


def of_mask(mask: Tensor, tile: HopperTile) -> TensorDescriptor:
    """[batch, head, row, key] tiles of an expanded mask, one entry along dimensions that it repeats; 0 outside."""
    steps = mask_strides(mask)
    shape = [size if step else 1 for size, step in zip(mask.shape, steps, strict=True)]
    return _descriptor(mask, shape, steps, [1, 1, ROWS.value, tile.BLOCK_N])


def _descriptor(x: Tensor, shape: list[int], steps: tuple[int, ...], block: list[int]) -> TensorDescriptor:
    layout = NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, shape, tma_strides(shape, steps, x.element_size()), block, layout)
