"""benchmarks.first_call: what its rows are made of. That they are seconds of a GPU's machine only such a one shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import first_call


def test_each_repeat_finds_nothing_compiled_and_the_next_process_what_it_left(monkeypatch):
    folders, seen = {}, []

    def process(folder, *args):
        *_, steps = args
        seen.append(args)
        before = folders[folder] = folders.get(folder, 0) + 1
        return {"walk_s": 0.5} if steps else {"s": 10.0 * len(folders) + before}

    monkeypatch.setattr(first_call, "in_a_process", process)
    found = first_call.measure("flashattn_lite", 64, 512, False, 3)
    assert found == {"first_s": [11.0, 21.0, 31.0], "again_s": [12.0, 22.0, 32.0], "walk_s": [0.5]}
    assert list(folders.values()) == [2, 2, 2, 1]
    assert set(seen) == {("flashattn_lite", 64, 512, False, steps) for steps in (False, True)}
    rows = first_call.rows_of("flashattn_lite", 64, 512, False, 3)
    assert [(row["metric"], row["median"], row["p20"], row["p80"]) for row in rows] == [
        ("first_s", "61.00", "51.00", "71.00"),
        ("again_s", "62.00", "52.00", "72.00"),
        ("walk_s", "0.50", "0.50", "0.50"),
    ]
    assert (rows[0]["batch"], rows[0]["heads_q"], rows[0]["len_q"]) == (32, 32, 512)
    assert "walk_s" not in first_call.measure("flex", 64, 512, False, 1)


def test_a_training_step_is_told_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(first_call, "in_a_process", lambda folder, *args: seen.append(args) or {"s": 2.0})
    rows = first_call.rows_of("flashattn_lite", 64, 512, True, 1)
    assert [(row["op"], row["metric"]) for row in rows] == [("first_step", "first_s"), ("first_step", "again_s")]
    assert seen == [("flashattn_lite", 64, 512, True, False)] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_provider_that_fails_has_a_row_that_says_why():
    (row,) = first_call.rows_of("flashattn_lite", 64, 512, False, 1)
    assert (row["provider"], row["metric"]) == ("flashattn_lite", "absent")
    assert "CUDA" in row["median"] or "NVIDIA" in row["median"]


def test_tritons_steps_are_told():
    """Where something is compiled: what the cache holds takes none."""
    triton = pytest.importorskip("triton", reason="no Triton")
    before = triton.knobs.compilation.listener
    try:
        seconds = first_call.listen()
        times = triton.knobs.CompileTimes(2_000_000, [("ttgir", 500_000), ("cubin", 1_000_000)], 7)
        for hit in (False, True, False):
            triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    finally:
        triton.knobs.compilation.listener = before
    assert seconds == {"walk_s": 4.0, "ttgir_s": 1.0, "cubin_s": 2.0}
