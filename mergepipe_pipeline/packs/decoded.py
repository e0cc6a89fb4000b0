"""Decodes the stored bytes of an expert's tensors from a pack's exact tiers and the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mergepipe_pipeline.checkpoints.stored import Readers, Verifier, Verify, read_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import content_digest, segment_digests
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, PackedTensor
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import BITS_OF, decode_bits
from mergepipe_pipeline.packs.frame_files import FrameFiles

#: Chunks that are decoded and handed over at once.
_CHUNKS_AT_ONCE = 16


class Decoder:
    """Decodes tensors of one pack; `readers` and `known` are of the base."""

    def __init__(self, files: FrameFiles, readers: Readers, segments: KnownSegments) -> None:
        self._files, self._readers, self._segments = files, readers, segments

    def stored(self, tensor: PackedTensor, base: TensorView) -> Iterator[memoryview]:
        """The stored bytes of a tensor, a piece at a time.

        Raises CorruptionError for frames or base bytes that are not what was written, and at the
        end if the whole has not the tensor's digest.
        """
        n_chunks = tensor.nbytes.shape[1]
        check = Verifier(base, self._segments.of_view(base)).check
        step = CHUNK_ELEMS * itemsize(tensor.dtype)
        digests = []
        with Workers(threads.analysis()) as workers:
            decode = partial(self._piece, tensor, base, check)
            pieces = _runs(0, n_chunks)
            for piece in workers.map(decode, pieces, depth=threads.analysis() + 2):
                digests.append(segment_digests(piece, step))
                yield piece
        digest = content_digest(b"".join(digests))
        if digest != tensor.digest:
            raise CorruptionError(
                "A tensor does not decode to what was packed",
                where=f"tensor {tensor.name}",
                expected=f"content {tensor.digest[:16]}",
                found=f"content {digest[:16]}",
                next_step="keep the original; `mergepipe verify --all` finds what is damaged",
            )

    def bytes_of(self, tensor: PackedTensor, base: TensorView) -> StoredBytes:
        """The stored bytes of a tensor, for reads of parts."""
        check = Verifier(base, self._segments.of_view(base)).check
        return StoredBytes(partial(self._piece, tensor, base, check), itemsize(tensor.dtype))

    def _piece(
        self, tensor: PackedTensor, base: TensorView, check: Verify, chunks: tuple[int, int]
    ) -> memoryview:
        """The stored bytes of chunks [first, stop)."""
        first, stop = chunks
        start_elem, stop_elem = first * CHUNK_ELEMS, min(stop * CHUNK_ELEMS, base.numel)
        raw = bytearray((stop_elem - start_elem) * itemsize(base.dtype))
        read_stored(self._readers, base, start_elem, stop_elem, memoryview(raw), check)
        base_bits = np.frombuffer(raw, BITS_OF[base.dtype])
        expert_bits = np.empty_like(base_bits)
        frames = self._files.read(tensor, ("X20", "X"), first, stop)
        decode_bits(frames, base_bits, expert_bits)
        return expert_bits.data.cast("B")


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The stored bytes of one tensor of `size` bytes an element. Safe for several threads.

    They are not compared with the tensor's digest: the reader compares segments.
    """

    decode: Callable[[tuple[int, int]], memoryview]
    size: int

    def read_into(self, start_byte: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start_byte` on; decodes the chunks that they are in.

        Raises CorruptionError for frames or base bytes that are not what was written.
        """
        chunk_nbytes, stop_byte = CHUNK_ELEMS * self.size, start_byte + len(out)
        for first, stop in _runs(start_byte // chunk_nbytes, -(-stop_byte // chunk_nbytes)):
            piece, at = self.decode((first, stop)), first * chunk_nbytes
            a, b = max(start_byte, at), min(stop_byte, at + len(piece))
            out[a - start_byte : b - start_byte] = piece[a - at : b - at]


def _runs(first_chunk: int, stop_chunk: int) -> Iterator[tuple[int, int]]:
    """Chunks [first, stop) in runs that are decoded at once."""
    for first in range(first_chunk, stop_chunk, _CHUNKS_AT_ONCE):
        yield first, min(first + _CHUNKS_AT_ONCE, stop_chunk)
