"""NaN and infinity are found by their bits, in every dtype, as torch finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints import stored
from mergepipe_pipeline.checkpoints.stored import count_non_finite, non_finite
from mergepipe_pipeline.errors import IncompleteCheckpointError

#: Every bit pattern of 16 and of 8 bits.
BITS = {2: torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16), 1: torch.arange(256).byte()}
SMALL = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
NAMED = list(zip(SMALL, ("F16", "BF16", "F8_E5M2", "F8_E4M3"), strict=True))
ODD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_bit_pattern_of_small_dtypes_is_judged_as_torch_judges_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = BITS[dtype.itemsize].view(dtype)
    save_file({"all": values}, tmp_path / "m.safetensors")
    expected = int((~values.float().isfinite()).sum())
    assert expected > 0
    assert non_finite(tmp_path / "m.safetensors") == {"all": expected}


@pytest.mark.parametrize(("dtype", "name"), NAMED)
def test_every_bit_pattern_is_judged_so_when_it_is_alone(dtype: torch.dtype, name: str) -> None:
    bits = BITS[dtype.itemsize]
    rows = bits.numpy().view(np.uint8).reshape(len(bits), -1)
    found = [count_non_finite(row, name) for row in rows]
    assert found == (~bits.view(dtype).float().isfinite()).int().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_finite_values_are_none_of_them(tmp_path: Path, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    tensors = {
        "fine": torch.tensor([top, -top, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype),
        "odd": torch.tensor([1.0, *ODD], dtype=dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "integers": torch.full((3,), -1, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    assert non_finite(tmp_path / "m.safetensors") == {"odd": 3}


def test_windows_count_every_element_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_WINDOW_NBYTES", 16)
    values = torch.zeros(11)
    values[[0, 3, 4, 10]] = float("inf")
    save_file({"t": values}, tmp_path / "m.safetensors")
    assert non_finite(tmp_path / "m.safetensors") == {"t": 4}


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"t": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(IncompleteCheckpointError, match="truncated"):
        non_finite(file)
