"""Stored numbers as compiled kernels read them: bits of bfloat16, or float32 as it is."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic, overload

from mergepipe_pipeline.arrays import F32Array, I16Array, U16Array
from mergepipe_pipeline.jit import cached_njit

Stored = U16Array | F32Array


def value_of(stored: Any) -> Any:
    """The float32 that an element of a `Stored` means; by type, when compiled."""
    raise NotImplementedError


@overload(value_of, inline="always")
def _value_for(stored: Any) -> Any:
    def of_bits(stored: Any) -> Any:
        return float_of(np.uint32(stored) << np.uint32(16))  # type: ignore[call-arg]

    def as_it_is(stored: Any) -> Any:
        return stored

    return as_it_is if stored == numba.float32 else of_bits


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""
    single = numba.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(single))

    return single(numba.uint32), generate


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""
    bits = numba.uint32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(bits))

    return bits(numba.float32), generate


@intrinsic
def fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    """x·y + z with one rounding, float32."""
    single = numba.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return single(single, single, single), generate


@cached_njit(nogil=True)
def subtract(bits: Stored, base: Stored, out: F32Array) -> None:
    """Write T − B to `out`, float32 [n], of bits of bfloat16: `bits` [n] and `base` [n]."""
    for e in range(len(out)):
        out[e] = value_of(bits[e]) - value_of(base[e])


@cached_njit(nogil=True)
def times(numbers: I16Array | Stored, step: np.float32, out: F32Array) -> None:
    """Write δ̂ to `out`, float32 [n]: `numbers` [n], int16 or its bits, times their step."""
    for e in range(len(out)):
        out[e] = np.float32(np.int16(numbers[e])) * step
