"""Tensor-scope facts that operators need before they can stream: thresholds and rescale factors.

Each is computed once per (base, expert, tensor, parameters) by a pass over that tensor, and
remembered in the catalog. Part of planning; see `spec.operator.Fact` for who asks for which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.pipeline.progress import Advance, Progress, Silent
from mergepipe_pipeline.planner.build import TensorFacts
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.operator import OperatorSchema
from mergepipe_pipeline.spec.plan import TrimRule
from mergepipe_pipeline.spec.recipe import Recipe
from mergepipe_pipeline.spec.stats import ExpertStats
from mergepipe_pipeline.warehouse import Warehouse

#: One fact as the catalog keeps it: (threshold_bits, tie_stop_elem, scale).
Fact = tuple[int, int, float]


@dataclass(frozen=True)
class _Request:
    """The tensors of one expert for which one kind of fact is wanted, with their density."""

    kind: str
    position: int
    density: float
    tensors: tuple[str, ...]
    seed: int

    @property
    def key(self) -> str:
        if self.kind == "drop":
            return f"drop-{self.seed}-{self.position}-{self.density!r}"
        return f"{self.kind}-{self.density!r}"


def ensure_facts(
    home: Warehouse,
    recipe: Recipe,
    schema: OperatorSchema,
    base: Checkpoint | None,
    experts: Sequence[Checkpoint],
    stats: Sequence[ExpertStats],
    progress: Progress | None = None,
) -> TensorFacts:
    """All facts that `recipe` needs; computes what the catalog lacks.

    Raises OperatorError for a density that keeps no element of some tensor.
    """
    trims: dict[tuple[int, str], TrimRule] = {}
    scales: dict[tuple[int, str], float] = {}
    if base is not None:
        for request in _requests(recipe, schema, base):
            facts = _ensure(
                home, request, base, experts[request.position], stats[request.position], progress
            )
            for tensor in request.tensors:
                bits, stop, scale = facts[tensor]
                if request.kind == "trim":
                    trims[request.position, tensor] = TrimRule(bits, stop)
                else:
                    scales[request.position, tensor] = scale
    return TensorFacts(trims, scales)


def _requests(recipe: Recipe, schema: OperatorSchema, base: Checkpoint) -> list[_Request]:
    wanted: dict[tuple[str, int, float], list[str]] = {}
    for t in recipe.tensors:
        entry = base.by_name[t.name]
        if entry.dtype not in FLOATING or entry.numel == 0:
            continue
        rescale = bool(dict(t.params).get("rescale", False))
        for model, params in zip(t.models, t.model_params, strict=True):
            density = float(dict(params).get("density", 1.0))
            if density >= 1.0:
                continue
            if schema.fact == "trim":
                wanted.setdefault(("trim", model, density), []).append(t.name)
                if rescale:
                    wanted.setdefault(("trimscale", model, density), []).append(t.name)
            elif schema.fact == "drop" and rescale:
                wanted.setdefault(("drop", model, density), []).append(t.name)
    return [
        _Request(kind, model, density, tuple(names), recipe.seed)
        for (kind, model, density), names in wanted.items()
    ]


def _ensure(
    home: Warehouse,
    request: _Request,
    base: Checkpoint,
    expert: Checkpoint,
    stats: ExpertStats,
    progress: Progress | None,
) -> Mapping[str, Fact]:
    catalog = Catalog(home.catalog)
    known = catalog.fact(base.checkpoint_id, expert.checkpoint_id, request.key)
    missing = [t for t in request.tensors if t not in known]
    if not missing:
        return known
    nbytes = sum(expert.by_name[t].nbytes for t in missing)
    label = {"trim": "thresholds", "trimscale": "rescale factors", "drop": "rescale factors"}
    with (progress or Silent()).task(f"{label[request.kind]} {expert.name}", nbytes) as advance:
        fresh = _compute(request, missing, base, expert, stats, advance)
    catalog.put_fact(base.checkpoint_id, expert.checkpoint_id, request.key, fresh)
    return {**known, **fresh}


def _compute(
    request: _Request,
    tensors: Sequence[str],
    base: Checkpoint,
    expert: Checkpoint,
    stats: ExpertStats,
    advance: Advance,
) -> dict[str, Fact]:
    from mergepipe_pipeline.analysis.scales import drop_scales, trim_scales
    from mergepipe_pipeline.analysis.thresholds import trim_rules

    densities = dict.fromkeys(tensors, request.density)
    if request.kind == "drop":
        scales = drop_scales(
            expert,
            base,
            stats,
            densities,
            position=request.position,
            seed=request.seed,
            progress=advance,
        )
        return {t: (0, 0, scale) for t, scale in scales.items()}
    rules = trim_rules(expert, base, stats, densities, progress=advance)
    if request.kind == "trimscale":
        scales = trim_scales(expert, base, stats, rules)
        return {t: (0, 0, scale) for t, scale in scales.items()}
    return {t: (r.threshold_bits, r.tie_stop_elem, 0.0) for t, r in rules.items()}
