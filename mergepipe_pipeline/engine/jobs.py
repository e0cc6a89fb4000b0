"""What all windows of one output tensor share: its inputs, and the way it is computed.

Decides the way, reads nothing: a copy of the base, the compiled kernel on stored bfloat16 or on
float32 rows, or the operator in torch.
"""

from __future__ import annotations

from functools import cached_property

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.operators import OPERATORS, Operator
from mergepipe_pipeline.operators.fused_kernel import FusedKernel
from mergepipe_pipeline.spec.blocks import clip, total_elems
from mergepipe_pipeline.spec.plan import TensorTask
from mergepipe_pipeline.tensors.low_rank import LowRankUpdate

#: Bytes per element of what an operator computes with beside its rows, and of the result.
_RESULT_BYTES = 4 * 6


class Job:
    """One output tensor to make from the checkpoints of a plan."""

    def __init__(self, task: TensorTask, sources: SourcePool) -> None:
        self.task, self.sources = task, sources
        self.operator: Operator | None = OPERATORS.get(task.operator)
        #: Bytes per stored element of each expert, and of the base at the end.
        self.sizes = [itemsize(e.view.dtype) for e in task.experts]
        self.sizes += [itemsize(task.base.view.dtype)] if task.base else []
        self.updates = [
            LowRankUpdate(sources.expert, e.view.low_rank) if e.view.low_rank else None
            for e in task.experts
        ]
        low_rank = task.base and task.base.view.low_rank
        self.base_update = LowRankUpdate(sources.base, low_rank) if low_rank else None

    @property
    def row_elems(self) -> int:
        """Elements that must stay together in a window."""
        whole_rows = self.operator is not None and self.operator.schema.scope == "row"
        return max(1, self.task.shape[-1]) if whole_rows and self.task.shape else 1

    @property
    def bytes_per_elem(self) -> int:
        """Bytes that a window holds per element."""
        stored = sum(self.sizes)
        has_bits = self.kernel is not None and self.is_stored_bfloat16
        rows = 0 if has_bits else 4 * len(self.sizes)
        return stored + rows + _RESULT_BYTES

    @property
    def as_delta(self) -> bool:
        """Whether the operator works on δ, not on T."""
        space = self.operator.schema.space if self.operator else "delta"
        return space == "delta" or (space == "delta_if_base" and self.task.base is not None)

    @property
    def is_copy(self) -> bool:
        """Nothing of any expert is read in the whole tensor: the base's values are the result."""
        if self.operator is None:
            return True
        return self.as_delta and not any(e.read for e in self.task.experts)

    def needs_base(self, start_elem: int, stop_elem: int) -> bool:
        """Whether the base's elements [start, stop) take part in the result."""
        if self.operator is None or self.as_delta or self.operator.schema.base != "none":
            return True
        return any(
            not e.view.stands_alone
            or total_elems(clip(e.read, start_elem, stop_elem)) < stop_elem - start_elem
            for e in self.task.experts
        )

    @cached_property
    def is_stored_bfloat16(self) -> bool:
        """Whether the kernel can work on the bytes as they are stored."""
        base = self.task.base
        views = [e.view for e in self.task.experts] + ([base.view] if base else [])
        is_plain = all(v.dtype == "BF16" and v.low_rank is None for v in views)
        return is_plain and (self.as_delta or all(v.stands_alone for v in views))

    @cached_property
    def kernel(self) -> FusedKernel | None:
        """The compiled merge of the tensor, if its operator has one."""
        if self.operator is None or self.operator.fused is None or not self.task.experts:
            return None
        is_delta = [
            not self.is_stored_bfloat16 or e.view.is_delta or not e.view.stored
            for e in self.task.experts
        ]
        return FusedKernel(self.operator.fused(self.task), tuple(is_delta))
