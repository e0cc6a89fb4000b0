"""Codes float32 matrices as fp8 with a scale for each block of 128 × 128, as they come.

The bits are those of transformers' converter (`Fp8Quantize`): with f = 448 · (1 / max |w|) of a
block, codes are w · f to nearest, ties to even, and the scale is 1 / f, each step in float32.
Where it makes infinity or NaN of numbers, this goes on: f is finite for the smallest blocks, codes
of the largest do not mean infinity, and what is not finite becomes NaN alone, not with its block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array, U32Array
from mergepipe_pipeline.domain.codes import FP8_BLOCK
from mergepipe_pipeline.jit import cached_njit

_TOP, _MOST = np.float32(448), np.float32(np.finfo(np.float32).max)
#: What is added to numbers below the smallest normal one, 2^-6, to round them to multiples of 2^-9.
_SHIFT = np.float32(1 << 14)
#: float32 bits of infinity, 2^-6 and the shift; of all but the sign, of what a code has no place
#: for, and half of the latter, less one.
_INFINITY, _NORMAL, _SHIFT_BITS = np.uint32(255 << 23), np.uint32(121 << 23), np.uint32(141 << 23)
_SIZE, _KEPT, _HALF = np.uint32(0x7FFFFFFF), np.uint32(0xFFF00000), np.uint32(0x7FFFF)
#: What the exponents' biases differ by, where a code has its exponent.
_REBIAS, _NAN, _SIGN = np.uint32((127 - 7) << 3), np.uint32(0x7F), np.uint32(0x80)


class BlockCoder:
    """Codes one tensor of matrices, whose elements come in order, a run at a time."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._n_rows, n_cols = shape[-2:]
        self._rows = np.empty((min(FP8_BLOCK, self._n_rows), n_cols), np.float32)
        #: Rows of the matrix that are coded, and elements after them.
        self._row, self._held = 0, 0
        self._scales: list[F32Array] = []
        #: Σ (w − what its code means)² of the finite w.
        self.sq_error = 0.0

    def codes(self, values: F32Array) -> Iterator[U8Array]:
        """The codes of every row of blocks that the next elements complete."""
        while len(values):
            rows = self._rows[: self._n_rows - self._row]
            free = rows.reshape(-1)[self._held :]
            n = min(len(values), len(free))
            free[:n], values = values[:n], values[n:]
            self._held += n
            if n == len(free):
                codes = np.empty(rows.shape, np.uint8)
                scales = np.empty(-(-rows.shape[1] // FP8_BLOCK), np.float32)
                self.sq_error += code_rows(rows, codes, scales)
                self._scales.append(scales)
                self._row, self._held = (self._row + len(rows)) % self._n_rows, 0
                yield codes.reshape(-1)

    @property
    def scales(self) -> U8Array:
        """The bytes of all scales, once every element is coded."""
        return np.concatenate(self._scales).view(np.uint8)


@cached_njit(nogil=True, error_model="numpy")
def _factor_and_scale(bits: U32Array, first: int, stop: int) -> tuple[np.float32, np.float32]:
    """What a block's numbers, given as bits, are multiplied by, and their scale."""
    most_bits, largest = np.zeros(1, np.uint32), np.uint32(0)
    for row in range(len(bits)):
        part = bits[row, first:stop]
        for i in range(len(part)):
            size = part[i] & _SIZE
            largest = max(largest, size if size < _INFINITY else np.uint32(0))
    most_bits[0] = largest
    most = most_bits.view(np.float32)[0]
    factor = min(_TOP * (np.float32(1) / most), _MOST) if most > 0 else np.float32(1)
    scale = np.float32(1) / factor
    while _TOP * scale > _MOST:
        scale = np.nextafter(scale, np.float32(0))
    return factor, scale


@cached_njit(nogil=True, error_model="numpy")
def code_rows(rows: F32Array, codes: U8Array, scales: F32Array) -> float:
    """Fill `codes` and `scales` of a row of blocks; gives the sum of squared errors.

    Selects instead of branches, and a sum for each column, let the compiler take many at once.

    Args:
        rows: float32 [n, columns], n at most a block's rows.
        codes: uint8 [n, columns].
        scales: float32, one for each block.
    """
    all_bits, sq_errors = rows.view(np.uint32), np.zeros(FP8_BLOCK, np.float64)
    scaled, shifted = np.empty(FP8_BLOCK, np.float32), np.empty(FP8_BLOCK, np.float32)
    normal = np.empty(FP8_BLOCK, np.float32)
    scaled_bits, shifted_bits = scaled.view(np.uint32), shifted.view(np.uint32)
    normal_bits = normal.view(np.uint32)
    for block in range(len(scales)):
        first, stop = block * FP8_BLOCK, min((block + 1) * FP8_BLOCK, rows.shape[1])
        n, (factor, scale) = stop - first, _factor_and_scale(all_bits, first, stop)
        scales[block] = scale
        for row in range(len(rows)):
            values, bits = rows[row, first:stop], all_bits[row, first:stop]
            out = codes[row, first:stop]
            for i in range(n):
                size = abs(values[i]) * factor
                scaled[i] = size if size < _TOP else _TOP
                shifted[i] = scaled[i] + _SHIFT
            for i in range(n):
                odd = (scaled_bits[i] >> np.uint32(20)) & np.uint32(1)
                rounded = scaled_bits[i] + _HALF + odd
                normal_bits[i] = rounded & _KEPT
                code = (rounded >> np.uint32(20)) - _REBIAS
                code = code if scaled_bits[i] >= _NORMAL else shifted_bits[i] - _SHIFT_BITS
                code = code if (bits[i] & _SIZE) < _INFINITY else _NAN
                out[i] = code | ((bits[i] >> np.uint32(24)) & _SIGN)
            for i in range(n):
                meant = normal[i] if scaled_bits[i] >= _NORMAL else shifted[i] - _SHIFT
                error = np.float64(abs(values[i])) - np.float64(meant * scale)
                sq_errors[i] += error * error if (bits[i] & _SIZE) < _INFINITY else 0.0
    return float(sq_errors.sum())
