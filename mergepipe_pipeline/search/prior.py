"""How much each layer is expected to matter, before anything is evaluated.

Differences of parameters come from the catalog's statistics; no weight is read for them, unless a
source was not analysed yet. A layer's score is the mean over its tensors of ‖Δ‖, each as a share of
the mean over layers of the tensor of that role: shapes and scales differ from role to role, and the
catalog has no norms of the base. Of a mix, Δ is what lies between the two sources: exact norms, and
inner products from sketches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.domain.layers import layer_count, layer_index, layer_name, with_layer_index
from mergepipe_pipeline.domain.model import grid_for
from mergepipe_pipeline.domain.stats import TensorStats, widened
from mergepipe_pipeline.facts.expert_stats import common_pairs, ensure_stats
from mergepipe_pipeline.optimise.prior import (
    length_scales,
    mixed_scores,
    proportional_length_scales,
)
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.search.blocks import grouped
from mergepipe_pipeline.search.ledger import Ledger
from mergepipe_pipeline.search.prompts import activation_differences
from mergepipe_pipeline.search.records import Prior, Search
from mergepipe_pipeline.search.space import Space, numbered
from mergepipe_pipeline.search.start import models_of
from mergepipe_pipeline.warehouse import Warehouse


def search_prior(warehouse: Warehouse, search: Search, progress: Progress | None = None) -> Prior:
    """The prior of a search, made if it is not there; analyses sources of which nothing is known.

    Raises EvaluationError where activations are asked for and the forward pass fails.
    """
    ledger = Ledger(warehouse, search.name)
    prior = ledger.prior()
    if prior is None:
        ledger.put_prior(_prior(warehouse, search, progress))
        prior = ledger.prior()
        assert prior is not None
    return prior


def _prior(warehouse: Warehouse, search: Search, progress: Progress | None) -> Prior:
    file, names = search.file, numbered(search.layers)
    count = len(names) if file.blocks is None else file.blocks
    parameter = activation = None
    if file.prior != "none" or count < len(names):
        parameter = _parameter_differences(warehouse, search, progress)
    if file.prompts is not None:
        activation = activation_differences(
            file, search.folder, models_of(warehouse, search), len(names), search.told
        )
    one_each = tuple((number,) for number in range(len(names)))
    blocks = one_each if count == len(names) or parameter is None else grouped(parameter, count)
    space = Space(file, search.layers, tuple(tuple(names[n] for n in b) for b in blocks))
    scores = lengths = None
    if file.prior != "none" and parameter is not None:
        scores = _per_coordinate(space, mixed_scores(parameter, activation), names)
        is_held = file.prior == "map"
        lengths = _tuple((proportional_length_scales if is_held else length_scales)(scores))
    return Prior(
        space.labels,
        space.blocks,
        None if parameter is None else _tuple(parameter),
        None if activation is None else _tuple(activation),
        None if scores is None else _tuple(scores),
        lengths,
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
    models = models_of(warehouse, search)
    base, sources = models[search.file.base], [models[s] for s in search.file.sources]
    wanted = [(source, common_pairs(source, base)) for source in sources]
    known = ensure_stats(warehouse, wanted, base, grid_for(base, None), progress)
    tensors = [{t.base_tensor: t for t in stats.tensors} for stats in known]
    norms: dict[str, float] = {}
    for name in base.views:
        of_sources = [of_one[name] for of_one in tensors if name in of_one]
        if of_sources:
            norms[name] = math.sqrt(_between(of_sources, is_mix=search.file.is_mix))
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


def _between(stats: Sequence[TensorStats], *, is_mix: bool) -> float:
    """‖Δ‖² of one tensor: of the sources from each other in a mix, else of all from the base."""
    total = sum(t.l2sq for t in stats)
    if is_mix:
        total -= 2 * sum(_product(a, b) for a, b in combinations(stats, 2))
    return max(total, 0.0) if math.isfinite(total) else 0.0


def _product(one: TensorStats, other: TensorStats) -> float:
    """The inner product of two deltas, from their sketches block by block."""
    a, b = (np.nan_to_num(widened(t.block_sketch).astype(np.float64)) for t in (one, other))
    return float((a * b).sum())


def _tuple(values: F64Array) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
