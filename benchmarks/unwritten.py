"""Instructions that compute with a uniform register which nobody wrote: a sign of what `mistakes` looks for."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.sass import Flow, Instruction, several, width

UNIFORM = re.compile(r"(gdesc\[|\bdesc\[)?\b(UR\d+)(\.64)?")
COPIES = re.compile(r"U?MOV|R2UR|IMAD\.U32|IMAD\.MOV\.U32")

Registers = frozenset[str]
NEVER_WRITTEN: Registers = frozenset(f"UR{number}" for number in range(64))  # at a kernel's beginning


class Effect(NamedTuple):
    """The uniform registers that an instruction reads, and the registers that it writes.

    `copied`: the one it reads, if it hands it on as it is. Registers are saved and restored that way, whatever is in
    them.
    """

    reads: Registers
    writes: Registers
    copied: str | None

    def after(self, lost: Registers) -> Registers:
        """What may have been written nowhere, given what may before."""
        return lost | self.writes if self.copied in lost else lost - self.writes


def unwritten(code: Flow) -> list[str]:
    """Instructions that compute with a uniform register which none before them, on some way there, has written."""
    effects = [[effect(instruction) for instruction in block] for block in code.blocks]
    lost: dict[int, Registers] = {0: NEVER_WRITTEN}  # by block: on some way to its beginning
    todo = [0] if effects else []
    while todo:
        block = todo.pop()
        state = lost[block]
        for each in effects[block]:
            state = each.after(state)
        for follower in code.followers[block]:
            known = lost.get(follower)
            if known is None or not state <= known:
                lost[follower] = state | (known or frozenset())
                todo.append(follower)
    found = []
    for block, state in sorted(lost.items()):
        for instruction, each in zip(code.blocks[block], effects[block], strict=True):
            # LLVM fills up a vector of bytes with what nobody wrote, and leaves that out again.
            if each.copied is None and instruction.operation != "UPRMT" and (missing := each.reads & state):
                found.append(f"{instruction} reads {', '.join(sorted(missing))}")
            state = each.after(state)
    return found


def effect(instruction: Instruction) -> Effect:
    """What it writes under a guard counts as written.

    A matrix product reads of its descriptors the pair of each factor that is not in registers.
    """
    operation, operands = instruction.operation, list(instruction.operands)
    writes: list[str] = []
    copied = None
    if operands and re.fullmatch(r"U?R\d+", operands[0]):
        name = operands.pop(0)
        writes = several(name, width(operation))
        if COPIES.fullmatch(operation) and re.fullmatch(r"U?R\d+", operands[-1]) and set(operands[:-1]) <= {"RZ"}:
            copied = operands[-1]
    in_pairs = operation.startswith("U") and ".64" in operation and not operation.startswith("ULDC")
    reads: list[str] = []
    for operand in operands:
        if "UR" not in operand:
            continue
        for kind, name, pair in UNIFORM.findall(operand):
            read = several(name, 2 if kind or pair or in_pairs else 1)
            if kind == "gdesc[" and operation.startswith("HGMMA"):
                read = several(name, 4)[2 if re.match(r"R\d+", operands[0]) else 0 :]
            reads += read
    return Effect(frozenset(reads), frozenset(writes), copied)
