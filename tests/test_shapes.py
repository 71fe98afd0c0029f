"""The shapes of benchmarks/shapes.py: providers compute the same, and the check tells who computes something else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Record

import pytest
import torch

from benchmarks import decode, shapes
from benchmarks.shapes import Shape
from benchmarks.timing import Timing

SMALL = {
    "padding": Shape(2, 2, 2, 9, 9, 16, mask="padding"),
    "causal mask": Shape(2, 4, 2, 9, 9, 16, causal=True, mask="causal"),
    "random mask": Shape(1, 2, 2, 9, 20, 16, mask="random"),
    "bias": Shape(2, 2, 2, 9, 9, 16, mask="bias"),
    "window": Shape(1, 4, 2, 20, 20, 16, causal=True, window=3, softcap=5.0, sinks=True),
    "chunk": Shape(1, 4, 2, 5, 20, 16, head_dim_v=8, causal=True),
    "token": Shape(2, 4, 2, 1, 20, 16, causal=True),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("provider", ["flashattn_lite", "sdpa"])
def test_providers_compute_the_same(name, provider):
    """On the CPU; those that need a GPU are checked by the benchmark before it times them."""
    torch.manual_seed(0)
    shape = replace(SMALL[name], dtype="fp32")
    data = shapes.make_sets(shape, "cpu", most=1)[0]
    if provider == "sdpa" and name == "window":
        with pytest.raises(NotImplementedError, match="window, soft cap or sinks"):
            shapes.PROVIDERS[provider](shape)
        return
    assert shapes.relative_error(shapes.PROVIDERS[provider](shape)(data), shape, data) < 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_who_forgets_an_option_is_wrong(name):
    torch.manual_seed(0)
    shape = replace(SMALL[name], dtype="fp32")
    data = shapes.make_sets(shape, "cpu", most=1)[0]
    plain = replace(shape, causal=shape.causal and shape.len_q == 1, window=None, softcap=None, sinks=False)
    out = shapes.ours(plain)(replace(data, mask=None, sinks=None))
    assert (shapes.relative_error(out, shape, data) > 0.01) == (name != "token")  # whose row sees all keys anyway


def test_inputs_rotate_and_share_their_mask():
    sets = shapes.make_sets(SMALL["bias"], "cpu", most=20000)
    assert len(sets) == -(-20000 // (3 * 2 * 2 * 9 * 16 * 2))
    assert len({x.q.data_ptr() for x in sets}) == len(sets)
    assert len({x.mask.data_ptr() for x in sets}) == 1


def test_graphs_are_timed_in_two_rounds_the_second_in_opposite_order(monkeypatch):
    replayed = []
    graphs = {name: (Record(replay=lambda name=name: replayed.append(name)), Timing()) for name in "abc"}

    def sustained(call, *_):
        call(0)
        return Timing([float(len(replayed))])

    monkeypatch.setattr(decode, "sustained", sustained)
    decode.replay_in_turn(graphs)
    assert replayed == list("abccba")
    assert [timing.milliseconds for _, timing in graphs.values()] == [[1, 6], [2, 5], [3, 4]]


def test_rows_are_microseconds_of_a_call():
    timing = Timing(milliseconds=[0.8, 0.4, 1.2])
    rows = shapes.rows_of({"shape": "token"}, 8, "sdpa", shapes.Result(timing, 1e-3, None))
    assert rows[0] == {"shape": "token", "provider": "sdpa", "metric": "us", "median": "100.0", "p20": "50.0",
                       "p80": "150.0"}  # fmt: skip
    assert rows[1]["median"] == "1.00e-03"
    assert {"shape", *rows[0]} <= set(shapes.columns())
