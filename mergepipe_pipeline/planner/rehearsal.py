"""How the error of a merge that is no sum falls with what is bought: tried on samples of deltas.

The catalog keeps δ at the same few elements of every block for all experts. Any method that works
element by element can be applied to them: once with all experts, then with fewer and fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.planner.candidates import Choice, Curve, Floats, Row
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.stats import SAMPLE_WIDTH, TensorStats, widened

#: [E, n] float32 deltas of E experts to the merged update, [n] float32.
Rehearse = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
#: Sampled elements of one tensor and all its experts that are tried at most.
_MAX_ELEMS = 1 << 18
#: Sampled elements that know a tensor's own curve, and its height, as well as all other tensors
#: do: shapes differ by a few percent from tensor to tensor, heights by more (measured on trained
#: experts), and estimates from so many elements err as much.
_SHAPE_ELEMS, _SIZE_ELEMS = 16384, 128
#: Inputs (tensors times experts) whose whole curves are tried; more only take time.
_MAX_INPUTS = 1 << 13
#: Points of a pooled curve.
_SHARES = 33


@dataclass(frozen=True)
class Rehearsal:
    """One output tensor's curve as tried on `n` sampled elements; `energy` is theirs, as kept.

    Without `has_shape` only its height is known, and nothing between its ends.
    """

    curve: Curve
    n: int
    energy: float
    has_shape: bool = True


def rehearsed(
    rows: Sequence[Row],
    stats: Sequence[TensorStats],
    grid: BlockGrid,
    rehearse: Rehearse,
    *,
    shape: bool = True,
) -> Rehearsal | None:
    """The rehearsal of one output tensor; None where the samples show no update at all.

    Experts are bought in the order of their energy, as a site's are. Without `shape` only nothing
    and everything are tried.
    """
    energy = np.array([r.coefficient**2 * _energy(r).sum() for r in rows])
    if not 0 < energy.sum() < np.inf:
        return None
    samples, lengths = _samples(rows, stats, grid)
    order = np.argsort(-energy, kind="stable")
    full = rehearse(samples.copy())
    lefts = []
    counts = _counts(len(rows)) if shape else [0, len(rows)]
    for count in counts[:-1]:
        some = np.zeros_like(samples)
        some[order[:count]] = samples[order[:count]]
        lefts.append(_wrong(full, rehearse(some), lengths))
    lefts.append(0.0)
    if not lefts[0] > 0 or not np.isfinite(lefts).all():
        return None
    bought = np.concatenate([[0.0], np.cumsum(energy[order])])[counts] / energy.sum()
    sampled = sum(
        r.coefficient**2 * float(_energy(r)[_kept_blocks(rows, len(_energy(r)))].sum())
        for r in rows
    )
    if not sampled > 0:
        return None

    def replay(omitted: Sequence[Choice]) -> list[float]:
        return _replayed(rows, stats, grid, rehearse, omitted)

    curve = Curve(bought, np.array(lefts) / lefts[0], lefts[0] / sampled, replay)
    return Rehearsal(curve, samples.shape[1], sampled, shape)


def pooled(rehearsals: Mapping[int, Rehearsal]) -> dict[int, Curve]:
    """The curves of tensors merged alike; what few samples say is drawn towards what all say."""
    if not rehearsals:
        return {}
    found = list(rehearsals.values())
    shares = np.linspace(0, 1, _SHARES)
    lefts = [np.interp(shares, r.curve.share, r.curve.left) for r in found]
    factor = np.average([r.curve.factor for r in found], weights=[r.energy for r in found])
    weights = [r.curve.factor * r.energy * r.has_shape for r in found]
    left = np.average(lefts, axis=0, weights=weights)
    out = {}
    for number, r, own in zip(rehearsals, found, lefts, strict=True):
        shape, size = (r.n / (r.n + n) for n in (_SHAPE_ELEMS, _SIZE_ELEMS))
        shape *= r.has_shape
        out[number] = Curve(
            shares,
            left + shape * (own - left),
            float(factor + size * (r.curve.factor - factor)),
            r.curve.replay,
        )
    return out


def _replayed(
    rows: Sequence[Row],
    stats: Sequence[TensorStats],
    grid: BlockGrid,
    rehearse: Rehearse,
    omitted: Sequence[Choice],
) -> list[float]:
    """The squared errors of leaving out just these blocks, [blocks, E] each."""
    samples, lengths = _samples(rows, stats, grid)
    scale = max(r.numel for r in rows) / lengths.sum()
    full = rehearse(samples.copy())
    squares = []
    for left in omitted:
        some = samples.reshape(len(rows), -1, SAMPLE_WIDTH).copy()
        some[left[_kept_blocks(rows, len(left))].T] = 0
        wrong = _wrong(full, rehearse(some.reshape(len(rows), -1)), lengths)
        squares.append(wrong * scale)
    return squares


def _wrong(full: npt.NDArray[np.float32], found: npt.NDArray[np.float32], lengths: Floats) -> float:
    """Σ(full − found)² over the blocks that the samples stand for."""
    off = np.square(full - found, dtype=np.float64).reshape(-1, SAMPLE_WIDTH)
    return float((off.sum(axis=1) * lengths).sum() / SAMPLE_WIDTH)


def _energy(row: Row) -> Floats:
    if row.block_energy is not None:
        return row.block_energy
    assert row.block_l2sq is not None
    return row.block_l2sq


def _kept_blocks(rows: Sequence[Row], n_blocks: int) -> slice:
    """Evenly spread blocks, so many that all experts' samples stay small."""
    most = max(1, _MAX_ELEMS // (SAMPLE_WIDTH * len(rows)))
    longest = max(len(_energy(r)) for r in rows)
    return slice(0, n_blocks, -(-longest // most))


def _samples(
    rows: Sequence[Row], stats: Sequence[TensorStats], grid: BlockGrid
) -> tuple[npt.NDArray[np.float32], Floats]:
    """[E, blocks · SAMPLE_WIDTH] of δ, and the elements that each block's samples stand for."""
    numel = max(r.numel for r in rows)
    n_blocks = grid.count(numel)
    kept = _kept_blocks(rows, n_blocks)
    table = np.zeros((len(rows), n_blocks, SAMPLE_WIDTH), np.float32)
    for i, s in enumerate(stats):
        table[i, : len(s.block_sample)] = widened(s.block_sample)
    lengths = np.minimum(grid.block_elems, numel - grid.block_elems * np.arange(n_blocks))
    return table[:, kept].reshape(len(rows), -1), lengths[kept].astype(np.float64)


def _counts(n_experts: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, … and all."""
    some = {0, 1, n_experts}
    step = 2
    while step < n_experts:
        some |= {step, min(n_experts, step + step // 2)}
        step *= 2
    return sorted(some)


def shaped_every(n_tensors: int, n_experts: int) -> int:
    """Each how many tensors the whole curve is tried: all, unless there are very many inputs."""
    return max(1, n_tensors * n_experts // _MAX_INPUTS)
