"""The shared-memory descriptors of wgmma in machine code, beside those of the PTX that it was made from.

Where a matrix lies at one place its descriptors are constants, so both can be computed. `benchmarks.mistakes` says why
they are compared.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.sass import PRODUCT, Flow, Instruction, several, width

SHARED_BASE = 0x400  # of what a kernel has of shared memory; the system keeps what lies below
WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
VARIABLE = -1  # stands for all descriptors that are no constants
PREDICATE = re.compile(r"U?P(\d|T)")
REGISTER = re.compile(r"(U?R)(\d+|Z)")
NUMBER = re.compile(r"-?(0x[0-9a-f]+|\d+)")
STACK = re.compile(r"\[(R\d+)(?:\+(-?0x[0-9a-f]+))?\]")

Known = dict[str, int]  # registers, predicates and words of the stack that hold a constant; others may hold anything


def differences(ptx: str, code: list[Flow]) -> list[str]:
    """Descriptors that the machine code has and the PTX has not, or the reverse."""
    wanted = ptx_descriptors(ptx)
    got = {value for function in code for value in sass_descriptors(function)}
    found = [f"descriptor {value:#018x} is in the machine code alone" for value in sorted(got - wanted - {VARIABLE})]
    found += [f"descriptor {value:#018x} is in the PTX alone" for value in sorted(wanted - got - {VARIABLE})]
    return found + ["a descriptor is a constant in the PTX alone"] * (VARIABLE in got - wanted)


def mixed(ptx: str) -> list[int]:
    """Addresses, in 16 bytes, of matrices in more than one swizzle: what the mistake begins with."""
    kinds: dict[int, set[int]] = {}
    for value in ptx_descriptors(ptx) - {VARIABLE}:
        kinds.setdefault(value & WORD, set()).add(value >> 32)
    return sorted(address for address, found in kinds.items() if len(found) > 1)


def ptx_descriptors(ptx: str) -> set[int]:
    written: dict[str, list[tuple[str, list[str]]]] = {}
    used: list[str] = []
    for line in ptx.splitlines():
        parts = re.match(r"\s*(@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);", line)
        if parts and parts[2].startswith("wgmma.mma_async"):
            used += re.findall(r"%rd\d+", parts[3])
        elif parts:
            name, *operands = (x.strip() for x in parts[3].split(","))
            written.setdefault(name, []).append(("guarded" if parts[1] else parts[2], operands))
    known: dict[str, int | None] = {"global_smem": SHARED_BASE}

    def value(name: str) -> int | None:
        if NUMBER.fullmatch(name):
            return int(name)
        if name not in known:
            known[name] = None
            makers = written.get(name, [])
            if len(makers) == 1 and (compute := PTX.get(makers[0][0])):
                values = [value(x) for x in makers[0][1]]
                if None not in values:
                    known[name] = compute(*values) & (LONG if name.startswith("%rd") else WORD)
        return known[name]

    return {VARIABLE if (x := value(name)) is None else x for name in used}


PTX: dict[str, Callable[..., int]] = {
    "cvt.u64.u32": operator.pos,
    "cvt.u32.u64": operator.pos,
    **{f"mov.{x}": operator.pos for x in ("b32", "u32", "b64", "u64")},
    **{f"{name}{x}": compute for x in (32, 64) for name, compute in (
        ("add.s", operator.add), ("sub.s", operator.sub), ("or.b", operator.or_), ("and.b", operator.and_),
        ("xor.b", operator.xor), ("shl.b", operator.lshift), ("shr.u", operator.rshift),
        ("bfe.u", lambda a, start, count: a >> start & (1 << count) - 1),
    )},
}  # fmt: skip


class Step(NamedTuple):
    """An instruction: all that it writes, registers first, and the operands that it computes that of."""

    instruction: Instruction
    writes: list[str]
    carries: list[str]  # predicates among what it writes
    sources: list[str]


def sass_descriptors(code: Flow) -> Iterator[int]:
    """Of all wgmma in a function's machine code, by the constants that reach each block on all ways there."""
    blocks = relevant([[step(x) for x in block] for block in code.blocks])
    before: dict[int, Known] = {0: {}}
    todo = [0] if blocks else []
    while todo:
        block = todo.pop()
        state = dict(before[block])
        for each in blocks[block]:
            take(each, state)
        for follower in code.followers[block]:
            known = before.get(follower)
            met = state if known is None else {name: x for name, x in known.items() if state.get(name) == x}
            if known is None or len(met) < len(known):
                before[follower] = dict(met)
                todo.append(follower)
    for block, known in before.items():
        state = dict(known)
        for each in blocks[block]:
            for name in descriptors_of(each.instruction):
                x = pair(name, state)
                yield VARIABLE if x is None else x
            take(each, state)


def descriptors_of(instruction: Instruction) -> list[str]:
    """The uniform registers where a matrix product has a descriptor each: of its factors that are not in registers."""
    if not PRODUCT.match(instruction.operation):
        return []
    first, second = instruction.operands[1:3]
    if match := re.match(r"gdesc\[UR(\d+)\]", first):
        return [f"UR{match[1]}", f"UR{int(match[1]) + 2}"]
    match = re.match(r"gdesc\[UR(\d+)\]", second)
    return [f"UR{int(match[1]) + 2}"] if match else []


def step(instruction: Instruction) -> Step:
    operation, rest = instruction.operation, list(instruction.operands)
    carries, registers = [], []
    while rest and PREDICATE.fullmatch(rest[0]):
        carries.append(rest.pop(0))
    target = REGISTER.fullmatch(rest[0]) if rest and not re.search("SETP|VOTE|PLOP3|R2P", operation) else None
    if target:
        rest.pop(0)
        while rest and PREDICATE.fullmatch(rest[0]):
            carries.append(rest.pop(0))
        if target[2] != "Z":
            registers = several(target[0], width(operation))
    if operation == "R2P":
        carries = [f"P{i}" for i in range(7)]
    carries = [x for x in carries if x[-1] != "T"]
    if operation.startswith("STL") and (place := STACK.fullmatch(rest[0])):
        registers = words(place, width(operation))
        return Step(instruction, registers, [], several(rest[1], len(registers)))
    if operation.startswith("LDL") and (place := STACK.fullmatch(rest[0])):
        rest = words(place, len(registers))
    return Step(instruction, registers + carries, carries, rest)


def words(place: re.Match[str], count: int) -> list[str]:
    """Of the stack, whose pointer stays where a kernel has put it at its beginning."""
    return [f"[{place[1]}+{int(place[2] or '0', 16) + 4 * i}]" for i in range(count)]


def relevant(blocks: list[list[Step]]) -> list[list[Step]]:
    """Without the steps that no descriptor is computed of."""
    makers: dict[str, list[Step]] = {}
    needed: list[str] = []
    for block in blocks:
        for each in block:
            for name in each.writes:
                makers.setdefault(name, []).append(each)
            for name in descriptors_of(each.instruction):
                needed += several(name, 2)
    seen: set[str] = set()
    while needed:
        name = needed.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in makers.get(name, []):
            wide = each.instruction.operation == "UIADD3.64"
            for source in each.sources:
                source = source.lstrip("-~!|")
                needed += several(source, 2) if wide and source.startswith("UR") else [source]
    return [[x for x in block if not seen.isdisjoint(x.writes) or descriptors_of(x.instruction)] for block in blocks]


def take(each: Step, state: Known) -> None:
    """What an instruction does to the constants that are known. Under a guard it may do nothing."""
    results = computed(each, state)
    for name in each.writes:
        x = results.get(name)
        if x is None or (each.instruction.guard and state.get(name) != x):
            state.pop(name, None)
        else:
            state[name] = x


def computed(each: Step, state: Known) -> Known:
    """The constants among what it writes."""
    operation, sources = each.instruction.operation, each.sources
    if operation.startswith(("LDL", "STL")):
        return {name: x for name, y in zip(each.writes, sources, strict=True) if (x := read(y, state)) is not None}
    if operation == "UIADD3.64":
        pairs = [x for y in sources[:3] if (x := pair(y, state)) is not None]
        result, carry = sum(pairs) if len(pairs) == 3 else None, None
    else:
        result, carry = arithmetic(operation, [read(x, state) for x in sources], sources)
    if result is None:
        return {}
    made = {name: result >> 32 * i & WORD for i, name in enumerate(x for x in each.writes if x not in each.carries)}
    return made | ({each.carries[0]: carry} if each.carries and carry is not None else {})


def read(operand: str, state: Known) -> int | None:
    if operand in state:
        return state[operand]
    if NUMBER.fullmatch(operand):
        return int(operand, 0)
    sign, name = (operand[:1], operand[1:]) if operand[:1] in ("-", "~", "!") else ("", operand)
    x = 0 if re.fullmatch(r"U?RZ|SRZ", name) else 1 if re.fullmatch(r"U?PT", name) else state.get(name)
    if x is None or not sign:
        return x
    return -x if sign == "-" else ~x if sign == "~" else 1 - x


def pair(operand: str, state: Known) -> int | None:
    """64 bits: a number, or a register and the next."""
    name = operand.removeprefix("-")
    if not re.fullmatch(r"UR\d+", name):
        return read(operand, state)
    low, high = (state.get(x) for x in several(name, 2))
    return None if low is None or high is None else (high << 32 | low) * (-1 if operand[0] == "-" else 1)


def arithmetic(operation: str, values: list[int | None], sources: list[str]) -> tuple[int | None, int | None]:
    """(result, carry) of what descriptors are computed with; None: not a constant, or not known here."""
    name, *flags = operation.split(".")
    if name in ("S2R", "S2UR"):
        return (0, None) if sources == ["SR_CgaCtaId"] else (None, None)  # clusters of one
    name = name if name == "UMOV" else name.removeprefix("U")
    count, compute = ARITHMETIC.get(".".join([name, *(x for x in flags if x != "X")]), ARITHMETIC.get(name, (0, None)))
    if compute is None or ({"WIDE", "HI"} & set(flags) and name != "SHF"):
        return None, None
    taken = [x for x in values[: count + ("X" in flags)] if x is not None]
    if len(taken) < count + ("X" in flags):
        return None, None
    result = compute(*(x & WORD for x in taken[:count])) + sum(taken[count:])  # and a carry
    return result & WORD, result >> 32 if name in ("IADD3", "VIADD") else None


def by_table(a: int, b: int, c: int, table: int) -> int:
    """LOP3: bits of three words, by their truth table."""
    rows = (row for row in range(8) if table >> row & 1)
    return sum((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c) & WORD for row in rows)


# By name, without the U of the uniform registers' own: how many operands, and what is made of these words.
ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    **dict.fromkeys(("MOV", "UMOV", "R2UR", "CS2R"), (1, operator.pos)),
    "VIADD": (2, operator.add),
    "IADD3": (3, lambda a, b, c: a + b + c),
    "IMAD": (3, lambda a, b, c: a * b + c),
    "LEA": (3, lambda a, b, shift: (a << shift) + b),
    "LOP3": (4, by_table),
    "SHF.R.U32.HI": (3, lambda low, shift, high: high >> shift),
    "SHF.L.U32": (3, lambda low, shift, high: low << shift),
    "SGXT.U32": (2, lambda a, bits: a & (1 << bits) - 1),
    "SEL": (3, lambda a, b, condition: a if condition else b),
}
