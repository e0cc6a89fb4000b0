"""NumPy arrays by the dtype of their elements, named as in safetensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
I16Array = npt.NDArray[np.int16]
I32Array = npt.NDArray[np.int32]
I64Array = npt.NDArray[np.int64]
U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]
U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]
