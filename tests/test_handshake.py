"""benchmarks.handshake: what racecheck is shown is what its options say."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="the kernels need Triton")
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from benchmarks import handshake  # noqa: E402
from benchmarks.offline import GPUS  # noqa: E402
from flashattn_lite import target as targets  # noqa: E402

WAYS = ("bar", "mbarrier")


@pytest.mark.skipif(targets.interpreting(), reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize("there", WAYS)
@pytest.mark.parametrize("back", WAYS)
def test_it_compiles_to_what_is_asked(there, back):
    signature = {"out_ptr": "*i32", "THERE": "constexpr", "BACK": "constexpr"}
    source = GluonASTSource(handshake.handshake_kernel, signature, {(1,): there, (2,): back})
    options = {"num_warps": 4, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUS["sm_90"][0], options=options).asm["ptx"]
    for way, barrier in ((there, "bar.sync 11, 160;"), (back, "bar.sync 12, 160;")):
        assert code.count(barrier) == (2 * handshake.TURNS if way == "bar" else 0)
    assert ("mbarrier.init" in code) == ("mbarrier" in (there, back))


@pytest.mark.gpu
@pytest.mark.parametrize("there", WAYS)
@pytest.mark.parametrize("back", WAYS)
def test_numbers_arrive(there, back, capsys):
    handshake.main(["--there", there, "--back", back])
    assert capsys.readouterr().out.split() == ["[1,", "2,", "3,", "4]"]
