"""Writes the files of a pack in one pass over expert and base, a few chunks in memory per thread.

What was encoded is decoded again from the frames before they are written, and compared. Frames lie
in the order of tensors and chunks, whatever thread made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.stored import Readers, Verifier, Verify, read_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, PackedTensor, TensorContent
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.basis import Basis, basis_from, basis_of
from mergepipe_pipeline.packs.checksums import checksum
from mergepipe_pipeline.packs.codec import (
    BITS_OF,
    EncodedChunk,
    decode_bits,
    delta_of,
    encode_chunk,
    predict,
)
from mergepipe_pipeline.packs.exact import Bits
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.frames import Frames, as_array
from mergepipe_pipeline.packs.index import frames_path, write_index
from mergepipe_pipeline.packs.product import factors_of
from mergepipe_pipeline.storage.atomic import full_disk_named

#: Chunks that one thread reads, encodes and hands over at once: 2 MiB of bfloat16 of each model.
_CHUNKS_AT_ONCE = 16


class Packing(NamedTuple):
    """A tensor to be packed: its contents and views, Σδ², how many δ ≠ 0, the least |δ| of X20."""

    content: TensorContent
    expert: TensorView
    base: TensorView
    l2sq: float
    nonzero: int
    threshold_bits: int


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a pack come from: both models' readers, and the segments that verify them.

    `older` has tensors of older packs, with their files, whose frames may be taken over.
    """

    readers: Readers
    known: KnownSegments
    older: Mapping[TensorContent, tuple[FrameFiles, PackedTensor]]


#: The encoded chunks [first, stop) of a tensor.
_Chunks = Callable[[int, int], list[EncodedChunk]]


class _Job(NamedTuple):
    packing: Packing
    basis: Basis
    chunks: _Chunks
    first: int
    stop: int


def write_pack(
    staged: Path,
    final: Path,
    tensors: Sequence[Packing],
    origin: Origin,
    advance: Callable[[int], None],
) -> None:
    """Write into `staged` all files of the pack that will be named `final`.

    `advance` gets the expert's bytes as they are done. Raises CorruptionError for inputs that are
    not what was analysed, CheckpointChangedError, StorageFullError.
    """
    written: list[PackedTensor] = []
    with full_disk_named(staged), ExitStack() as stack:  # to close a file may fill the disk, too
        files = [stack.enter_context(frames_path(staged, t).open("wb")) for t in TIERS]
        # Products of matrices are made by one thread each: the bits of a sum depend on the parts.
        stack.enter_context(threadpool_limits(1, "blas"))
        workers, finders = (stack.enter_context(Workers(threads.analysis())) for _ in range(2))
        found = finders.map(partial(_with_basis, origin=origin), tensors, depth=threads.analysis())
        jobs = (
            job for packing, basis, older in found for job in _jobs(packing, basis, older, origin)
        )
        done = workers.map(_run, jobs, depth=threads.analysis() + 2)
        for job, encoded in done:
            if job.first == 0:
                written.append(_unwritten(job, files))
            _append(written[-1], job.first, encoded, files)
            advance(_elems(job) * itemsize(job.packing.content.dtype))
    write_index(staged, final, written)


def _run(job: _Job) -> tuple[_Job, list[EncodedChunk]]:
    return job, job.chunks(job.first, job.stop)


def _with_basis(
    packing: Packing, origin: Origin
) -> tuple[Packing, Basis, tuple[FrameFiles, PackedTensor] | None]:
    """A tensor with what its chunks are encoded on, and an older one to take chunks over from."""
    if (older := origin.older.get(packing.content)) is not None:
        with suppress(CorruptionError):
            return packing, basis_from(*older), older

    def delta(start: int, stop: int) -> F32Array:
        views = packing.expert, packing.base
        expert, base = (_bits(origin.readers, view, start, stop) for view in views)
        return delta_of(expert, base, packing.content.dtype)

    basis = basis_of(packing.content.shape, packing.l2sq, packing.nonzero, delta)
    return packing, basis, None


def _jobs(
    packing: Packing, basis: Basis, older: tuple[FrameFiles, PackedTensor] | None, origin: Origin
) -> Iterator[_Job]:
    check, check_base = (
        Verifier(view, origin.known.of_view(view)).check for view in (packing.expert, packing.base)
    )
    chunks: _Chunks = partial(_encoded, packing, basis, origin.readers, check, check_base)
    if older is not None:
        chunks = partial(_taken_over, *older, chunks)
    n_chunks = -(-packing.expert.numel // CHUNK_ELEMS)
    for first in range(0, n_chunks, _CHUNKS_AT_ONCE):
        yield _Job(packing, basis, chunks, first, min(n_chunks, first + _CHUNKS_AT_ONCE))


def _encoded(
    packing: Packing,
    basis: Basis,
    readers: Readers,
    check: Verify,
    check_base: Verify,
    first: int,
    stop: int,
) -> list[EncodedChunk]:
    """Chunks read from both models, encoded, decoded again and compared."""
    start_elem = first * CHUNK_ELEMS
    stop_elem = min(stop * CHUNK_ELEMS, packing.expert.numel)
    expert, base = (
        _bits(readers, view, start_elem, stop_elem, verify)
        for view, verify in ((packing.expert, check), (packing.base, check_base))
    )
    dtype, threshold_bits = packing.content.dtype, packing.threshold_bits
    rungs = basis.numbers(start_elem, stop_elem - start_elem)
    chunks = []
    for at in range(0, stop_elem - start_elem, CHUNK_ELEMS):
        some = slice(at, at + CHUNK_ELEMS)
        near = [numbers[some] for numbers in rungs]
        chunk = encode_chunk(expert[some], base[some], dtype, basis.unit, threshold_bits, near)
        chunks.append(chunk)
    told = predict(base, rungs[-1], basis.unit, dtype) if rungs else None
    decoded = np.empty_like(expert)
    decode_bits(Frames.of({"X": [chunk.frames["X"] for chunk in chunks]}), base, decoded, told)
    if not np.array_equal(decoded, expert):
        wrong = int(np.argmax(decoded != expert))
        raise _decoded_to_others(packing, (start_elem + wrong) // CHUNK_ELEMS)
    if first == 0:
        chunks[0] = replace(chunks[0], frames={**chunks[0].frames, **basis.frames})
    return chunks


def _bits(
    readers: Readers, view: TensorView, start: int, stop: int, verify: Verify | None = None
) -> Bits:
    """[stop − start] stored elements of a view as unsigned numbers."""
    raw = bytearray((stop - start) * itemsize(view.dtype))
    read_stored(readers, view, start, stop, memoryview(raw), verify)
    return np.frombuffer(raw, BITS_OF[view.dtype])


def _decoded_to_others(packing: Packing, number: int) -> CorruptionError:
    return CorruptionError(
        "A chunk does not decode to what was encoded",
        where=f"tensor {packing.content.name}, chunk {number}",
        expected="the expert's stored bits",
        found="other bits",
        next_step="run the command again; if it stays, please report it as a defect",
    )


def _taken_over(
    files: FrameFiles, tensor: PackedTensor, encoded: _Chunks, first: int, stop: int
) -> list[EncodedChunk]:
    """Chunks of an older pack, compared with their checksums; damaged ones are `encoded` anew."""
    try:
        frames = files.read(tensor, TIERS, first, stop)
    except CorruptionError:
        return encoded(first, stop)
    return [
        EncodedChunk(
            {tier: bytes(frames.frame(tier, at)) for tier in TIERS},
            tensor.residual_sq[:, first + at],
        )
        for at in range(stop - first)
    ]


def _unwritten(job: _Job, files: Sequence[IO[bytes]]) -> PackedTensor:
    """A tensor of which no chunk is written yet."""
    shape = len(TIERS), -(-job.packing.expert.numel // CHUNK_ELEMS)
    return PackedTensor(
        *job.packing.content,
        job.basis.unit,
        factors_of(job.basis.frames),
        job.packing.threshold_bits,
        np.zeros(shape, np.uint32),
        np.zeros(shape, np.uint64),
        np.zeros(shape, np.float32),
        np.array([file.tell() for file in files], np.int64),
        job.basis.tails,
    )


def _append(
    tensor: PackedTensor, first: int, encoded: Sequence[EncodedChunk], files: Sequence[IO[bytes]]
) -> None:
    """Write chunks from number `first` on, and fill in their sizes and checksums for the index."""
    for chunk, encoded_chunk in enumerate(encoded, first):
        tensor.residual_sq[:, chunk] = encoded_chunk.residual_sq
        for number, (tier, file) in enumerate(zip(TIERS, files, strict=True)):
            frame = encoded_chunk.frames[tier]
            file.write(frame)
            tensor.nbytes[number, chunk] = len(frame)
            tensor.checksums[number, chunk] = checksum(as_array(frame)) if frame else 0


def _elems(job: _Job) -> int:
    return min(job.stop * CHUNK_ELEMS, job.packing.expert.numel) - job.first * CHUNK_ELEMS
