"""What a launch of the Hopper kernel is given: its own tensors, and nothing of them is kept."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
from benchmarks.offline import GPUS, attention_problem  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels import (  # noqa: E402
    attention_hopper_launch,
    attention_launch,
    decode_launch,
    merge_launch,
    start,
    uncovered,
)
from flashattn_lite.problem import Inputs, describe  # noqa: E402
from flashattn_lite.state import LOG2E  # noqa: E402
from tests.starters import starters_run  # noqa: E402

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 has no launches")


class Launches:
    """In the place of a compiled kernel: the addresses and scores of each launch, read after `during` it."""

    function = packed_metadata = None

    def __init__(self, during=lambda: None):
        self.seen, self.during = [], during

    def run(self, *args):
        args = args[-len(attention_hopper_launch.attention_hopper_kernel.arg_names) :]
        self.during()
        described = [descriptor.base.data_ptr() for descriptor in args[:5] if descriptor]
        self.seen.append(([*described, *args[5:8]], args[-3]))


@pytest.fixture
def prepared(monkeypatch):
    """(call, new tensors for it): a call of the Hopper kernel whose launches are only looked at."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(attention_hopper_launch, "on", lambda device, launch, *args: launch(*args))
    monkeypatch.setattr(attention_hopper_launch.counters, "next", lambda device: counter, raising=False)
    monkeypatch.setattr(start, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def prepare(launches, sinks=False, mask=""):
        def tensors():
            """(inputs, out, lse), and the addresses that a launch with them must see."""
            inputs, _ = attention_problem(64, 64, torch.float16, 64, 2, False, sinks, False, mask, (None, None), {})
            inputs = inputs._replace(k=torch.empty_like(inputs.k))
            out, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:-1])
            copied = [inputs.mask] if mask else []
            return (inputs, out, lse), [x.data_ptr() for x in (*inputs[:3], out, *copied, out, lse, counter)]

        _, problem = attention_problem(64, 64, torch.float16, 64, 2, False, sinks, False, mask, (None, None), {})
        given, _ = tensors()
        call = attention_hopper_launch.Call(problem, *given, GPUS["sm_90"][1])
        call.start.compiled, call.start.pointers = launches, [5, 6, 7]
        return call, tensors

    return prepare


@pytest.mark.parametrize(("sinks", "mask"), [(False, ""), (True, ""), (False, "bool")])
def test_each_launch_has_its_own_tensors_and_none_is_kept(sinks, mask, prepared):
    launches = Launches()
    call, tensors = prepared(launches, sinks, mask)
    assert bool(mask) == call.tile.MASK_COPIED
    for _ in range(3):
        given, expected = tensors()
        call(*given)
        addresses, scores = launches.seen.pop()
        assert addresses == expected
        assert scores.scale_log2 == call.problem.scale * LOG2E
        assert (scores.sinks_ptr is given[0].sinks) if sinks else scores.sinks_ptr is None
        alive = [weakref.ref(x) for x in (*given[0], *given[1:]) if x is not None]
        del given, scores
        gc.collect()
        assert len(alive) == 5 + sinks + bool(mask) and not any(reference() is not None for reference in alive)


def test_launches_at_the_same_time_do_not_share_their_arguments(prepared):
    launches = Launches(threading.Barrier(4).wait)
    call, tensors = prepared(launches)
    for _ in range(3):
        each = [tensors() for _ in range(4)]
        threads = [threading.Thread(target=call, args=given) for given, _ in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(addresses for addresses, _ in launches.seen) == sorted(expected for _, expected in each)
        launches.seen.clear()


def test_a_launch_that_fails_leaves_nothing_to_the_next(prepared):
    def fail():
        raise RuntimeError("no such kernel")

    launches = Launches(fail)
    call, tensors = prepared(launches)
    given, _ = tensors()
    with pytest.raises(RuntimeError, match="no such kernel"):
        call(*given)
    launches.during = lambda: None
    given, expected = tensors()
    call(*given)
    assert launches.seen[0][0] == expected


@pytest.mark.parametrize("behind", ["merge", "uncovered"])
def test_lengths_are_copied_ahead_of_the_launch_that_another_follows(behind, monkeypatch):
    """What follows may read them while this one runs, and knows of no copy in between."""
    order = []
    copied = lambda x: order.append("copy") or x.contiguous()
    monkeypatch.setattr(attention_hopper_launch.counters, "next", lambda device: torch.zeros(1), raising=False)
    starters_run(monkeypatch, lambda self, args: order.append(self.kernel.__name__))
    for module in (merge_launch, uncovered):
        monkeypatch.setattr(module, "contiguous", lambda x: x if x is None or x.is_contiguous() else copied(x))
    options = dict(causal=True, q_start=None, window_left=None, window_right=None, scale=1.0, softcap=None)
    if behind == "merge":
        q, k = (torch.empty(2, 2, rows, 64, dtype=torch.bfloat16) for rows in (128, 8192))
        inputs = Inputs(q, k, k, kv_lens=torch.zeros(2, 2, dtype=torch.int32)[:, 0])
    else:
        q = torch.empty(300, 2, 64, dtype=torch.bfloat16)
        table = torch.tensor([[0, 0], [100, 0], [300, 0]], dtype=torch.int32)[:, 0]
        inputs = Inputs(q, q, q, cu_seqlens_q=table, cu_seqlens_k=table)
        options |= {"max_seqlen_q": 200, "max_seqlen_k": 200}
    problem = describe(inputs, **options)
    given = inputs, torch.empty_like(q), torch.empty(q.shape[:-1])
    many = dataclasses.replace(GPUS["sm_90"][1], multiprocessors=132)  # so that parts are tasks, and merged
    attention_hopper_launch.Call(problem, *given, many)._launch(*given)
    assert order == ["copy", "attention_hopper_kernel", f"{behind}_kernel"]


def test_more_row_tiles_than_a_message_tells_of_are_refused():
    inputs, problem = attention_problem(64, 64, torch.float16, 64, 2, False, False, False, "", (None, None), {})
    least = attention_hopper_launch.MOST_TASKS // problem.heads_q
    for len_k, parts in ((problem.len_k, 1), (8192, 64)):
        most = dataclasses.replace(problem, len_k=len_k, batch=least // parts - 1)
        assert not attention_hopper_launch.why_not(most, inputs)
        many = dataclasses.replace(most, batch=least // parts)
        assert "row" in attention_hopper_launch.why_not(many, inputs)[0]


@pytest.mark.parametrize("lengths", [(1, 2**30), (2**30, 1), (1, 2**31)])
def test_sequences_past_what_int32_counts_are_refused(lengths):
    """A row plus a diagonal would wrap around there, and nothing would show it."""
    q, k = (torch.empty(1).half().expand(1, 1, length, 16) for length in lengths)
    inputs = Inputs(q, k, k)
    none = dict.fromkeys(("q_start", "window_left", "window_right", "scale", "softcap"))
    problem = describe(inputs, causal=False, **none)
    text = f"it counts fewer than {2**30} queries and keys of a sequence; these are {lengths[0]} and {lengths[1]}"
    assert text in attention_hopper_launch.why_not(problem, inputs)
    target = targets.Target("cuda", 90, "sm_90")
    assert attention_launch.why_not(problem, target) == [text]
    assert text in decode_launch.why_not_attention(problem, target)
