"""How much each layer is expected to matter, before anything is evaluated: the prior of AP-BMM.

Differences of parameters come from the catalog's statistics; no weight is read for them, unless a
source was not analysed yet. A layer's score is the mean over its tensors of ‖Δ‖, each as a share of
the mean over layers of the tensor of that role: shapes and scales differ from role to role, and the
catalog has no norms of the base. Of a mix, Δ is what lies between the two sources: exact norms, and
inner products from samples. A short length-scale says that an objective changes fast along a
dimension. In the paper (arXiv 2512.09972) only ranks of scores enter; here how far they are apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from mergepipe_pipeline.analysis.agreement import sums_of
from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.layers import layer_count, layer_index, layer_name, with_layer_index
from mergepipe_pipeline.domain.model import grid_for
from mergepipe_pipeline.domain.stats import TensorStats
from mergepipe_pipeline.facts.analysed import analysed_experts
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.search.ledger import Ledger, Prior, Search
from mergepipe_pipeline.search.space import Space, numbered
from mergepipe_pipeline.search.start import models_of
from mergepipe_pipeline.warehouse import Warehouse


def search_prior(warehouse: Warehouse, search: Search, progress: Progress | None = None) -> Prior:
    """The prior of a search, made if it is not there; what is not known of sources is analysed."""
    ledger = Ledger(warehouse, search.name)
    prior = ledger.prior()
    if prior is None:
        ledger.put_prior(_prior(warehouse, search, progress))
        prior = ledger.prior()
        assert prior is not None
    return prior


def _prior(warehouse: Warehouse, search: Search, progress: Progress | None) -> Prior:
    file, names = search.file, numbered(search.layers)
    parameter = _parameter_differences(warehouse, search, progress)
    blocks = grouped(parameter, len(names) if file.space.blocks is None else file.space.blocks)
    space = Space(file, search.layers, tuple(tuple(names[n] for n in b) for b in blocks))
    scores = _per_coordinate(space, smooth_scores(parameter), names)
    return Prior(
        space.labels,
        space.blocks,
        _tuple(parameter),
        _tuple(scores),
        _tuple(length_scales(scores)),
    )


def _per_coordinate(space: Space, scores: F64Array, names: Sequence[str]) -> F64Array:
    """The mean score of each group's layers, for each of its coordinates; the rest have the mean
    of all.
    """
    score = dict(zip(names, scores, strict=True))
    step = 1 if space.file.is_mix else len(space.file.sources)
    of_layers = [
        float(np.mean([score.get(layer, scores.mean()) for layer in group.layers]))
        for group in space.groups
        for _ in range(step)
    ]
    return np.array(of_layers + [float(scores.mean())] * (space.dims - len(of_layers)))


def _parameter_differences(
    warehouse: Warehouse, search: Search, progress: Progress | None
) -> F64Array:
    """A score per numbered layer, from the catalog."""
    models = models_of(warehouse, search.file, search.folder)
    base, sources = models[search.file.base_model], [models[s] for s in search.file.sources]
    known = analysed_experts(warehouse, sources, base, grid_for(base, None), progress)
    tensors = [{t.base_tensor: t for t in e.stats().tensors} for e in known]
    norms: dict[str, float] = {}
    for name in base.views:
        of_sources = [of_one[name] for of_one in tensors if name in of_one]
        if of_sources:
            is_mix, elems = search.file.is_mix, known[0].grid.block_elems
            norms[name] = math.sqrt(_between(of_sources, elems, is_mix=is_mix))
    return layer_scores(norms, numbered(search.layers))


def layer_scores(norms: Mapping[str, float], names: Sequence[str]) -> F64Array:
    """Per layer the mean of its tensors' norms, each as a share of its role's mean over layers."""
    by_role: dict[str, list[float]] = {}
    inner = {name: norm for name, norm in norms.items() if layer_index(name) is not None}
    for name, norm in inner.items():
        by_role.setdefault(with_layer_index(name, 0), []).append(norm)
    n_layers = layer_count(norms)
    shares: dict[str, list[float]] = {name: [] for name in names}
    for name, norm in inner.items():
        mean = float(np.mean(by_role[with_layer_index(name, 0)]))
        shares[layer_name(name, n_layers)].append(norm / mean if mean else 0.0)
    return np.array([float(np.mean(of_layer)) if of_layer else 0.0 for of_layer in shares.values()])


def _between(stats: Sequence[TensorStats], block_elems: int, *, is_mix: bool) -> float:
    """‖Δ‖² of one tensor: of the sources from each other in a mix, else of all from the base."""
    total = sum(t.l2sq for t in stats)
    if not math.isfinite(total):
        return 0.0
    if is_mix:
        inner = sums_of(stats, block_elems).inner  # [sources, sources]
        total = float(2 * np.trace(inner) - inner.sum())
    return max(total, 0.0)


def _tuple(values: F64Array) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


#: Consistent with a standard deviation, for normal scores.
_MAD_SCALE = 1.4826
_SMALL = 1e-8
#: Where a sigmoid is flat.
_FAR = 50.0


def smooth_scores(differences: F64Array) -> F64Array:
    """Scores between 0.05 and 1 from differences of layers, normalised, then smoothed.

    What is not finite counts as the middle.
    """
    each = _normalised(differences)
    smooth = each.copy()
    smooth[1:-1] = each[:-2] / 4 + each[1:-1] / 2 + each[2:] / 4
    scores: F64Array = np.clip(smooth, 0.05, 1.0)
    return scores


def length_scales(scores: F64Array) -> F64Array:
    """Length-scales in inverse proportion to scores above 0: 0.5 for a score of 1."""
    lengths: F64Array = 0.5 / scores
    return lengths


def _normalised(scores: F64Array) -> F64Array:
    """0 to 1 about the median, robustly; between the extremes where most scores are equal."""
    known = scores[np.isfinite(scores)]
    middle = np.full(len(scores), 0.5)
    if not len(known):
        return middle
    median = np.median(known)
    spread = np.median(np.abs(known - median))
    if spread >= _SMALL:
        apart = (scores - median) / (_MAD_SCALE * spread + _SMALL)
        scaled = 1 / (1 + np.exp(-np.clip(apart, -_FAR, _FAR)))
    elif np.ptp(known) >= _SMALL:
        scaled = (scores - known.min()) / np.ptp(known)
    else:
        return middle
    return np.where(np.isfinite(scores), scaled, middle)


def grouped(scores: F64Array, count: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of layers in `count` runs with the least sum of squared errors about their means.

    By dynamic programming over the ends of runs, in n² · count steps.
    """
    n = len(scores)
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (scores, scores**2))

    def error(start: int, stop: int) -> float:
        total = sums[stop] - sums[start]
        return float(squares[stop] - squares[start] - total * total / (stop - start))

    best = [[np.inf] * (n + 1) for _ in range(count + 1)]
    came = [[0] * (n + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for runs in range(1, count + 1):
        for stop in range(runs, n + 1):
            options = [
                best[runs - 1][start] + error(start, stop) for start in range(runs - 1, stop)
            ]
            least = int(np.argmin(options))
            best[runs][stop], came[runs][stop] = options[least], runs - 1 + least
    cuts = [n]
    for runs in range(count, 0, -1):
        cuts.append(came[runs][cuts[-1]])
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(reversed(cuts)))
