"""Factors of matrix products in registers that something else may lie in: another mistake that `mistakes` looks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.sass import Flow, Instruction, several, width

LOADED, PACKED = "LDSM", "F2FP"  # rows of a matrix come from shared memory, numbers of 16 bits are made of float32

Origins = dict[str, frozenset[str]]  # by register: which of the two may have written it last


def overwritten(code: Flow) -> list[str]:
    """Products whose first factor is what was loaded or what was packed, by the way that led there.

    No product of ours has either: one of them was put where the other was needed once more.
    """
    before: dict[int, Origins] = {0: {}}  # by block: at its beginning
    todo = [0] if code.blocks else []
    while todo:
        block = todo.pop()
        state = dict(before[block])
        for instruction in code.blocks[block]:
            write(instruction, state)
        for follower in code.followers[block]:
            known = before.get(follower)
            merged = joined((state, known or {}))
            if merged != known:
                before[follower] = merged
                todo.append(follower)
    found = []
    for block, begins in sorted(before.items()):
        state = dict(begins)
        for instruction in code.blocks[block]:
            if any(len(state.get(name, ())) > 1 for name in factor(instruction)):
                found.append(f"{instruction} multiplies what was loaded or what was packed")
            write(instruction, state)
    return found


def joined(states: Iterable[Origins]) -> Origins:
    merged: Origins = {}
    for state in states:
        for name, origins in state.items():
            merged[name] = merged.get(name, frozenset()) | origins
    return merged


def write(instruction: Instruction, state: Origins) -> None:
    """What is written under a guard may still be what it was."""
    operation, operands = instruction.operation, instruction.operands
    if not operands or not re.fullmatch(r"R\d+", operands[0]):
        return
    origins = frozenset(kind for kind in (LOADED, PACKED) if operation.startswith(kind))
    for name in several(operands[0], width(operation)):
        state[name] = origins | (state.get(name, frozenset()) if instruction.guard else frozenset())


def factor(instruction: Instruction) -> list[str]:
    """The registers of a product's first factor, if it is in registers."""
    operands = instruction.operands
    if instruction.operation.startswith("HGMMA") and len(operands) > 1 and re.fullmatch(r"R\d+", operands[1]):
        return several(operands[1], 4)
    return []
