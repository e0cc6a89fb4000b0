"""The input of an operator: some elements of one tensor, from the base and from all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergepipe_pipeline.domain.plan import TensorTask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Elements [start_elem, start_elem + n) of one tensor, from the base and from K experts.

    `base` is [n] float32 and never written to, or None for an operator that needs none. `experts`
    is [K, n] float32 in the order of `task.experts`: deltas for space "delta", values for space
    "value". The operator may overwrite it. For scope "row", n is a multiple of `row_elems`.
    `task.facts` holds what `Operator.settle` gave.
    """

    base: Tensor | None
    experts: Tensor
    task: TensorTask
    start_elem: int

    @property
    def row_elems(self) -> int:
        """Length of the tensor's rows: its last dimension, all of a vector."""
        return self.task.shape[-1] if self.task.shape else 1
