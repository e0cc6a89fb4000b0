"""Asks the processor for memory before it is used.

By themselves processors fetch ahead inside a page of 4 KiB: a loop that takes a piece of each row
of a large table waits at every row.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.operators.kernels.bits import Stored

_LINE_NBYTES = 64
#: As LLVM has it: to be read, kept in the cache of the second level, data.
_READ, _SECOND_LEVEL, _DATA = 0, 2, 1


@cached_njit(nogil=True)
def prefetch_row(table: Stored, row: int, start: int, stop: int) -> None:
    """Fetch the elements [start, stop) of a row of `table` [rows, n], as far as there are any."""
    n, size = table.shape[1], table.itemsize
    address = np.uint64(table.ctypes.data) + np.uint64((row * n + start) * size)
    for line in range(0, (min(stop, n) - start) * size, _LINE_NBYTES):
        _prefetch(address + np.uint64(line))  # type: ignore[call-arg]


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Fetch the line at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        name = "llvm.prefetch.p0"
        fetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        how = [ir.Constant(number, n) for n in (_READ, _SECOND_LEVEL, _DATA)]
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), *how])
        return context.get_dummy_value()

    return numba.void(numba.uint64), generate
