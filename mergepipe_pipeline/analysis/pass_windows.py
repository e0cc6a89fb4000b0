"""What windows of tensors are to whoever computes with them.

`stream` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.view import TensorView

if TYPE_CHECKING:
    import torch


@dataclass
class DeltaWindow:
    """Elements [start_elem, start_elem + n) of one expert; valid until the next window is taken.

    `expert_raw` and `base_raw` are the stored bytes that were read. `dtype` is that of both where δ
    is nothing but their difference, else None. `make` computes δ when it is first asked for.
    """

    start_elem: int
    n: int
    expert_raw: memoryview
    base_raw: memoryview
    dtype: str | None
    make: Callable[[], F32Array]

    @cached_property
    def delta(self) -> F32Array:
        """Float32 [m], m ≥ n a multiple of CHUNK_ELEMS, zero from n on."""
        return self.make()

    @property
    def values(self) -> F32Array:
        """The n deltas without padding."""
        return self.delta[: self.n]


@dataclass(frozen=True)
class GroupWindow:
    """Elements [start_elem, start_elem + n) of K experts and their base, as an operator sees them.

    `base` [n] or None, `rows` [K, n], both float32; valid until the next window is taken.
    """

    start_elem: int
    base: torch.Tensor | None
    rows: torch.Tensor
    nbytes: int


@dataclass(frozen=True)
class Family:
    """A tensor of the base with the tensors of experts that differ from it."""

    experts: tuple[TensorView, ...]
    base: TensorView

    @property
    def hashed_with(self) -> int | None:
        """The expert that is compared with all of a plain base, so that its pass hashes both."""
        numels = [v.numel if v.stands_alone else -1 for v in self.experts]
        is_hashed = self.base.is_plain and self.base.numel in numels
        return numels.index(self.base.numel) if is_hashed else None
