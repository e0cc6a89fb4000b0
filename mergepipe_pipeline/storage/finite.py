"""Counts the elements of stored weights that are NaN or infinity, in one pass over their bits.

It judges and repairs nothing: a checkpoint may hold such values on purpose.
"""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

import numpy as np

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.storage.header import LENGTH_NBYTES, header_nbytes, parse_header

#: Per dtype its bits as an unsigned integer, and the least that is not finite without the sign:
#: an exponent of ones; float8_e4m3fn has no infinity, and one NaN.
_LEAST = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
_WINDOW_NBYTES = 1 << 19


def non_finite(path: Path) -> dict[str, int]:
    """Tensor name to the number of NaN and infinite elements, for tensors that have any.

    Raises CheckpointError if the file is not valid safetensors.
    """
    with path.open("rb") as file:
        size, first8 = path.stat().st_size, file.read(LENGTH_NBYTES)
        raw = file.read(header_nbytes(first8, size, str(path)))
        entries, _ = parse_header(raw, size, str(path))
        counts = {t.name: _count(file, t) for t in entries if t.dtype in _LEAST}
    return {name: count for name, count in counts.items() if count}


def count_non_finite(raw: U8Array, dtype: str) -> int:
    """How many elements of `dtype` in the bytes `raw` are NaN or infinite; of integers none."""
    if dtype not in _LEAST or not len(raw):
        return 0
    kind, least = _LEAST[dtype]
    bits = raw.view(kind)
    signed = bits.view(kind.replace("u", "i"))
    sign = 1 << (8 * bits.itemsize - 1)
    # Read as numbers, bits of either sign are in order; the two largest tell almost always.
    if int(signed.max()) < least and int(bits.max()) < sign | least:
        return 0
    return int(np.count_nonzero((bits & bits.dtype.type(sign - 1)) >= least))


def _count(file: BufferedReader, tensor: TensorEntry) -> int:
    buffer = np.empty(min(tensor.nbytes, _WINDOW_NBYTES), np.uint8)
    n_non_finite = 0
    file.seek(tensor.start_byte)
    for start in range(0, tensor.nbytes, _WINDOW_NBYTES):
        window = buffer[: tensor.nbytes - start]
        file.readinto(window.data)
        n_non_finite += count_non_finite(window, tensor.dtype)
    return n_non_finite
