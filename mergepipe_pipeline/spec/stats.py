"""What analysis learns about an expert's delta, per tensor and per block, as plain arrays.

Filled in by `analysis`, kept by `catalog`, read by `planner`. Statistics of δ = float32(expert) −
float32(base), elementwise; sums in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

#: Width of the per-tensor sketch: cosines between experts are estimated to about 1/sqrt(width).
SKETCH_WIDTH = 256
#: A magnitude's histogram bin is its float32 pattern without sign, shifted by this many bits.
HIST_SHIFT = 16


@dataclass(frozen=True)
class TensorStats:
    """One expert tensor against a tensor of the base.

    `sha256` and `base_sha256` are of the stored bytes, empty where the pass did not see them whole.

    `hist_bins` (uint16, ascending) and `hist_counts` (int64): occupied bins of bits(|δ|) >> 16.
    `sketch`: float32 [SKETCH_WIDTH], a random-sign projection; inner products of sketches estimate
    inner products of deltas. `block_*`: one entry per block of the grid.
    """

    tensor: str
    base_tensor: str
    sha256: str
    base_sha256: str
    numel: int
    l1: float
    l2sq: float
    max_abs: float
    nonzero: int
    hist_bins: npt.NDArray[np.uint16]
    hist_counts: npt.NDArray[np.int64]
    sketch: npt.NDArray[np.float32]
    block_l2sq: npt.NDArray[np.float64]
    block_max_abs: npt.NDArray[np.float32]
    block_nonzero: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExpertStats:
    """Tensors of one expert against a base's, on one block grid; ids are those of models."""

    base_id: str
    checkpoint_id: str
    block_elems: int
    tensors: tuple[TensorStats, ...]

    @cached_property
    def by_pair(self) -> dict[tuple[str, str], TensorStats]:
        """By (expert's tensor, base's tensor)."""
        return {(t.tensor, t.base_tensor): t for t in self.tensors}
