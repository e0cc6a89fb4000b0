"""Telling our result from mergekit's: distance in last places, and where a difference is no fault.

All formulas here are in float64 and owe nothing to the code under test.
"""

from __future__ import annotations

import torch

from tests.parity.peer import Planned
from tests.parity.recipes import Doubt
from tests.support.architectures import Tensors

#: Rounding of float32 arithmetic, relative to the largest value of the inputs: where terms cancel,
#: the result is smaller than what was rounded on the way, and its last place is no measure.
_NOISE = 2.0**-21
#: Relative distance to its threshold within which a computed score may fall on either side.
_NEAR = 1e-4


def ulps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance in units of the last bfloat16 place, elementwise; -0 and +0 are one place."""

    def place(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    assert a.dtype == b.dtype == torch.bfloat16
    return (place(a) - place(b)).abs()


def assert_same(
    ours: Tensors, theirs: Tensors, doubtful: Tensors, *, equal_share: float = 0.999
) -> None:
    """Every tensor within one last place, and `equal_share` of all elements bit-equal.

    Elements marked in `doubtful` are left out. Raises AssertionError naming the tensor.
    """
    assert ours.keys() == theirs.keys()
    total = equal = 0
    for name, value in ours.items():
        other = theirs[name]
        assert value.shape == other.shape, name
        assert bool(value.isfinite().all()), name
        distance = ulps(value, other)
        rounding = (value.double() - other.double()).abs() <= _NOISE * float(other.abs().max())
        wrong = (distance > 1) & ~rounding
        if name in doubtful:
            wrong &= ~doubtful[name]
            distance = distance[~doubtful[name]]
        assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of {wrong.numel()} differ"
        total += distance.numel()
        equal += int((distance == 0).sum())
    assert equal / total >= equal_share, f"{total - equal} of {total} elements are not bit-equal"


def doubtful_elements(
    doubt: Doubt, plan: dict[str, Planned], models: dict[str, Tensors]
) -> Tensors:
    """Masks of the elements where mergekit's choice is arbitrary; `models` by folder."""
    if doubt == "none":
        return {}
    out = {}
    for name, planned in plan.items():
        sources = (planned.base, *planned.experts)
        if None in sources or any(n not in models[m] for m, n in sources if m):  # type: ignore[misc]
            continue
        base, *experts = (models[m][n].double() for m, n in sources)  # type: ignore[misc]
        deltas = torch.stack([e - base for e in experts])
        out[name] = _DOUBTS[doubt](base, deltas, planned)
    return out


def _trim(base: torch.Tensor, deltas: torch.Tensor, planned: Planned) -> torch.Tensor:
    out = torch.zeros(base.shape, dtype=torch.bool)
    for delta, params in zip(deltas, planned.model_params, strict=True):
        if 0 < params["density"] < 1:
            n_kept = max(1, int(params["density"] * delta.numel()))
            out |= _at_border(delta.abs(), delta.numel() - n_kept)
    return out


def _band(base: torch.Tensor, deltas: torch.Tensor, planned: Planned) -> torch.Tensor:
    out = torch.zeros(base.shape, dtype=torch.bool)
    for delta, params in zip(deltas, planned.model_params, strict=True):
        if 0 < params["density"] < 1:
            n = delta.numel()
            n_kept = int(params["density"] * n)
            first = max(0, n - n_kept - int(params["gamma"] * n))
            out |= _at_border(delta.abs(), first) | _at_border(delta.abs(), first + n_kept)
    return out


def _choice(base: torch.Tensor, deltas: torch.Tensor, planned: Planned) -> torch.Tensor:
    if "select_topk" in planned.params:
        score = deltas.var(dim=0, unbiased=False)
        n_kept = int(int((score > 0).sum()) * planned.params["select_topk"])
        threshold = score.flatten().sort(descending=True).values[max(0, n_kept - 1)]
    else:
        (delta,) = deltas
        p, q = ((x.softmax(dim=-1) + 1e-8) for x in (base + delta, base))
        score = delta.abs() * (p * (p / q).log()).sum(dim=-1, keepdim=True)
        ranks = [int(share * (score.numel() - 1)) for share in (0.25, 0.5, 0.75)]
        low, median, high = score.flatten().sort().values[ranks]
        threshold = median + 1.5 * (high - low)
    return ((score - threshold).abs() <= _NEAR * threshold) & (score > 0)


def _at_border(size: torch.Tensor, rank: int) -> torch.Tensor:
    """Where `size` equals the size on both sides of a cut at an ascending rank, save for zeros."""
    ascending = size.flatten().sort().values
    if not 0 < rank < len(ascending) or ascending[rank - 1] != ascending[rank]:
        return torch.zeros(size.shape, dtype=torch.bool)
    return (size == ascending[rank]) & (size > 0)


_DOUBTS = {"trim": _trim, "band": _band, "choice": _choice}
