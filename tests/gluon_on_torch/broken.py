"""The Hopper kernel with one thing wrong: what the kernel on PyTorch has to notice, and which problems show it."""

from __future__ import annotations

# (what is wrong: the module, what stands there, what stands there instead)
BROKEN = {
    "K is read before it lands": (
        "hopper_steps", "        mbarrier.wait(bars.k_full.index(k_at), k_phase)\n", ""),
    "V is read before it lands": (
        "hopper_steps", "        mbarrier.wait(bars.v_full.index(at), phase)\n        acc", "        acc"),
    "V that a consumer passes over is not waited for": (
        "hopper_steps",
        "    if passed:\n        at, phase = stage(it, T)\n        mbarrier.wait(bars.v_full.index(at), phase)\n",
        "    if passed:\n        at, phase = stage(it, T)\n"),
    "V of the first of two tiles that are passed over is not waited for": (
        "hopper_steps",
        "pass_over_v(i > 0, bars, it - 1, T)\n        mbarrier",
        "pass_over_v(i > 1, bars, it - 1, T)\n        mbarrier"),
    "V of the tile at hand is waited for, not of the one that is passed over": (
        "hopper_steps",
        "pass_over_v(i > 0, bars, it - 1, T)\n        mbarrier",
        "pass_over_v(i > 0, bars, it, T)\n        mbarrier"),
    "Q is read before it lands": (
        "attention_hopper", "    mbarrier.wait(bars.q_full.index(q_at), q_phase)\n", ""),
    "scores are used before they are there": (
        "hopper_steps", "warpgroup_mma_wait(T.V_PIECES, [s])", "warpgroup_mma_wait(T.V_PIECES + 1, [s])"),
    "K is given back too early": (
        "hopper_steps",
        "        s = warpgroup_mma_wait(T.V_PIECES, [s])  # the scores are there; P V goes on under the softmax\n"
        "        if T.APART:\n            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n",
        "        if T.APART:\n            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n"
        "        s = warpgroup_mma_wait(T.V_PIECES, [s])\n"),
    "V is given back too early": (
        "hopper_steps", "        acc = values_added(acc, T)\n        if T.APART:\n"
        "            mbarrier.arrive(bars.v_empty.index(at), count=1)\n        else:\n"
        "            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n",
        "        if T.APART:\n            mbarrier.arrive(bars.v_empty.index(at), count=1)\n        else:\n"
        "            mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n        acc = values_added(acc, T)\n"),
    "V is never given back": (
        "attention_hopper",
        "    if T.APART:\n        mbarrier.arrive(bars.v_empty.index(v_at), count=1)\n\n", "\n"),
    "copies do not wait for room": ("hopper_producer", "    if empty is not None:\n", "    if False:\n"),
    "one piece's bytes are expected for all": (
        "hopper_producer", "PIECES * desc.block_type.nbytes", "desc.block_type.nbytes"),
    "Q's copy does not wait for room": (
        "hopper_producer", "    mbarrier.wait(bars.q_empty.index(at), phase ^ 1)\n", ""),
    "a phase is counted wrongly": ("hopper_tasks", "(use // T.STAGES & 1)", "(use // T.STAGES + 1 & 1)"),
    "messages do not wait for room": (
        "hopper_tasks", "    mbarrier.wait(slot_empty.index(at), ((n_message // 2) & 1) ^ 1)\n", ""),
    "O is overwritten while it leaves": (
        "hopper_epilogue", "        tma.store_wait(T.O_SLOTS - 1)  # what was in it before has left\n", ""),
    "O leaves with no fence": (
        "hopper_epilogue",
        '    """Begins the TMA copy of all of a consumer\'s rows of O, some columns of it."""\n'
        "    fence_async_shared()\n",
        ""),
    "a block ends before its O has left": (
        "attention_hopper", "    tma.store_wait(0)  # no block ends before its O has left\n", ""),
    "turns are not passed on": ("attention_hopper", "    if WG == 1:\n        pass_turn(WG, T)\n", ""),
    "the accumulator is not rescaled": (
        "hopper_steps",
        "        if CAREFUL:\n            acc = weighed", "        if False:\n            acc = weighed"),
    "edges are not hidden": ("hopper_scores", "    if not sees_whole(start_n, rows, task, F, T):\n", "    if False:\n"),
    "a redo does not wait for the first pass": (
        "hopper_again",
        "    writes_done()  # of O as the first pass left it, which is read and written from here on\n", ""),
    "V is cleaned by each as if alone": (
        "hopper_again", "    mbarrier.wait(cleaned, n_clean & 1)\n    return", "    return"),
    "clean V is read with no fence": (
        "hopper_again", "    fence_async_shared()\n    mbarrier.arrive(cleaned", "    mbarrier.arrive(cleaned"),
    "O takes V's room too early": (
        "hopper_again",
        "    mbarrier.wait(bars.cleaned, n_clean & 1)\n", ""),
    "parts overlap": ("hopper_tasks", "len_k - start_k, 0), span.each * T.BLOCK_N)", "len_k - start_k, 0), len_k)"),
    "a mask is read before it lands": (
        "attention_hopper", "barriers(STAGES, 1 + T.MASK_COPIED)", "barriers(STAGES, 1)"),
    "a mask is read from the room of the step before": (
        "hopper_steps", "mask = mask_tile(k_at, i,", "mask = mask_tile(at, i,"),
    "all consumers get the first one's mask": (
        "hopper_producer", "task.first + w * ROWS, start_n", "task.first, start_n"),
    "a mask of one head is taken for one of many": (
        "hopper_producer", "gl.where(step_h == 0, 0, task.head)", "task.head"),
    "a mask of one sequence is taken for one of many": (
        "hopper_producer", "gl.where(step_b == 0, 0, task.b)", "task.b"),
    "K of the next part is read before it lands": (
        "hopper_folds", "    mbarrier.wait(bars.k_full.index(k_at), k_phase)\n", ""),
    "V at the end of a part is read before it lands": (
        "hopper_folds", "    mbarrier.wait(bars.v_full.index(at), phase)\n", ""),
    "scores of the next part are used before they are there": (
        "hopper_folds", "warpgroup_mma_wait(T.V_PIECES, [s])", "warpgroup_mma_wait(T.V_PIECES + 1, [s])"),
    "K of the next part is given back too early": (
        "hopper_folds",
        "    s = warpgroup_mma_wait(T.V_PIECES, [s])\n"
        "    if T.APART:\n        mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n",
        "    if T.APART:\n        mbarrier.arrive(bars.k_empty.index(k_at), count=1)\n"
        "    s = warpgroup_mma_wait(T.V_PIECES, [s])\n"),
    "V of the last part is given back too early": (
        "hopper_folds",
        "    acc = values_added(acc, T)\n    if T.APART:\n        mbarrier.arrive(bars.v_empty.index(v_at), count=1)\n",
        "    if T.APART:\n        mbarrier.arrive(bars.v_empty.index(v_at), count=1)\n"
        "    acc = values_added(acc, T)\n"),
    "V is given back too early by who does rows again": (
        "hopper_again",
        "        acc = values_added(acc, T)\n        if T.APART:\n"
        "            mbarrier.arrive(bars.v_empty.index(at), count=1)\n",
        "        if T.APART:\n            mbarrier.arrive(bars.v_empty.index(at), count=1)\n"
        "        acc = values_added(acc, T)\n"),
    "rows beside another sequence overwrite O while it leaves": (
        "hopper_epilogue",
        "            tma.store_wait(0)  # what follows adds no copy to count\n", "            pass\n"),
    "O that was done again leaves V's room with no fence": (
        "hopper_again", "    fence_async_shared()\n    barrier()", "    barrier()"),
    "a part is folded where O leaves": (
        "hopper_folds", "    tma.store_wait(0)  # the last tile's O has left the room\n", ""),
    "parts that fail are not noticed": ("hopper_folds", "(over != 0) | is_bad(acc, T)", "(over != 0)"),
    "a part that fails is folded all the same": ("hopper_again", "asked & (fails == 0)", "asked"),
    "a part is folded twice": ("hopper_again", "((mark == CLEAN) & (second == 0))", "(mark == CLEAN)"),
    "parts are folded to the chain of the tile before": (
        "hopper_again", "        if (part % (T.CHAIN * T.CHAINS) == 0) & (second == 0):\n", "        if False:\n"),
    "a chain goes on from the one before": (
        "hopper_again", "if (part % (T.CHAIN * T.CHAINS) == 0) &", "if (part == 0) &"),
    "chains begin at the first part": ("hopper_tasks", "        part *= T.OWNED\n", ""),
    "a chain ends with all parts": (
        "hopper_tasks", "gl.minimum((tiles + each - 1) // each, part + T.OWNED * T.CHAINS)",
        "(tiles + each - 1) // each"),
    "pages past the room are looked up": (
        "hopper_producer", "mask=key + i * KEYS < task.len_k, other=-1", ""),
    "all pages of a tile are its first": ("hopper_producer", "[pages[j], kv_head", "[pages[0], kv_head"),
    "all pages of a tile land in one place": ("hopper_producer", "rooms.index(first + j)", "rooms.index(first)"),
    "a page is read from its first key on": ("hopper_producer", "kv_head, row % T.PAGE,", "kv_head, row * 0,"),
    "bytes of one page are expected for all": (
        "hopper_producer", "PIECES * COUNT * desc.block_type.nbytes", "PIECES * desc.block_type.nbytes"),
    "a part that a sequence has is passed over": ("hopper_tasks", "past -= present\n", "past -= present - 1\n"),
    "the narrower section is taken for a whole one": (
        "hopper_tasks", "past * gl.minimum(sizes.section, sizes.early - before)", "past * sizes.section"),
    "all chains leave the first one's state": (
        "hopper_tasks", "part_of(task, T)[0] // T.CHAIN", "part_of(task, T)[0] * 0"),
    "a chain that was done again is not written": (
        "hopper_again", "        if (mode == REDO) & (behind == 0):\n", "        if False:\n"),
    "infinities of a chain are not written": (
        "hopper_again",
        "        if mode != REDO:\n            move_state(acc, mode, rows.exists, dst, lse, task, WG, T)\n        if",
        "        if"),
    "the second chain goes on from the first": (
        "hopper_folds", "        begins = part % T.CHAIN == 0\n", "        begins = part < 0\n"),
    "two chains wait in one room": ("hopper_folds", "        return part // T.CHAIN\n", "        return part * 0\n"),
    "the first of two chains is left out": (
        "hopper_folds", "merge(before[0], before[1], m_c, l_c)", "merge(before[0], before[1] * 0.0, m_c, l_c)"),
    "Q comes with each part": ("hopper_producer", "    if begins:\n        copy_q", "    if True:\n        copy_q"),
    "each part asks for the next row tile": ("hopper_producer", "        if ends:\n", "        if True:\n"),
    "rows that failed are not noticed": ("attention_hopper", "gl.where(is_bad(acc, T), CLEAN, 0)", "0"),
}  # fmt: skip


# The problems that show what the others never would, or late.
SHOWN_BY = {
    "V that a consumer passes over is not waited for": "passed over",
    "V of the first of two tiles that are passed over is not waited for": "dealt out",
    "V of the tile at hand is waited for, not of the one that is passed over": "dealt out",
    "K is given back too early": "passed over",
    "V is never given back": "passed over",
    "one piece's bytes are expected for all": "in two chains",
    "messages do not wait for room": "far ahead",
    **dict.fromkeys(
        (
            "K of the next part is read before it lands",
            "V at the end of a part is read before it lands",
            "scores of the next part are used before they are there",
            "parts that fail are not noticed",
            "a part that fails is folded all the same",
            "a part is folded twice",
            "parts are folded to the chain of the tile before",
            "Q comes with each part",
            "each part asks for the next row tile",
        ),
        "folded",
    ),
    **dict.fromkeys(
        (
            "a part is folded where O leaves",
            "a chain goes on from the one before",
            "chains begin at the first part",
            "a chain ends with all parts",
            "all chains leave the first one's state",
            "a chain that was done again is not written",
            "infinities of a chain are not written",
        ),
        "in chains",
    ),
    "K of the next part is given back too early": "given back apart",
    "V of the last part is given back too early": "given back apart",
    "the second chain goes on from the first": "in two chains",
    "two chains wait in one room": "in two chains",
    "the first of two chains is left out": "in two chains",
    **dict.fromkeys(
        (
            "pages past the room are looked up",
            "all pages of a tile are its first",
            "all pages of a tile land in one place",
            "a page is read from its first key on",
            "bytes of one page are expected for all",
            "a part that a sequence has is passed over",
        ),
        "in pages",
    ),
    "the narrower section is taken for a whole one": "short",
    "parts overlap": "in parts",
    "a redo does not wait for the first pass": "done again",
    "V is cleaned by each as if alone": "done again",
    "clean V is read with no fence": "done again",
    "O takes V's room too early": "done again",
    "O that was done again leaves V's room with no fence": "done again",
    "V is given back too early by who does rows again": "done again",
    "rows beside another sequence overwrite O while it leaves": "packed",
    "rows that failed are not noticed": "done again",
    "a mask is read before it lands": "masked",
    "a mask is read from the room of the step before": "masked",
    "all consumers get the first one's mask": "masked",
    "a mask of one head is taken for one of many": "masked",
    "a mask of one sequence is taken for one of many": "masked",
}

# Late to be found, each beside one like it that is found sooner and stays in `make test`.
LATE = {
    "V that a consumer passes over is not waited for": "V is read before it lands",
    "a redo does not wait for the first pass": "a part is folded where O leaves",
    "V is cleaned by each as if alone": "clean V is read with no fence",
    "O takes V's room too early": "O is overwritten while it leaves",
    "V is given back too early by who does rows again": "V is given back too early",
    "all consumers get the first one's mask": "a mask of one head is taken for one of many",
    "V at the end of a part is read before it lands": "K of the next part is read before it lands",
    "a part that fails is folded all the same": "parts that fail are not noticed",
    "a part is folded twice": "parts that fail are not noticed",
    "parts are folded to the chain of the tile before": "a chain goes on from the one before",
    "chains begin at the first part": "a chain ends with all parts",
    "a chain that was done again is not written": "infinities of a chain are not written",
    "each part asks for the next row tile": "Q comes with each part",
}
assert set(LATE.values()) <= BROKEN.keys() - LATE.keys()
