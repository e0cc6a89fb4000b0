"""One run of elements of one output tensor, from bytes to bytes: read, merge, cast.

Inputs and intermediate values lie in a `BufferPool`, the result does not. The job has decided which
way the tensor goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.buffers import BufferPool
from mergepipe_pipeline.engine.jobs import MERGED_BYTES, Job
from mergepipe_pipeline.engine.near_rows import ReadExpert, chunks_within
from mergepipe_pipeline.engine.tie_breaks import RuleKey, nth_in, with_stops
from mergepipe_pipeline.operators import Window as OperatorWindow
from mergepipe_pipeline.operators.kernels.bits import Bits, Floats, Stored, narrow
from mergepipe_pipeline.operators.kernels.merge_tiles import TILE_ELEMS
from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel, Ints
from mergepipe_pipeline.packs.elements import ChunkPart
from mergepipe_pipeline.spec.blocks import Range, clip
from mergepipe_pipeline.spec.plan import TensorTask
from mergepipe_pipeline.spec.view import TensorView
from mergepipe_pipeline.tensors.rows import BaseRow, ExpertRow, fill_verified
from mergepipe_pipeline.tensors.stored import (
    Bytes,
    Readers,
    announce_stored,
    read_stored,
    torch_dtype,
)
from mergepipe_pipeline.tensors.verified import Verify

if TYPE_CHECKING:
    import torch

D = TypeVar("D", bound=BufferPool)
#: Halfway from 448, the largest value of F8_E4M3, to the next one if there were one.
_E4M3_ROUNDS_DOWN_TO = 464.0


class Window(Generic[D]):
    """Elements [start_elem, stop_elem) of a job's tensor."""

    def __init__(self, job: Job, start_elem: int, stop_elem: int) -> None:
        self._job = job
        self._start, self._stop = start_elem, stop_elem
        self._n = stop_elem - start_elem
        #: Elements that `run` had to cut off at the end of the output's type.
        self.n_cut_off = 0

    @property
    def task(self) -> TensorTask:
        """What the elements are of."""
        return self._job.task

    def announce(self) -> None:
        """Say to the disk what will be read of whole tensors, so that it starts before `run`."""
        job, start, stop = self._job, self._start, self._stop
        if not job.sources.reads_ahead:
            return
        base = job.task.base
        if base is not None and base.view.stored and job.needs_base(start, stop):
            announce_stored(job.sources.base, base.view, start, stop)
        for e, packed in zip(job.task.experts, job.packed, strict=True):
            if e.view.stored:
                for a, b in clip(e.read, start, min(stop, e.view.numel)):
                    announce_stored(job.sources.expert, e.view, a, b)
            if packed:
                packed.announce(start, stop)

    def run(self, buffers: D) -> Bytes:
        """Read what the plan allows, merge it, and give the window's output bytes.

        No other window may use the buffers meanwhile.
        """
        self._buffers, job = buffers, self._job
        if job.unchanged:
            return self._stored(*job.unchanged)
        self._clear()
        base = self._fetch_base()
        if job.is_copy:
            assert base is not None
            return self._to_bytes(base.values())
        if job.kernel and job.is_stored_bfloat16:
            return self._fused(job.kernel, *self._fetch_bits(base))
        if job.kernel and job.is_near_bfloat16:
            assert base is not None
            return self._fused_near(job.kernel, base.raw.view(np.uint16))
        values = base.values() if base else None
        rows = self._fill(self._buffers.rows(len(job.task.experts), self._n), values, base)
        if job.kernel:
            below = values.numpy() if values is not None else np.empty(0, np.float32)
            return self._fused(job.kernel, below, rows.numpy(), np.arange(len(rows)))
        return self._to_bytes(self._applied(values, rows))

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends with it."""
        return self._stop == prod(self.task.shape)

    def finish(self) -> None:
        """Verify what is left of the tensor, when all its windows have run."""
        self._job.finish()

    def cancel(self) -> None:
        """Let go the windows of the tensor that wait for others, because the run ends."""
        self._job.tie_breakers.cancel()

    def _to_bytes(self, values: torch.Tensor) -> Bytes:
        out = to_bytes(values, self._job.task.out_dtype)
        if self._job.task.out_dtype == "F8_E4M3":
            import torch

            self.n_cut_off = count_cut_off(values, torch.from_numpy(out))
        return out

    def _applied(self, base: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """The operator's merge of rows that lie anywhere."""
        job = self._job
        assert job.operator is not None

        def find(k: int, bits: int, a: int, b: int, nth: int) -> tuple[int, int]:
            return nth_in(rows[k, a - self._start : b - self._start].cpu().numpy(), None, bits, nth)

        task = job.task
        if job.tie_breakers:
            task = with_stops(task, job.tie_breakers.stops(self._start, self._stop, find))
        return job.operator.apply(OperatorWindow(base, rows, task, self._start))

    def _clear(self) -> None:
        job = self._job
        result = max(MERGED_BYTES, itemsize(job.task.out_dtype))
        self._buffers.clear(self._n * (job.stored_bytes_per_elem + result), len(job.sizes) + 1)

    def _fetch_base(self) -> BaseRow | None:
        job, base = self._job, self._job.task.base
        if base is None or not job.needs_base(self._start, self._stop):
            return None
        buffer = self._buffers.take(self._n * job.sizes[-1])
        row = BaseRow(job.sources.base, base.view, buffer, job.base_update, job.verify_base)
        row.fetch(self._start, self._stop)
        return row

    def _fill(
        self, rows: torch.Tensor, values: torch.Tensor | None, base: BaseRow | None
    ) -> torch.Tensor:
        """Put all experts into `rows` [K, n] float32: δ or T, as the operator wants them."""
        job, task = self._job, self._job.task
        fetches = [p.fetch if p else None for p in job.packed]
        experts = []
        helpers = zip(job.updates, job.verify, fetches, strict=True)
        for e, size, all_three in zip(task.experts, job.sizes, helpers, strict=False):
            buffer = self._buffers.take(self._n * size)
            expert = ExpertRow(job.sources.expert, e.view, e.read, buffer, *all_three)
            expert.fetch(self._start, self._stop, base.raw if base else None)
            experts.append(expert)
        for row, expert in zip(rows, experts, strict=True):
            (expert.delta if job.as_delta else expert.value)(row, values)
        return rows

    def _fetch_bits(self, base: BaseRow | None) -> tuple[Stored, Stored, Ints, Ints]:
        """Bits of the base [n] and of experts that have a part here [p, n], and which they are.

        Which: their numbers, and from where to where in the window, [p, 2], there are bits of them;
        outside they equal the base.
        """
        job, n = self._job, self._n
        below = base.raw.view(np.uint16) if base else np.empty(0, np.uint16)
        bits = self._buffers.take(len(job.task.experts) * n * 2).view(np.uint16).reshape(-1, n)
        present: list[int] = []
        spans: list[Range] = []
        for k, e in job.present:
            stop = min(self._stop, e.view.numel) if e.view.stored else self._start
            parts = [
                (a - self._start, b - self._start)
                for a, b in clip(job.differing[k], self._start, stop)
            ]
            if not parts and job.as_delta:
                continue
            row = bits[len(present)]
            span = _tiles(parts[0][0], parts[-1][1], n) if job.as_delta else (0, n)
            present.append(k)
            spans.append(span)
            at = span[0]
            for a, b in (*parts, (span[1], span[1])):
                row[at:a] = 0 if e.view.is_delta else below[at:a]
                at = b
            self._read_bits(k, row, below)
        numbers = np.array(present, np.int64)
        return below, bits[: len(present)], numbers, np.array(spans, np.int64).reshape(-1, 2)

    def _read_bits(self, k: int, row: Stored, base: Stored) -> list[ChunkPart]:
        """Read what is there of expert k into `row` [n], bits of bfloat16; `base` [n] likewise.

        Gives the parts of which a pack has no bits.
        """
        job, start = self._job, self._start
        view, verify, packed = job.task.experts[k].view, job.verify[k], job.packed[k]
        stop = min(self._stop, view.numel)
        for a, b in clip(job.task.experts[k].read, start, stop):
            piece = row[a - start : b - start].view(np.uint8)
            read_stored(job.sources.expert, view, a, b, piece.data, verify)
        near = []
        for part in packed.fetch(start, stop) if packed else ():
            if not part.gives_bits:
                near.append(part)
                continue
            inside = slice(part.start_elem - start, part.stop_elem - start)
            out, below = (x[inside].view(np.uint8) for x in (row, base))
            fill_verified(part, out, below, verify)
        return near

    def _fused(
        self,
        kernel: FusedKernel,
        base: Stored,
        experts: Stored,
        present: Ints,
        spans: Ints | None = None,
    ) -> Bytes:
        merged = self._buffers.take(self._n * MERGED_BYTES).view(np.float32)
        self._merge(kernel, self._start, base, experts, present, merged, spans)
        return self._cast(merged)

    def _fused_near(self, kernel: FusedKernel, base: Bits) -> Bytes:
        """As `_fused`, of rows that are made chunk by chunk; `base` [n] are bits of bfloat16."""
        job, start = self._job, self._start
        merged = self._buffers.take(self._n * MERGED_BYTES).view(np.float32)
        bits = self._buffers.take(len(job.present) * self._n * 2).view(np.uint16)
        experts = []
        for (k, _), row in zip(job.present, bits.reshape(-1, self._n), strict=True):
            near = self._read_bits(k, row, base)
            experts.append(ReadExpert(k, start, row, job.bits_read[k], near))
        for first, stop in chunks_within(start, self._stop):
            inside = slice(first - start, stop - start)
            below = base[inside]
            rows = self._buffers.floats(len(experts), stop - first)
            present: list[int] = []
            for expert in experts:
                if expert.delta(first, below, rows[len(present)]):
                    present.append(expert.number)
            rows = rows[: len(present)]
            self._merge(kernel, first, below, rows, np.array(present, np.int64), merged[inside])
        return self._cast(merged)

    def _merge(
        self,
        kernel: FusedKernel,
        start: int,
        base: Stored,
        experts: Stored,
        present: Ints,
        out: Floats,
        spans: Ints | None = None,
    ) -> None:
        """Fill `out` with the merge of the elements from `start` on."""
        if self._job.tie_breakers:
            kernel = kernel.with_stops(self._stops(start, base, experts, present, spans, len(out)))
        kernel.run(base, experts, present, start, out, spans)

    def _cast(self, merged: Floats) -> Bytes:
        if self._job.task.out_dtype == "BF16":
            return narrowed(merged)
        import torch

        return self._to_bytes(torch.from_numpy(merged))

    def _stops(
        self,
        start: int,
        base: Stored,
        experts: Stored,
        present: Ints,
        spans: Ints | None,
        n: int,
    ) -> Mapping[RuleKey, int]:
        places = {int(k): i for i, k in enumerate(present)}

        def find(k: int, bits: int, a: int, b: int, nth: int) -> tuple[int, int]:
            if k not in places:  # equal to the base: no ties
                return -1, 0
            row = places[k]
            low, high = (0, n) if spans is None else spans[row]
            first, last = max(a - start, int(low)), min(b - start, int(high))
            if first >= last:
                return -1, 0
            below = None if self._job.is_delta[k] else base[first:last]
            place, count = nth_in(experts[row, first:last], below, bits, nth)
            return (place if place < 0 else first + place - (a - start)), count

        return self._job.tie_breakers.stops(start, start + n, find)

    def _stored(self, readers: Readers, view: TensorView, verify: Verify | None) -> Bytes:
        job, raw = self._job, np.empty(self._n * itemsize(view.dtype), np.uint8)
        packed = None if job.is_copy else job.packed[0]
        if packed is None:
            read_stored(readers, view, self._start, self._stop, raw.data, verify)
            return raw
        self._clear()
        base, read = self._fetch_base(), job.task.experts[0].read
        assert base is not None
        row = ExpertRow(readers, view, read, raw, None, verify, packed.fetch)
        row.fetch(self._start, self._stop, base.raw)
        return raw


def _tiles(start: int, stop: int, n: int) -> Range:
    """[start, stop) of a window of n elements, grown to whole tiles of the kernel."""
    return start // TILE_ELEMS * TILE_ELEMS, min(n, -(-stop // TILE_ELEMS) * TILE_ELEMS)


def to_bytes(values: torch.Tensor, dtype: str) -> Bytes:
    """The bytes of [n] float32 values cast once, to nearest even, to `dtype`."""
    import torch

    if dtype == "BF16":
        return narrowed(values.numpy())
    cast = values.to(torch_dtype(dtype))
    if cast is values:  # the caller reuses its rows while these bytes are still being written
        cast = values.clone()
    out: Bytes = cast.view(torch.uint8).numpy()
    return out


def count_cut_off(values: torch.Tensor, codes: torch.Tensor) -> int:
    """How many of [n] float32 values became the largest of F8_E4M3, in `codes`, from beyond it.

    Some versions of torch make such values NaN instead.
    """
    return int((((codes & 0x7F) == 0x7E) & (values.abs() > _E4M3_ROUNDS_DOWN_TO)).sum())


def narrowed(values: Floats) -> Bytes:
    """The bytes of [n] float32 values cast once, to nearest even, to bfloat16."""
    bits = np.empty(len(values), np.uint16)
    narrow(values, bits)
    return bits.view(np.uint8)
