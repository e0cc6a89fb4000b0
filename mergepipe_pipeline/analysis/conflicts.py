"""How experts' deltas agree and differ, from catalog sketches alone: no weight is read.

Cosines are estimated: an inner product of sketches has a standard error of about
‖δᵢ‖‖δⱼ‖/sqrt(width) per tensor. Norms are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.spec.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.spec.stats import SKETCH_WIDTH, ExpertStats


@dataclass(frozen=True)
class ConflictReport:
    """`cosine` [K, K] over whole deltas; `layer_norms` ‖δ‖₂ per layer and expert.

    `interference` is 1 − ‖Σδ‖²/Σ‖δ‖²: 0 for orthogonal deltas, above 0 where they cancel, below
    where they agree. `digest` covers the statistics compared.
    """

    experts: tuple[str, ...]
    cosine: npt.NDArray[np.float64]
    layer_norms: dict[str, tuple[float, ...]]
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
    gram, norms = np.zeros((k, k)), np.zeros(k)
    layers: dict[str, list[float]] = {}
    tables = [{t.tensor: t for t in s.tensors} for s in stats]
    tensors = list(dict.fromkeys(t for table in tables for t in table))
    n_layers = layer_count(tensors)
    for tensor in tensors:
        found = [table.get(tensor) for table in tables]
        sketches = np.stack(
            [t.sketch.astype(np.float64) if t else np.zeros(SKETCH_WIDTH) for t in found]
        )
        gram += sketches @ sketches.T
        exact = np.array([t.l2sq if t else 0.0 for t in found])
        norms += exact
        sums = layers.setdefault(layer_name(tensor, n_layers), [0.0] * k)
        layers[layer_name(tensor, n_layers)] = [a + b for a, b in zip(sums, exact, strict=True)]
    np.fill_diagonal(gram, norms)
    scale = np.sqrt(np.outer(norms, norms))
    cosine = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
    total = float(norms.sum())
    contents = [[(t.tensor, t.sha256, t.base_sha256) for t in s.tensors] for s in stats]
    return ConflictReport(
        experts=tuple(names),
        cosine=np.clip(cosine, -1.0, 1.0),
        layer_norms={
            layer: tuple(math.sqrt(v) for v in layers[layer])
            for layer in sorted(layers, key=layer_order)
        },
        interference=1.0 - float(gram.sum()) / total if total else 0.0,
        standard_error=1.0 / math.sqrt(SKETCH_WIDTH),
        digest=digest_json([list(names), contents]),
    )
