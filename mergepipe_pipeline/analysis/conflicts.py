"""How experts' deltas agree and differ, from catalog sketches alone: no weight is read.

Norms are exact. Cosines are cosines of sketches: estimates with a standard error of at most about
1/sqrt(width), less the more two deltas agree, and exactly 1 for equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.spec.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.spec.stats import SKETCH_WIDTH, ExpertStats

#: Two experts whose deltas have at least this cosine tell a merge nearly the same.
REDUNDANT_COSINE = 0.95

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ConflictReport:
    """`cosine` [K, K] over whole deltas, `layer_cosine` per layer; `layer_norms` ‖δ‖₂ per expert.

    A delta that is zero has cosine 0 with all, itself included. `redundant_pairs`: (name, name,
    cosine) of pairs at REDUNDANT_COSINE or above, most alike first. `standard_error`: of cosines.
    `interference` is 1 − ‖Σδ‖²/Σ‖δ‖²: 0 for orthogonal deltas, above 0 where they cancel, below
    where they agree. `digest` covers the statistics compared.
    """

    experts: tuple[str, ...]
    cosine: Matrix
    layer_cosine: dict[str, Matrix]
    layer_norms: dict[str, tuple[float, ...]]
    redundant_pairs: tuple[tuple[str, str, float], ...]
    interference: float
    standard_error: float
    digest: str

    def cosine_rows(self) -> list[tuple[str, ...]]:
        """One row per expert for a table."""
        return [
            (name, *(f"{c:+.3f}" for c in row))
            for name, row in zip(self.experts, self.cosine, strict=True)
        ]

    def norm_rows(self) -> list[tuple[str, ...]]:
        """One row per layer for a table."""
        return [(layer, *(f"{n:.4g}" for n in norms)) for layer, norms in self.layer_norms.items()]


def conflicts(names: Sequence[str], stats: Sequence[ExpertStats]) -> ConflictReport:
    """Compare experts of one base.

    Sketches of tensors that not all have count as zero where absent.
    """
    k = len(stats)
    grams: dict[str, Matrix] = {}
    norms_sq: dict[str, npt.NDArray[np.float64]] = {}
    tables = [{t.base_tensor: t for t in s.tensors} for s in stats]
    tensors = list(dict.fromkeys(t for table in tables for t in table))
    n_layers = layer_count(tensors)
    for tensor in tensors:
        layer = layer_name(tensor, n_layers)
        found = [table.get(tensor) for table in tables]
        sketches = np.stack(
            [t.sketch.astype(np.float64) if t else np.zeros(SKETCH_WIDTH) for t in found]
        )
        grams[layer] = grams.get(layer, np.zeros((k, k))) + sketches @ sketches.T
        exact = np.array([t.l2sq if t else 0.0 for t in found])
        norms_sq[layer] = norms_sq.get(layer, np.zeros(k)) + exact
    layers = sorted(grams, key=layer_order)
    cosine = _cosine(sum((grams[layer] for layer in layers), np.zeros((k, k))))
    return ConflictReport(
        experts=tuple(names),
        cosine=cosine,
        layer_cosine={layer: _cosine(grams[layer]) for layer in layers},
        layer_norms={layer: tuple(np.sqrt(norms_sq[layer]).tolist()) for layer in layers},
        redundant_pairs=_redundant(names, cosine),
        interference=_interference(cosine, sum((norms_sq[layer] for layer in layers), np.zeros(k))),
        standard_error=1.0 / math.sqrt(SKETCH_WIDTH),
        digest=digest_json([list(names), [_content(s) for s in stats]]),
    )


def _content(stats: ExpertStats) -> list[list[str]]:
    """What is compared of one expert, in an order of its own."""
    return sorted(
        [t.base_tensor, sha256_hex(np.float64(t.l2sq).tobytes() + t.sketch.tobytes())]
        for t in stats.tensors
    )


def _cosine(gram: Matrix) -> Matrix:
    """Inner products of sketches [K, K] over the sketches' own norms; 0 where one is zero."""
    diagonal = np.diagonal(gram)
    scale = np.sqrt(np.outer(diagonal, diagonal))
    return np.clip(np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0), -1.0, 1.0)


def _redundant(names: Sequence[str], cosine: Matrix) -> tuple[tuple[str, str, float], ...]:
    pairs = [
        (names[i], names[j], float(cosine[i, j]))
        for i, j in combinations(range(len(names)), 2)
        if cosine[i, j] >= REDUNDANT_COSINE
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair[2]))


def _interference(cosine: Matrix, norms_sq: npt.NDArray[np.float64]) -> float:
    total = float(norms_sq.sum())
    gram = cosine * np.sqrt(np.outer(norms_sq, norms_sq))
    return 1.0 - float(gram.sum()) / total if total else 0.0
