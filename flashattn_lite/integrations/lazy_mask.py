"""A mask that is made when somebody reads it. Attention, which has what it says in numbers, does not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Band = tuple[int, int | None, int | None]  # q_start, left, right


class LazyMask(Tensor):
    """(B, 1, L, S) of booleans: whether i + q_start - left <= j <= i + q_start + right, and both are of one sequence.

    It has the mask's shape, strides, dtype and device, and no memory. Every other operation makes the mask and goes on
    with that, so that what operations return is no LazyMask; what is written into it is in the mask.
    """

    of: tuple[Band, Tensor | None, Tensor | None]
    plain: Tensor | None  # the mask, once it is made

    # Else what operations return would be of this class, too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device | str, band: Band, number: Tensor | None = None,
        there: Tensor | None = None,
    ) -> LazyMask:  # fmt: skip
        """number: (B, L), of each token's sequence, where there are several in a row. there: (B, S), keys that are."""
        device = torch.empty(0, device=device).device  # which of several
        with counting_versions():
            mask: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.of, mask.plain = (band, number, there), None
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
                self.plain = band_mask(self.shape, self.device, *self.of)
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


def band_mask(
    shape: tuple[int, ...], device: torch.device, band: Band, number: Tensor | None, there: Tensor | None
) -> Tensor:
    """The mask that a LazyMask of these stands for."""
    q_start, left, right = band
    rows = torch.arange(shape[-2], device=device)[:, None] + q_start
    keys = torch.arange(shape[-1], device=device)
    seen = torch.ones((), dtype=torch.bool, device=device) if right is None else keys <= rows + right
    if left is not None:
        seen = seen & (keys >= rows - left)
    if number is not None:
        seen = seen & (number[:, None, :, None] == number[:, None, None, :])
    if there is not None:
        seen = seen & there[:, None, None, :]
    return seen.expand(shape).contiguous()


def counting_versions() -> AbstractContextManager[Any]:
    """Within this a mask is one of which can be said whether somebody has written into it since."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else nullcontext()
