"""A cache that grows by a token: the call of one length made of another's."""

from __future__ import annotations

import functools
import random

import pytest
import torch

import flashattn_lite as fa
from flashattn_lite import calls, dispatch, keys
from flashattn_lite.problem import Inputs
from flashattn_lite.target import Target

pytest.importorskip("triton", reason="the launches are Triton's")
from flashattn_lite.kernels import decode_launch
from flashattn_lite.kernels.series import Series

GPUS = [
    Target("cuda", 90, "H200", multiprocessors=132),
    Target("cuda", 80, "A100", multiprocessors=108),
    Target("cuda", 100, "B200", multiprocessors=148),
    Target("hip", "gfx942", "MI300X", multiprocessors=304),
]
LENGTHS = [64, 128, 320, 512, 1024, 1536, 2048, 4096, 8192, 16384, 32768, 65536]  # about where something is decided
HEADS = [(1, 1), (8, 1), (8, 8), (32, 8), (64, 8), (12, 2), (16, 1), (71, 1)]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    for name in ("_ready", "_like"):
        monkeypatch.setattr(calls, name, {})


@pytest.fixture(params=GPUS, ids=lambda target: target.name)
def gpu(request, monkeypatch):
    """Calls are prepared as for that GPU, of tensors without memory."""
    monkeypatch.setattr(dispatch.targets, "of", lambda device: request.param)
    return request.param


def a_cache(rng: random.Random):
    """What makes a call's arguments for a length of the cache."""
    batch, (heads_q, heads_kv), len_q = rng.choice([1, 2, 8, 64]), rng.choice(HEADS), rng.choice([1, 1, 1, 2, 4, 16])
    dim, dim_v = rng.choice([(64, 64), (128, 128), (72, 72), (128, 64), (256, 256), (96, 96)])
    dtype, layout = (
        rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        rng.choice(["heads", "rows", "room", "odd"]),
    )
    mask = rng.choice([None, None, torch.bool, dtype])
    ones = [rng.random() < 0.5 for _ in range(3)]
    with_sinks, fill = rng.random() < 0.2, {"dtype": dtype, "device": "meta"}
    diagonal = rng.choice([(True, None), (True, rng.choice(LENGTHS) + 5), (False, None), (False, None)])
    window = rng.choice([None, None, None, 100, 5000])

    def make(length):
        def lying(dim):
            if layout == "heads":
                return torch.empty(batch, heads_kv, length, dim, **fill)
            if layout == "rows":
                return torch.empty(batch, length, heads_kv, dim, **fill).transpose(1, 2)
            if layout == "odd":  # no multiple of 16 bytes, of 16 elements, or none that fits in int32, by length
                steps = 2**31 + 16 * (length % 3 - 1), length * dim + 4 * (length % 4), dim, 1
                return torch.empty_strided((batch, heads_kv, length, dim), steps, **fill)
            return torch.empty(batch, heads_kv, 70000, dim, **fill)[:, :, :length]

        shape = [1 if one else n for one, n in zip(ones, (batch, heads_q, len_q), strict=True)]
        given = None if mask is None else torch.empty(*shape, length, dtype=mask, device="meta")
        sinks = torch.empty(heads_q, dtype=torch.float32, device="meta") if with_sinks else None
        q = torch.empty(batch, len_q, heads_q, dim, **fill).transpose(1, 2)
        tensors = q, lying(dim), lying(dim_v), given, sinks, None, None, None
        return *tensors, *diagonal, window, None, None, None, None, None, "auto"

    return make


def what_is_launched(run):
    """All that a call's launches are but for addresses, in an order of their own."""
    call, numbers = (run.func, run.keywords["numbers"]) if isinstance(run, functools.partial) else (run, run.numbers)
    assert isinstance(call, decode_launch.Call)
    of = lambda start: (start.kernel, start.grid, start.options, start.descriptors.blank)
    merge = call.merge
    merged = merge and (merge.parts, merge.state_sizes, merge.ahead, merge.behind, of(merge.start))
    own = call.tile, call.between, call.behind, call.uncovered, [of(x) for x in call.starters]
    return numbers, compiled_for(numbers), own, merged


def compiled_for(numbers):
    """What Triton tells apart of strides; lengths are not specialised."""
    steps = [step for each in numbers.steps if each is not None for step in each]
    assert all(type(step) is int for step in steps) and numbers.flat == (*steps, numbers.length)
    return [(step == 1, step % 16 == 0, step < 2**31) for step in steps]


@pytest.mark.parametrize("seed", range(12))
def test_a_longer_call_launches_what_a_new_one_would(gpu, seed):
    """Of caches whose key is the same whatever is decided by their length is the same."""
    rng, longer = random.Random(seed), 0
    for _ in range(60):
        about = rng.choice(LENGTHS)
        make = a_cache(rng)
        begin = max(1, about + keys.STEP * rng.randrange(-2, 3))
        lengths = [begin, *(begin + rng.choice([1, 2, rng.randrange(keys.STEP), keys.STEP]) for _ in range(3))]
        for one, other in [(a, b) for a in lengths for b in lengths if a != b]:
            args, others = make(one), make(other)
            calls._ready.clear()
            calls._like.clear()
            calls.trust(calls.prepared(args), args)
            found = calls.met(others)
            if found is None:
                continue
            longer += 1
            calls._ready.clear()
            fresh = calls.prepared(others)
            assert found is not fresh and found.trusted and found.problem == fresh.problem
            assert what_is_launched(found.run) == what_is_launched(fresh.run), (one, other)
            assert what_is_launched(found.run)[1] == compiled_for(calls.prepared(args).run.numbers), (one, other)
    assert longer > 10


def test_decisions_fall_at_whole_steps(gpu):
    """Which kernel, tile, splits: of lengths between two multiples of STEP all have what one has."""
    rng = random.Random(1)
    for _ in range(40):
        make = a_cache(rng)
        for about in rng.sample(LENGTHS, 4):
            begin = about + keys.STEP * rng.randrange(-3, 4)
            if begin < keys.STEP:
                continue
            runs = []
            for length in (begin + 1, begin + 17, begin + keys.STEP - 1):
                inputs, problem = calls.problem_of(make(length)[:-1])
                if problem.features.left:
                    break
                backend = dispatch.choose(problem, inputs, "auto", dispatch.BACKENDS)
                runs.append((backend.name, backend.name == "split" and decode_launch.config_of(problem, inputs, gpu)))
            assert len(set(runs)) <= 1, (begin, runs)


@pytest.fixture
def launched(monkeypatch):
    """(len_k, arguments behind the addresses, the merge's) of what a GPU would be given to launch, on a CPU."""
    monkeypatch.setattr(dispatch.targets, "of", lambda device: GPUS[0])
    seen = []

    def start(series, *given):
        (_, partial), (_, merge) = series.launches(*given)
        seen.append((given[1].shape[2], partial[16:], [x for x in merge if type(x) is int]))

    monkeypatch.setattr(Series, "__call__", start)
    monkeypatch.setattr(decode_launch, "on", lambda device, launch, *args: launch(*args))
    return seen


def grown(length, heads=2):
    return [torch.randn(2, heads, n, 64).bfloat16() for n in (1, length, length)]


@pytest.mark.parametrize("door", ["attention", "scaled_dot_product_attention"])
def test_a_cache_that_grows_is_prepared_once_a_step_of_lengths(launched, door, monkeypatch):
    """The other lengths are neither checked nor planned, and each knows its own numbers."""
    planned = []
    prepare = dispatch.prepare
    monkeypatch.setattr(
        dispatch, "prepare", lambda problem, *given: planned.append(problem.len_k) or prepare(problem, *given)
    )
    for length in range(1000, 1100):
        for _layer in range(2):
            getattr(fa, door)(*grown(length))
    assert planned == [1000, 1024, 1025, 1088, 1089]
    assert [length for length, *_ in launched] == [length for length in range(1000, 1100) for _ in range(2)]
    for length, numbers, merge in launched:
        q, k, v = grown(length)
        assert numbers[1] == k.stride() and numbers[2] == v.stride() and length in numbers
        assert numbers[0] == q.stride() and length in merge
        assert not ({1000, 1024, 1025, 1088, 1089} - {length}) & {*numbers, *merge}


def arguments(length, backend="auto", causal=False, scale=None, **given):
    optional = [given.get(name) for name in Inputs._fields[3:]]
    return *grown(length), *optional, causal, None, None, None, scale, None, None, None, backend


def test_another_call_of_that_length_is_not_taken_for_it(launched):
    """Each differs from the one that was there in one thing, and is checked."""
    fa.attention(*grown(1000))
    assert calls.known(arguments(1010)) is not None
    others = {
        "scale": 0.5, "causal": True, "backend": "triton", "sinks": torch.zeros(2), "mask": torch.ones(2, 1, 1, 1011),
        "kv_lens": torch.tensor([5, 6]).int(),
    }  # fmt: skip
    for name, value in others.items():
        assert calls.known(arguments(1011, **{name: value})) is None, name
    q, k, v, *rest = args = arguments(1011)
    changed = [
        (0, q[:, :1]), (0, q.float()), (1, k[:, :, :-1]), (2, v[:, :, :-1]), (1, k[:1]), (2, v[..., ::2]),
        (1, k[..., 1:]), (2, v.to("meta")), (1, torch._neg_view(k)), (1, k.flatten()), (1, k.to_sparse()), (1, None),
        (2, 7),
    ]  # fmt: skip
    for at, x in changed:
        assert calls.known((*args[:at], x, *args[at + 1 :])) is None, (at, type(x))
    off = torch.randn(k.numel() + 1).bfloat16()[1:].view(k.shape)
    assert calls.known((q, k, off, *rest)) is None
    assert calls.known(args) is not None


def test_a_mask_belongs_to_the_length(launched):
    """One that has a column less is refused, and one whose rows are the same is not taken for one whose rows differ.

    Of lengths whose strides are compiled alike.
    """
    rows = lambda length: torch.randn(2, 2, 1, length)
    fa.attention(*grown(976), mask=rows(976))
    assert calls.known(arguments(992, mask=rows(992))) is not None
    same_rows = rows(1008)[:, :1].expand(2, 2, 1, 1008)
    for mask in (rows(992), rows(1), rows(1008)[:1], rows(1008)[0], same_rows, rows(1008) > 0):
        assert calls.known(arguments(1008, mask=mask)) is None
    with pytest.raises(ValueError, match="mask: "):
        fa.attention(*grown(1008), mask=rows(992))
    assert calls.known(arguments(1008, mask=rows(1008))) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "len_q"), [((32, 8), 1), ((8, 8), 4), ((16, 2), 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_bits_of_a_cache_that_grows(heads, len_q, masked):
    """As of each length by itself."""
    make = lambda n, length: torch.randn(2, n, length, 128, dtype=torch.bfloat16, device="cuda")
    q, k, v = make(heads[0], len_q), make(heads[1], 1200), make(heads[1], 1200)
    hides = torch.rand(2, 1, 1, 1200, device="cuda") > 0.2
    one = lambda n: fa.attention(q, k[:, :, :n].contiguous(), v[:, :, :n].contiguous(), causal=len_q > 1,
                                 mask=hides[..., :n].contiguous() if masked else None, return_lse=True)  # fmt: skip
    lengths = [*range(1080, 1130), 1200]
    got = [one(n) for n in lengths for _ in range(20)][19::20]  # from the 17th call on the driver is asked directly
    assert len(calls._like) < 12
    for n, (out, lse) in zip(lengths, got, strict=True):
        calls._ready.clear()
        calls._like.clear()
        want = one(n)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]), n
