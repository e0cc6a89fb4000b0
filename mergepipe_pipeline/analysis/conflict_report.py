"""How experts' deltas agree and differ, from catalog statistics alone: no weight is read.

Norms are exact. All else is estimated (see `agreement`) and comes with a standard error, which
falls as blocks add up: a tensor is known better than a block, a layer better than a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add
from statistics import NormalDist

import numpy as np

from mergepipe_pipeline.analysis.agreement import Agreement, Sums, sums_of
from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.digest import digest_json, sha256_hex
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.stats import ExpertStats

#: Two experts whose deltas have at least this cosine tell a merge nearly the same.
REDUNDANT_COSINE = 0.95
#: The chance that a list of conflicting or of redundant pairs holds any that is not.
_WRONG_LIST = 0.05


@dataclass(frozen=True, slots=True)
class Pair:
    """Two experts in one place (a layer, a tensor, or "all"); errors are standard errors.

    `lost` is what the plain sum loses by this pair here, as a share of Σ‖δ‖² of all
    experts in all places; below 0 where the two add up.
    """

    place: str
    first: str
    second: str
    cosine: float
    cosine_error: float
    overlap: float
    overlap_error: float
    sign_agreement: float
    sign_error: float
    lost: float
    lost_error: float


@dataclass(frozen=True)
class ConflictReport:
    """Agreement of experts: of whole deltas, and per layer and per tensor in model order.

    `digest` covers the statistics compared.
    """

    experts: tuple[str, ...]
    whole: Agreement
    layers: Mapping[str, Agreement]
    tensors: Mapping[str, Agreement]
    digest: str

    def places(self, by: str) -> Mapping[str, Agreement]:
        """The agreement by "layer" or "tensor", or of "all"."""
        return {"all": {"all": self.whole}, "layer": self.layers, "tensor": self.tensors}[by]

    def pairs(self, by: str) -> Iterator[Pair]:
        """Each pair of experts in each place."""
        total = float(np.square(self.whole.norms).sum())
        for place, agreement in self.places(by).items():
            for i, j in combinations(range(len(self.experts)), 2):
                share = 2 * float(agreement.norms[i] * agreement.norms[j]) / total if total else 0.0
                yield Pair(
                    place,
                    self.experts[i],
                    self.experts[j],
                    float(agreement.cosine[i, j]),
                    float(agreement.cosine_error[i, j]),
                    float(agreement.overlap[i, j]),
                    float(agreement.overlap_error[i, j]),
                    float(agreement.sign_agreement[i, j]),
                    float(agreement.sign_error[i, j]),
                    lost=-share * float(agreement.cosine[i, j]),
                    lost_error=share * float(agreement.cosine_error[i, j]),
                )

    def conflicting(self, by: str) -> list[Pair]:
        """The pairs that certainly cancel, those that certainly cost most of Σ‖δ‖² first."""
        pairs = list(self.pairs(by))
        errors = _certain_errors(len(pairs))
        certain = [(p.lost - errors * p.lost_error, p) for p in pairs]
        return [p for lost, p in sorted(certain, key=lambda c: -c[0]) if lost > 0]

    def redundant(self, by: str) -> list[Pair]:
        """The pairs whose cosine is certainly REDUNDANT_COSINE or more, most alike first."""
        pairs = list(self.pairs(by))
        errors = _certain_errors(len(pairs))
        certain = [(p.cosine - errors * p.cosine_error, p) for p in pairs]
        return [p for cos, p in sorted(certain, key=lambda c: -c[0]) if cos >= REDUNDANT_COSINE]

    def profile(self, by: str) -> F64Array:
        """[places, K]: the mean cosine of each expert with the others, place by place."""
        profiles = [mean_cosine(agreement) for agreement in self.places(by).values()]
        return np.array(profiles).reshape(-1, len(self.experts))


def conflicts(names: Sequence[str], stats: Sequence[ExpertStats]) -> ConflictReport:
    """Compare experts of one base, on one block grid.

    A tensor of the base is compared with those of the same name. An expert that lacks it counts as
    unchanged there.
    """
    tables = [{t.tensor: t for t in s.tensors if t.tensor == t.base_tensor} for s in stats]
    tensors = list(dict.fromkeys(t for table in tables for t in table))
    n_layers = layer_count(tensors)
    # By name within a layer: sums must not depend on the order in which experts were analysed.
    tensors.sort(key=lambda tensor: (layer_order(layer_name(tensor, n_layers)), tensor))
    by_tensor = {t: sums_of([x.get(t) for x in tables], stats[0].block_elems) for t in tensors}
    layers: dict[str, Sums] = {}
    for tensor, sums in by_tensor.items():
        layer = layer_name(tensor, n_layers)
        layers[layer] = layers[layer] + sums if layer in layers else sums
    return ConflictReport(
        experts=tuple(names),
        whole=_total(layers.values(), len(names)).agreement(),
        layers={layer: sums.agreement() for layer, sums in layers.items()},
        tensors={tensor: sums.agreement() for tensor, sums in by_tensor.items()},
        digest=digest_json([list(names), [_content(s) for s in stats]]),
    )


def _certain_errors(count: int) -> float:
    """How many standard errors none of `count` figures is off on one side, but for _WRONG_LIST."""
    return NormalDist().inv_cdf(1 - _WRONG_LIST / max(1, count))


def mean_cosine(agreement: Agreement) -> F64Array:
    """[K]: the mean cosine of each expert with the others; 0 where it is alone."""
    n_others = max(1, len(agreement.norms) - 1)
    mean: F64Array = (agreement.cosine.sum(axis=1) - np.diagonal(agreement.cosine)) / n_others
    return mean


def _total(parts: Iterable[Sums], count: int) -> Sums:
    """The sum of all; zeros if there are none."""
    zero = np.zeros((count, count))
    return reduce(add, parts, Sums(zero, zero, 0.0, zero, zero, zero, 0.0, 0.0))


def _content(stats: ExpertStats) -> list[list[str]]:
    """Return what is compared of one expert, in an order of its own."""
    return sorted(
        [
            t.base_tensor,
            sha256_hex(np.float64(t.l2sq).tobytes() + t.block_sample.tobytes()),
        ]
        for t in stats.tensors
    )
