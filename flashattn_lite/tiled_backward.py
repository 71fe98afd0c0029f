"""Gradients of attention from its result and lse, tile by tile in plain torch, in memory linear in L and S.

With P = exp(S - lse), dP = dO V^T and delta = rowsum(dO * O) - d_lse, a tile of pairs adds

    dV += P^T dO,    dS = P * (dP - delta),    dQ += scale * dS K,    dK += scale * dS^T Q

(source: FlashAttention-2, arXiv:2307.08691, algorithm 2; a soft cap multiplies dS by 1 - tanh^2 on its way to Q and K).

A row is bad if its q, d_out, lse or delta is not finite, a key if its k or v is not. Bad rows and keys enter products
as zeros, and every gradient that a visible pair with a bad member would enter is NaN. So nothing leaks through 0 * NaN,
and no step waits for a value on a GPU.

Where a float32 lse says too little about m + log l, P = exp(S - m) / l, both taken anew (`Rows.count`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_lite import state
from flashattn_lite.autocast import as_written
from flashattn_lite.problem import AttentionProblem, Grads, Inputs
from flashattn_lite.products import add_product_, operand, product, sum_is_finite
from flashattn_lite.scores import to_log2_
from flashattn_lite.state import LOG2E
from flashattn_lite.tiles import RowTile, Sequences, TileShape, fit, sequences

# Scores of one tile over all its slots: 4 MiB of float32, on a GPU 128 MiB (fewer launches).
SCORES = {"cpu": 2**20, "cuda": 2**25}
COARSE = 256.0  # of |lse| in log2 units: P is then off by 1e-5, relative, where lse has half an ulp to hide


def tile_of(problem: AttentionProblem, len_q: int, len_k: int) -> TileShape:
    """The tile of the backward (not tuned)."""
    scores = SCORES.get(problem.device.type, SCORES["cuda"])
    side = 256 if problem.device.type == "cpu" else 1024
    return fit(problem, len_q, len_k, scores=scores, rows=2 * side, keys=side)


@torch.no_grad()
def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    needs: tuple[bool, ...],
) -> Grads:
    """Gradients of q, k, v, mask and sinks, shapes, order in memory and dtypes theirs; None where `needs` says so."""
    sums: list[Tensor | None] = []
    wide = torch.promote_types(problem.dtype, torch.float32)
    for name, x, need in zip(Inputs._fields, inputs, needs, strict=False):
        if not need or x is None:
            sums.append(None)
            continue
        # The mask's and the sinks' gradients are sums over tiles; q's, k's and v's are complete when they are stored.
        dtype = torch.promote_types(x.dtype, wide) if name in ("mask", "sinks") else x.dtype
        sums.append(torch.zeros_like(x, dtype=dtype))
    grads: Grads = (sums[0], sums[1], sums[2], sums[3], sums[4])
    with as_written(problem.device):
        for seq in sequences(problem, inputs) if lse.numel() else ():
            of_rows = seq.of_rows
            rows = of_rows(out), of_rows(lse), of_rows(d_out), None if d_lse is None else of_rows(d_lse)
            shape = tile_of(problem, seq.q.shape[3], seq.k.shape[2])
            in_room = problem.device.type == "cpu" or problem.dtype.itemsize >= 4  # else `product` takes none
            rooms = [seq.room(shape) if in_room else None for _ in range(2)]
            for tiles in seq.row_tiles(shape):
                chunk = Chunk(seq, tiles, grads, rooms)
                for tile in tiles:
                    chunk.add(tile, *rows)
                chunk.store()
    dq, dk, dv, dmask, dsinks = grads
    return dq, dk, dv, _cast(dmask, inputs.mask), _cast(dsinks, inputs.sinks)


def _cast(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
    return grad if grad is None or x is None else grad.to(x.dtype)


def not_finite(x: Tensor) -> Tensor:
    """[...] of x [..., columns]: rows with what is not finite. Only on the CPU may this ask for a value first."""
    if x.device.type == "cpu" and sum_is_finite(x):
        return x.new_zeros(x.shape[:-1], dtype=torch.bool)
    return ~torch.isfinite(x).all(-1)


class Chunk:
    """The row tiles of some slots, and what they add up to for the keys of these slots.

    rooms: for a tile's P and dS.
    """

    def __init__(self, seq: Sequences, tiles: list[RowTile], grads: Grads, rooms: list[Tensor | None]) -> None:
        self.seq, self.problem, self.tile = seq, seq.problem, tiles[0]
        self.dq, self.dk, self.dv, self.dmask, self.dsinks = grads
        self.of_p, self.of_ds = rooms
        on_host = self.problem.device.type == "cpu"
        self.wide = torch.promote_types(self.problem.dtype, torch.float32)
        # Operands of products: float32 on the CPU, the inputs' own dtype on a GPU, with float32 sums.
        self.narrow = self.wide if on_host else self.problem.dtype
        k, v = (x[self.tile.b, self.tile.h] for x in (seq.k, seq.v))
        bad = not_finite(k) | not_finite(v)
        self.bad_keys = bad.flatten(0, 1)  # [slots, S]
        self.poisoned = torch.zeros_like(self.bad_keys)
        self.keys_are_clean = on_host and not bool(bad.any())
        self.sums: dict[int, tuple[slice, Tensor, Tensor]] = {}  # by first key: keys, dK, dV

    def add(self, tile: RowTile, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> None:
        """One row tile: completes its dq, adds to the rest."""
        rows = Rows(self, tile, out, lse, d_out, d_lse)
        if (coarse := rows.coarse()) is not None:
            rows.count(coarse)
        if self.dsinks is not None:
            self.add_sinks(rows)
        dq = rows.q.new_zeros(rows.q.shape, dtype=self.wide)
        poisoned = torch.zeros_like(rows.bad)
        for n, whole in tile.visited():
            self.add_pair(rows, n, whole, dq, poisoned)
        if self.dq is not None:
            dq = dq.mul_(self.problem.scale).masked_fill_(poisoned.unsqueeze(-1), torch.nan)
            dq = dq[..., : self.problem.head_dim].reshape(*tile.shape, -1)
            tile.rows(self.seq.of_rows(self.dq)).copy_(dq)

    def add_pair(self, rows: Rows, n: slice, whole: bool, dq: Tensor, poisoned: Tensor) -> None:
        """One tile of pairs, [slots, rows, keys]."""
        k, v = self.keys(self.seq.k, n), self.keys(self.seq.v, n)
        pairs = self.bad_pairs(rows, n, whole)
        if pairs is not None:
            poisoned |= pairs.any(-1)
            self.poisoned[:, n] |= pairs.any(1)
        s = to_log2_(product(rows.q, k.mT, self.of_p), self.problem.scale, self.problem.softcap)
        slope = None
        if self.problem.softcap is not None:
            slope = 1 - (s / (self.problem.softcap * LOG2E)).square_()
        s = s if whole else rows.tile.hide_(s, n)
        p = state.exp2_(s.sub_(rows.lse.unsqueeze(-1)))
        if rows.inv_l is not None:
            p.mul_(rows.inv_l.unsqueeze(-1))
        if n.start not in self.sums:
            self.sums[n.start] = n, torch.zeros_like(k, dtype=self.wide), torch.zeros_like(v, dtype=self.wide)
        _, dk, dv = self.sums[n.start]
        if self.dv is not None:
            add_product_(dv, p.mT, rows.d_out)
        ds = product(rows.d_out, v.mT, self.of_ds).sub_(rows.delta.unsqueeze(-1)).mul_(p)
        # An unseen pair whose dP overflowed, or whose score, so that its slope is NaN; and a seen one whose p is 0: a
        # neighbour's length may decide which tiles are whole.
        if not whole or ds.device.type != "cpu" or not sum_is_finite(ds):
            unseen = p == 0
            ds.masked_fill_(unseen, 0.0)
            slope = slope if slope is None else slope.masked_fill_(unseen, 0.0)
        if self.dmask is not None:
            self.add_mask_gradient(rows.tile, ds if pairs is None else ds.masked_fill(pairs, torch.nan), n)
        ds = ds if slope is None else ds.mul_(slope)
        if self.dq is not None:
            add_product_(dq, ds, k)
        if self.dk is not None:
            add_product_(dk, ds.mT, rows.q)

    def bad_pairs(self, rows: Rows, n: slice, whole: bool) -> Tensor | None:
        """[slots, rows, keys]: visible pairs with a bad member; None where there is surely none."""
        if self.keys_are_clean and rows.are_clean:
            return None
        bad = rows.bad.unsqueeze(-1) | self.bad_keys[:, n].unsqueeze(1)
        if not whole:
            grouped, seen = rows.tile.grouped(bad), rows.tile.seen(n)
            if seen is not None:
                grouped &= seen
            if self.problem.features.mask == "float" and self.seq.mask is not None:
                grouped &= rows.tile.mask(self.seq.mask, n) != -torch.inf
        return bad

    def keys(self, x: Tensor, n: slice) -> Tensor:
        x = self.tile.keys(x, n)
        if not self.keys_are_clean:
            x = x.masked_fill(self.bad_keys[:, n].unsqueeze(-1), 0.0)
        return operand(x, self.narrow)

    def add_mask_gradient(self, tile: RowTile, ds: Tensor, n: slice) -> None:
        assert self.dmask is not None
        part = tile.mask(self.seq.of_mask(self.dmask), n)
        part += tile.grouped(ds).sum_to_size(part.shape)

    def add_sinks(self, rows: Rows) -> None:
        """A sink is one more key with value 0: its dS is -p * delta."""
        assert self.dsinks is not None
        ds = -rows.sink_weight() * rows.true_delta
        self.dsinks.view(self.seq.heads)[self.tile.h] += ds.view(rows.tile.shape).sum((0, 3))

    def store(self) -> None:
        """Writes dK and dV of these slots."""
        batch, heads = self.tile.shape[:2]
        for n, dk, dv in self.sums.values():
            dk.mul_(self.problem.scale).add_(0.0)  # 0, not -0, of a key that is not seen, as where none is longer
            for grad, total in ((self.dk, dk), (self.dv, dv)):
                if grad is not None:
                    total.masked_fill_(self.poisoned[:, n].unsqueeze(-1), torch.nan)
                    target = self.seq.of_keys(grad)[self.tile.b, self.tile.h, n]
                    target.copy_(total[..., : target.shape[-1]].unflatten(0, (batch, heads)))


class Rows:
    """The query side of a row tile, packed: [slots, rows, D] and [slots, rows]; bad rows as zeros, with P = 0."""

    def __init__(
        self, chunk: Chunk, tile: RowTile, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> None:
        self.chunk, self.tile, wide = chunk, tile, chunk.wide
        self.inv_l: Tensor | None = None
        q, d_out_tile = tile.packed(chunk.seq.q), tile.packed(d_out)
        delta = (d_out_tile.to(wide) * tile.packed(out).to(wide)).sum(-1)
        if d_lse is not None:
            delta = delta - tile.packed(d_lse)
        self.true_lse = state.reference(tile.packed(lse).to(wide) * LOG2E)
        self.true_delta = delta
        finite = torch.isfinite(self.true_lse) & torch.isfinite(delta)
        self.bad = not_finite(q) | not_finite(d_out_tile) | ~finite
        self.are_clean = q.device.type == "cpu" and not bool(self.bad.any())
        self.lse, self.delta = self.true_lse, delta
        if not self.are_clean:
            q, d_out_tile = (x.masked_fill(self.bad.unsqueeze(-1), 0.0) for x in (q, d_out_tile))
            self.lse = self.lse.masked_fill(self.bad, torch.inf)
            self.delta = delta.masked_fill(self.bad, 0.0)
        self.q, self.d_out = (operand(x, chunk.narrow) for x in (q, d_out_tile))

    def coarse(self) -> Tensor | None:
        """[slots, rows] those whose lse, a float32, says m + log2 l less well than P needs it; None: there is none.

        A float mask can hide log2 l altogether: of -1e9, what is left of it is a multiple of 64.
        """
        problem = self.chunk.problem
        large = (self.true_lse.abs() > COARSE) & torch.isfinite(self.true_lse)
        if problem.dtype == torch.float64:
            return torch.ones_like(large)
        some = bool(large.any()) if problem.device.type == "cpu" else problem.features.mask == "float"
        return large if some else None

    def count(self, coarse: Tensor) -> None:
        """Takes m and 1 / l of these rows anew, from the scores that the gradients are made of, in place of lse."""
        chunk, problem = self.chunk, self.chunk.problem
        m_i = self.true_lse.new_full(self.true_lse.shape, state.EMPTY_M)
        l_i = torch.zeros_like(m_i)
        if chunk.seq.sinks is not None:
            m_i, l_i = state.single(self.sinks())
        for n, whole in self.tile.visited():
            s = to_log2_(product(self.q, chunk.keys(chunk.seq.k, n).mT), problem.scale, problem.softcap)
            m_i, l_i, _, _ = state.update(m_i, l_i, s if whole else self.tile.hide_(s, n), 1.0)
        coarse = coarse & ~self.bad
        self.lse = torch.where(coarse, state.reference(m_i), self.lse)
        self.inv_l = torch.where(coarse, state.finish(m_i, l_i)[0], 1.0)

    def sinks(self) -> Tensor:
        assert self.chunk.seq.sinks is not None
        return self.tile.packed(self.chunk.seq.sinks).to(self.chunk.wide) * LOG2E

    def sink_weight(self) -> Tensor:
        """P of the sink; of a bad row what its lse says, which may be NaN."""
        p = state.exp2(self.sinks() - torch.where(self.bad, self.true_lse, self.lse))
        return p if self.inv_l is None else p * self.inv_l
