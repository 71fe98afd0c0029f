"""Factors of matrix products in registers that something else may lie in: another mistake that `mistakes` looks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from benchmarks.sass import Flow, Instruction, several, width

COPIES = re.compile(r"MOV|IMAD\.MOV(\.U32)?")
LDMATRIX = re.compile(r"ldmatrix\S+ \{([^}]*)\}")
FACTOR = re.compile(r"wgmma\.mma_async\S+ \{[^}]*\}, \{(%\w+)")
LOADED, PACKED = "LDSM", "F2FP"  # rows of a matrix come from shared memory, numbers of 16 bits are made of float32

Origins = dict[str, frozenset[str]]  # by register: which of the two may have written it last


def overwritten(ptx: str, codes: Iterable[Flow]) -> list[str]:
    """Products whose first factor is what was loaded and what was packed, in parts or by the way that led there.

    No product of ours has both: one of them was put where the other was needed once more. By whichever way, that
    leaves fewer products of what was loaded than the PTX has. What was on the stack in between is not followed.
    """
    found, loaded = [], 0
    for code in codes:
        for instruction, origins in factors(code):
            loaded += LOADED in origins
            if len(origins) > 1:
                found.append(f"{instruction} multiplies what was loaded and what was packed")
    rows = {name.strip() for names in LDMATRIX.findall(ptx) for name in names.split(",")}
    asked = sum(name in rows for name in FACTOR.findall(ptx))
    if loaded < asked:
        found.append(f"{loaded} products multiply what was loaded, for {asked} of the PTX")
    return found


def factors(code: Flow) -> Iterator[tuple[Instruction, frozenset[str]]]:
    """Products whose first factor is in registers, and what may have been written there."""
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
    for block, begins in sorted(before.items()):
        state = dict(begins)
        for instruction in code.blocks[block]:
            if names := factor(instruction):
                yield instruction, frozenset().union(*(state.get(name, frozenset()) for name in names))
            write(instruction, state)


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
    if COPIES.fullmatch(operation):
        origins = state.get(operands[-1], frozenset())
    for name in several(operands[0], width(operation)):
        state[name] = origins | (state.get(name, frozenset()) if instruction.guard else frozenset())


def factor(instruction: Instruction) -> list[str]:
    """The registers of a product's first factor, if it is in registers."""
    operands = instruction.operands
    if instruction.operation.startswith("HGMMA") and len(operands) > 1 and re.fullmatch(r"R\d+", operands[1]):
        return several(operands[1], 4)
    return []
