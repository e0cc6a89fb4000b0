"""Facts of whole tensors about one expert: trim thresholds, outlier bounds, rescale factors.

Each is computed once per (base, expert, tensor, parameters), thresholds from the magnitudes that
the catalog lists, the rest by a pass over the tensor, and stored in the catalog. Part of planning;
`domain.operator.Fact` says who asks for which. Facts about several experts together are in
`group`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property

from mergepipe_pipeline.catalog.catalog import Fact
from mergepipe_pipeline.catalog.stats_tables import Histogram
from mergepipe_pipeline.contents.input_segments import Inputs, checkpoint_inputs
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Fact as Kind
from mergepipe_pipeline.domain.plan import ENGINE_VERSION, ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes
from mergepipe_pipeline.facts.expert_stats import ensure_stats
from mergepipe_pipeline.operators.steps.sparsify import band_counts, trim_count
from mergepipe_pipeline.planner.kept_sq_norm import Kept, kept_sq_norm, kurtosis
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.warehouse import Warehouse

Pair = tuple[str, str]
#: (output tensor, input number) as `planner.parts.TensorFacts` asks.
Place = tuple[str, int]
#: Loads the histograms of one expert.
Load = Callable[[], Mapping[Pair, Histogram]]


@dataclass(frozen=True)
class Sparsified:
    """One expert's sparsified part of one output tensor, with all that its facts depend on."""

    place: Place
    pair: Pair
    position: int
    seed: int
    params: Params
    model_params: Params
    shape: tuple[int, ...]
    numel: int

    @property
    def density(self) -> float:
        """Share of elements to keep."""
        return float(dict(self.model_params).get("density", 1.0))

    def number(self, name: str) -> float:
        """A parameter of this model."""
        return float(dict(self.model_params)[name])


@dataclass
class FactTables:
    """Facts by place, filled in kind by kind."""

    trims: dict[Place, TrimRule] = field(default_factory=dict)
    outliers: dict[Place, TrimRule] = field(default_factory=dict)
    scales: dict[Place, float] = field(default_factory=dict)
    l1s: dict[Place, float] = field(default_factory=dict)
    kept: dict[Place, Kept] = field(default_factory=dict)
    kurtosis: dict[Place, float] = field(default_factory=dict)


class ExpertFacts:
    """Finds the facts of one expert against one base, computing what the catalog lacks.

    `stats` may lack histograms, which `load` gives. They go with this object: those of all experts
    together would be most of what planning holds.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        expert: Model,
        base: Model,
        stats: ExpertStats,
        load: Load,
        progress: Progress | None,
    ) -> None:
        self._warehouse, self._catalog = warehouse, warehouse.catalog
        self._expert, self._base, self._stats = expert, base, stats
        self._load = load
        self._grid = BlockGrid(stats.block_elems)
        self._progress = progress or Silent()

    def add(
        self, kind: Kind, parts: Sequence[Sparsified], tables: FactTables, *, in_full: bool
    ) -> None:
        """Add the facts of `kind` for all `parts` to `tables`.

        A merge `in_full` reads every tensor anyway, so it can find for itself what a random drop
        leaves; for a part of it, only a pass beforehand can.
        """
        active = [s for s in parts if 0 < s.density < 1]
        if kind == "trim":
            self._add_trims(active, tables)
        elif kind == "band":
            self._add_bands(active, tables)
        rescaled = [s for s in active if _rescales(s.params)]
        if kind == "drop" and in_full:
            self._leave_scales_open(rescaled, tables)
        elif rescaled and kind != "none":
            self._add_scales(kind, rescaled, tables)

    def add_sq_norms(self, kind: Kind, parts: Sequence[Sparsified], tables: FactTables) -> None:
        """Add what rules keep of the squared norm, and of random drops how heavy the tails are.

        Call it after `add`, where a part of a merge is weighed.
        """
        for s in (s for s in parts if 0 < s.density < 1):
            stats = self._with_histograms.by_pair[s.pair]
            if kind in ("trim", "band"):
                rules = tables.trims.get(s.place), tables.outliers.get(s.place)
                tables.kept[s.place] = kept_sq_norm(stats, self._grid, *rules)
            else:
                tables.kurtosis[s.place] = kurtosis(stats)

    @cached_property
    def _with_histograms(self) -> ExpertStats:
        histograms = self._load()
        tensors = (
            replace(t, hist_bins=histograms[pair][0], hist_counts=histograms[pair][1])
            for pair, t in self._stats.by_pair.items()
            if pair in histograms
        )
        return replace(self._stats, tensors=tuple(tensors))

    def _add_trims(self, parts: Sequence[Sparsified], tables: FactTables) -> None:
        keeps = {s: trim_count(s.numel, s.density) for s in parts}
        for s, rule in self._rules(keeps, "thresholds").items():
            tables.trims[s.place] = rule

    def _add_bands(self, parts: Sequence[Sparsified], tables: FactTables) -> None:
        counts = {s: band_counts(s.numel, s.density, s.number("gamma")) for s in parts}
        above = {s: outliers for s, (_, outliers) in counts.items() if outliers}
        for s, rule in self._rules({s: c for s, (c, _) in counts.items()}, "thresholds").items():
            tables.trims[s.place] = rule
        for s, rule in self._rules(above, "outlier bounds").items():
            tables.outliers[s.place] = rule

    def _rules(self, keeps: Mapping[Sparsified, int], label: str) -> dict[Sparsified, TrimRule]:
        """The rule that keeps so many of each tensor's largest |δ|."""
        by_key = {s: f"{_name(s.pair)}#{keep}" for s, keep in keeps.items()}
        # A cut may be open by a block, and blocks are of the grid.
        of_grid = f"keep-largest-b{self._stats.block_elems}"
        facts = self._facts(of_grid) | self._facts("keep-largest")
        missing = {s: keep for s, keep in keeps.items() if by_key[s] not in facts}
        if missing:
            listed = {by_key[s]: astuple(rule) for s, rule in self._listed(missing)}
            facts |= self._remember(of_grid, listed)
            missing = {s: keep for s, keep in missing.items() if by_key[s] not in listed}
        if missing:
            from mergepipe_pipeline.analysis.thresholds import trim_rules

            nbytes = sum(self._expert.views[s.pair[0]].stored_nbytes for s in missing)
            inputs = self._inputs()
            with self._progress.task(f"{label} {self._expert.name}", nbytes) as advance:
                # One count of a tensor at a time: a tensor may be asked for several.
                fresh: dict[str, Fact] = {}
                for batch in _distinct(missing):
                    counts = {s.pair: keep for s, keep in batch.items()}
                    rules = trim_rules(
                        self._expert,
                        self._base,
                        self._with_histograms,
                        counts,
                        known=inputs,
                        progress=advance,
                    )
                    for s in batch:
                        rule = rules[s.pair]
                        fresh[by_key[s]] = (rule.threshold_bits, rule.tie_stop_elem)
            facts |= self._remember("keep-largest", fresh)
        return {s: TrimRule(*map(int, facts[by_key[s]])) for s in keeps}

    def _listed(self, keeps: Mapping[Sparsified, int]) -> Iterator[tuple[Sparsified, TrimRule]]:
        """The rules that follow from what the catalog knows. Reads no weight."""
        from mergepipe_pipeline.analysis.cuts import open_rule, plain_rule

        open_rules: dict[Pair, list[Sparsified]] = {}
        for s, keep in keeps.items():
            if rule := plain_rule(self._stats.by_pair[s.pair], keep):
                yield s, rule
            else:
                open_rules.setdefault(s.pair, []).append(s)
        for pair, magnitudes in self._magnitudes(open_rules):
            for s in open_rules[pair]:
                stats = self._with_histograms.by_pair[pair]
                yield s, open_rule(stats, magnitudes, keeps[s], self._stats.block_elems)

    def _magnitudes(self, pairs: Collection[Pair]) -> Iterator[tuple[Pair, Magnitudes]]:
        """The magnitudes of `pairs`, where they have some; damaged files are analysed again."""
        ids = self._base.model_id, self._expert.model_id, self._stats.block_elems
        missing = set(pairs)
        for pair, magnitudes in self._catalog.magnitudes(*ids, pairs):
            missing.remove(pair)
            yield pair, magnitudes
        every = list(self._stats.by_pair)
        if missing and self._catalog.missing_pairs(*ids, every):
            experts = [(self._expert, every)]
            ensure_stats(self._warehouse, experts, self._base, self._grid, self._progress)
            yield from self._catalog.magnitudes(*ids, missing)

    def _leave_scales_open(self, parts: Sequence[Sparsified], tables: FactTables) -> None:
        for s in parts:
            tables.scales[s.place] = 1 / s.density
            tables.l1s[s.place] = self._stats.by_pair[s.pair].l1

    def _add_scales(self, kind: Kind, parts: Sequence[Sparsified], tables: FactTables) -> None:
        by_key = {s: _scale_key(kind, s) for s in parts}
        facts = self._facts(f"l1-{kind}")
        missing = [s for s in parts if by_key[s] not in facts]
        if missing:
            from mergepipe_pipeline.analysis.scales import l1_scales

            nbytes = sum(self._expert.views[s.pair[0]].stored_nbytes for s in missing)
            inputs = self._inputs()
            with self._progress.task(f"rescale factors {self._expert.name}", nbytes) as advance:
                fresh: dict[str, Fact] = {}
                for batch in _distinct(dict.fromkeys(missing, 0)):
                    scales = l1_scales(
                        self._expert,
                        self._base,
                        self._stats,
                        {s.pair: self._task(s, tables) for s in batch},
                        kind,
                        known=inputs,
                        progress=advance,
                    )
                    fresh |= {by_key[s]: (scales[s.pair],) for s in batch}
            facts |= self._remember(f"l1-{kind}", fresh)
        for s in parts:
            (tables.scales[s.place],) = facts[by_key[s]]

    def _task(self, s: Sparsified, tables: FactTables) -> TensorTask:
        """The task as the engine will see it, for this expert alone."""
        view = self._expert.views[s.pair[0]]
        expert = ExpertInput(
            position=s.position,
            view=view,
            digest="",
            params=s.model_params,
            covered=((0, view.numel),),
            read=((0, view.numel),),
            trim=tables.trims.get(s.place),
            outliers=tables.outliers.get(s.place),
        )
        return TensorTask(s.place[0], s.shape, view.dtype, "", s.params, s.seed, None, (expert,))

    def _inputs(self) -> Inputs:
        """What is read for a fact is verified."""
        checkpoints = (*self._expert.checkpoints, *self._base.checkpoints)
        return checkpoint_inputs(self._warehouse, checkpoints, self._progress)

    def _facts(self, key: str) -> dict[str, Fact]:
        return self._catalog.fact(self._base.model_id, self._expert.model_id, key)

    def _remember(self, key: str, fresh: Mapping[str, Fact]) -> Mapping[str, Fact]:
        if fresh:
            self._catalog.put_fact(self._base.model_id, self._expert.model_id, key, fresh)
        return fresh


def _rescales(params: Params) -> bool:
    by_name = dict(params)
    return bool(by_name.get("rescale", False)) and by_name.get("variant", "mergekit") != "paper"


def _scale_key(kind: Kind, s: Sparsified) -> str:
    """What a rescale factor depends on: the elements kept, and for a random drop its numbers.

    These may change with the engine.
    """
    parts = [_name(s.pair), repr(s.density)]
    if kind == "band":
        parts.append(repr(s.number("gamma")))
    if kind == "ranked":
        parts.append(repr(s.number("epsilon")))
    if kind in ("drop", "ranked"):
        parts += [f"engine {ENGINE_VERSION}", str(s.seed), str(s.position), s.place[0]]
    return "#".join(parts)


def _name(pair: Pair) -> str:
    return pair[0] if pair[0] == pair[1] else f"{pair[0]}|{pair[1]}"


def _distinct(keeps: Mapping[Sparsified, int]) -> list[dict[Sparsified, int]]:
    """The same in batches that hold each pair of tensors once."""
    batches: list[dict[Sparsified, int]] = []
    seen: list[set[Pair]] = []
    for s, value in keeps.items():
        at = next((i for i, pairs in enumerate(seen) if s.pair not in pairs), None)
        if at is None:
            at = len(batches)
            batches.append({})
            seen.append(set())
        batches[at][s] = value
        seen[at].add(s.pair)
    return batches
