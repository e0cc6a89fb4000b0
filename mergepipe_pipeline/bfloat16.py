"""How float32 becomes bfloat16: to nearest, ties to even, and one NaN.

The rule is written once, for NumPy arrays and for compiled loops alike. torch rounds by the same
rule but has several NaNs, so that what it casts gets `NAN_BITS` afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: The one NaN of bfloat16 results.
NAN_BITS = np.uint16(0x7FC0)


def nearest(bits: Any) -> Any:
    """The bfloat16 bits of float32 `bits` that mean a number; uint32, or an array of them.

    The upper half grows by one where the lower is over a half, or is a half and the upper odd.
    """
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
