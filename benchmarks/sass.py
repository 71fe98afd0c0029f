"""Machine code of a kernel that was compiled for an NVIDIA GPU, as blocks of instructions. No GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton

LABEL = re.compile(r"^(\.L_\S+):")
LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
JUMPS = ("BRA", "BRX", "EXIT", "RET", "CALL")
TARGETS = re.compile(r"\.L_[\w.]+")
PRODUCT = re.compile(r"[QH]?GMMA\.64x(\d+)")


class Instruction(NamedTuple):
    """One line: `@P0 IADD3.X R4, R4, 0x1, RZ, P3, !PT` has the guard "@P0 ", the operation "IADD3.X", six operands."""

    address: str
    guard: str
    operation: str
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.address} {self.guard}{self.operation} {', '.join(self.operands)}"


def width(operation: str) -> int:
    """32-bit registers that it writes, if any."""
    if match := PRODUCT.match(operation):
        return int(match[1]) // 2
    if "SHF" in operation:  # one half of its 64 bits
        return 1
    if re.search(r"128|x4|M88\.4", operation):
        return 4
    return 2 if re.search("64|WIDE", operation) or operation == "CS2R" else 1


def several(name: str, count: int) -> list[str]:
    """That many registers from this one on; of the zero, as often the same."""
    kind, _, first = name.partition("R")
    return [f"{kind}R{int(first) + i if first != 'Z' else first}" for i in range(count)]


def disassembled(kernel: Any) -> str:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout


def functions(code: str) -> list[str]:
    return code.split("\n.text.")[1:]


class Flow(NamedTuple):
    """Instructions in blocks that are run from their first to their last, and which blocks may follow each."""

    blocks: list[list[Instruction]]
    followers: list[list[int]]


def flow(function: str) -> Flow:
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in function.splitlines():
        if label := LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif parts := LINE.match(line):
            address, guard, operation, rest = parts.groups()
            operands = [operand.strip().removesuffix(".reuse") for operand in rest.split(",")] if rest else []
            blocks[-1].append(Instruction(address, guard or "", operation, operands))
            if operation.startswith(JUMPS):
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    return Flow(blocks, [list(next_of(number, block, labels, len(blocks))) for number, block in enumerate(blocks)])


def next_of(number: int, block: list[Instruction], labels: dict[str, int], count: int) -> Iterator[int]:
    last = block[-1]
    if last.operation.startswith(("BRA", "BRX")):
        for target in TARGETS.findall(" ".join(last.operands)):
            if labels.get(target, count) < count:
                yield labels[target]
    # A branch may also have its condition among its operands: BRA UP0, `(.L_x_0).
    always = not last.guard and not re.match(r"!?U?P\d", (last.operands or [""])[0])
    if number + 1 < count and not (always and last.operation.startswith(("BRA", "BRX", "EXIT", "RET"))):
        yield number + 1
