"""How the error of a merge that is no sum falls with what is read: tried on samples of deltas.

The catalog keeps δ at the same few elements of every block for all experts. Any method that works
element by element can be applied to them: with all experts, and with less and less of them. Nothing
is tried before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mergepipe_pipeline.arrays import F32Array, F64Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import SAMPLE_WIDTH, TensorStats, widened
from mergepipe_pipeline.planner.candidates import Choice, Curve, Row

Samples = F32Array
#: [E, n] float32 deltas of E experts to the merged update, [n] float32.
Simulate = Callable[[Samples], Samples]
#: Parts of the samples that estimate an error each for itself: by how far they disagree, what all
#: of them say may be off.
PARTS = 8
#: Sampled elements of one tensor and all its experts that are tried at most.
_MAX_ELEMS = 1 << 18
#: Sampled elements that give a tensor's own curve, and its height, as well as all other tensors
#: do: shapes differ by a few percent from tensor to tensor, heights by more (measured on trained
#: experts), and estimates from so many elements err as much.
_SHAPE_ELEMS, _SIZE_ELEMS = 16384, 128
#: Inputs (tensors times experts) whose whole curves are tried; more only take time.
_MAX_INPUTS = 1 << 13
#: Points of a pooled curve.
_SHARES = 33


@dataclass(frozen=True)
class SimulatedCurve:
    """One output tensor's curve as tried on `n` sampled elements; `sq_norm` is theirs, as kept.

    Without `has_shape` only its height is known, and nothing between its ends.
    """

    curve: Curve
    n: int
    sq_norm: float
    has_shape: bool = True


class Simulation:
    """One output tensor's merge, to be tried on samples of its experts' deltas."""

    def __init__(
        self,
        rows: Sequence[Row],
        stats: Sequence[TensorStats],
        grid: BlockGrid,
        simulate: Simulate,
    ) -> None:
        self._rows, self._stats, self._simulate = rows, stats, simulate
        numel = max(r.numel for r in rows)
        n_blocks = grid.count(numel)
        # Evenly spread blocks, so many that all experts' samples stay small.
        step = -(-n_blocks // max(1, _MAX_ELEMS // (SAMPLE_WIDTH * len(rows))))
        self._kept = slice(0, n_blocks, step)
        lengths = np.minimum(grid.block_elems, numel - grid.block_elems * np.arange(n_blocks))
        #: Elements that each block's samples stand for.
        self._lengths = lengths[self._kept].astype(np.float64)
        self._scale = numel / self._lengths.sum()
        self._squares: dict[bytes, F64Array] = {}

    @property
    def n_experts(self) -> int:
        """Deltas per sampled element."""
        return len(self._rows)

    def squares(self, omitted: Sequence[Choice]) -> F64Array | None:
        """As `candidates.SimulatedErrors.squares`, of this tensor."""
        if not self._tells:
            return None
        squares = [self._without(choice[self._kept]) for choice in omitted]
        return np.array(squares).reshape(-1, PARTS)

    def _without(self, omitted: Choice) -> F64Array:
        """[PARTS]: the squared error without the `omitted` sampled blocks, [blocks, E]."""
        # A choice is asked for twice: when it is judged, and when its error is stated.
        key = omitted.tobytes()
        if key not in self._squares:
            some = self._samples().reshape(len(self._rows), -1, SAMPLE_WIDTH)
            some[omitted.T] = 0
            self._squares[key] = self._wrong(some.reshape(len(some), -1)) * self._scale
        return self._squares[key]

    def simulated_curve(self, *, shape: bool = True) -> SimulatedCurve | None:
        """The curve; None where the samples show no update at all.

        Experts are read in the order of their squared norm, as an output block's are. Without
        `shape` only nothing and everything are tried.
        """
        if not self._tells:
            return None
        samples, sq_norm = self._samples(), self._sq_norms
        order = np.argsort(-sq_norm, kind="stable")
        counts = _counts(len(order)) if shape else [0, len(order)]
        errors = []
        for count in counts[:-1]:
            some = np.zeros_like(samples)
            some[order[:count]] = samples[order[:count]]
            errors.append(self._wrong(some).mean())
        errors.append(0.0)
        sampled = sum(r.coefficient**2 * float(_sq_norm(r)[self._kept].sum()) for r in self._rows)
        if not sampled > 0 or not np.isfinite(errors).all():
            return None
        bought = np.concatenate([[0.0], np.cumsum(sq_norm[order])])[counts] / sq_norm.sum()
        curve = Curve(bought, np.array(errors) / errors[0], errors[0] / sampled)
        return SimulatedCurve(curve, samples.shape[1], sampled, shape)

    @cached_property
    def _sq_norms(self) -> F64Array:
        """(c·‖δ‖)² of each expert, as kept."""
        return np.array([r.coefficient**2 * _sq_norm(r).sum() for r in self._rows])

    @cached_property
    def _full(self) -> Samples:
        """The update that all experts give the samples."""
        return self._simulate(self._samples())

    @cached_property
    def _tells(self) -> bool:
        """Whether the samples show an update, in numbers."""
        if not 0 < self._sq_norms.sum() < np.inf:
            return False
        return bool(0 < self._weighed(self._full).mean() < np.inf)

    def _samples(self) -> Samples:
        """[E, blocks · SAMPLE_WIDTH] of δ."""
        bits = np.zeros((len(self._rows), len(self._lengths), SAMPLE_WIDTH), np.uint16)
        for i, s in enumerate(self._stats):
            own = s.block_sample[self._kept]
            bits[i, : len(own)] = own
        return widened(bits.reshape(len(bits), -1))

    def _wrong(self, some: Samples) -> F64Array:
        """[PARTS]: Σ(full − what `some` give)² over the blocks that the samples stand for."""
        # Every method merges nothing to nothing.
        return self._weighed(self._full - self._simulate(some) if some.any() else self._full)

    def _weighed(self, off: Samples) -> F64Array:
        squares = np.square(off, dtype=np.float64).reshape(len(self._lengths), -1, PARTS)
        weighed: F64Array = self._lengths @ squares.sum(axis=1) * (PARTS / SAMPLE_WIDTH)
        return weighed


class Simulations:
    """All simulations of a merge; `alike` are those of the same method, by number of the tensor."""

    def __init__(self, alike: Sequence[Mapping[int, Simulation]]) -> None:
        self._alike = alike
        self._all = {n: simulation for group in alike for n, simulation in group.items()}

    @cached_property
    def curves(self) -> Mapping[int, Curve]:
        """How each tensor's error falls, in the light of those that are merged alike."""
        return {n: curve for group in self._alike for n, curve in _drawn(group).items()}

    def squares(self, tensor: int, omitted: Sequence[Choice]) -> F64Array | None:
        """As `candidates.SimulatedErrors.squares`."""
        simulation = self._all.get(tensor)
        return simulation.squares(omitted) if simulation else None


def _drawn(alike: Mapping[int, Simulation]) -> dict[int, Curve]:
    """The curves of tensors merged alike; the shape of each of them, unless there are very many."""
    n_inputs = sum(r.n_experts for r in alike.values())
    every = max(1, n_inputs // _MAX_INPUTS)
    with Workers(threads.PLANNING) as workers:
        simulated = workers.map(
            lambda pair: pair[1].simulated_curve(shape=pair[0] % every == 0),
            enumerate(alike.values()),
        )
        return pooled({n: t for n, t in zip(alike, simulated, strict=True) if t})


def pooled(simulated: Mapping[int, SimulatedCurve]) -> dict[int, Curve]:
    """The curves of tensors merged alike; what few samples say is drawn towards what all say."""
    if not simulated:
        return {}
    curves = list(simulated.values())
    shares = np.linspace(0, 1, _SHARES)
    residuals = [np.interp(shares, r.curve.share, r.curve.residual) for r in curves]
    factor = _average(np.array([r.curve.factor for r in curves]), [r.sq_norm for r in curves])
    weights = [r.curve.factor * r.sq_norm * r.has_shape for r in curves]
    residual = _average(np.array(residuals), weights)
    out = {}
    for number, r, own in zip(simulated, curves, residuals, strict=True):
        shape, size = (r.n / (r.n + n) for n in (_SHAPE_ELEMS, _SIZE_ELEMS))
        shape *= r.has_shape
        out[number] = Curve(
            shares,
            residual + shape * (own - residual),
            float(factor + size * (r.curve.factor - factor)),
        )
    return out


def _average(values: F64Array, weights: Sequence[float]) -> F64Array:
    """The weighted mean over the first axis; the plain one where no sample has any weight."""
    mean: F64Array = np.average(values, axis=0, weights=weights if any(weights) else None)
    return mean


def _sq_norm(row: Row) -> F64Array:
    if row.block_sq_norm is not None:
        return row.block_sq_norm
    assert row.block_l2sq is not None
    return row.block_l2sq


def _counts(n_experts: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, … and all."""
    some = {0, 1, n_experts}
    step = 2
    while step < n_experts:
        some |= {step, min(n_experts, step + step // 2)}
        step *= 2
    return sorted(some)
