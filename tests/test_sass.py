"""What is looked for in machine code, on lines as nvdisasm writes them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the disassembler comes with Triton")

from benchmarks import descriptors, sass
from benchmarks.overwritten import overwritten
from benchmarks.unwritten import unwritten


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
        (["UPRMT UR6, UR6, 0x3340, UR6", "UIADD3 UR5, UR6, 0x1, URZ"], []),
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
    assert [line.partition(" reads ")[2] for line in unwritten(sass.flow(listed(*lines)))] == missing


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["LDSM.16.M88.4 R88, [R4]", ".L_x_0:", "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24",
          "F2FP.BF16.F32.PACK_AB R90, R3, R2", "@P1 BRA `(.L_x_0)"], 1),
        (["LDSM.16.M88.4 R88, [R4]", ".L_x_0:", "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24",
          "F2FP.BF16.F32.PACK_AB R92, R3, R2", "@P1 BRA `(.L_x_0)"], 0),
        ([".L_x_0:", "LDSM.16.M88.4 R88, [R4]", "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24",
          "F2FP.BF16.F32.PACK_AB R90, R3, R2", "@P1 BRA `(.L_x_0)"], 0),
        (["LDSM.16.M88.4 R88, [R4]", "F2FP.BF16.F32.PACK_AB R91, R3, R2",
          "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24"], 1),  # in parts
        # What is copied is what it was.
        (["LDSM.16.M88.4 R88, [R4]", ".L_x_0:", "IMAD.MOV.U32 R40, RZ, RZ, R88", "MOV R41, R89",
          "HGMMA.64x64x16.F32.BF16 R24, R40, gdesc[UR16], R24", "F2FP.BF16.F32.PACK_AB R88, R3, R2",
          "@P1 BRA `(.L_x_0)"], 1),
        (["LDSM.16.M88.4 R88, [R4]", "@P0 F2FP.BF16.F32.PACK_AB R91, R3, R2",
          "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24"], 1),
        (["LDSM.16.M88.4 R88, [R4]", ".L_x_0:", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24",
          "F2FP.BF16.F32.PACK_AB R90, R3, R2", "@P1 BRA `(.L_x_0)"], 0),
    ],
)  # fmt: skip
def test_a_factor_is_not_overwritten(lines, found):
    assert len(overwritten("", [sass.flow(listed(*lines))])) == found


def test_as_many_factors_are_loaded_as_the_ptx_has():
    """Also where a first step is by itself, so that each later one has what was packed by all ways."""
    ptx = """
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1, %f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f3, %f4}, {%r5,%r6,%r7,%r8}, %rd1, 1, 1, 1, 0;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1, %f2}, {%r1,%r2,%r3,%r4}, %rd1, 1, 1, 1, 0;
    """
    product = "HGMMA.64x64x16.F32.BF16 R24, R{}, gdesc[UR16], R24"

    def code(to: int) -> sass.Flow:
        packed = [f"F2FP.BF16.F32.PACK_AB R{to + i}, R3, R2" for i in range(4)]
        again = [".L_x_0:", product.format(88), *packed, product.format(to), "@P1 BRA `(.L_x_0)"]
        lines = ["LDSM.16.M88.4 R88, [R4]", product.format(88), *packed, product.format(to), *again]
        return sass.flow(listed(*lines))

    assert overwritten(ptx, [code(92)]) == []
    assert overwritten(ptx, [code(88)]) == ["1 products multiply what was loaded, for 2 of the PTX"]


def test_each_function_is_looked_at_by_itself():
    code = (
        "header\n.text.one:\n"
        + listed("UMOV UR4, 0x1", "EXIT")
        + "\n.text.two:\n"
        + listed("UIADD3 UR5, UR4, 1, URZ", "EXIT")
    )
    first, second = (sass.flow(function) for function in sass.functions(code))
    assert not unwritten(first)
    assert unwritten(second) == ["0000 UIADD3 UR5, UR4, 1, URZ reads UR4"]


def test_all_ways_of_a_branch_by_table_are_followed():
    code = sass.flow(
        listed(
            'BRX R2 -0x460 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', ".L_x_0:", "EXIT", ".L_x_1:", "EXIT", ".L_x_2:", "NOP"
        )
    )
    assert code.followers == [[2, 3], [], [], []]


# A matrix product of registers R64 on with what the pair UR6, UR7 describes.
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR4], RZ, !UPT"
BASE = ["S2UR UR5, SR_CgaCtaId", "UMOV UR4, 0x400", "ULEA UR4, UR5, UR4, 0x18", "UMOV UR7, 0x40000040"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["UIADD3 UR6, UR4, 0x8000, URZ", "USHF.R.U32.HI UR6, URZ, 0x4, UR6", "USGXT.U32 UR6, UR6, 0xe"], 0x840),
        # Through registers, the stack, and additions of two halves.
        (["UMOV UR6, 0x840", "IMAD.U32 R8, RZ, RZ, UR6", "MOV R9, UR7", "STL.64 [R1+0x10], R8", "UMOV UR6, URZ",
          "LDL R3, [R1+0x10]", "R2UR UR6, R3"], 0x840),
        (["IADD3 R2, P0, RZ, 0x7, RZ", "IADD3.X R3, RZ, 0x40000040, RZ, P0, !PT", "R2UR UR6, R2", "R2UR UR7, R3"], 7),
        (["IADD3 R2, P0, RZ, -0x1, RZ", "IADD3 R2, P0, R2, 0x8, RZ", "IADD3.X R3, RZ, 0x4000003f, RZ, P0, !PT",
          "R2UR UR6, R2", "R2UR UR7, R3"], 7),
        (["UMOV UR8, 0x2", "UMOV UR9, URZ", "UMOV UR6, 0x9", "UIADD3.64 UR6, UR6, -UR8, URZ"], 7),
        (["UMOV UR2, 0x3", "ULOP3.LUT UR6, UR2, 0x840, URZ, 0xfc, !UPT"], 0x843),
        (["UMOV UR6, 0x7", "USHF.L.U64.HI UR5, UR8, 0x2, UR9"], 7),
        # What nobody wrote, what only one way writes, or writes otherwise, and what a loop changes.
        (["UIADD3 UR6, UR20, 0x2, URZ"], None),
        (["@P0 UMOV UR6, 0x7"], None),
        (["UMOV UR6, 0x7", "@P0 UMOV UR6, 0x8"], None),
        (["UMOV UR6, 0x7", "@P0 BRA `(.L_x_0)", "UMOV UR6, 0x8", ".L_x_0:"], None),
        (["UMOV UR6, 0x7", "@P0 BRA `(.L_x_0)", "UMOV UR6, 0x7", ".L_x_0:"], 7),
        (["UMOV UR6, 0x7", ".L_x_0:", PRODUCT, "UIADD3 UR6, UR6, 0x1, URZ", "@P0 BRA `(.L_x_0)"], None),
        (["UMOV UR6, 0x7", ".L_x_0:", PRODUCT, "UMOV UR6, UR6", "@P0 BRA `(.L_x_0)"], 7),
        (["UMOV UR6, 0x7", "ULDC.64 UR6, c[0x0][0x208]"], None),
        (["MOV R6, 0x7", "HGMMA.64x16x16.F32.BF16 R0, R64, gdesc[UR4], R0", "R2UR UR6, R6"], None),
    ],
)  # fmt: skip
def test_descriptors_of_machine_code(lines, found):
    code = sass.flow(listed(*BASE, *lines, PRODUCT, "EXIT"))
    wanted = {descriptors.VARIABLE} if found is None else {0x40000040 << 32 | found}
    assert set(descriptors.sass_descriptors(code)) == wanted


PTX = """
  mov.b32 %r1, global_smem;
  add.s32 %r2, %r1, 131072;
  bfe.u32 %r3, %r2, 4, 14;
  cvt.u64.u32 %rd1, %r3;
  or.b64 %rd2, %rd1, 4611686293305294848;
  add.s64 %rd3, %rd1, -4611685949707911136;
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r9}, {%r8}, %rd2, 0, 1, 1, 0;
  wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r9}, {%r8}, %rd3, %p1, 1, 1, 1;
"""


def test_descriptors_of_ptx_and_what_differs():
    assert descriptors.ptx_descriptors(PTX) == {0x4000004000002040, 0xC000001000002060}
    stepped = PTX.replace("cvt.u64.u32 %rd1, %r3;", "cvt.u64.u32 %rd1, %r3;\n  add.s64 %rd1, %rd1, 1;")
    assert descriptors.ptx_descriptors(stepped) == {descriptors.VARIABLE}
    right = ["UMOV UR6, 0x2040", PRODUCT, "UMOV UR6, 0x2060", "UMOV UR7, 0xc0000010", PRODUCT]
    wrong = [line.replace("0x2060", "0x20") for line in right]
    lost = [line.replace("UMOV UR6, 0x2060", "R2UR UR6, R9") for line in right]
    assert descriptors.differences(PTX, [sass.flow(listed(*BASE, *right))]) == []
    assert descriptors.differences(PTX, [sass.flow(listed(*BASE, *wrong))]) == [
        "descriptor 0xc000001000000020 is in the machine code alone",
        "descriptor 0xc000001000002060 is in the PTX alone",
    ]
    assert (
        descriptors.differences(PTX, [sass.flow(listed(*BASE, *lost))])[-1]
        == "a descriptor is a constant in the PTX alone"
    )


def test_swizzles_at_one_place():
    assert descriptors.mixed(PTX) == []
    assert descriptors.mixed(PTX.replace("-4611685949707911136", "-4611685949707911168")) == [0x2040]
