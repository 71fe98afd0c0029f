"""What the launchers ask of strides and addresses: a sequence or head alone is told from none among others."""

from __future__ import annotations

import pytest
import torch

from flashattn_lite.kernels.operands import mask_strides, takes_tma, tma_strides, vectorised
from flashattn_lite.testing.tensors import LAYOUTS, lay_out

HALF = torch.bfloat16


def room(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=HALF)


# Tensors [2, 3, 5, 64], and whether the copy engine takes them.
TENSORS = {
    **{layout: (lambda layout=layout: lay_out(room(2, 3, 5, 64), layout)) for layout in LAYOUTS},
    "one for the batch": lambda: room(1, 3, 5, 64).expand(2, -1, -1, -1),
    "one for all heads": lambda: room(2, 1, 5, 64).expand(-1, 3, -1, -1),
    "behind an odd address": lambda: room(2 * 3 * 5 * 64 + 4)[4:].view(2, 3, 5, 64),
    "entries eight bytes apart": lambda: room(2, 3 * 5 * 64 + 4)[:, 4:].view(2, 3, 5, 64),
}
TAKEN = {"contiguous", "rows before heads", "slice of a longer tensor", "one for the batch", "one for all heads"}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("asked", [takes_tma, vectorised])
def test_an_entry_alone_is_taken_as_among_the_others(name, asked):
    """A slice of a batch or of heads has that batch's steps: another kernel would give it other bits."""
    x = TENSORS[name]()
    assert asked(x) == (name in TAKEN)
    for alone in (*x.split(1, 0), *x.split(1, 1), x[:1, :1]):
        assert asked(alone) == asked(x)


def test_one_row_or_packed_head_is_not_read_again_and_again_by_tma():
    one_row, one_head = room(2, 3, 1, 64).expand(-1, -1, 5, -1), TENSORS["one for all heads"]()
    assert not takes_tma(one_row) and not takes_tma(room(1, 3, 64).expand(5, -1, -1))
    for x in (one_head, one_head[:, :1]):
        assert takes_tma(x) and not takes_tma(x, heads_packed=True)
    assert vectorised(one_row)  # which asks about loads


@pytest.mark.parametrize("asked", [takes_tma, vectorised])
def test_a_step_of_one_element_leads_nowhere(asked):
    """DLPack gives it to dimensions of one entry."""
    assert asked(room(1, 1, 5, 64).as_strided((1, 1, 5, 64), (1, 1, 64, 1)))
    assert not asked(room(2, 1, 5, 64).as_strided((2, 1, 5, 64), (1, 1, 64, 1)))


def test_a_row_of_an_odd_length_is_not_loaded_as_one_of_16_bytes():
    """The copy engine reads 0 behind it."""
    x = room(2, 3, 5, 72)[..., :36]
    assert takes_tma(x) and not vectorised(x)


def test_the_copy_engine_takes_nothing_empty_and_no_step_of_a_tebibyte():
    assert not takes_tma(room(2, 3, 0, 64))
    far = [torch.empty_strided((2, 3, 5, 64), (step, 320, 64, 1), dtype=HALF, device="meta") for step in (2**38, 2**39)]
    assert [takes_tma(x) for x in far] == [True, False]


def test_a_dimension_of_one_entry_has_a_legal_step():
    assert tma_strides([1, 3, 5, 64], (1, 320, 64, 1), 2) == [8, 320, 64, 1]
    assert mask_strides(room(1, 3, 1, 64)) == (0, 64, 0, 1)  # none, for rows that do not exist
