"""NaN and infinity are found in the tensors of checkpoints, in every dtype, as torch finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.integrity import weights

#: Every bit pattern of 16 and of 8 bits.
BITS = {2: torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16), 1: torch.arange(256).byte()}
SMALL = (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
ODD = (float("nan"), float("inf"), float("-inf"))


def counts_of(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    save_file(tensors, folder / "model.safetensors")
    return weights.non_finite(open_checkpoint(str(folder), "m"))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_bit_pattern_of_small_dtypes_is_judged_as_torch_judges_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = BITS[dtype.itemsize].view(dtype)
    expected = int((~values.float().isfinite()).sum())
    assert expected > 0
    assert counts_of(tmp_path, {"all": values}) == {"all": expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_finite_values_are_none_of_them(tmp_path: Path, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    tensors = {
        "fine": torch.tensor([top, -top, 0.0, -0.0, torch.finfo(dtype).tiny], dtype=dtype),
        "odd": torch.tensor([1.0, *ODD], dtype=dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "integers": torch.full((3,), -1, dtype=torch.int32),
    }
    assert counts_of(tmp_path, tensors) == {"odd": 3}


def test_pieces_count_every_element_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_NBYTES", 16)
    values = torch.zeros(11)
    values[[0, 3, 4, 10]] = float("inf")
    assert counts_of(tmp_path, {"t": values}) == {"t": 4}
