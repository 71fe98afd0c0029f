"""A mask that is made when somebody reads it: what is known of it by numbers, attention need not read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Band = tuple[int, int | None, int]  # q_start, left, right


class LazyMask(Tensor):
    """(B, 1, L, S) of booleans: whether i + q_start - left <= j <= i + q_start + right, in a sequence of its own.

    It has the mask's shape, strides, dtype and device, and no memory. Every other operation makes the mask and goes on
    with that, so that what operations return is no LazyMask; what is written into it is in the mask.
    """

    band: Band
    number: Tensor | None
    plain: Tensor | None  # the mask, once it is made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: torch.device | str, band: Band, number: Tensor | None) -> LazyMask:
        """number: (B, L), of each token's sequence, where there are several in a row."""
        len_q, len_k = shape[-2:]
        strides = 0 if number is None else len_q * len_k, len_q * len_k, len_k, 1  # as `band_mask` has them
        device = torch.empty(0, device=device).device  # which of several
        with counting_versions():
            mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=torch.bool, device=device)
        mask.band, mask.number, mask.plain = band, number, None
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyMask, LazyMask.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def made(self) -> Tensor:
        """The mask, as a tensor like any other."""
        if self.plain is None:
            with counting_versions():
                self.plain = band_mask(self.shape, self.device, self.band, self.number)
        return self.plain

    # What asks no operator:
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.made().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made().__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        return self.made().data_ptr()

    def numpy(self, **options: Any) -> Any:
        return self.made().numpy(**options)

    def tolist(self) -> Any:
        return self.made().tolist()


def band_mask(shape: tuple[int, ...], device: torch.device, band: Band, number: Tensor | None) -> Tensor:
    q_start, left, right = band
    """The mask that a LazyMask of these stands for."""
    rows = torch.arange(shape[-2], device=device)[:, None] + q_start
    keys = torch.arange(shape[-1], device=device)
    seen = keys <= rows + right
    if left is not None:
        seen &= keys >= rows - left
    if number is not None:
        seen = (number[:, None, :, None] == number[:, None, None, :]) & seen
    return seen.expand(shape)


def counting_versions() -> AbstractContextManager[Any]:
    """Within this a mask is one of which can be said whether somebody has written into it since."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else nullcontext()
