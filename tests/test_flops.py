"""torch's FlopCounterMode counts our ops as it counts torch's own attention."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashattn_lite as fa
from flashattn_lite import flops

Q, K, V = (2, 6, 9, 16), (2, 3, 13, 16), (2, 3, 13, 24)


def tensors(*shapes, **options):
    return [torch.randn(shape, **options) for shape in shapes]


def torchs(q, k, v, formula=sdpa_flop_count):
    """torch's count. That of torch 2.11 takes no grouped heads; they count like as many as q has."""
    return formula(q, *((x[0], q[1], *x[2:]) for x in (k, v)))


def torchs_backward(q, k, v):
    return torchs(q, k, v, lambda *shapes: sdpa_backward_flop_count((*q[:3], v[3]), *shapes))


def counted(call, **options):
    with FlopCounterMode(display=False, **options) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"backend": "tiled", "window": (3, 0)}])
def test_forward_and_backward_count_as_torchs_own(device, options):
    q, k, v = tensors(Q, K, V, requires_grad=True, device=device)
    forward, backward = torchs(Q, K, V), torchs_backward(Q, K, V)
    assert counted(lambda: fa.attention(q, k, v, **options)) == forward > 0
    out = fa.attention(q, k, v, **options)  # nobody counts; then its backward alone
    assert counted(lambda: out.sum().backward()) == backward
    assert counted(lambda: fa.attention(q, k, v, **options).sum().backward()) == forward + backward


def test_what_replaces_torchs_function_counts(device):
    q, k = tensors(Q, K, device=device)
    with fa.replace_sdpa():
        call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        assert counted(call) == torchs(Q, K, K)
    assert counted(lambda: fa.scaled_dot_product_attention(q, k, k, enable_gqa=True)) == torchs(Q, K, K)


def test_modules_have_their_share():
    class Block(torch.nn.Module):
        def forward(self, x):
            return fa.attention(x, x, x)

    model = torch.nn.Sequential(Block(), Block())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*tensors(Q))
    assert counter.get_flop_counts()["Sequential.0"].popitem()[1] == torchs(Q, Q, Q)


def test_keys_past_their_lengths_do_not_count(device):
    q, k, v = tensors(Q, K, V, device=device)
    lens = torch.tensor([4, 13], dtype=torch.int32, device=device)
    one = lambda keys: torchs((1, *Q[1:]), (1, 3, keys, 16), (1, 3, keys, 24))
    assert counted(lambda: fa.attention(q, k, v, kv_lens=lens)) == one(4) + one(13)
    assert counted(lambda: fa.attention_decode(q, k, v, lens)) == one(4) + one(13)
    pages_k, pages_v = tensors((3, 3, 16, 16), (3, 3, 16, 24), device=device)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, -1], [0, 1]], [4, 27]))
    assert counted(lambda: fa.attention_decode(q, pages_k, pages_v, lens, block_table=table)) == one(4) + one(27)


def test_packed_sequences_count_one_by_one(device):
    q, k = tensors((9, 6, 16), (12, 3, 16), device=device)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 2, 2, 9], [0, 5, 6, 12]))
    one = lambda rows, keys: torchs((1, 6, rows, 16), (1, 3, keys, 16), (1, 3, keys, 16))
    call = lambda: fa.attention_varlen(q, k, k, cu_q, cu_k)
    assert counted(call) == one(2, 5) + one(0, 1) + one(7, 6)
    lens = torch.tensor([3, -2, 40], dtype=torch.int32, device=device)
    assert counted(lambda: fa.attention_varlen(q, k, k, cu_q, cu_k, kv_lens=lens)) == one(2, 3) + one(7, 6)


@pytest.mark.gpu
def test_a_graph_may_capture_what_is_counted():
    q, k, v = tensors(Q, K, V, device="cuda")
    lens = torch.tensor([4, 13], dtype=torch.int32, device="cuda")
    fa.attention_decode(q, k, v, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count = counted(lambda: fa.attention_decode(q, k, v, lens))
    assert count == torchs(Q, K, V)  # nobody knows with which lengths it will be replayed


def test_shapes_alone_are_enough():
    with FakeTensorMode():
        q, k, v = tensors(Q, K, V)
        lens = torch.empty(2, dtype=torch.int32)
        cu = torch.empty(3, dtype=torch.int32)
        assert counted(lambda: fa.attention(q, k, v, kv_lens=lens)) == torchs(Q, K, V)
        packed = torch.empty(9, 6, 16)
        whole = torchs((1, 6, 9, 16), (1, 6, 9, 16), (1, 6, 9, 16))
        call = lambda: fa.attention_varlen(packed, packed, packed, cu, cu, max_seqlen_q=5, max_seqlen_k=5)
        assert counted(call) == whole


def test_a_formula_of_ones_own_stays():
    mine = {torch.ops.flashattn_lite.attention: lambda *args, **kwargs: 7}
    assert counted(lambda: fa.attention(*tensors(Q, Q, Q)), custom_mapping=mine) == 7


def test_nobody_who_does_not_count_imports_the_counter():
    """And the first call that is counted is, whoever was imported first."""
    code = (
        "import sys, torch, flashattn_lite as fa; x = torch.randn(1, 2, 4, 8); fa.attention(x, x, x);"
        "assert 'torch.utils.flop_counter' not in sys.modules;"
        "from torch.utils.flop_counter import FlopCounterMode; counter = FlopCounterMode(display=False);"
        "counter.__enter__(); fa.attention(x, x, x); print(counter.get_total_flops())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == torchs((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))


BACKWARD_ALONE = """
import torch, flashattn_lite as fa
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 2, 5, 16, requires_grad=True)
out = fa.attention(q, q, q).sum()
with FlopCounterMode(display=False) as counter:
    out.backward()
print(counter.get_total_flops())
"""


def test_a_backward_alone_counts():
    """In a process that has counted nothing before: torch is taught our ops by the first call that somebody watches."""
    done = subprocess.run([sys.executable, "-c", BACKWARD_ALONE], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(torchs_backward(*[(1, 2, 5, 16)] * 3))], done.stderr


def test_a_length_below_0_counts_as_none(device):
    q, k, v = tensors(Q, K, V, device=device)
    lens = torch.tensor([-5, 13], dtype=torch.int32, device=device)
    want = torchs((1, *Q[1:]), (1, 3, 13, 16), (1, 3, 13, 24))
    assert counted(lambda: fa.attention(q, k, v, kv_lens=lens)) == want
    assert counted(lambda: fa.attention_decode(q, k, v, lens)) == want


def test_lengths_past_what_a_table_has_room_for_do_not_count(device):
    (q,) = tensors((1, 6, 2, 16), device=device)
    (pages,) = tensors((9, 3, 16, 16), device=device)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[7, 8]], [100]))
    want = torchs((1, 6, 2, 16), (1, 3, 32, 16), (1, 3, 32, 16))
    assert counted(lambda: fa.attention_decode(q, pages, pages, lens, block_table=table)) == want


def test_a_call_while_another_thread_imports_the_counter(monkeypatch):
    """The module is there, and still empty."""
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", types.ModuleType("torch.utils.flop_counter"))
    flops.teach()


def test_threads_that_call_first_together_register_once(monkeypatch):
    """Between a look into torch's table and the entry another thread may have made it."""

    class Late(dict):
        def __contains__(self, op):
            found = super().__contains__(op)
            self.setdefault(op, "another thread's")
            return found

    monkeypatch.setattr(flop_counter, "flop_registry", Late())
    flops.teach()
    assert len(flop_counter.flop_registry) == len(flops.FORMULAS)
