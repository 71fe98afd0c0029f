"""Starting the decoding kernels: when they fit, their arguments, the two launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashattn_lite.kernels import attention_launch
from flashattn_lite.kernels.compiling import Launch
from flashattn_lite.kernels.decode import partial_kernel
from flashattn_lite.kernels.decode_splits import DecodeTile
from flashattn_lite.kernels.interpreter import fill
from flashattn_lite.kernels.merge_launch import Merge
from flashattn_lite.kernels.operands import (
    VECTOR,
    contiguous,
    expanded_mask,
    in_bytes,
    in_rows,
    lse_strides,
    mask_strides,
    packing,
    rows_differ,
    strides,
    vectorised,
)
from flashattn_lite.kernels.series import Numbers, Series
from flashattn_lite.kernels.start import Plan, Starter, on, options_of
from flashattn_lite.kernels.tuning import cdiv, padded
from flashattn_lite.kernels.tuning_decode import (
    FEW_ROWS,
    FILLED,
    FULL_OF_PAIRS,
    MANY,
    TELLING,
    DecodeConfig,
    decode_tile,
    enough,
)
from flashattn_lite.kernels.uncovered import Uncovered
from flashattn_lite.problem import UNPROMISED, AttentionProblem, Inputs
from flashattn_lite.state import LOG2E
from flashattn_lite.target import Target, takes_tf32


def why_not_attention(problem: AttentionProblem, target: Target) -> list[str]:
    """Reasons why `attention` does not split this problem's keys; empty if it does. Not the batch: bits would tell."""
    reasons = attention_launch.why_not(problem, target)
    if problem.features.varlen:
        return reasons + why_not_packed(problem)
    rows = problem.group * problem.len_q
    keys = next((keys for most, keys in FEW_ROWS if rows <= most), None)
    if rows == 0 or keys is None:
        reasons.append(f"it is for 1 to {FEW_ROWS[-1][0]} query rows per key/value head; this one has {rows}")
    elif problem.len_k < keys:
        reasons.append(f"with {rows} query rows per key/value head it takes {keys} keys or more (here {problem.len_k})")
    return reasons


def why_not_packed(problem: AttentionProblem) -> list[str]:
    """The same of packed sequences. What was promised says how few rows there are, not how long the neighbours are."""
    rows, most = problem.group * problem.rows, FEW_ROWS[0][0]
    if 0 < rows <= most:
        return []
    return [
        f"of packed sequences it is for 1 to {most} query rows per key/value head by max_seqlen_q, which counts as "
        f"{UNPROMISED} or more where it is not given; here {rows}"
    ]


def as_promised(problem: AttentionProblem) -> AttentionProblem:
    """With len_q of packed sequences as promised, however few rows there are in all: a row's bits follow from it."""
    return replace(problem, len_q=problem.promised_q) if problem.promised_q is not None else problem


def tile_of(problem: AttentionProblem, inputs: Inputs, target: Target, config: DecodeConfig, page: int) -> DecodeTile:
    """What the kernels are compiled for, but for what a launch's splits decide. page: keys of one, or 0."""
    precise = problem.dtype != torch.float32 or not takes_tf32()
    aligned = vectorised(inputs.k) and vectorised(inputs.v)
    features = problem.features
    mask_rows = rows_differ(problem, inputs.mask, problem.group)
    return DecodeTile(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLIT=config.splits.keys,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v),
        GROUP=problem.group,
        PAGE=page,
        ALIGN=VECTOR // problem.dtype.itemsize if aligned else 1,
        PRECISION="ieee" if precise else "tf32",
        ONE=problem.len_q == 1,
        UNEQUAL=mask_rows or (problem.len_q > 1 and (features.left or features.right)),
        MASK_ROWS=mask_rows,
        FEW=config.splits.few,
        LONG=config.splits.long,
        LANES=config.lanes,
        CHAIN=config.chain,
        PAIRED=config.paired,
        OWNS_PAIR=False,
        SEPARATE=False,
        ALONE=False,
        FLAT=config.flat,
        PDL=target.is_cuda(90),
    )


def config_of(problem: AttentionProblem, inputs: Inputs, target: Target) -> DecodeConfig:
    """The tile that a launch takes."""
    return decode_tile(as_promised(problem), target, vectorised(inputs.k) and vectorised(inputs.v))


class Call:
    """A problem ready to run: `call(inputs, out, lse, table)` fills out and lse, for all tensors of the same metadata.

    problem.len_k is the capacity of a sequence; inputs.k and inputs.v are pages where there is a table.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        target: Target,
        config: DecodeConfig | None = None,
        table: Tensor | None = None,
    ) -> None:
        problem = as_promised(problem)
        config = config or config_of(problem, inputs, target)
        k = inputs.k
        tile = tile_of(problem, inputs, target, config, 0 if table is None else k.shape[2])
        num_m = cdiv(problem.group * problem.len_q, tile.BLOCK_M)
        heads = problem.batch * problem.heads_kv
        splits = most_splits(problem, tile)
        # What is done again where rows see different keys is one state.
        several = 1 if tile.UNEQUAL else config.several
        pairs = may_own_pairs(problem, inputs, table, splits, config)
        owners = owners_of(splits, num_m * heads, replace(config, several=several, owns_pairs=pairs), target)
        (few_own, _), (long_own, of_a_state) = owners
        if of_a_state > tile.CHAIN:
            tile = replace(tile, OWNS_PAIR=True)
        elif any(own > state for own, state in owners):
            tile = replace(tile, SEPARATE=True)
        programs, states = (
            max(cdiv(min(splits, tile.FEW), few), cdiv(splits, long)) for few, long in zip(*owners, strict=True)
        )
        alone = states == 1
        if alone:
            tile = replace(tile, ALONE=True, SEPARATE=False)
        self.tile = tile
        step = 0 if table is None else in_rows(table).stride(0)
        packed, grid = problem.features.varlen, num_m * programs * heads
        self.between = (
            *((strides(out, packed), *lse_strides(lse, packed)) if alone else (None, 0, 0)),
            *(step, k.shape[0], num_m, programs, states, few_own, long_own, problem.heads_kv, problem.len_q),
        )
        self.behind = (
            *(problem.diag_lo, problem.diag_hi, problem.scale * LOG2E, problem.softcap),
            *(tile.PDL and (packed or not alone) and grid <= TELLING, problem.features, tile),
        )
        self.numbers = numbers_of(problem, inputs)
        partial = options_of(config)
        if config.registers:
            partial["maxnreg"] = config.registers
        self.partial = Starter(partial_kernel, grid, partial)
        self.starters, self.merge = [self.partial], None
        if not alone:
            self.merge = Merge(problem, tile, states, splits, [state for _, state in owners], config, out, lse, target)
            self.starters.append(self.merge.start)
        self.uncovered = Uncovered(problem, inputs, target, follows=heads > 0) if packed else None
        if self.uncovered:
            self.starters.append(self.uncovered.start)
        self.series = Series(self.launches)

    def longer(self, problem: AttentionProblem, inputs: Inputs) -> Callable[..., None]:
        """The call of as many more or fewer keys as `keys.but_length` allows: other numbers for the same launches."""
        return functools.partial(self, table=None, numbers=numbers_of(problem, inputs))

    def launches(self, *given: Any) -> list[Launch]:
        """Of inputs, out, lse, a table, room for states and the numbers of a length."""
        *tensors, out, lse, table, room, numbers = given
        inputs, (steps, len_k, _) = Inputs(*tensors), numbers
        behind_addresses = (*steps, *self.between, len_k, *self.behind)
        table = None if table is None else in_rows(table)
        mask = None if inputs.mask is None else in_bytes(inputs.mask)
        read = (*inputs[:3], table, contiguous(inputs.kv_lens), mask, *packing(inputs))
        behind = (self.uncovered.arguments(inputs, out, lse),) if self.uncovered else ()
        if self.merge is None:
            written = (None, None, None, out, lse, contiguous(inputs.sinks))
            arguments = ((*read, *written, *behind_addresses), *behind)
        else:
            states = self.merge.states(room)
            partial = (*read, *states, None, None, None, *behind_addresses)
            arguments = (partial, self.merge.arguments(inputs, out, lse, states, len_k), *behind)
        return list(zip(self.starters, arguments, strict=True))

    def given(
        self, inputs: Inputs, out: Tensor, lse: Tensor, table: Tensor | None, numbers: Numbers | None = None
    ) -> tuple[Any, ...]:
        """What the launches are of."""
        return *inputs, out, lse, table, self.merge.room(out) if self.merge else None, numbers or self.numbers

    def __call__(
        self, inputs: Inputs, out: Tensor, lse: Tensor, table: Tensor | None = None, numbers: Numbers | None = None
    ) -> None:
        """numbers: of another length."""
        if out.numel():
            on(out.device, self.series, *self.given(inputs, out, lse, table, numbers))


def numbers_of(problem: AttentionProblem, inputs: Inputs) -> Numbers:
    """What belongs to a cache's length."""
    mask, packed = inputs.mask, problem.features.varlen
    mask_steps = None if mask is None else mask_strides(expanded_mask(problem, mask))
    return Numbers.of((*(strides(x, packed) for x in inputs[:3]), mask_steps), problem.len_k)


def may_own_pairs(
    problem: AttentionProblem, inputs: Inputs, table: Tensor | None, splits: int, config: DecodeConfig
) -> bool:
    """Whether programs may own pairs of chains: of sequences that may all be as long as the longest (`FILLED`).

    Of packed ones the host knows. Pages are for sequences that are not, which have pairs only as all that there can be.
    """
    if not config.owns_pairs or problem.features.mask:
        return False
    if table is not None:
        return splits <= 2 * config.chain
    return not problem.features.varlen or inputs.k.shape[0] >= FILLED * problem.batch * problem.len_k


def plan(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    config: DecodeConfig | None = None,
    table: Tensor | None = None,
) -> tuple[Plan, ...]:
    """The launches, to look at or to compile."""
    call = Call(problem, inputs, out, lse, target, config, table)
    return tuple(start.plan(args) for start, args in call.launches(*call.given(inputs, out, lse, table)))


Owner = tuple[int, int]  # splits of one program, and of one state


def owners_of(splits: int, rows: int, config: DecodeConfig, target: Target) -> tuple[Owner, Owner]:
    """Of sequences that have up to FEW splits, and of longer ones, in one launch for up to `splits` of each.

    A cache may have room for far more keys than it holds, so both are looked for as if all had so many. One program
    text serves both: it keeps splits apart or folds them, and where it folds pairs of chains, chains at least.
    """
    few_splits = min(splits, config.splits.few)
    few = splits_owned(few_splits, rows, config, target)
    if few_splits == splits:
        return few, few
    folds = few[1] > 1  # else `several` splits apart, or one
    long = splits_owned(splits, rows, replace(config, owns_pairs=config.owns_pairs and folds), target)
    if long[1] < few[1]:
        return few, few
    return (few if folds or long[1] == 1 else (1, 1)), long


def splits_owned(splits: int, rows: int, config: DecodeConfig, target: Target) -> Owner:
    """A pair of chains or a chain, the most with which programs are enough for the GPU.

    Else a state is one split's, of which a program has several where there would be many and one wave holds these.
    """
    pair, chain, each = 2 * config.chain, config.chain, config.programs
    if config.owns_pairs and splits > chain and enough(rows, splits, pair, each, target, FULL_OF_PAIRS):
        return pair, pair
    if enough(rows, splits, chain, each, target):
        return chain, chain
    several = rows * cdiv(splits, config.several)
    fit = several <= config.programs * target.multiprocessors
    return (config.several if fit and rows * splits > MANY * target.multiprocessors else 1), 1


def most_splits(problem: AttentionProblem, tile: DecodeTile) -> int:
    """Splits of a sequence that fills its cache; none has more. One where nobody sees a key: rows are written too."""
    # Keys count in tiles, and with a window the first may begin before the first key that is seen.
    tiles = max(1, cdiv(problem.keys_seen, tile.BLOCK_N) + problem.features.left)
    of = lambda keys: cdiv(tiles, keys // tile.BLOCK_N)
    return min(tile.LANES, of(tile.SPLIT), max(of(tile.LONG), tile.FEW))


def prepare(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, target: Target, table: Tensor | None = None
) -> Callable[..., None]:
    """What fills out and lse for tensors of this metadata. On a GPU in few microseconds from its second run on."""
    if target.interpreting:
        of = lambda lse, table: functools.partial(plan, lse=lse, target=target, table=table)
        return lambda inputs, out, lse, table=None: fill(of(lse, table), problem, inputs, out)
    return Call(problem, inputs, out, lse, target, table=table)
