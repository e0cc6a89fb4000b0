"""Which tensors of a weight file hold NaN or infinity: one pass over its bits.

Not a repair and no judgement: a checkpoint may hold such values on purpose.
"""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

import numpy as np

from mergepipe_pipeline.spec.checkpoint import TensorEntry
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
_WINDOW_ELEMS = 1 << 18


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


def _count(file: BufferedReader, tensor: TensorEntry) -> int:
    bits, least = _LEAST[tensor.dtype]
    buffer = np.empty(min(tensor.numel, _WINDOW_ELEMS), bits)
    found = 0
    file.seek(tensor.start_byte)
    for start in range(0, tensor.numel, _WINDOW_ELEMS):
        window = buffer[: tensor.numel - start]
        file.readinto(window.data)
        np.left_shift(window, 1, out=window)  # the sign leaves, and the order stays
        if window.max() >= least << 1:
            found += int(np.count_nonzero(window >= least << 1))
    return found
