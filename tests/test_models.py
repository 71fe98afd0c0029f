"""benchmarks/models.py: whole models with their attention and with ours, compared before they are timed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks import model_works, models
from benchmarks.timing import Timing
from flashattn_lite.integrations import packing
from flashattn_lite.integrations import transformers as integration

pytest.importorskip("transformers", reason="its models are those that are run")
TINY = model_works.Work(lambda: model_works.llama(32, 4, 2, 32, layers=1), lambda device: model_works.prompt(device, 9))
LEARNING = replace(TINY, inputs=lambda device: model_works.learning(device, 2, 9), training=True)


def rows(work, monkeypatch, modes=("eager", "compiled")):
    timed = []

    def measure(called, model, inputs, work):
        timed.append(called is not model)
        return {name: (Timing([2.0, 1.0, 3.0]), 5.0) for name in (work.rival, models.OURS)}

    monkeypatch.setattr(models, "measure", measure)
    return list(models.rows_of("tiny", work, modes, "cpu", torch.bfloat16)), timed


@pytest.mark.parametrize("work", [TINY, LEARNING], ids=["forward", "train"])
def test_a_model_is_compared_and_timed(work, monkeypatch):
    found, timed = rows(replace(work, compiled=True), monkeypatch)
    assert timed == [False, True]
    op = "train" if work.training else "forward"
    values = {(row["op"], row["provider"], row["metric"]): row["median"] for row in found}
    assert {values[op, name, "ms"] for name in ("sdpa", models.OURS)} == {"2.000"}
    assert values[op + "+compiled", models.OURS, "peak_mib"] == "5"
    assert float(values[op, models.OURS, "relative_error"]) < 0.03  # of one layer in bf16: four eps
    assert set().union(*found) <= set(models.columns())


@pytest.mark.parametrize(("each", "turns"), [(40.0, 13), (600.0, 2)])
def test_ours_and_the_rival_take_turns(each, turns, monkeypatch):
    """Until both have 500 ms, and two turns at least; who begins changes."""
    model, order = torch.nn.Linear(2, 2), []

    def attending(of, name):
        order.append(name)
        return nullcontext()

    monkeypatch.setattr(models, "attending", attending)
    monkeypatch.setattr(models, "peak_mib", lambda call: float(len(order)))
    monkeypatch.setattr(models, "sustained", lambda call, warm, timed: call(0) or Timing([each]))
    found = models.measure(lambda x: (model(x),), model, {"x": torch.zeros(1, 2)}, TINY)
    assert order == [*("sdpa", models.OURS, models.OURS, "sdpa") * turns][: 2 * turns]
    assert {name: timing.milliseconds for name, (timing, _) in found.items()} == dict.fromkeys(order, [each] * turns)
    assert {mib for _, mib in found.values()} == {1.0, 2.0}  # of the first turn


def test_what_is_compiled_in_minutes_is_not(monkeypatch):
    assert rows(TINY, monkeypatch)[1] == [False]


@pytest.mark.parametrize("work", [TINY, LEARNING], ids=["forward", "train"])
def test_a_model_that_is_wrong_with_ours_is_not_timed(work, monkeypatch):
    """And what runs with ours is ours."""
    attend = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *args, **options: attend(*args, **options) * 1.5)
    with pytest.raises(ArithmeticError, match="wrong: relative error"):
        rows(work, monkeypatch)


def test_a_model_that_does_not_call_ours_is_not_timed(monkeypatch):
    class Own(torch.nn.Linear):
        def forward(self, x):
            return (super().forward(x),)

    work = model_works.Work(lambda: Own(4, 4), lambda device: {"x": model_works.normal(device, 2, 4)})
    with pytest.raises(ArithmeticError, match="nothing called ours"):
        rows(work, monkeypatch)


def test_an_answer_is_what_one_pass_over_all_tokens_gives():
    model = model_works.llama(32, 4, 2, 32, layers=2)
    ids = model_works.tokens("cpu", 2, 5)
    keys, values = model_works.normal("cpu", 2, 2, 0, 8), model_works.normal("cpu", 2, 2, 0, 8)
    with torch.no_grad():
        (one_by_one,) = model_works.Answering(model)(ids, keys, values)
        torch.testing.assert_close(one_by_one, model(input_ids=ids).logits)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_answer_is_compared_and_timed(batch, monkeypatch):
    def inputs(device):
        return {"input_ids": model_works.tokens(device, batch, 3),
                **{name: model_works.normal(device, batch, 2, 9, 8) for name in ("keys", "values")}}  # fmt: skip

    work = model_works.Work(lambda: model_works.Answering(model_works.llama(32, 4, 2, 32, layers=2)), inputs)
    found, timed = rows(work, monkeypatch)
    assert timed == [False]
    errors = {row["provider"]: float(row["median"]) for row in found if row["metric"] == "relative_error"}
    assert set(errors) == {"sdpa", models.OURS} and 0 < max(errors.values()) < 0.03


def test_no_length_of_a_new_answer_was_there_before(monkeypatch):
    """With either provider; and no answer is behind more keys than there are."""
    seen = []

    class Seen(torch.nn.Module):
        def forward(self, input_ids, keys, values):
            seen.extend(keys.shape[2] + token for token in range(1, input_ids.shape[1] + 1))
            assert keys.shape == values.shape
            return (keys,)

    keys = torch.zeros(1, 2, 2500, 8)
    given = {"input_ids": torch.zeros(1, 3).long(), "keys": keys, "values": keys}
    work = model_works.Work(Seen, lambda device: given, varied=model_works.behind_more)
    monkeypatch.setattr(models, "attending", lambda model, name: nullcontext())
    monkeypatch.setattr(models, "peak_mib", lambda call: call() or 1.0)
    monkeypatch.setattr(models, "sustained", lambda call, warm, timed: [call(i) for i in range(5)] and Timing([600.0]))
    models.measure(Seen(), Seen(), given, work)
    assert len(seen) == len(set(seen)) == 2 * 2 * 7 * 3 and min(seen) > 2048
    with pytest.raises(ValueError, match="n: there are 2500 keys; got 200, for which 2848 are needed"):
        work.varied(given, 200)


def test_texts_in_one_row_are_taken_apart(monkeypatch):
    """By their lengths, not by a mask: else what is timed is another work."""
    lengths = []
    varlen = packing.attention_varlen
    monkeypatch.setattr(
        packing, "attention_varlen", lambda q, k, v, starts, *rest, **options: lengths.append(starts.diff().tolist())
        or varlen(q, k, v, starts, *rest, **options)
    )  # fmt: skip
    model = model_works.llama(32, 4, 2, 32, layers=1, cached=False)
    with models.attending(model, models.OURS):
        model(**model_works.learning_packed("cpu", [3, 5, 2])).loss.backward()
    assert lengths == [[3, 5, 2]]


def test_models_of_diffusers_take_what_stands_for_torchs_function():
    q = torch.randn(1, 2, 5, 8)
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with models.attending(torch.nn.Module(), models.OURS) as report:
        attend()
    with models.attending(torch.nn.Module(), "sdpa"):
        attend()
    assert report.calls == 1
