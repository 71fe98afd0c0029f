"""The Hopper kernel compiles for sm_90a without a GPU, keeps its loop out of memory, and serves every length."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")
from benchmarks.mistakes import mistakes  # noqa: E402
from benchmarks.offline import attention_plan, attention_problem, compiled, usage  # noqa: E402
from benchmarks.sass import disassembled, flow, functions  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402
from flashattn_lite.kernels import attention_hopper_launch  # noqa: E402
from flashattn_lite.kernels.hopper_config import HopperConfig  # noqa: E402
from flashattn_lite.kernels.tuning_dealt import one_consumer  # noqa: E402
from flashattn_lite.problem import Inputs  # noqa: E402
from tests.exhaustive import also, quick  # noqa: E402
from tests.targets import H200  # noqa: E402
from tests.test_hopper import take_parts  # noqa: E402
from tests.test_hopper_folds import few_rows  # noqa: E402

pytestmark = pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")

# name: (head dim, head dim of v, dtype, options). Between them every feature, head dim and tile.
CASES = {
    "64": (64, 64, torch.bfloat16, {}),
    "64 causal, long": (64, 64, torch.float16, {"causal": True, "rows": 8192}),
    "128 causal": (128, 128, torch.bfloat16, {"causal": True}),
    "128 long": (128, 128, torch.bfloat16, {"rows": 4096}),
    "256": (256, 256, torch.float16, {"causal": True}),
    "192, 128": (192, 128, torch.bfloat16, {"causal": True}),
    "192, 128 long": (192, 128, torch.float16, {"rows": 4096}),
    "160": (160, 160, torch.bfloat16, {}),
    "96 long": (96, 96, torch.bfloat16, {"causal": True, "rows": 4096}),
    "everything": (80, 40, torch.bfloat16, {"causal": True, "window": (9, None), "softcap": 30.0, "mask": "float",
                                           "sinks": True, "kv_lens": True}),
    "bool mask": (128, 128, torch.float16, {"mask": "bool"}),
    "bool mask, 64": (64, 64, torch.bfloat16, {"mask": "bool"}),
    "bool mask, 64 long": (64, 64, torch.bfloat16, {"mask": "bool", "rows": 2048}),
    "bool mask, 128 long": (128, 128, torch.bfloat16, {"mask": "bool", "rows": 2048}),
    "bool mask, 256": (256, 256, torch.bfloat16, {"mask": "bool"}),
    "mask, 64": (64, 64, torch.bfloat16, {"mask": "half"}),
    "mask, 64 causal, long": (64, 64, torch.float16, {"mask": "half", "causal": True, "rows": 2048}),
    "mask, 128": (128, 128, torch.bfloat16, {"mask": "half", "causal": True}),
    "mask by loads": (128, 128, torch.bfloat16, {"mask": "half", "rows": 65}),
    "mask by loads, 64": (64, 64, torch.bfloat16, {"mask": "half", "rows": 65}),
    "mask for all rows, 64": (64, 64, torch.bfloat16, {"mask": "row"}),
    "mask for all rows, 64 long": (64, 64, torch.bfloat16, {"mask": "row", "rows": 2048}),
    "packed sequences": (128, 128, torch.bfloat16, {"causal": True, "varlen": True, "sinks": True}),
}  # fmt: skip
# Bytes of stack a thread: numbers that a tile computes once, and what rows that are done again need. The loop over the
# whole tiles has at most a few loads of them, at the speeds of docs/performance.md.
STACK_LIMIT = 208
LOADS_LIMIT = 248  # a mask that no TMA can copy is loaded by the threads, a tile ahead, into registers
SECOND_ACC_LIMIT = 440  # where parts are folded; but see assert_the_fast_loop_stays_out_of_memory


IN_PARTS = {
    f"{case}, in parts": (*CASES[case][:3], {"rows": 256} | CASES[case][3])
    for case in ("64", "128 long", "192, 128", "256")
}
FOLDED = {
    f"{case}, folded": (*CASES[case][:3], {"rows": 256} | CASES[case][3])
    for case in ("64", "64 causal, long", "128 causal", "128 long", "96 long")
}
# To one consumer, of one block a multiprocessor or two.
DEALT = {
    f"{case}, dealt out": CASES[case]
    for case in ("64 causal, long", "128 causal", "128 long", "256", "96 long", "mask, 128", "packed sequences")
} | {"80, dealt out": (80, 80, torch.bfloat16, {}), "64, 577, dealt out": (64, 64, torch.bfloat16, {"rows": 577})}
OTHERS = {"72": (72, 72, torch.bfloat16, {})}
CHAINED = {f"{case}, in chains": (*CASES[case][:3], CASES[case][3] | {"rows": 600}) for case in ("64", "128 causal")}
# Each way through the kernel once, and the widest heads; parts that are folded without chains below, of one consumer.
QUICK = ("64", "256", "everything", "mask, 64", "packed sequences", "64, in parts", "64, in chains", "80, dealt out")


@pytest.mark.parametrize("case", quick(CASES | IN_PARTS | FOLDED | CHAINED | DEALT | OTHERS, QUICK))
def test_it_compiles_and_keeps_its_registers(case, monkeypatch):
    head_dim, head_dim_v, dtype, options = (CASES | IN_PARTS | FOLDED | CHAINED | DEALT | OTHERS)[case]
    if case in DEALT:
        deal_out(monkeypatch)
    if case in IN_PARTS | FOLDED | CHAINED:
        take_parts(monkeypatch, case not in IN_PARTS, case in CHAINED)
    plan = attention_plan(attention_hopper_launch.plan, "sm_90", head_dim, head_dim_v, dtype, **options)
    kernel = compiled("sm_90", plan)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "setmaxnreg" in kernel.asm["ptx"]
    another_follows = options.get("varlen", False) or case in IN_PARTS | CHAINED
    assert ("griddepcontrol.launch_dependents" in kernel.asm["ptx"]) == another_follows
    assert kernel.metadata.shared <= 227 << 10
    assert (case in FOLDED | CHAINED, case in FOLDED) == (plan[2][-1].FOLDS, plan[2][-1].ALONE)
    assert (case in DEALT) == (plan[2][-1].DEALT > 1)
    limit = LOADS_LIMIT if "by loads" in case else SECOND_ACC_LIMIT if case in FOLDED | CHAINED else STACK_LIMIT
    assert usage(kernel).stack <= limit
    assert not mistakes(kernel)
    assert not barriers_in_no_use(kernel)
    if case in FOLDED | CHAINED:
        assert_the_fast_loop_stays_out_of_memory(kernel, plan[2][-1].WARPGROUPS)


def barriers_in_no_use(kernel):
    """The memory of one that no consumer and no producer knows would serve for sums, and be written by the hardware."""
    code = kernel.asm["ttgir"]
    # The first consumer is part of the function; the others, and the producer, are given what they know.
    first = re.search(r"ttg\.warp_specialize\(.*? partition0\(", code, re.DOTALL)[0]
    known = set(re.findall(r"%\w+", first))
    barriers = re.findall(r"(%\w+) = ttg\.local_alloc[^\n]*memdesc<\d+x1xi64", code)
    assert len(barriers) >= 9
    places = {name: re.findall(rf"(%\w+) = ttg\.memdesc_index {re.escape(name)}\[", code) for name in barriers}
    return [name for name in barriers if not {name, *places[name]} & known]


def assert_the_fast_loop_stays_out_of_memory(kernel, consumers):
    """What does not fit in registers moves between two parts, or where keys are taken with care."""
    steps = []
    for blocks, followers in map(flow, functions(disassembled(kernel))):
        for last, nexts in enumerate(followers):
            for first in nexts:
                step = [line.operation for block in blocks[first : last + 1] for line in block]
                products = sum("GMMA" in operation for operation in step)
                steps += [step] if first <= last and products and len(step) < 400 else []
    assert len(steps) == consumers
    assert not any(operation.startswith(("LDL", "STL")) for step in steps for operation in step)


# 16 rows of 32 query and 8 key heads: parts folded, by blocks that take so many chains; bytes of stack a thread.
@pytest.mark.parametrize(
    ("batch", "keys", "dim", "folds", "chains", "stack"),
    [
        also(1, 4096, 128, False, 1, 48), also(8, 8192, 128, True, 1, 48), (16, 4096, 128, True, 2, 48),
        also(16, 4096, 192, True, 2, 480), also(8, 4096, 256, True, 1, 250), also(16, 4096, 256, True, 2, 500),
        also(32, 2048, 256, True, 1, 560),
    ],
)  # fmt: skip
def test_the_tiles_of_one_consumer(batch, keys, dim, folds, chains, stack):
    rows = 16
    q, k = (torch.empty(batch, heads, n, dim, dtype=torch.bfloat16) for heads, n in ((32, rows), (8, keys)))
    problem, out, lse = few_rows(batch, (32, 8), rows, keys, dim), torch.empty_like(q), torch.empty(q.shape[:-1])
    kernel = compiled("sm_90", plan := attention_hopper_launch.plan(problem, Inputs(q, k, k), out, lse, H200))
    tile = plan[2][-1]
    assert (1, folds, chains) == (tile.WARPGROUPS, tile.FOLDS, tile.CHAINS)
    assert kernel.metadata.shared <= 227 << 10
    assert usage(kernel).stack <= stack
    if folds:
        assert_the_fast_loop_stays_out_of_memory(kernel, 1)
    assert not mistakes(kernel)


def deal_out(patch):
    """Every row tile of more than one consumer."""
    patch.setattr(attention_hopper_launch, "dealt", lambda problem, config, target: one_consumer(problem, config))


def plan_of(case, **changes):
    """Of a case, whose kernel is compiled once for all tests."""
    head_dim, head_dim_v, dtype, options = CASES[case]
    planner = functools.partial(attention_hopper_launch.plan, **changes)
    return attention_plan(planner, "sm_90", head_dim, head_dim_v, dtype, **options)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("packed sequences", {}),
        also("128 causal", {}),
        also("64", {"config": HopperConfig(3, 64, 4, carried="kv", q_held=True)}),
    ],
)
def test_q_is_given_back_when_a_product_has_used_it(case, changes):
    """Read into registers, and nobody told that its room is free before they have been used: see take_q."""
    plan = plan_of(case, **changes)
    ptx = compiled("sm_90", plan).asm["ptx"]
    events = re.findall(r"ldmatrix|mbarrier\.arrive|wgmma\.mma_async", ptx)
    behind = [event for read, event in itertools.pairwise(events) if read == "ldmatrix" != event]
    assert len(behind) >= 2  # of each consumer
    assert set(behind) == {"wgmma.mma_async"}


def test_descriptors_are_made_where_they_are_used():
    """Uniform registers hold those of a step at head dim 256: none comes from another register (`unknown`)."""
    steps = []
    for blocks, followers in map(flow, functions(disassembled(compiled("sm_90", plan_of("256"))))):
        for last, nexts in enumerate(followers):
            for first in nexts:
                step = [line.operation for block in blocks[first : last + 1] for line in block]
                if first <= last and sum("GMMA" in operation for operation in step) == 16 + 4:  # Q K^T and P V
                    steps.append(step)
    assert len(steps) >= 2 * 2  # a loop with care and a fast one, of each consumer
    assert not any("R2UR" in operation for step in steps if len(step) < 400 for operation in step)
    assert sum(len(step) < 400 for step in steps) == 2  # the fast ones


@pytest.mark.parametrize(
    ("dtype", "options", "loops"),
    [
        (torch.bfloat16, {}, 1),
        also(torch.bfloat16, {"kv_lens": True}, 1),
        (torch.float16, {}, 2),
        also(torch.bfloat16, {"causal": True}, 2),
        also(torch.bfloat16, {"mask": "bool"}, 1),
    ],
)
def test_no_loop_that_is_never_entered(dtype, options, loops):
    """Products in the code: two a loop (with care, or fast; under a mask with care only), two apart, two done again."""
    plan = attention_plan(attention_hopper_launch.plan, "sm_90", 64, 64, dtype, **options)
    consumers = plan[2][-1].WARPGROUPS
    assert compiled("sm_90", plan).asm["ttgir"].count("ttng.warp_group_dot %") == consumers * (2 * loops + 2 + 2)


@pytest.mark.parametrize(
    ("mask", "rows", "wanted", "others"),
    [
        ("bool", 64, "ld.global.b32", ["ld.global.b8", "ld.global.b16"]),
        also("bool", 66, "ld.global.b16", ["ld.global.b8"]),
        also("float", 64, "ld.global.v4.b32", ["ld.global.v2.b32"]),
        also("float", 66, "ld.global.v2.b32", ["ld.global.b16"]),
        also("half", 65, "ld.global.b16", ["ld.global.v2.b32"]),
    ],
)
def test_a_mask_comes_four_or_two_keys_at_a_time_where_its_rows_allow_it(mask, rows, wanted, others, monkeypatch):
    monkeypatch.setattr(attention_hopper_launch, "by_tma", lambda mask: False)
    plan = attention_plan(attention_hopper_launch.plan, "sm_90", 64, 64, torch.bfloat16, mask=mask, rows=rows)
    ptx = compiled("sm_90", plan).asm["ptx"]
    assert f"{wanted} " in ptx
    assert not [other for other in others if f"{other} " in ptx]


def used_after(definition, code):
    """The code between a value's definition and its first use."""
    rest = code[definition.end() :]
    return rest[: re.search(rf"{re.escape(definition[1])}\b", rest).start()]


@pytest.mark.parametrize("case", [also("128 causal"), "256", "packed sequences"])
def test_the_next_row_tile_is_asked_for_late_and_without_waiting(case):
    """A number, with nothing to order; between the question and the answer goes the last V tile, and nothing else."""
    code = compiled("sm_90", plan_of(case)).asm["ttgir"]
    asked = list(re.finditer(r"(%\w+) = tt.atomic_rmw add, (\w+), gpu, [^\n]*", code))
    assert {match[2] for match in asked} == {"relaxed"}
    copies = [used_after(match, code).count("async_tma_copy_global_to_local") for match in asked]
    packed = case == "packed sequences"
    assert sorted(copies) == ([0, 0, 1] if packed else [1])  # past what a packed sequence does not have: at once


def test_lengths_do_not_recompile():
    """The compiled kernel of one length, batch and number of heads serves any other that takes the same tile."""
    hashes = set()
    for rows, heads in ((1, 1), (16, 4), (17, 3), (2000, 16)):
        options = {"causal": True, "q_start": rows, "scale": 1 / rows, "rows": rows, "heads": heads}
        plan = attention_plan(attention_hopper_launch.plan, "sm_90", 64, 64, torch.float16, **options)
        hashes.add(compiled("sm_90", plan).hash)
    assert len(hashes) == 1


def problem_with(**changes):
    inputs, problem = attention_problem(
        64, 64, torch.float16, 64, 2, False, False, False, "", (None, None), {"causal": True}
    )
    return inputs, dataclasses.replace(problem, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, "it computes float16 and bfloat16, not float32"),
        ({"batch": 0}, "nothing to compute"),
        ({"len_q": 0}, "nothing to compute"),
        ({"len_k": 0}, "nothing to compute"),
    ],
)
def test_problems_that_it_leaves_to_others(changes, words):
    inputs, problem = problem_with(**changes)
    assert words in "; ".join(attention_hopper_launch.why_not(problem, inputs))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: torch.empty(1, 2, 64, 63, dtype=x.dtype),
        lambda x: torch.empty(1, 2, 64, 72, dtype=x.dtype)[..., 1:65],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.empty(1, 2 * 64 * 64 + 4, dtype=x.dtype)[:, 4:].view_as(x),
    ],
    ids=["row length", "address", "columns first", "a batch entry's step"],
)
def test_tensors_that_it_can_not_copy_are_named(spoil):
    inputs, problem = problem_with()
    assert attention_hopper_launch.why_not(problem, inputs) == []
    (reason,) = attention_hopper_launch.why_not(problem, inputs._replace(k=spoil(inputs.k)))
    assert "whole 16-byte pieces" in reason
    assert ": k of head dim" in reason
    for k in (inputs.k[:, :1].expand_as(inputs.k), inputs.k[:1].as_strided((1, 2, 64, 64), (1, 64 * 64, 64, 1))):
        assert attention_hopper_launch.why_not(problem, inputs._replace(k=k)) == []
