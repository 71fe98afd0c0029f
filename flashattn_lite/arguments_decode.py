"""The door of attention_decode: few query rows, a cache or pages with their table, the length of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashattn_lite.arguments import check_dense, check_int32, check_kv_lens, check_qkv, readable
from flashattn_lite.errors import value_error
from flashattn_lite.scalars import unless_known

NAMES = ("q", "k_cache", "v_cache")
MAX_ROWS = 16  # query tokens
PAGE_SIZES = tuple(2**i for i in range(4, 31))  # keys; 16 is the shortest that a matrix instruction takes


def check_decode(q: Any, k_cache: Any, v_cache: Any, kv_lens: Any, block_table: Any) -> None:
    """q [B, Hq, L, D] with a cache [B, Hkv, S, D], or with pages [pages, Hkv, page_size, D] and a table [B, max_pages].

    The table's values are read where they can be; a GPU clamps them into the cache.
    """
    if block_table is None:
        remedy = "Pass a cache for each sequence of queries, or block_table= if these are pages."
        check_dense(q, k_cache, v_cache, NAMES, remedy)
    else:
        check_qkv(q, k_cache, v_cache, NAMES, "(batch or pages, heads, length, head_dim)")
    if not 1 <= q.shape[2] <= MAX_ROWS:
        raise value_error("q", f"length must be from 1 to {MAX_ROWS}", q, "For other lengths call attention(kv_lens=).")
    check_int32("kv_lens", kv_lens, q)  # here it may not be None
    check_kv_lens(kv_lens, q, q.shape[0])
    if block_table is not None:
        _check_pages(k_cache, v_cache)
        _check_table(block_table, q, k_cache)
        check_table_values(block_table, kv_lens, k_cache)


def _check_pages(k_cache: Tensor, v_cache: Tensor) -> None:
    if v_cache.shape[0] != k_cache.shape[0]:
        relation = f"must have as many pages as k_cache ({k_cache.shape[0]})"
        raise value_error("v_cache", relation, v_cache, "Pass one page of values per page of keys.")
    if v_cache.shape[2] != k_cache.shape[2]:
        raise value_error(
            "v_cache", f"page size must equal k_cache's ({k_cache.shape[2]})", v_cache, "Pass one value for each key."
        )
    if k_cache.shape[2] not in PAGE_SIZES:
        relation = "page size (dim 2, with a block_table) must be a power of two from 16 up"
        raise value_error("k_cache", relation, k_cache, "Lay the pages out as (pages, heads, page_size, head_dim).")


def _check_table(table: Any, q: Tensor, k_cache: Tensor) -> None:
    check_int32("block_table", table, q)
    if table.dim() != 2 or table.shape[0] != q.shape[0]:
        relation = f"must have shape (batch, max_pages) = ({q.shape[0]}, any)"
        raise value_error("block_table", relation, table, "Pass one row of page numbers for each sequence.")
    if not unless_known(k_cache.shape[0] != 0) and unless_known(table.shape[1] != 0):
        raise value_error("k_cache", "must have at least one page for a block_table to name", k_cache, "Add a page.")


def check_table_values(table: Tensor, kv_lens: Tensor, k_cache: Tensor) -> None:
    """What only the CPU reads, and no compiler or transform while it stands for a tensor: the op asks again inside."""
    if not (readable(table) and readable(kv_lens)):
        return
    pages, page_size = k_cache.shape[0], k_cache.shape[2]
    used = torch.arange(table.shape[1], device=table.device) * page_size < kv_lens.unsqueeze(1)
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        relation = f"entries that kv_lens reaches must be from 0 to {pages - 1}, the pages of k_cache"
        raise value_error(
            f"block_table[{b}, {i}]", relation, int(table[b, i]), "Pass a page; entries past the length may be any."
        )
