"""Launches handed to the driver as they lie in memory: what it reads there, and when it is not asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the launches are Triton's")
from flashattn_lite.kernels import series

STREAM, FUNCTION = 0x5EED, 0xF00
SIGNATURE = {"q": "*bf16", "k": "tensordesc<bf16[64, 32]>", "lse": "*fp32", "none": "*i32", "steps": ("i32", "i64"),
             "scale": "fp32", "scores": ("fp32", "*i32", "constexpr"), "T": "constexpr", "low": "i32"}  # fmt: skip
SIZES = [8, 128, 4, 4, 8, 8, 8, 8, 4, 8, 4, 4, 8, 4, 8, 8]


class Driver:
    """Reads what it is handed, and launches nothing."""

    def __init__(self) -> None:
        self.sizes, self.seen, self.codes, self.meanwhile = SIZES, [], [], None

    def ask(self, function, number, offset, size):
        if number >= len(self.sizes):
            return 1
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self.sizes[number]
        return 0

    def launch(self, config, function, parameters, extra):
        if self.meanwhile:  # what another thread does before the driver has read a word
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.codes and (code := self.codes.pop(0)):
            return code
        config = series.Config.from_address(config)
        overlaps = config.count and series.Attribute.from_address(config.attributes)
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        words = [p if size == 128 else int.from_bytes(ctypes.string_at(p, size), "little")
                 for p, size in zip(pointers, self.sizes, strict=True)]  # fmt: skip
        grid = config.x, config.y, config.z, config.threads_x, config.threads_y, config.threads_z, config.shared
        assert extra is None and (overlaps == 0 or (overlaps.id, overlaps.value[0], config.count) == (6, 1, 1))
        self.seen.append((function, grid, config.stream, bool(overlaps), words))
        return 0


class Maps:
    """Tensor maps by address, and the launch that learns them, as a launcher's."""

    def __init__(self) -> None:
        self.kept, self.launched = {}, []

    def start_all(self, launches):
        self.launched.append(launches)
        for _, args in launches:
            self.kept.setdefault((1, args[1].data_ptr()), [object(), 5, 6, 70, 1])


def starter(maps, grid=(7, 1, 1), **options):
    metadata = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False)
    source = SimpleNamespace(signature=SIGNATURE)
    kernel = SimpleNamespace(function=FUNCTION, metadata=metadata, src=source, packed_metadata=(8, 1, 4096))
    return SimpleNamespace(grid=grid, options=options, index=3, compiled=kernel, launcher=maps)


def launches_of(*starters):
    """Of the second half of q, of k, of the second half of lse, and of lengths."""

    def launches(q, k, lse, lengths):
        args = (q[3:], k, lse[4:], None, (5, -6), 0.5, (2.0, lengths, "a"), "T", -1)
        return [(start, args) for start in starters]

    return launches


def tensors():
    return [torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(5, 6), torch.zeros(9), torch.zeros(3).int()]


@pytest.fixture
def maps():
    return Maps()


@pytest.fixture
def driver(monkeypatch, maps):
    driver = Driver()
    monkeypatch.setattr(series, "cuda_driver", lambda: (driver.ask, driver.launch))
    monkeypatch.setattr(series, "current_stream", {3: STREAM}.__getitem__)
    monkeypatch.setattr(series, "lies_in", lambda *_: True)
    monkeypatch.setattr(series, "start_all", maps.start_all)
    monkeypatch.setattr(series, "WORTH", 1)
    return driver


def words_of(maps, q, k, lse, lengths):
    float32 = lambda x: int.from_bytes(bytes(ctypes.c_float(x)), "little")
    low = lambda x, size: x & (1 << 8 * size) - 1
    own = [
        q.data_ptr() + 48,
        id(maps.kept[1, k.data_ptr()][0]) + 128,
        5,
        6,
        70,
        1,
        lse.data_ptr() + 16,
        0,
        5,
        low(-6, 8),
    ]
    return [*own, float32(0.5), float32(2.0), lengths.data_ptr(), low(-1, 4), 0, 0]


def test_what_the_driver_reads(driver, maps):
    """The second time: numbers as before, pointers and maps of these tensors. One launch has no blocks."""
    starters = [starter(maps), starter(maps, (0, 1, 1)), starter(maps, (9, 1, 1), launch_pdl=True)]
    run, first, others = series.Series(launches_of(*starters)), tensors(), tensors()
    run(*first)
    assert len(maps.launched) == 1 and driver.seen == []
    maps.kept[1, others[1].data_ptr()] = [object(), 5, 6, 70, 1]
    for given in (others, first, others):
        run(*given)
        want = words_of(maps, *given)
        assert driver.seen == [(FUNCTION, (7, 1, 1, 256, 1, 1, 4096), STREAM, False, want),
                               (FUNCTION, (9, 1, 1, 256, 1, 1, 4096), STREAM, True, want)]  # fmt: skip
        driver.seen.clear()
    assert len(maps.launched) == 1


def test_few_calls_stay_tritons(driver, maps, monkeypatch):
    monkeypatch.setattr(series, "WORTH", 3)
    run, given = series.Series(launches_of(starter(maps))), tensors()
    for times in range(1, 6):
        run(*given)
        assert (len(maps.launched), len(driver.seen)) == (min(times, 3), max(times - 3, 0))


def test_one_tensor_in_two_places_says_nothing_of_the_next_call(driver, maps, monkeypatch):
    driver.sizes = [8, 8, 8, 8]
    start = starter(maps)
    start.compiled.src.signature = {"a": "*fp32", "b": "*fp32"}
    run = series.Series(lambda a, b: [(start, (b, a))])
    a, b = torch.zeros(4), torch.zeros(4)
    monkeypatch.setattr(series, "start_all", lambda launches: None)
    run(a, a)
    run(a, b)
    assert driver.seen[0][-1] == [b.data_ptr(), a.data_ptr(), 0, 0]


def test_an_address_without_a_map_is_tritons_launch_once(driver, maps):
    run, first, others = series.Series(launches_of(starter(maps))), tensors(), tensors()
    run(*first)
    run(*others)
    assert len(maps.launched) == 2 and driver.seen == []
    run(*others)
    assert len(maps.launched) == 2 and driver.seen[0][-1] == words_of(maps, *others)


def test_two_threads_have_rooms_of_their_own(driver, maps):
    """The driver is called without Python's lock, and reads late; then both rooms serve again."""
    run, one, two = series.Series(launches_of(starter(maps))), tensors(), tensors()
    maps.kept[1, two[1].data_ptr()] = [object(), 5, 6, 70, 1]
    run(*one)
    driver.meanwhile = lambda: run(*two)
    run(*one)
    assert [seen[-1] for seen in driver.seen] == [words_of(maps, *two), words_of(maps, *one)]
    assert len(run.again.rooms) == 2
    run(*two)
    assert driver.seen[-1][-1] == words_of(maps, *two) and len(run.again.rooms) == 2


def test_what_the_driver_refuses(driver, maps):
    """The first launch then is Triton's, which says why; behind one that has begun it is told here."""
    run, given = series.Series(launches_of(starter(maps), starter(maps))), tensors()
    run(*given)
    driver.codes = [201]
    run(*given)
    assert len(maps.launched) == 2 and driver.seen == []
    driver.codes = [0, 700]
    with pytest.raises(RuntimeError, match="CUDA driver refused a launch: error 700"):
        run(*given)
    run(*given)
    assert len(maps.launched) == 2 and len(driver.seen) == 3


def test_the_stream_is_the_current_one(driver, maps, monkeypatch):
    run, given = series.Series(launches_of(starter(maps))), tensors()
    run(*given)
    run(*given)
    monkeypatch.setattr(series, "current_stream", {3: 77}.__getitem__)
    run(*given)
    assert [seen[2] for seen in driver.seen] == [STREAM, 77]


def test_which_driver_is_asked(monkeypatch):
    """CUDA's, with pointers of 64 bits; not for AMD, nor one that lacks a function."""
    ask, launch = SimpleNamespace(), SimpleNamespace()
    library = SimpleNamespace(cuFuncGetParamInfo=ask, cuLaunchKernelEx=launch)
    find = series.cuda_driver.__wrapped__
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert find() == (ask, launch)
    assert launch.argtypes == (ctypes.c_void_p,) * 4 and ask.argtypes[0] is ctypes.c_void_p
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        assert find() is None
    del library.cuFuncGetParamInfo
    assert find() is None


def test_a_profilers_hook_sees_tritons_launch(driver, maps, monkeypatch):
    run, given = series.Series(launches_of(starter(maps))), tensors()
    run(*given)
    monkeypatch.setattr(series, "hooked", lambda: True)
    run(*given)
    assert len(maps.launched) == 2 and driver.seen == []


def of(name, value):
    def change(start):
        setattr(start.compiled.metadata, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        of("num_ctas", 2),
        of("launch_cooperative_grid", True),
        lambda start: setattr(start.compiled, "packed_metadata", (8, 1, 4096, 0)),
        lambda start: setattr(start.compiled.src, "signature", SIGNATURE | {"low": "fp8"}),
        lambda start: setattr(start.compiled.src, "signature", SIGNATURE | {"low": "i64"}),
        lambda start: setattr(start.compiled.src, "signature", SIGNATURE | {"another": "i32"}),
        lambda start: setattr(start, "launcher", None),
    ],
)
def test_launches_of_another_kind_stay_tritons(driver, maps, change):
    change(start := starter(maps))
    run = series.Series(launches_of(start))
    run(*tensors())
    assert run.started == 1 and run.again is None


def test_what_is_not_there_stays_tritons(driver, maps, monkeypatch):
    """Copies that the launches make; maps of views, or that lie elsewhere; a driver without these functions."""
    start, given = starter(maps), tensors()
    copies = series.Series(lambda q, k, lse, lengths: launches_of(start)(q, k, lse, lengths.contiguous()))
    copies(*given[:3], torch.zeros(3, 2).int()[:, 0])
    assert copies.again is None
    views = series.Series(lambda q, k, lse, lengths: launches_of(start)(q, k[1:], lse, lengths))
    views(*given)
    assert views.again is None
    others = series.Series(launches_of(start, other := starter(maps)))
    other.launcher = None
    others(*given)
    assert others.again is None
    for name, value in (("lies_in", lambda *_: False), ("cuda_driver", lambda: None)):
        with monkeypatch.context() as patch:
            patch.setattr(series, name, value)
            run = series.Series(launches_of(start))
            run(*given)
            assert run.again is None, name
    driver.sizes = SIZES[:-1]
    run = series.Series(launches_of(start))
    run(*given)
    assert run.again is None


def test_views_are_known_in_inference_mode_too(driver, maps):
    with torch.inference_mode():
        run, given = series.Series(launches_of(starter(maps))), tensors()
        run(*given)
        run(*given)
    assert driver.seen[0][-1] == words_of(maps, *given)


def test_where_a_map_lies():
    """At the second 128 bytes of an object of 256, and it begins with its tensor's address."""
    assert not series.lies_in(object(), 0)

    class Map:
        __slots__ = tuple(f"word{i:02}" for i in range(30))  # 256 bytes with the header

    assert Map.__basicsize__ == 256
    kept = []
    for _ in range(64):
        kept.append(Map())
        word = kept[-1].word14 = object()  # the word at 128
        assert series.lies_in(kept[-1], id(word)) == (id(kept[-1]) % 128 == 0)
        assert not series.lies_in(kept[-1], id(word) + 16)
