"""What all windows of one output tensor share: its inputs, and the way it is computed.

Decides the way, reads nothing: stored bytes as they are, the base in another type, the compiled
kernel on stored bfloat16 or float32, or on float32 rows of a window, or the operator in torch.
"""

from __future__ import annotations

from functools import cached_property, partial
from math import prod

from mergepipe_pipeline.checkpoints.low_rank import open_update
from mergepipe_pipeline.checkpoints.stored import Readers, Verify, read_stored
from mergepipe_pipeline.domain.blocks import clip, total_elems
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.sums import TensorSums
from mergepipe_pipeline.engine.tie_breaks import TieBreakers
from mergepipe_pipeline.operators import OPERATORS, Operator
from mergepipe_pipeline.operators.methods.linear import is_unscaled
from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel
from mergepipe_pipeline.packs.together import PackedInputs

#: Bytes per element of a merge before it is cast.
MERGED_BYTES = 4
#: Bytes per element of exact sums, and of the pieces that are kept of them.
_SUMS_BYTES = 48
#: Bytes per element that an operator in torch needs beside its rows.
_OPERATOR_BYTES = 4 * 5


class Job:
    """One output tensor to make from the checkpoints of a plan.

    With `before`, it reads before the merge itself, and what it reads is not counted.
    """

    def __init__(self, task: TensorTask, sources: SourcePool, *, before: bool = False) -> None:
        self.task, self.sources = task, sources
        #: How exact sums of the tensor come about, which are kept.
        self.sums: TensorSums | None = None
        segments, experts = sources.known, task.experts
        expert = sources.expert_before if before else sources.expert
        base_readers = sources.base_before if before else sources.base
        self.operator: Operator | None = OPERATORS.get(task.operator)
        #: Bytes per stored element of each expert, and of the base at the end.
        self.sizes = [itemsize(e.view.dtype) for e in task.experts]
        self.sizes += [itemsize(task.base.view.dtype)] if task.base else []
        self.updates = [open_update(expert, e.view.low_rank, segments) for e in task.experts]
        low_rank = task.base.view.low_rank if task.base else None
        self.base_update = open_update(base_readers, low_rank, segments)
        base = task.base
        self.packed = PackedInputs([sources.packed(e, base, before=before) for e in experts])
        #: Per expert, the ranges `ExpertInput.differing`, computed once for all windows.
        self.differing = [e.differing for e in experts]
        self._verifiers = [
            sources.verifier(e.view, e.digest) if e.read or _has_bits(e) else None for e in experts
        ]
        self._base_verifier = sources.verifier(base.view, base.digest) if base else None
        #: Per expert, and of the base, the function that compares the bytes that are read.
        self.verify = [v.check if v else None for v in self._verifiers]
        self.verify_base = self._base_verifier.check if self._base_verifier else None
        self.tie_breakers = TieBreakers(task)

    def finish(self) -> None:
        """Verify segments that windows read in parts, when all are done. Raises CorruptionError.

        The rest of a base's segment is read now: it is not budgeted. Experts are read in whole
        blocks, which are whole segments.
        """
        for verifier in self._verifiers:
            if verifier:
                verifier.finish()
        if self._base_verifier and self.task.base:
            view = self.task.base.view
            self._base_verifier.finish(partial(read_stored, self.sources.base_besides, view))

    @property
    def needs_torch(self) -> bool:
        """Whether any window of it is computed by torch, which takes a second to load."""
        is_compiled = self.kernel is not None and self.stored_dtype is not None
        return not self.unchanged and not (is_compiled and self.task.out_dtype == "BF16")

    @property
    def row_elems(self) -> int:
        """Elements that must stay together in a window."""
        whole_rows = self.operator is not None and self.operator.schema.scope == "row"
        return max(1, self.task.shape[-1]) if whole_rows and self.task.shape else 1

    @property
    def working_bytes_per_elem(self) -> int:
        """Bytes per element that a window holds while it is worked on: what it reads and needs."""
        if self.unchanged:
            return 0
        held = self.stored_bytes_per_elem + MERGED_BYTES
        if self.sums:
            return held + 4 * len(self.sizes) + _SUMS_BYTES
        if self.is_copy or (self.kernel is not None and self.stored_dtype is not None):
            return held
        rows = 4 * len(self.sizes)
        return held + rows + (0 if self.kernel is not None else _OPERATOR_BYTES)

    @property
    def ahead_bytes_per_elem(self) -> int:
        """Bytes per element that are read before a window is worked on: of packs, and the base."""
        nbytes = sum(e.packed.nbytes for e in self.task.experts if e.packed)
        return -(-nbytes // prod(self.task.shape)) + self.sizes[-1] if nbytes else 0

    @property
    def stored_bytes_per_elem(self) -> int:
        """Bytes per element of the inputs that a window reads."""
        return self.sizes[-1] if self.is_copy else sum(self.sizes)

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
        return self.as_delta and not any(e.read or e.packed for e in self.task.experts)

    @cached_property
    def unchanged(self) -> tuple[Readers, TensorView, Verify | None] | None:
        """The stored bytes that are the result as they are, who may read and what verifies them.

        They go through a buffer and not from file to file in the kernel: they must be hashed, which
        would read them back, and they are written past the page cache. Nor can blocks be shared:
        tensors lie anywhere in a block.
        """
        task = self.task
        if self.is_copy and task.base:
            readers, view, verify = self.sources.base, task.base.view, self.verify_base
        # Passed through, 64 bits become those of a float32.
        elif is_unscaled(task) and task.out_dtype != "F64":
            readers, view, verify = self.sources.expert, task.experts[0].view, self.verify[0]
            if not self.gives_bits or self.differing[0] != ((0, view.numel),):
                return None
        else:
            return None
        is_stored = view.stands_alone and not view.low_rank
        is_same = (view.dtype, view.numel) == (task.out_dtype, prod(task.shape))
        return (readers, view, verify) if is_stored and is_same else None

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
    def present(self) -> list[tuple[int, ExpertInput]]:
        """Experts that the kernel looks at when it works on stored bits, and their numbers.

        An update omits experts that read nothing: their δ is 0. A merge of values has all: unread
        elements are B.
        """
        numbered = enumerate(self.task.experts)
        return [
            (k, e)
            for k, e in numbered
            if not self.as_delta or ((e.read or e.packed) and e.view.stored)
        ]

    @property
    def gives_bits(self) -> bool:
        """Whether all that is read are stored elements, also what comes from packs."""
        packed = (e.packed for e in self.task.experts if e.packed)
        return all(r.gives_bits for p in packed for r in p.ranges)

    @cached_property
    def stored_dtype(self) -> str | None:
        """The one type of what the kernel can work on as it is stored; None if it cannot.

        With bfloat16 it also works on numbers from packs.
        """
        dtypes = {v.dtype for v in self._views}
        is_packed = any(e.packed for e in self.task.experts)
        if dtypes not in ({"BF16"}, {"F32"}) or (is_packed and dtypes == {"F32"}):
            return None
        values = self.gives_bits and all(v.stands_alone for v in self._views)
        is_plain = all(v.low_rank is None for v in self._views)
        return dtypes.pop() if is_plain and (self.as_delta or values) else None

    @property
    def _views(self) -> list[TensorView]:
        base = self.task.base
        return [e.view for e in self.task.experts] + ([base.view] if base else [])

    @cached_property
    def kernel(self) -> FusedKernel | None:
        """The compiled merge of the tensor, if its operator has one."""
        if self.operator is None or self.operator.fused is None or not self.task.experts:
            return None
        return FusedKernel(self.operator.fused(self.task), self.is_delta)

    @cached_property
    def is_delta(self) -> tuple[bool, ...]:
        """Per expert, whether what the kernel gets of it is δ, not T."""
        return tuple(
            self.stored_dtype is None or e.view.is_delta or not e.view.stored
            for e in self.task.experts
        )


def _has_bits(e: ExpertInput) -> bool:
    """Whether some of an expert's stored bytes come from a pack."""
    return e.packed is not None and any(r.level == "X" for r in e.packed.ranges)
