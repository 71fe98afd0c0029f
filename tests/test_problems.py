"""Problems by chance find what is wrong with a function, and nothing where nothing is."""

from __future__ import annotations

import random
import re

import pytest
import torch

import flashattn_lite as fa
from benchmarks import problems, problems_drawn, problems_softmax

WRONG = {  # by what V, or y, is multiplied
    "a hundredth off": lambda q: 1.01,
    "never twice the same": lambda q: 1 + 3e-7 * torch.rand(1),
    "by the batch": lambda q: 1 + 3e-7 * len(q),
    "by the neighbours": lambda x: 1 + 3e-7 * float(x.isnan().sum() > 9),
}
FOUND = {
    ("dense", "a hundredth off"): {"matches_oracle", "gradients_match_autograd"},
    ("dense", "never twice the same"): {"repeats_have_the_same_bits", "batch_slot_is_irrelevant",
                                        "gradients_have_their_bits"},
    ("dense", "by the batch"): {"batch_slot_is_irrelevant", "gradients_have_their_bits"},
    ("packed", "a hundredth off"): {"packed_is_a_loop_of_dense", "packed_gradients_are_those_of_dense"},
    ("packed", "never twice the same"): {"packed_neighbours_are_irrelevant", "packed_slot_is_irrelevant",
                                         "gradients_have_their_bits"},
    ("packed", "by the batch"): {"packed_slot_is_irrelevant", "gradients_have_their_bits"},
    ("decoding", "a hundredth off"): {"matches_oracle"},
    ("decoding", "never twice the same"): {"repeats_have_the_same_bits", "batch_slot_is_irrelevant",
                                           "paged_is_contiguous"},
    ("decoding", "by the batch"): {"batch_slot_is_irrelevant"},
    ("softmax", "a hundredth off"): {"is_softmax"},
    ("softmax", "never twice the same"): {"repeats_have_the_same_bits", "other_rows_are_irrelevant"},
    ("softmax", "by the neighbours"): {"other_rows_are_irrelevant"},
}  # fmt: skip
SEEDS = range(4)


@pytest.fixture
def small_problems(monkeypatch):
    monkeypatch.setattr(problems_softmax, "COLUMNS", (7, 100))
    monkeypatch.setattr(problems_softmax, "DTYPES", (torch.float32,))
    monkeypatch.setattr(problems_drawn, "QUERIES", (7, 16))
    monkeypatch.setattr(problems_drawn, "KEYS", (33, 100))
    monkeypatch.setattr(problems_drawn, "DTYPES", (torch.float32,))


@pytest.mark.usefixtures("small_problems")
@pytest.mark.parametrize("kind", problems.KINDS)
def test_random_problems_find_nothing_in_ours(kind):
    for seed in SEEDS:
        attention, case = problems.KINDS[kind].draw(random.Random(seed), torch.device("cpu"))
        assert problems.differences(attention, case, problems.KINDS[kind].asked) == []


@pytest.mark.usefixtures("small_problems")
@pytest.mark.parametrize(("kind", "name"), FOUND)
def test_random_problems_tell_a_wrong_attention(kind, name):
    torch.manual_seed(0)  # of the noise: some of it is too small for any bit
    found, asked = set(), problems.KINDS[kind].asked
    for seed in SEEDS:
        attention, case = problems.KINDS[kind].draw(random.Random(seed), torch.device("cpu"))
        wrong = lambda q, k, v, *rest, **options: attention(q, k, v * WRONG[name](q), *rest, **options)  # noqa: B023
        if kind == "softmax":
            wrong = lambda x, dim: (fa.online_softmax(x, dim) * WRONG[name](x), *fa.softmax_stats(x, dim))
        lines = problems.differences(wrong, case, asked)
        found |= {line.partition(":")[0] for line in lines}
    assert found == FOUND[kind, name]


@pytest.mark.usefixtures("small_problems")
def test_random_problems_are_drawn_and_counted(monkeypatch, capsys):
    assert problems.main(["--device", "cpu", "--seconds", "0.01"]) == 0
    assert re.match("[1-9] problems by torch .*, 0 differences", capsys.readouterr().out)
    monkeypatch.setattr(problems, "checks", lambda *_: [lambda attention, case: 1 / 0])
    assert problems.main(["--device", "cpu", "--seconds", "0.01", "--kinds", "packed"]) == 1


@pytest.mark.usefixtures("small_problems")
def test_a_graph_holds_packed_sequences_whose_lengths_are_promised():
    """And every other call; the host reads the lengths that nobody promises."""
    held = set()
    for seed in range(40):
        for kind in problems.KINDS.values():
            attention, case = kind.draw(random.Random(seed), torch.device("cpu"))
            promised = len({"max_seqlen_q", "max_seqlen_k"} & attention.keywords.keys())
            held.add((type(case).__name__, promised, problems.may_be_captured(attention, case)))
    packed_calls = {("PackedCase", 0, False), ("PackedCase", 1, False), ("PackedCase", 2, True)}
    assert held == {("Case", 0, True), ("SoftmaxCase", 0, True), *packed_calls}


@pytest.mark.gpu
def test_a_dense_problem_can_be_captured():
    """What looks on while it runs, the kit that compares arguments say, must not wait for the GPU meanwhile."""
    attention, case = problems.KINDS["dense"].draw(random.Random(0), torch.device("cuda"))
    problems.graphs_see_new_numbers(attention, case)
