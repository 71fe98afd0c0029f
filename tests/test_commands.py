"""Command lines of the benchmarks: what can't be measured, read or drawn is told, with no traceback."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks.provenance import RESULTS, ROOT

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
WRONG = [
    ("memory", ["--lengths", "256", "0"], "--lengths: must be a positive integer; got '0'"),
    ("memory", ["--heads", "-1"], "--heads: must be a positive integer; got '-1'"),
    ("attention", ["--profile", "sm_123"], "--profile: invalid choice: 'sm_123'"),
    ("problems", ["--device", "foo"], "--device: 'foo' can't be used here: "),
    ("plot", ["memory", "--csv", "nowhere.csv"], "--csv: there is no nowhere.csv"),
    ("plot", ["attention", "--csv", str(ROOT / "README.md")], "README.md has no column metric"),
    ("plot", ["decode", "--csv", str(RESULTS / "cpu" / "memory.csv")], "memory.csv has no row of metric gbps"),
    ("tables", ["--results", "nowhere"], "--results: there is no nowhere"),
    ("tables", ["--results", str(RESULTS / "cpu")], "has no results of a GPU"),
    *[
        pytest.param(name, argv, says, marks=NO_GPU)
        for name, argv, says in (
            ("problems", [], "--device: 'cuda' can't be used here: "),
            ("small_calls", [], "--device: 'cuda' can't be used here: "),
            ("memory", ["--device", "cuda"], "needs a GPU; or --device cpu"),
            *(
                (name, [], "needs a GPU")
                for name in ("attention", "backward", "packed", "shapes", "softmax", "decode", "first_call", "models")
            ),
        )
    ],
]


@pytest.mark.parametrize(("name", "argv", "says"), WRONG)
def test_a_wrong_command_line_is_told(name, argv, says, capsys):
    if name == "plot":
        pytest.importorskip("matplotlib", reason="matplotlib draws")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main(argv)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
