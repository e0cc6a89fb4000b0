"""One run of elements of one output tensor, from bytes to bytes: read, merge, cast.

Inputs and intermediate values lie in a `BufferPool`, the result does not. The job has decided which
way the tensor goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from mergepipe_pipeline.arrays import F32Array, I64Array, U8Array
from mergepipe_pipeline.checkpoints.codes import round_to_bfloat16
from mergepipe_pipeline.checkpoints.stored import (
    Readers,
    Verify,
    announce_stored,
    read_stored,
    torch_dtype,
)
from mergepipe_pipeline.domain.blocks import Range, clip
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.jobs import MERGED_BYTES, Job
from mergepipe_pipeline.engine.sources import Read
from mergepipe_pipeline.engine.sums import WindowSums
from mergepipe_pipeline.engine.tie_breaks import RuleKey, deltas_of, nth_in, with_stops
from mergepipe_pipeline.operators import Window as OperatorWindow
from mergepipe_pipeline.operators.kernels.bits import Stored
from mergepipe_pipeline.operators.kernels.merge_tiles import ABSENT, STORED, TILE_ELEMS
from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel, tiles_of
from mergepipe_pipeline.packs.elements import PackedPart
from mergepipe_pipeline.packs.rows import BaseRow, ExpertRow, verify_part
from mergepipe_pipeline.packs.together import Placed, decode_together
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.uncached import pages_nbytes

if TYPE_CHECKING:
    import torch


_ALIGN = 64


class BufferPool:
    """The buffers of the window that a worker is on: its inputs as stored, float32 rows."""

    def __init__(self) -> None:
        self._bytes: U8Array = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._flat = np.empty(0, dtype=np.float32)

    def clear(self, nbytes: int, pieces: int) -> None:
        """Make room for `pieces` pieces of `nbytes` together; what lay here becomes invalid."""
        need = nbytes + pieces * _ALIGN
        if need > len(self._bytes):
            self._bytes = self._allocated(need)
        self._used = 0

    def take(self, nbytes: int) -> U8Array:
        """The next `nbytes` bytes, aligned for any element type."""
        start = self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return self._bytes[start : start + nbytes]

    def floats(self, k: int, n: int) -> F32Array:
        """An uninitialised [k, n] float32 matrix; the one handed out before becomes invalid."""
        if k * n > len(self._flat):
            self._flat = np.empty(k * n, dtype=np.float32)
        return self._flat[: k * n].reshape(k, n)

    def rows(self, k: int, n: int) -> torch.Tensor:
        """`floats` for torch."""
        import torch

        return torch.from_numpy(self.floats(k, n))

    def _allocated(self, nbytes: int) -> U8Array:
        return np.empty(nbytes, dtype=np.uint8)


def cut(numel: int, window_elems: int) -> Iterator[tuple[int, int]]:
    """Half-open element ranges that cover a tensor in order."""
    for start in range(0, numel, window_elems):
        yield start, min(numel, start + window_elems)


D = TypeVar("D", bound=BufferPool)
#: Halfway from 448, the largest value of F8_E4M3, to the next one if there were one.
_E4M3_ROUNDS_DOWN_TO = 464.0


class Window(Generic[D]):
    """Elements [start_elem, stop_elem) of a job's tensor."""

    def __init__(self, job: Job, start_elem: int, stop_elem: int) -> None:
        self._job = job
        self._start, self._stop = start_elem, stop_elem
        self._n = stop_elem - start_elem
        #: Bytes that `read_packed` read, and the buffer that they are in.
        self.read = Read()
        self.page_buffer: PageBuffer | None = None
        #: Per expert, what was read of its pack; and the base, if that was read with them.
        self._base: BaseRow | None = None
        self._packed: Sequence[Sequence[PackedPart]] = [()] * len(job.task.experts)
        #: Elements that `run` had to cut off at the end of the output's type.
        self.n_cut_off = 0
        #: The exact sums that `run` found, for a task that keeps them.
        self.sums: WindowSums | None = None

    @property
    def start_elem(self) -> int:
        """Its first element."""
        return self._start

    @property
    def task(self) -> TensorTask:
        """The task that the elements are of."""
        return self._job.task

    def announce(self) -> None:
        """Say to the disk what will be read of whole tensors, so that it starts before `run`."""
        job, start, stop = self._job, self._start, self._stop
        if not job.sources.reads_ahead:
            return
        base = job.task.base
        if base is not None and base.view.stored and job.needs_base(start, stop):
            announce_stored(job.sources.base, base.view, start, stop)
        for e in job.task.experts:
            if e.view.stored:
                for a, b in clip(e.read, start, min(stop, e.view.numel)):
                    announce_stored(job.sources.expert, e.view, a, b)

    def read_packed(self, buffer: PageBuffer) -> None:
        """Read into `buffer` what the plan takes from packs, and the base; `run` needs it there."""
        job, start, stop = self._job, self._start, self._stop
        self._packed = job.packed.fetch(start, stop, buffer)
        if any(self._packed):
            self._base = self._read_base(buffer.take(pages_nbytes(0, self._n * job.sizes[-1])))

    def run(self, buffers: D) -> U8Array:
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
        if job.kernel and job.stored_dtype:
            return self._fused(job.kernel, *self._fetch_stored(base, job.stored_dtype))
        values = base.values() if base else None
        rows = self._fill(self._buffers.rows(len(job.task.experts), self._n), values, base)
        if job.sums:
            self.sums = job.sums.of(job.task.name, rows.numpy(), self._start)
            return self._cast(self.sums.mean)
        if job.kernel:
            base_values = values.numpy() if values is not None else np.empty(0, np.float32)
            return self._fused(job.kernel, base_values, rows.numpy(), np.arange(len(rows)))
        return self._to_bytes(self._applied(values, rows))

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends with it."""
        return self._stop == prod(self.task.shape)

    def finish(self) -> None:
        """Verify segments read in parts, when all the tensor's windows have run."""
        self._job.finish()

    def cancel(self) -> None:
        """Let go the windows of the tensor that wait for others, because the run ends."""
        self._job.tie_breakers.cancel()

    def _to_bytes(self, values: torch.Tensor) -> U8Array:
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
        job = self._job
        if job.task.base is None or not job.needs_base(self._start, self._stop):
            return None
        return self._base or self._read_base(self._buffers.take(self._n * job.sizes[-1]))

    def _read_base(self, buffer: U8Array) -> BaseRow:
        job, base = self._job, self._job.task.base
        assert base is not None
        row = BaseRow(job.sources.base, base.view, buffer, job.base_update, job.verify_base)
        with job.sources.batch() as batch:
            row.fetch(self._start, self._stop, batch)
        return row

    def _fill(
        self, rows: torch.Tensor, values: torch.Tensor | None, base: BaseRow | None
    ) -> torch.Tensor:
        """Put all experts into `rows` [K, n] float32: δ or T, as the operator wants them."""
        job, task = self._job, self._job.task
        experts = []
        helpers = zip(job.updates, job.verify, self._packed, strict=True)
        base_bytes = base.raw if base else None
        with job.sources.batch() as batch:
            for e, size, (update, verify, packed) in zip(
                task.experts, job.sizes, helpers, strict=False
            ):
                buffer = self._buffers.take(self._n * size)
                expert = ExpertRow(job.sources.expert, e.view, e.read, buffer, update, verify)
                expert.fetch(self._start, self._stop, packed, base_bytes, batch)
                experts.append(expert)
        for row, expert in zip(rows, experts, strict=True):
            (expert.delta if job.as_delta else expert.value)(row, values)
        return rows

    def _fetch_stored(
        self, base: BaseRow | None, dtype: str
    ) -> tuple[Stored, Stored, I64Array, F32Array]:
        """The kernel's inputs: base [n], rows [p, n], their experts and `steps` [p, tiles].

        Rows hold float32, or bits of bfloat16 or numbers from packs, as `steps` says tile by tile.
        An expert without a part here has none.
        """
        job, n = self._job, self._n
        base_elems = _as_stored(base.raw if base else np.empty(0, np.uint8), dtype)
        flat = self._buffers.take(len(job.task.experts) * n * itemsize(dtype))
        rows = _as_stored(flat, dtype).reshape(-1, n)
        steps = np.empty((len(job.task.experts), tiles_of(self._start, n)), np.float32)
        present: list[int] = []
        with job.sources.batch() as batch:
            for k, e in job.present:
                stop = min(self._stop, e.view.numel) if e.view.stored else self._start
                parts = list(clip(job.differing[k], self._start, stop))
                if not parts and job.as_delta:
                    continue
                row, step = rows[len(present)], steps[len(present)]
                present.append(k)
                step[:] = ABSENT if job.as_delta else STORED
                for a, b in parts if job.as_delta else ():
                    step[self._tiles(a, b)] = STORED
                self._fill_gaps(row, base_elems, parts, step, is_delta=e.view.is_delta)
                self._read_row(k, row, step, batch)
        self._decode(rows, base_elems, present)
        return base_elems, rows[: len(present)], np.array(present, np.int64), steps[: len(present)]

    def _fill_gaps(
        self,
        row: Stored,
        base: Stored,
        parts: Sequence[Range],
        step: F32Array,
        *,
        is_delta: bool,
    ) -> None:
        """Let `row` [n] be the base between `parts`, in tiles that hold stored elements."""
        edges = [self._start, *(edge for part in parts for edge in part), self._stop]
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            if a < b and (step[self._tiles(a, b)] != ABSENT).any():
                inside = slice(a - self._start, b - self._start)
                row[inside] = 0 if is_delta else base[inside]

    def _read_row(self, k: int, row: Stored, step: F32Array, batch: ReadBatch) -> None:
        """Read what is stored of expert k into `row` [n], and say what its pack gives."""
        job, start = self._job, self._start
        view, verify = job.task.experts[k].view, job.verify[k]
        stop = min(self._stop, view.numel)
        for a, b in clip(job.task.experts[k].read, start, stop):
            piece = row[a - start : b - start].view(np.uint8)
            read_stored(job.sources.expert, view, a, b, piece.data, verify, batch)
        for part in self._packed[k]:
            if not part.gives_bits:
                step[self._tiles(part.start_elem, part.stop_elem)] = part.step

    def _decode(self, rows: Stored, base: Stored, present: Sequence[int]) -> None:
        """Put what was read of packs into the `rows` [p, n], bfloat16, of the experts `present`."""
        parts = [(row, k, part) for row, k in enumerate(present) for part in self._packed[k]]
        if not parts:
            return
        bits, base_bits, placed = rows.view(np.uint16), base.view(np.uint16), []
        for row, _, part in parts:
            at = part.start_elem - self._start
            placed.append(Placed(part, row * self._n + at, at))
        decode_together(placed, base_bits, bits.reshape(-1))
        for row, k, part in parts:
            inside = slice(part.start_elem - self._start, part.stop_elem - self._start)
            verify_part(part, bits[row, inside].view(np.uint8), self._job.verify[k])

    def _tiles(self, start_elem: int, stop_elem: int) -> slice:
        """The window's tiles that elements [start, stop) lie in."""
        first = self._start // TILE_ELEMS
        return slice(start_elem // TILE_ELEMS - first, -(-stop_elem // TILE_ELEMS) - first)

    def _fused(
        self,
        kernel: FusedKernel,
        base: Stored,
        experts: Stored,
        present: I64Array,
        steps: F32Array | None = None,
    ) -> U8Array:
        merged = self._buffers.take(self._n * MERGED_BYTES).view(np.float32)
        if self._job.tie_breakers:
            kernel = kernel.with_stops(self._stops(base, experts, present, steps))
        kernel.run(base, experts, present, self._start, merged, steps)
        return self._cast(merged)

    def _cast(self, merged: F32Array) -> U8Array:
        if self._job.task.out_dtype == "BF16":
            return narrowed(merged)
        import torch

        return self._to_bytes(torch.from_numpy(merged))

    def _stops(
        self, base: Stored, experts: Stored, present: I64Array, steps: F32Array | None
    ) -> Mapping[RuleKey, int]:
        places = {int(k): i for i, k in enumerate(present)}

        def find(k: int, bits: int, a: int, b: int, nth: int) -> tuple[int, int]:
            if k not in places:  # equal to the base: no ties
                return -1, 0
            inside = slice(a - self._start, b - self._start)
            row = experts[places[k], inside]
            base_elems = None if self._job.is_delta[k] else base[inside]
            if steps is not None and (of := steps[places[k], self._tiles(a, b)]).any():
                row, base_elems = deltas_of(row, base_elems, a, of), None
            return nth_in(row, base_elems, bits, nth)

        return self._job.tie_breakers.stops(self._start, self._stop, find)

    def _stored(self, readers: Readers, view: TensorView, verify: Verify | None) -> U8Array:
        job, raw = self._job, np.empty(self._n * itemsize(view.dtype), np.uint8)
        packed = () if job.is_copy else self._packed[0]
        if not packed:
            with job.sources.batch() as batch:
                read_stored(readers, view, self._start, self._stop, raw.data, verify, batch)
            return raw
        self._clear()
        base, read = self._fetch_base(), job.task.experts[0].read
        assert base is not None
        row = ExpertRow(readers, view, read, raw, None, verify)
        row.fetch(self._start, self._stop, packed, base.raw)
        return raw


def to_bytes(values: torch.Tensor, dtype: str) -> U8Array:
    """The bytes of [n] float32 values cast once, to nearest even, to `dtype`."""
    import torch

    if dtype == "BF16":
        return narrowed(values.numpy())
    cast = values.to(torch_dtype(dtype))
    if cast is values:  # the caller reuses its rows while these bytes are still being written
        cast = values.clone()
    out: U8Array = cast.view(torch.uint8).numpy()
    return out


def count_cut_off(values: torch.Tensor, codes: torch.Tensor) -> int:
    """How many of [n] float32 values became the largest of F8_E4M3, in `codes`, from beyond it.

    Some versions of torch make such values NaN instead.
    """
    return int((((codes & 0x7F) == 0x7E) & (values.abs() > _E4M3_ROUNDS_DOWN_TO)).sum())


def _as_stored(raw: U8Array, dtype: str) -> Stored:
    return raw.view(np.float32) if dtype == "F32" else raw.view(np.uint16)


def narrowed(values: F32Array) -> U8Array:
    """The bytes of [n] float32 values cast once, to nearest even, to bfloat16."""
    bits = np.empty(len(values), np.uint16)
    round_to_bfloat16(values.view(np.uint32), bits)
    return bits.view(np.uint8)
