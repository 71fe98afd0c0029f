"""Machine code of a kernel compiled for an NVIDIA GPU, looked through for the one mistake of ptxas that we know.

Where operands of wgmma lie at one place in shared memory, their descriptors are loop-invariant. Short of uniform
registers, ptxas 12.8 then makes some of one that it never wrote: the PTX is right, results are wrong or accesses
illegal (docs/design.md). `unwritten` finds that with no GPU: it named the kernel that failed on one, and none that
passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton

LABEL = re.compile(r"^(\.L_\S+):")
LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
JUMP = re.compile(r"\b(BRA|BRX|EXIT|RET|CALL)\b")
TARGET = re.compile(r"\bBRA\S*\s+.*?(\.L_[\w.]+)")
UNIFORM = re.compile(r"(gdesc\[|\bdesc\[)?\b(UR\d+)(\.64)?")
COPY = re.compile(r"(?:U?MOV|R2UR|IMAD\.U32|IMAD\.MOV\.U32) (U?R\d+),(?: RZ, RZ,)? (U?R\d+)(?:\.reuse)?$")

Registers = frozenset[str]
NEVER_WRITTEN: Registers = frozenset(f"UR{number}" for number in range(64))  # at a kernel's beginning


class Instruction(NamedTuple):
    """One line: its address and text, the uniform registers that it reads, the registers that it writes.

    `copied`: the one it reads, if it hands it on as it is. Registers are saved and restored that way, whatever is in
    them.
    """

    address: str
    text: str
    reads: Registers
    writes: Registers
    copied: str | None

    def after(self, lost: Registers) -> Registers:
        """What may have been written nowhere, given what may before."""
        return lost | self.writes if self.copied in lost else lost - self.writes


def unwritten(kernel: Any) -> list[str]:
    """Instructions that compute with a uniform register which none before them, on some way there, has written."""
    return [line for function in functions(disassembled(kernel)) for line in too_early(function)]


def disassembled(kernel: Any) -> str:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout


def functions(code: str) -> list[str]:
    return code.split("\n.text.")[1:]


def too_early(function: str) -> list[str]:
    """The same of one function's text."""
    blocks, followers = flow(function)
    lost: dict[int, Registers] = {0: NEVER_WRITTEN}  # by block: on some way to its beginning
    todo = [0] if blocks else []
    while todo:
        block = todo.pop()
        state = lost[block]
        for instruction in blocks[block]:
            state = instruction.after(state)
        for follower in followers[block]:
            known = lost.get(follower)
            if known is None or not state <= known:
                lost[follower] = state | (known or frozenset())
                todo.append(follower)
    found = []
    for block, state in sorted(lost.items()):
        for instruction in blocks[block]:
            if instruction.copied is None and (missing := instruction.reads & state):
                found.append(f"{instruction.address} {instruction.text} reads {', '.join(sorted(missing))}")
            state = instruction.after(state)
    return found


def flow(function: str) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Instructions in blocks that are run from their first to their last, and which blocks may follow each."""
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in function.splitlines():
        if label := LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif parts := LINE.match(line):
            blocks[-1].append(Instruction(parts[1], parts[2], *effects(parts[2])))
            if JUMP.search(parts[2]):
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    return blocks, [list(next_of(number, block, labels, len(blocks))) for number, block in enumerate(blocks)]


def next_of(number: int, block: list[Instruction], labels: dict[str, int], count: int) -> Iterator[int]:
    text = block[-1].text
    always = not PREDICATE.match(text) and not re.search(r"\bBRA\S*\s+!?U?P\d", text)
    if (target := TARGET.search(text)) and labels.get(target[1], count) < count:
        yield labels[target[1]]
    if number + 1 < count and not (always and re.search(r"\b(BRA|BRX|EXIT|RET)\b", text)):
        yield number + 1


def effects(text: str) -> tuple[Registers, Registers, str | None]:
    """(reads, writes, copied) of an `Instruction`. What it writes under a predicate counts as written.

    A matrix product reads of its descriptors the pair of each factor that is not in registers.
    """
    text = PREDICATE.sub("", text)
    operation, _, rest = text.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    writes: list[str] = []
    if re.fullmatch(r"U?R\d+", operands[0]):
        name = operands.pop(0)
        wide = 4 if re.search("128|x4|M88.4", operation) else 2 if re.search("64|WIDE", operation) else 1
        writes = several(name, wide)
    in_pairs = operation.startswith("U") and ".64" in operation and not operation.startswith("ULDC")
    reads: list[str] = []
    for operand in operands:
        for kind, name, pair in UNIFORM.findall(operand):
            read = several(name, 2 if kind or pair or in_pairs else 1)
            if kind == "gdesc[" and operation.startswith("HGMMA"):
                read = several(name, 4)[2 if re.match(r"R\d+", operands[0]) else 0 :]
            reads += read
    copy = COPY.fullmatch(text)
    return frozenset(reads), frozenset(writes), copy[2] if copy else None


def several(name: str, count: int) -> list[str]:
    """That many registers from this one on."""
    kind, first = re.fullmatch(r"(U?R)(\d+)", name).groups()  # type: ignore[union-attr]
    return [f"{kind}{number}" for number in range(int(first), int(first) + count)]
