"""Attention over tiles in plain torch, on any device, in memory linear in L and S: the CPU's path.

A tile of query rows visits the key tiles that it sees and keeps the state (m_i, l_i, acc) of `state.py`.
On the CPU it first takes 0 for the reference of every row, which spares the maximum, the subtraction and the rescale:
2^s itself fits in float32 for any scores that a trained model makes. Where a row's sum leaves the safe range, or its
result is not finite, the tile is done again with care: rows that were right keep their bits, the others get the running
maximum, and non-finite values reach only the rows that see them.

On the CPU a row's bits depend on that row alone. On a GPU the library behind torch.bmm picks its kernel by the batch
size too, so there they may differ between batches.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flashattn_lite import state
from flashattn_lite.autocast import as_written
from flashattn_lite.problem import AttentionProblem, Inputs, too_long
from flashattn_lite.products import ALIGN, add_product_, operand, product, sum_is_finite
from flashattn_lite.scores import cap
from flashattn_lite.state import LOG2E
from flashattn_lite.tiles import RowTile, Sequences, TileShape, fit, sequences


def why_not(problem: AttentionProblem) -> list[str]:
    """Reasons why the tiled path can't take a problem: diagonals are clamped for the kernels, here too."""
    return too_long(problem) if problem.features.left or problem.features.right else []


def tile_of(problem: AttentionProblem, len_q: int | None = None, len_k: int | None = None) -> TileShape:
    """The tile that a problem runs with, by problem.len_q, or by the len_q and len_k of one packed sequence.

    Within 1% of the fastest of 12 shapes in up to 4 sizes, for L from 1k to 4k, D 64, float32, two threads of an
    AVX-512 CPU. Where a diagonal cuts the scores, smaller tiles waste less on its corners. Not tuned on GPUs.
    """
    len_q = problem.len_q if len_q is None else len_q
    len_k = problem.len_k if len_k is None else len_k
    diagonal = problem.features.left or problem.features.right
    if problem.device.type != "cpu":
        return fit(problem, len_q, len_k, scores=2**24, rows=256 if diagonal else 1024, keys=256)
    if diagonal:
        return fit(problem, len_q, len_k, scores=2**20, rows=256, keys=256)
    return fit(problem, len_q, len_k, scores=2**19, rows=1024, keys=128)


@torch.no_grad()
def forward(problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    """Fills out (the layout and dtype of q) and lse (float32, natural log); both may have any strides."""
    if lse.numel() == 0:
        return
    if problem.features.varlen:  # rows that no sequence covers
        out.zero_()
        lse.fill_(-torch.inf)
    with as_written(problem.device):
        for seq in sequences(problem, inputs):
            shape = tile_of(problem, seq.q.shape[3], seq.k.shape[2])
            room, out_rows, lse_rows = seq.room(shape), seq.of_rows(out), seq.of_rows(lse)
            for tile in itertools.chain.from_iterable(seq.row_tiles(shape)):
                acc, inv_l, lse_tile = RowPass(seq, tile, room).run()
                acc, inv_l = (x.view(*tile.shape, -1) for x in (acc[..., : problem.head_dim_v], inv_l))
                torch.mul(acc, inv_l, out=tile.rows(out_rows))
                tile.rows(lse_rows).copy_(lse_tile.view(tile.shape))


class RowPass:
    """The passes of one row tile over its keys; the last one gives (acc, inv_l, lse)."""

    def __init__(self, seq: Sequences, tile: RowTile, room: Tensor) -> None:
        problem = seq.problem
        self.seq, self.tile, self.room = seq, tile, room
        self.on_host = problem.device.type == "cpu"  # only there may the next step depend on a value
        self.dtype = torch.promote_types(problem.dtype, torch.float32)
        factor = problem.scale * LOG2E if problem.softcap is None else 1.0
        q = tile.packed(seq.q).to(self.dtype)
        scaled = q * factor
        self.late: Tensor | None = None  # what scores are still to be multiplied by
        if not self.on_host or not sum_is_finite(scaled):
            # Finite rows that the factor takes past the range get it behind the product; by 1 others keep their bits.
            past = torch.isinf(scaled).any(-1) & torch.isfinite(q).all(-1)
            scaled = torch.where(past.unsqueeze(-1), q, scaled)
            self.late = q.new_ones(past.shape).masked_fill_(past, factor).unsqueeze(-1)
        self.q = operand(scaled, self.dtype)
        self.acc_shape = (*self.q.shape[:2], -(-problem.head_dim_v // ALIGN) * ALIGN)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.on_host:
            acc, m_i, l_i = self.careful(None)
            return acc, *state.finish(m_i, l_i)
        for finite in (True, False):
            acc, l_i = self.pinned(finite)
            settled = state.settled(l_i)
            if bool(settled.all()) and sum_is_finite(acc) and not bool(self.sunk(acc, l_i).any()):
                return acc, *state.finish(torch.zeros_like(l_i), l_i)
        acc, m_i, l_i = self.careful(settled)
        # A sum near the top of the range times a huge value can overflow where the running maximum does not.
        lost = settled & (~torch.isfinite(acc).all(-1) | self.sunk(acc, l_i))
        if bool(lost.any()):
            acc, m_i, l_i = self.careful(settled & ~lost)
        return acc, *state.finish(m_i, l_i)

    def pinned(self, finite: bool) -> tuple[Tensor, Tensor]:
        """(acc, l_i) about the reference 0; `finite`: in the belief that invisible scores are finite."""
        m_i, l_i = self.start()
        l_i = l_i * state.exp2(m_i)
        acc = self.q.new_zeros(self.acc_shape)
        for n, whole in self.tile.visited():
            p = state.update_pinned_(l_i, self.scores(n, whole, finite))
            add_product_(acc, p, self.keys(self.seq.v, n))
            if n.start == 0 and bool((l_i > state.SETTLED[1]).all()):
                break  # sums only grow: no row will settle
        return acc, l_i

    def sunk(self, acc: Tensor, l_i: Tensor) -> Tensor:
        """Rows whose weights, below 1 in all, may have taken values out of the bottom of the range."""
        sunk = l_i < 1
        if bool(sunk.any()):
            bottom = torch.finfo(self.dtype).tiny / torch.finfo(self.dtype).eps
            sunk &= acc[..., : self.seq.problem.head_dim_v].abs().amin(-1) < bottom
        return sunk

    def careful(self, pinned: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(acc, m_i, l_i) about 0 for `pinned` rows, about the running maximum for others."""
        m_i, l_i = self.start()
        if pinned is not None:
            l_i = torch.where(pinned, l_i * state.exp2(m_i), l_i)
            m_i = torch.where(pinned, 0.0, m_i)
        acc = self.q.new_zeros(self.acc_shape)
        unbounded = torch.zeros_like(acc)
        for n, whole in self.tile.visited():
            v = self.keys(self.seq.v, n)
            s = self.scores(n, whole)
            finite = torch.isfinite(v)
            if not (self.on_host and bool(finite.all())):
                # 0 * inf is NaN: what is not finite leaves the product and is counted for the rows that see it.
                seen, nan = self.seen(s, n, whole), torch.isnan(v)
                up, down = (seen @ (v == inf).logical_or_(nan).to(s.dtype) for inf in (torch.inf, -torch.inf))
                unbounded += torch.where(up > 0, torch.inf, 0.0) + torch.where(down > 0, -torch.inf, 0.0)
                v = torch.where(finite, v, 0.0)
            m_i, l_i, alpha, p = state.update(m_i, l_i, s, 1.0, pinned)
            add_product_(acc.mul_(alpha.unsqueeze(-1)), p, v)
        return acc + unbounded, m_i, l_i

    def start(self) -> tuple[Tensor, Tensor]:
        """The state before the first key: empty, or the sink."""
        if self.seq.sinks is None:
            empty = self.q.new_full(self.q.shape[:2], state.EMPTY_M)
            return empty, torch.zeros_like(empty)
        sinks = self.tile.packed(self.seq.sinks).to(self.dtype) * LOG2E
        return state.single(sinks.expand(self.q.shape[:2]))

    def keys(self, x: Tensor, n: slice) -> Tensor:
        return operand(self.tile.keys(x, n), self.dtype)

    def scores(self, n: slice, whole: bool, finite: bool = False) -> Tensor:
        """[slots, rows, keys] in log2 units, -inf where invisible; `whole`: every pair is visible."""
        s = product(self.q, self.keys(self.seq.k, n).mT, self.room)
        if self.late is not None:
            s.mul_(self.late)
        if (softcap := self.seq.problem.softcap) is not None:
            s = cap(s, self.seq.problem.scale, softcap)
        return s if whole else self.tile.hide_(s, n, finite)

    def seen(self, like: Tensor, n: slice, whole: bool) -> Tensor:
        """[slots, rows, keys] 1 where a pair is visible, whatever its score, else 0; as `like`, a tile of scores."""
        shown = torch.zeros_like(like)
        return torch.ones_like(like) if whole else (self.tile.hide_(shown, n) != -torch.inf).to(like.dtype)
