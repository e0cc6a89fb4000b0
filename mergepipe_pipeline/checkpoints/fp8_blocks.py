"""Codes float32 matrices as fp8 with a scale for each block of 128 × 128, as they come.

The bits are those of transformers' converter (`Fp8Quantize`): with f = 448 · (1 / max |w|) of a
block, codes are w · f to nearest, ties to even, and the scale is 1 / f, each step in float32.
Where it makes infinity or NaN of numbers, this goes on: f is finite for the smallest blocks, codes
of the largest do not mean infinity, and what is not finite becomes NaN alone, not with its block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array
from mergepipe_pipeline.checkpoints.codes import small_floats
from mergepipe_pipeline.domain.codes import FP8_BLOCK
from mergepipe_pipeline.jit import cached_njit

_TOP, _MOST = np.float32(448), np.finfo(np.float32).max
#: float32 bits of 2^-6, the smallest normal number. Below, numbers are multiples of 2^-9.
_NORMAL, _STEPS = 121 << 23, np.float32(512)
#: What the exponents' biases differ by, where a code has its exponent.
_REBIAS, _NAN = (127 - 7) << 3, 0x7F
_VALUES = small_floats("F8_E4M3")


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
                self.sq_error += code_rows(rows, _VALUES, codes, scales)
                self._scales.append(scales)
                self._row, self._held = (self._row + len(rows)) % self._n_rows, 0
                yield codes.reshape(-1)

    @property
    def scales(self) -> U8Array:
        """The bytes of all scales, once every element is coded."""
        return np.concatenate(self._scales).view(np.uint8)


@cached_njit(nogil=True, error_model="numpy")
def code_rows(rows: F32Array, table: F32Array, codes: U8Array, scales: F32Array) -> float:
    """Fill `codes` and `scales` of a row of blocks; gives the sum of squared errors.

    Args:
        rows: float32 [n, columns], n at most a block's rows.
        table: float32 [256], the number of each code.
        codes: uint8 [n, columns].
        scales: float32, one for each block.
    """
    signs, sq_error = rows.view(np.uint32), 0.0
    scaled = np.empty(FP8_BLOCK, np.float32)
    bits = scaled.view(np.uint32)
    for block in range(len(scales)):
        first = block * FP8_BLOCK
        n = min(FP8_BLOCK, rows.shape[1] - first)
        largest = np.float32(0)
        for row in range(len(rows)):
            for col in range(first, first + n):
                magnitude = abs(rows[row, col])
                if largest < magnitude <= _MOST:
                    largest = magnitude
        factor = min(_TOP * (np.float32(1) / largest), _MOST) if largest > 0 else np.float32(1)
        scale = np.float32(1) / factor
        while _TOP * scale > _MOST:
            scale = np.nextafter(scale, np.float32(0))
        scales[block] = scale
        for row in range(len(rows)):
            for i in range(n):
                scaled[i] = min(abs(rows[row, first + i]) * factor, _TOP)
            for i in range(n):
                magnitude = abs(rows[row, first + i])
                if not magnitude <= _MOST:
                    codes[row, first + i] = _NAN
                    continue
                if bits[i] < _NORMAL:
                    code = np.uint32(np.rint(scaled[i] * _STEPS))
                else:
                    code = ((bits[i] + 0x7FFFF + (bits[i] >> 20 & 1)) >> 20) - _REBIAS
                error = np.float64(magnitude) - np.float64(table[code] * scale)
                sq_error += error * error
                codes[row, first + i] = code | (signs[row, first + i] >> 24 & 0x80)
    return sq_error
