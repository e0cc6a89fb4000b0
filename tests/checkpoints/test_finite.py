"""NaN and infinity are found by their bits, one by one, as torch finds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergepipe_pipeline.checkpoints.stored import count_non_finite

#: Every bit pattern of 16 and of 8 bits.
BITS = {2: torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16), 1: torch.arange(256).byte()}
SMALL = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
NAMED = list(zip(SMALL, ("F16", "BF16", "F8_E5M2", "F8_E4M3"), strict=True))


@pytest.mark.parametrize(("dtype", "name"), NAMED)
def test_every_bit_pattern_is_judged_so_when_it_is_alone(dtype: torch.dtype, name: str) -> None:
    bits = BITS[dtype.itemsize]
    rows = bits.numpy().view(np.uint8).reshape(len(bits), -1)
    found = [count_non_finite(row, name) for row in rows]
    assert found == (~bits.view(dtype).float().isfinite()).int().tolist()
