"""Turns a chunk's bits into the frames of its tiers, and frames back; knows no file.

A chunk is up to CHUNK_ELEMS elements of one tensor and the base's elements in the same places, as
little-endian bits: uint16 of BF16 or F16, uint32 of F32. A tier in which nothing differs from zero
has no bytes. The bits of a frame follow from those of the chunk, the tensor's unit, factors and
threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import F32Array, F64Array, I16Array, I64Array, U8Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, FACTORED, STEPPED, TIERS, Tier
from mergepipe_pipeline.operators.kernels.bits import subtract
from mergepipe_pipeline.packs import ternary
from mergepipe_pipeline.packs.exact import (
    Bits,
    Prediction,
    encode_all,
    encode_large,
    predict_bf16,
    restore,
)
from mergepipe_pipeline.packs.frames import Frames, Places, as_array, contents_of, refuse, to_frame
from mergepipe_pipeline.storage.uncached import scratch_pages

#: The types of elements that a pack has levels of, as NumPy has their bits.
BITS_OF: Mapping[str, type[np.unsignedinteger]] = {
    "BF16": np.uint16,
    "F16": np.uint16,
    "F32": np.uint32,
}
#: The tiers that approximate, in their order.
APPROXIMATE: tuple[Tier, ...] = (*FACTORED, *STEPPED)
_STEPPED = slice(TIERS.index(STEPPED[0]), 1 + TIERS.index(STEPPED[-1]))
_EXACT = [TIERS.index("X20"), TIERS.index("X")]
#: A unit is so many times the root mean square of the nonzero deltas.
_RMS_PER_UNIT = 9
#: What factors give of an element is at most so many steps: with tiers L0 to L3 it fits in int16.
STEPS_AT_MOST = 21_000
_STEPS_PER_OCTAVE = 16
#: Within these a unit, an 81st of it and its inverse lose no bits.
_LEAST_UNIT, _LARGEST_UNIT = 2.0**-100, 2.0**100
#: Sums of float64 are off by less.
_ROUNDING = 1 + 2.0**-40


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's frame in each tier, b"" where it has nothing there.

    `residual_sq` is float32 [levels] in the order of TIERS: ‖δ − δ̂‖² rounded up.
    """

    frames: Mapping[Tier, bytes]
    residual_sq: F32Array


def unit_of(l2sq: float, nonzero: int) -> float:
    """The unit of a tensor with Σδ² and that many δ ≠ 0, a float32 number.

    It is rounded to a 16th of an octave, so that it does not depend on how sums were rounded.
    """
    if not (0 < l2sq < math.inf) or not nonzero:
        return 1.0
    octaves = math.log2(_RMS_PER_UNIT * math.sqrt(l2sq / nonzero))
    unit = 2.0 ** (round(octaves * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE)
    return float(np.float32(min(max(unit, _LEAST_UNIT), _LARGEST_UNIT)))


def encode_chunk(
    expert: Bits,
    base: Bits,
    dtype: str,
    unit: float,
    threshold_bits: int,
    rungs: Sequence[I16Array] = (),
) -> EncodedChunk:
    """The frames of a chunk [n] of `dtype`, for a tensor of this unit and threshold of X20.

    `rungs` are what the tensor's factors up to R0, R1 and R2 give of it, in steps; () for none. The
    frames of factors are the tensor's, not the chunk's.
    """
    delta = delta_of(expert, base, dtype)
    residual_sq = np.zeros(len(TIERS))
    if not rungs and np.array_equal(expert, base):
        # Where ∞ − ∞ is not a number, only an exact level says what the expert has.
        residual_sq[: len(APPROXIMATE)] = 0 if np.isfinite(delta).all() else np.inf
        return EncodedChunk(dict.fromkeys(TIERS, b""), residual_sq.astype(np.float32))
    near = rungs[-1] if rungs else np.zeros(len(delta), np.int16)
    coarse = _encode_ternary(delta, near, unit, residual_sq[_STEPPED])
    step = ternary.step_of(unit)
    residual_sq[: len(FACTORED)] = [ternary.left(delta, r, step) for r in rungs] or math.inf
    # X20 never has zeros, and always what is no number.
    least = np.uint32(max(threshold_bits, 1))
    x20, left_out = encode_large(expert, base, delta, least)
    predicted = predict(base, near, unit, dtype) if rungs else Prediction.of_base(base)
    # Where nothing has a frame, the expert is the base.
    x = b"" if np.array_equal(expert, base) else encode_all(expert, predicted)
    residual_sq[TIERS.index("X20")] = left_out if left_out == left_out else math.inf
    _drop_dear(coarse, residual_sq[_STEPPED], len(x))
    none = dict.fromkeys(FACTORED, b"")
    return EncodedChunk({**none, **coarse, "X20": x20, "X": x}, _rounded_up(residual_sq))


def _drop_dear(frames: dict[Tier, bytes], residual_sq: F64Array, exact_nbytes: int) -> None:
    """Leave out stepped tiers that take, with those before, as many bytes as an exact level."""
    sizes = np.cumsum([len(frames[tier]) for tier in STEPPED])
    dear = int(np.searchsorted(sizes, max(exact_nbytes, 1)))
    residual_sq[dear:] = math.inf
    frames.update(dict.fromkeys(STEPPED[dear:], b""))


def decode_numbers(
    frames: Frames, n_tiers: Sequence[int], out: I16Array, places: Places | None = None
) -> None:
    """Put δ̂ without what factors give into `out`, int16 in steps.

    Chunks lie at `places`, or fill `out` one after the other; each has the first `n_tiers` of the
    stepped tiers. One without bytes is of zeros. Raises CorruptionError.
    """
    places = places or Places.one_after_another(len(out))
    counts, most = np.array(n_tiers, np.int64), max(1, *n_tiers)
    trits = -(-places.elems // ternary.PER_BYTE)
    sizes = np.stack([places.elems, *[trits] * (most - 1)])  # [tiers, chunks]
    rows = slice(_STEPPED.start, _STEPPED.start + most)
    starts, nbytes = frames.starts[rows], frames.nbytes[rows]
    front = ternary.trit_nbytes(CHUNK_ELEMS)
    # Used again: fresh pages cost more than decoding.
    pages = scratch_pages(front + _unpacked_nbytes(nbytes, sizes))
    unpacked = np.frombuffer(pages, np.uint8)
    unpacked[:front] = ternary.NO_TRITS
    contents, _ = contents_of(frames.raw, starts, nbytes, sizes, unpacked, front)
    ternary.add_up(frames.raw, as_array(pages), contents, counts, *places, out)


def decode_bits(
    frames: Frames,
    base_bits: Bits,
    out_bits: Bits,
    near: Prediction | None = None,
    places: Places | None = None,
    base_places: I64Array | None = None,
) -> None:
    """Put the expert's bits into `out_bits`, given the base's, which begin at `base_places`.

    Chunks lie at `places`, as does what factors predict of them, or fill all one after the other.
    Elements that are not in X20 are the base's at its level. Raises CorruptionError.
    """
    places = places or Places.one_after_another(len(out_bits))
    at_base = places.starts if base_places is None else base_places
    starts, nbytes = (np.ascontiguousarray(of[_EXACT]) for of in (frames.starts, frames.nbytes))
    chunks = places.starts, places.elems, at_base, at_base if near is None else places.starts
    predicted = near or Prediction.of_base(base_bits)
    bad = restore(frames.raw, (starts, nbytes), chunks, base_bits, predicted, out_bits)
    if bad >= 0:
        refuse(f"streams of {places.elems[bad]} elements", "no such streams")


def _unpacked_nbytes(nbytes: I64Array, sizes: I64Array) -> int:
    """Bytes of the contents of those frames that are not stored as they are."""
    return int(sizes[(nbytes > 0) & (nbytes < sizes)].sum())


def _quantise(
    delta: F32Array, near: I16Array, unit: float
) -> tuple[npt.NDArray[np.int8], U8Array, F64Array]:
    units = np.empty(len(delta), np.int8)
    trits = np.empty((ternary.N_TIERS - 1, ternary.trit_nbytes(len(delta))), np.uint8)
    residual_sq = np.zeros(ternary.N_TIERS)
    per_unit = np.float32(1 / unit)
    ternary.quantise(delta, near, per_unit, ternary.step_of(unit), units, trits, residual_sq)
    return units, trits, residual_sq


def _encode_ternary(
    delta: F32Array, near: I16Array, unit: float, residual_sq: F64Array
) -> dict[Tier, bytes]:
    """The frames of the stepped tiers; fills in their levels' `residual_sq`."""
    units, trits, residual_sq[:] = _quantise(delta, near, unit)
    frames = [to_frame(units.view(np.uint8)) if units.any() else b""]
    frames += [to_frame(row) if (row != ternary.NO_TRITS).any() else b"" for row in trits]
    return dict(zip(STEPPED, frames, strict=True))


def _rounded_up(values: F64Array) -> F32Array:
    at_least = values * _ROUNDING
    with np.errstate(over="ignore"):
        rounded = at_least.astype(np.float32)
    return np.where(rounded < at_least, np.nextafter(rounded, np.float32(np.inf)), rounded)


def delta_of(expert: Bits, base: Bits, dtype: str) -> F32Array:
    """δ [n] of elements as they are stored, float32."""
    if dtype == "BF16":
        delta = np.empty(len(expert), np.float32)
        subtract(expert.view(np.uint16), base.view(np.uint16), delta)
        return delta
    with np.errstate(invalid="ignore", over="ignore"):
        return _values(expert, dtype) - _values(base, dtype)


def predict(base: Bits, numbers: I16Array, unit: float, dtype: str) -> Prediction:
    """The elements [n] nearest to base + δ̂, with δ̂ in steps of a tensor of this unit.

    The base's where δ̂ is 0, or that is no number.
    """
    step = ternary.step_of(unit)
    is_below = np.empty(len(base), np.uint8)
    if dtype == "BF16":
        bits = np.empty(len(base), np.uint16)
        predict_bf16(base.view(np.uint16), numbers, step, bits, is_below)
        return Prediction(bits, is_below)
    of = np.float32 if dtype == "F32" else np.float16
    with np.errstate(invalid="ignore", over="ignore"):
        told = _values(base, dtype) + numbers * step
        rounded = told.astype(of)
    np.less(rounded, told, out=is_below.view(np.bool_))
    keeps = (numbers == 0) | np.isnan(told)
    return Prediction(np.where(keeps, base, rounded.view(base.dtype)), is_below)


def _values(bits: Bits, dtype: str) -> F32Array:
    return bits.view(np.float32) if dtype == "F32" else bits.view(np.float16).astype(np.float32)
