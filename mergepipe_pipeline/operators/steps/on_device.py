"""What `sparsify` does in NumPy, in torch: for deltas that lie on an accelerator.

It gives the same numbers and the same masks, as integers wrap alike everywhere and a stable sort
has one answer. Works on any device; on a CPU, NumPy is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA

if TYPE_CHECKING:
    from torch import Tensor

_LOW_32_BITS = 2**32 - 1


def uniforms(key: np.uint64, start_elem: int, like: Tensor) -> Tensor:
    """Numbers [start, start + n) of stream `key`, for `like` [n] on its device: int64, below 2**32.

    Those of `random.uniforms`.
    """
    import torch

    n = like.shape[0]
    first, skip = divmod(start_elem, 2)
    words = (skip + n + 1) // 2
    states = torch.arange(first + 1, first + 1 + words, device=like.device)
    states.mul_(_signed(int(GAMMA))).add_(_signed(int(key)))
    # The low half comes first: all of safetensors and CUDA is little-endian.
    return _mixed(states).view(torch.int32)[skip : skip + n].long().bitwise_and_(_LOW_32_BITS)


def drop_(delta: Tensor, numbers: Tensor, keep_below: int) -> None:
    """Zero elements of `delta`, float32 [n], whose number is not below `keep_below`."""
    delta.mul_(numbers.lt(keep_below))


def drop_by_rank_(rows: Tensor, numbers: Tensor, probability: F64Array, *, inverse: bool) -> None:
    """As `sparsify.drop_by_rank_`: `rows` [r, n], p by rank [n], int64 numbers [r·n]."""
    import torch

    limits = torch.from_numpy(np.rint(probability * 2**32).astype(np.int64)).to(rows.device)
    factors = rows.new_tensor(1 / probability if inverse else np.ones_like(probability))
    # Magnitudes rank as their bit patterns do, NaN above infinity.
    ascending = rows.abs().view(torch.int32).sort(dim=1, stable=True).indices  # [r, n] by rank
    kept = numbers.view(rows.shape).gather(1, ascending).lt(limits)
    rows.mul_(torch.empty_like(rows).scatter_(1, ascending, kept * factors))


def _mixed(states: Tensor) -> Tensor:
    """`splitmix.mixed` of int64 [n], in place."""
    _xor_shifted_(states, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    _xor_shifted_(states, 27).mul_(_signed(0x94D049BB133111EB))
    return _xor_shifted_(states, 31)


def _xor_shifted_(states: Tensor, places: int) -> Tensor:
    """Each word xor itself shifted right, zeros moving in, where torch moves the sign in."""
    shifted = states.bitwise_right_shift(places).bitwise_and_(2 ** (64 - places) - 1)
    return states.bitwise_xor_(shifted)


def _signed(word: int) -> int:
    """The int64 with the bits of a uint64."""
    return word - 2**64 if word >= 2**63 else word
