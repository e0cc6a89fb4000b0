"""Compares a pack from elsewhere with the result of packing its expert here.

Its exact frames give the expert's bits, which have the digests that the pack's id is made of. These
bits are encoded again: every level must decode to the same numbers and leave the same residuals.
Frames may have other bytes, since compressors have versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from mergepipe_pipeline.arrays import I16Array
from mergepipe_pipeline.checkpoints.stored import Readers, Verifier, Verify, read_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import content_digest, segment_digests
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, PackedTensor, Tier
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import (
    APPROXIMATE,
    BITS_OF,
    EncodedChunk,
    decode_bits,
    decode_numbers,
    encode_chunk,
)
from mergepipe_pipeline.packs.exact import Bits
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.frames import Frames
from mergepipe_pipeline.packs.index import SUMMED_CHUNKS, damaged_pack, summed
from mergepipe_pipeline.packs.store import TIER_SETS, Pack

#: Chunks that are compared at once.
_CHUNKS_AT_ONCE = 16
#: Sums of squares on another processor may be off by less.
_ROUNDING = 1e-5


def refuse_forged(
    pack: Pack,
    base_of: Callable[[PackedTensor], TensorView],
    readers: Readers,
    known: KnownSegments,
    advance: Callable[[int], None],
) -> None:
    """Raise CorruptionError unless a pack belongs to the contents which it names.

    Args:
        pack: one with the exact tiers.
        base_of: the base's tensor that a tensor was packed against.
        readers: of the base.
        known: segments of the base, with which its bytes are compared.
        advance: called with the expert's bytes as they are compared.
    """
    if pack.tiers not in TIER_SETS or not {"X20", "X"} <= set(pack.tiers):
        raise damaged_pack(pack.root, "X20, X and lossy tiers from L0 on", ", ".join(pack.tiers))
    with FrameFiles(pack.root, "once") as files, Workers(threads.analysis()) as workers:
        for tensor in pack.tensors.values():
            base = base_of(tensor)
            if (base.dtype, base.shape) != (tensor.dtype, tensor.shape):
                _refuse(pack, tensor, f"{base.dtype} {base.shape}, as its base", "others")
            if not 0 < tensor.unit < math.inf:
                _refuse(pack, tensor, "a unit", str(tensor.unit))
            if tensor.nbytes[[tier not in pack.tiers for tier in TIERS]].any():
                _refuse(pack, tensor, f"frames of {', '.join(pack.tiers)}", "others")
            check = Verifier(base, known.of_view(base)).check
            compare = partial(_compared, pack, files, tensor, base, readers, check)
            n_chunks, digests = tensor.nbytes.shape[1], []
            for bits in workers.map(
                compare, range(0, n_chunks, _CHUNKS_AT_ONCE), depth=threads.analysis() + 2
            ):
                raw = bits.data.cast("B")
                digests.append(segment_digests(raw, CHUNK_ELEMS * itemsize(tensor.dtype)))
                advance(len(raw))
            if content_digest(b"".join(digests)) != tensor.digest:
                _refuse(pack, tensor, f"content {tensor.digest[:16]}", "another")
    _refuse_other_sums(pack)


def _compared(
    pack: Pack,
    files: FrameFiles,
    tensor: PackedTensor,
    base: TensorView,
    readers: Readers,
    check: Verify,
    first: int,
) -> Bits:
    """The expert's bits [n] of chunks from `first` on, checked: all levels are as encoded here.

    They are unsigned numbers of the dtype's width. Raises CorruptionError.
    """
    stop = min(first + _CHUNKS_AT_ONCE, tensor.nbytes.shape[1])
    start_elem, stop_elem = first * CHUNK_ELEMS, min(stop * CHUNK_ELEMS, base.numel)
    raw = bytearray((stop_elem - start_elem) * itemsize(base.dtype))
    read_stored(readers, base, start_elem, stop_elem, memoryview(raw), check)
    base_bits = np.frombuffer(raw, BITS_OF[base.dtype])  # [n], as `mine`
    expert_bits = _bits(files.read(tensor, ("X20", "X"), first, stop), base_bits)
    encoded = [
        encode_chunk(
            expert_bits[at : at + CHUNK_ELEMS],
            base_bits[at : at + CHUNK_ELEMS],
            tensor.dtype,
            tensor.unit,
            tensor.threshold_bits,
            pack.tiers,
        )
        for at in range(0, len(expert_bits), CHUNK_ELEMS)
    ]
    residual_sq = np.stack([c.residual_sq for c in encoded], axis=1)  # [levels, chunks]
    residual_sq[[tier not in pack.tiers for tier in TIERS]] = np.inf  # levels that are not there
    if not np.allclose(residual_sq, tensor.residual_sq[:, first:stop], rtol=_ROUNDING, atol=0):
        _refuse(pack, tensor, "the residuals of its levels", "others")
    # Elements that X20 leaves out come as the base's, in both.
    x20: tuple[Tier, ...] = ("X20",)
    large = files.read(tensor, x20, first, stop)
    if not np.array_equal(_bits(large, base_bits), _bits(_frames(encoded, x20), base_bits)):
        _refuse(pack, tensor, "the largest elements in X20", "others")
    for n, tier in enumerate(APPROXIMATE, 1):
        if tier in pack.tiers:
            came = files.read(tensor, APPROXIMATE[:n], first, stop)
            again = _frames(encoded, APPROXIMATE[:n])
            if not np.array_equal(_numbers(came, n, expert_bits), _numbers(again, n, expert_bits)):
                _refuse(pack, tensor, f"its numbers in {tier}", "others")
    return expert_bits


def _frames(encoded: Sequence[EncodedChunk], tiers: Sequence[Tier]) -> Frames:
    """The frames of encoded chunks in some tiers, as files give them."""
    return Frames.of({tier: [chunk.frames[tier] for chunk in encoded] for tier in tiers})


def _bits(frames: Frames, base: Bits) -> Bits:
    """The bits [n] that exact frames give on the base's."""
    out = np.empty_like(base)
    decode_bits(frames, base, out)
    return out


def _numbers(frames: Frames, n_tiers: int, like: Bits) -> I16Array:
    """δ̂ [n] of all chunks in the first `n_tiers`, in steps of the last of these."""
    numbers = np.empty(len(like), np.int16)
    decode_numbers(frames, [n_tiers] * frames.nbytes.shape[1], numbers)
    return numbers


def _refuse_other_sums(pack: Pack) -> None:
    """Raise CorruptionError unless the stored sums of runs of chunks are those of the chunks."""
    for row, *stored in pack.sizes(SUMMED_CHUNKS * CHUNK_ELEMS):
        tensor = pack.tensors[row.content.name]
        for computed, kept in zip(
            summed(tensor.nbytes, tensor.residual_sq, SUMMED_CHUNKS), stored, strict=True
        ):
            if not np.array_equal(computed, kept):
                raise damaged_pack(pack.index.sums, f"the sums of {tensor.name}", "others")


def _refuse(pack: Pack, tensor: PackedTensor, expected: str, found: str) -> NoReturn:
    raise CorruptionError(
        "A pack does not hold what it says",
        where=f"{pack.root}, tensor {tensor.name}",
        expected=expected,
        found=found,
        next_step="do not use it before you know who made it, and how",
    )
