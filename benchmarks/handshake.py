"""A block of two roles that hands numbers over and does nothing else: what racecheck says of that.

    compute-sanitizer --tool racecheck python -m benchmarks.handshake --there bar --back mbarrier

Four warps store a number in shared memory, one warp reads it and says so; four times. `bar`: all threads of both meet
at bar.sync. `mbarrier`: behind a barrier of the role's own warps one thread arrives, the other role waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from benchmarks.command import need_gpu, parser_of
from flashattn_lite.kernels.hopper_pieces import execute

TURNS = gl.constexpr(4)
WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def writer(word, there, back, out_ptr, THERE: gl.constexpr, BACK: gl.constexpr):
    for i in gl.static_range(TURNS):
        word.store(gl.full([1], i + 1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        if THERE == "bar":
            execute("bar.sync 11, 160;")
        else:
            mbarrier.arrive(there, count=1)
        if BACK == "bar":
            execute("bar.sync 12, 160;")
        else:
            mbarrier.wait(back, i & 1)


@gluon.jit
def reader(word, there, back, out_ptr, THERE: gl.constexpr, BACK: gl.constexpr):
    for i in gl.static_range(TURNS):
        if THERE == "bar":
            execute("bar.sync 11, 160;")
        else:
            mbarrier.wait(there, i & 1)
        gl.store(out_ptr + i, gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), 0))
        if BACK == "bar":
            execute("bar.sync 12, 160;")
        else:
            mbarrier.arrive(back, count=1)


@gluon.jit
def handshake_kernel(out_ptr, THERE: gl.constexpr, BACK: gl.constexpr):
    word = gl.allocate_shared_memory(gl.int32, [1], WORD)
    bars = word, word
    if THERE == "mbarrier" or BACK == "mbarrier":
        both = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        bars = both.index(0), both.index(1)
        mbarrier.init(bars[0], count=1)
        mbarrier.init(bars[1], count=1)
    gl.warp_specialize([
        (writer, (word, bars[0], bars[1], out_ptr, THERE, BACK)),
        (reader, (word, bars[0], bars[1], out_ptr, THERE, BACK)),
    ], [1], [24])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("handshake", __doc__)
    for way in ("there", "back"):
        parser.add_argument(f"--{way}", choices=("bar", "mbarrier"), default="bar", help="default: %(default)s")
    options = parser.parse_args(argv)
    need_gpu(parser)
    out = torch.zeros(TURNS.value, dtype=torch.int32, device="cuda")
    handshake_kernel[(1,)](out, options.there, options.back, num_warps=4, enable_fp_fusion=False)
    print(out.tolist())


if __name__ == "__main__":
    main()
