"""The search for registers that machine code reads before it writes them, on lines as nvdisasm writes them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the disassembler comes with Triton")

from benchmarks import sass


def listed(*lines: str) -> str:
    """A function: labels as they are, instructions with addresses."""
    return "\n".join(x if x.endswith(":") else f"        /*{16 * i:04x}*/   {x} ;" for i, x in enumerate(lines))


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        (["UMOV UR4, 0x400", "UIADD3 UR5, UR4, 0x10, URZ"], []),
        (["UIADD3 UR22, UP0, UR22, 0x20, URZ", "EXIT"], ["UR22"]),
        (["ULDC.64 UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]"], []),
        (["ULDC UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]"], ["UR5"]),
        (["UIADD3 UR8, UR9, 0x1, URZ"], ["UR9"]),
        (["R2UR UR6, R3", "UMOV UR7, 0x40000040", "HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR4], RZ, !UPT"], []),
        (["R2UR UR6, R3", "UMOV UR7, 0x40000040", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"], ["UR4, UR5"]),
        (["UIADD3.64 UR4, UR6, 0x2, URZ"], ["UR6, UR7"]),
        (["S2UR UR5, SR_CgaCtaId", "STS [R0+UR5+0x400], R18"], []),
        (["REDUX.MAX.S32 UR6, R4", "IMAD.U32 R7, RZ, RZ, UR6"], []),
        (["@P0 UMOV UR4, 0x1", "@P0 UIADD3 UR5, UR4, 0x1, URZ"], []),
        # What is saved and restored may be anything; what is made of it may not.
        (["MOV R9, UR4", "UMOV UR4, 0x1", "R2UR UR4, R9"], []),
        (["MOV R9, UR4", "UMOV UR4, 0x1", "R2UR UR4, R9", "UMOV UR5, UR4", "UIADD3 UR5, UR5, 0x1, URZ"], ["UR5"]),
        (["UMOV UR4, 0x1", "IMAD.U32 R9, RZ, RZ, UR4", "R2UR UR6, R9", "UIADD3 UR5, UR6, 0x1, URZ"], []),
        (["MOV R9, UR4", "IADD3 R9, R8, 0x1, RZ", "R2UR UR6, R9", "UIADD3 UR5, UR6, 0x1, URZ"], []),
        # One way round the write.
        (["@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", ".L_x_0:", "USHF.L.U32 UR5, UR4, 1, URZ"], ["UR4"]),
        (["@P0 BRA `(.L_x_0)", "UMOV UR4, 1", "BRA `(.L_x_1)", ".L_x_0:", "UMOV UR4, 2", ".L_x_1:", "ULEA UR5, UR4"],
         []),
        (["@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", "EXIT", ".L_x_0:", "USHF.L.U32 UR5, UR4, 1, URZ"], ["UR4"]),
        # Written in a loop, read at its beginning.
        ([".L_x_0:", "USHF.L.U32 UR5, UR4, 1, URZ", "UMOV UR4, 0x1", "@P1 BRA `(.L_x_0)", "EXIT"], ["UR4"]),
        (["UMOV UR4, 0x0", ".L_x_0:", "USHF.L.U32 UR5, UR4, 1, URZ", "UMOV UR4, 0x1", "@P1 BRA `(.L_x_0)"], []),
        # Nobody comes there.
        (["EXIT", ".L_x_0:", "USHF.L.U32 UR5, UR4, 1, URZ"], []),
    ],
)  # fmt: skip
def test_what_is_read_too_early(lines, missing):
    assert [line.partition(" reads ")[2] for line in sass.too_early(listed(*lines))] == missing


def test_each_function_is_looked_at_by_itself():
    code = (
        "header\n.text.one:\n"
        + listed("UMOV UR4, 0x1", "EXIT")
        + "\n.text.two:\n"
        + listed("UIADD3 UR5, UR4, 1, URZ", "EXIT")
    )
    first, second = sass.functions(code)
    assert not sass.too_early(first)
    assert sass.too_early(second) == ["0000 UIADD3 UR5, UR4, 1, URZ reads UR4"]
