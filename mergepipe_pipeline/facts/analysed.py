"""All facts of one expert against one base: statistics, thresholds, outlier bounds, factors.

Each is computed once per (base, expert, tensor, parameters) and kept in the catalog; nothing else
asks the catalog for them. `domain.operator.Fact` says who asks for which. Facts about several
experts together are in `group`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from mergepipe_pipeline.catalog.pairs import Fact, Pair
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Fact as Kind
from mergepipe_pipeline.domain.plan import ENGINE_VERSION, ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.stats import ExpertStats, Histogram, Magnitudes, TensorStats
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.facts.input_segments import checkpoint_inputs
from mergepipe_pipeline.facts.passes import complete
from mergepipe_pipeline.operators.steps.sparsify import band_counts, trim_count
from mergepipe_pipeline.planner.kept_sq_norm import Sparse, kept_sq_norms
from mergepipe_pipeline.planner.parts import Place, TensorFacts
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, eq=False)
class Sparsified:
    """One expert's sparsified part of one output tensor, with all that its facts depend on.

    Facts are gathered by it: it is hashed as the one object that it is, not by all its fields.
    """

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


class AnalysedExpert:
    """An expert, a base and a block grid, with all that is known of the expert's deltas.

    What the catalog lacks is found and remembered: statistics by a pass over the tensors `pairs`,
    thresholds from listed magnitudes, other facts by a pass over the tensor. Histograms go with
    this object: those of all experts together would be most of what planning holds.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        expert: Model,
        base: Model,
        grid: BlockGrid,
        pairs: Sequence[Pair],
        progress: Progress | None = None,
    ) -> None:
        self.warehouse, self.expert, self.base = warehouse, expert, base
        self.grid, self.pairs, self.progress = grid, pairs, progress or Silent()
        self._facts = warehouse.catalog.facts(base.model_id, expert.model_id)
        self._stats: tuple[frozenset[str], ExpertStats] | None = None

    def missing(self) -> list[Pair]:
        """The part of `pairs` that has no statistics yet."""
        return self._facts.missing_pairs(self.grid.block_elems, self.pairs)

    def complete(self) -> None:
        """Make the statistics of `pairs` known; of several experts `passes.complete` does it."""
        complete([self])

    def put(self, tensors: tuple[TensorStats, ...]) -> None:
        """Remember statistics that a pass has found, or that hold for equal contents."""
        ids = self.base.model_id, self.expert.model_id, self.grid.block_elems
        self._facts.put_stats(ExpertStats(*ids, tensors))

    def stats(self, without: Collection[str] = ()) -> ExpertStats:
        """The statistics of `pairs`, without magnitudes; see `PairFacts.stats`."""
        if self._stats is None or self._stats[0] != frozenset(without):
            stats = self._facts.stats(self.grid.block_elems, without=without)
            if not stats.by_pair.keys() >= set(self.pairs):  # of a file that turned out damaged
                self.complete()
                stats = self._facts.stats(self.grid.block_elems, without=without)
            self._stats = frozenset(without), stats
        return self._stats[1]

    @cached_property
    def histograms(self) -> Mapping[Pair, Histogram]:
        """How large the deltas of `pairs` are, by (expert's tensor, base's tensor)."""
        histograms = self._facts.histograms(self.grid.block_elems)
        if not histograms.keys() >= set(self.pairs):
            self.complete()
            histograms = self._facts.histograms(self.grid.block_elems)
        return histograms

    def forget_histograms(self) -> None:
        """Free the memory of `histograms` until they are asked for again."""
        vars(self).pop("histograms", None)

    def add(
        self, kind: Kind, parts: Sequence[Sparsified], facts: TensorFacts, *, in_full: bool
    ) -> None:
        """Add the facts of `kind` for all `parts` to `facts`.

        A merge `in_full` reads every tensor anyway, so it can find for itself what a random drop
        leaves; for a part of it, only a pass beforehand can.
        """
        active = [s for s in parts if 0 < s.density < 1]
        if kind in ("trim", "band"):
            self._add_rules(kind, active, facts)
        rescaled = [s for s in active if _rescales(s.params)]
        if kind == "drop" and in_full:
            self._leave_scales_open(rescaled, facts)
        elif rescaled and kind != "none":
            self._add_scales(kind, rescaled, facts)

    def add_sq_norms(self, kind: Kind, parts: Sequence[Sparsified], facts: TensorFacts) -> None:
        """Add what rules keep of the squared norm.

        Call it after `add`, where a part of a merge is weighed.
        """
        sparse = [s for s in parts if 0 < s.density < 1] if kind in ("trim", "band") else []
        tensors = [
            Sparse(
                self._of(s.pair),
                self.histograms[s.pair],
                facts.trims.get(s.place),
                facts.outliers.get(s.place),
                _counts(kind, s),
            )
            for s in sparse
        ]
        for s, kept in zip(sparse, kept_sq_norms(tensors, self.grid), strict=True):
            facts.kept[s.place] = kept

    def _of(self, pair: Pair) -> TensorStats:
        """Statistics of a tensor; blocks and histogram may be missing."""
        stats = self._stats[1] if self._stats else self.stats(("sample", "hist"))
        return stats.by_pair[pair]

    def _with_histogram(self, pair: Pair) -> TensorStats:
        bins, counts = self.histograms[pair]
        return replace(self._of(pair), hist_bins=bins, hist_counts=counts)

    def _add_rules(self, kind: Kind, parts: Sequence[Sparsified], facts: TensorFacts) -> None:
        counts = {s: _counts(kind, s) for s in parts}
        above = {s: outliers for s, (_, outliers) in counts.items() if outliers}
        for s, rule in self._rules({s: c for s, (c, _) in counts.items()}, "thresholds").items():
            facts.trims[s.place] = rule
        for s, rule in self._rules(above, "outlier bounds").items():
            facts.outliers[s.place] = rule

    def _rules(self, keeps: Mapping[Sparsified, int], label: str) -> dict[Sparsified, TrimRule]:
        """The rule that keeps so many of each tensor's largest |δ|."""
        by_key = {s: f"{_name(s.pair)}#{keep}" for s, keep in keeps.items()}
        # A cut may be open by a block, and blocks are of the grid.
        of_grid = f"keep-largest-b{self.grid.block_elems}"
        known = self._facts.fact(of_grid) | self._facts.fact("keep-largest")
        missing = {s: keep for s, keep in keeps.items() if by_key[s] not in known}
        if missing:
            listed = {by_key[s]: astuple(rule) for s, rule in self._listed(missing)}
            known |= self._remember(of_grid, listed)
            missing = {s: keep for s, keep in missing.items() if by_key[s] not in listed}

        def rules(batch: Mapping[Sparsified, int], **reading: Any) -> dict[str, Fact]:
            from mergepipe_pipeline.analysis.thresholds import trim_rules

            of = {s.pair: (self._with_histogram(s.pair), keep) for s, keep in batch.items()}
            found = trim_rules(self.expert, self.base, of, **reading)
            both = ((by_key[s], found[s.pair]) for s in batch)
            return {key: (rule.threshold_bits, rule.tie_stop_elem) for key, rule in both}

        known |= self._remember("keep-largest", self._read(label, missing, rules))
        return {s: TrimRule(*map(int, known[by_key[s]])) for s in keeps}

    def _listed(self, keeps: Mapping[Sparsified, int]) -> Iterator[tuple[Sparsified, TrimRule]]:
        """The rules that follow from what the catalog knows. Reads no weight."""
        from mergepipe_pipeline.analysis.order import open_rule, plain_rule

        open_rules: dict[Pair, list[Sparsified]] = {}
        for s, keep in keeps.items():
            if rule := plain_rule(self._of(s.pair), keep):
                yield s, rule
            else:
                open_rules.setdefault(s.pair, []).append(s)
        for pair, magnitudes in self._magnitudes(open_rules):
            stats = self._with_histogram(pair)
            for s in open_rules[pair]:
                yield s, open_rule(stats, magnitudes, keeps[s], self.grid.block_elems)

    def _magnitudes(self, pairs: Collection[Pair]) -> Iterator[tuple[Pair, Magnitudes]]:
        """The magnitudes of `pairs`, where they have some; damaged files are analysed again."""
        elems, missing = self.grid.block_elems, set(pairs)
        for pair, magnitudes in self._facts.magnitudes(elems, pairs):
            missing.remove(pair)
            yield pair, magnitudes
        if missing and self.missing():
            self.complete()
            yield from self._facts.magnitudes(elems, missing)

    def _leave_scales_open(self, parts: Sequence[Sparsified], facts: TensorFacts) -> None:
        for s in parts:
            facts.scales[s.place] = 1 / s.density
            facts.l1s[s.place] = self._of(s.pair).l1

    def _add_scales(self, kind: Kind, parts: Sequence[Sparsified], facts: TensorFacts) -> None:
        by_key = {s: _scale_key(kind, s) for s in parts}
        known = self._facts.fact(f"l1-{kind}")
        missing = {s: 0 for s in parts if by_key[s] not in known}

        def scales(batch: Mapping[Sparsified, int], **reading: Any) -> dict[str, Fact]:
            from mergepipe_pipeline.analysis.scales import l1_scales

            tasks = {s.pair: (self._of(s.pair).l1, self._task(s, facts)) for s in batch}
            found = l1_scales(self.expert, self.base, tasks, kind, **reading)
            return {by_key[s]: (found[s.pair],) for s in batch}

        known |= self._remember(f"l1-{kind}", self._read("rescale factors", missing, scales))
        for s in parts:
            (facts.scales[s.place],) = known[by_key[s]]

    def _read(
        self,
        label: str,
        missing: Mapping[Sparsified, int],
        find: Callable[..., dict[str, Fact]],
    ) -> dict[str, Fact]:
        """Find facts of parts by a pass over their tensors, which verifies what it reads.

        One part of a tensor at a time: a tensor may be asked for several.
        """
        if not missing:
            return {}
        nbytes = sum(self.expert.views[s.pair[0]].stored_nbytes for s in missing)
        checkpoints = (*self.expert.checkpoints, *self.base.checkpoints)
        inputs = checkpoint_inputs(self.warehouse, checkpoints, self.progress)
        fresh: dict[str, Fact] = {}
        with self.progress.task(f"{label} {self.expert.name}", nbytes) as advance:
            for batch in _distinct(missing):
                fresh |= find(batch, known=inputs, progress=advance)
        return fresh

    def _task(self, s: Sparsified, facts: TensorFacts) -> TensorTask:
        """The task as the engine will see it, for this expert alone."""
        view = self.expert.views[s.pair[0]]
        expert = ExpertInput(
            position=s.position,
            view=view,
            digest="",
            params=s.model_params,
            covered=((0, view.numel),),
            read=((0, view.numel),),
            trim=facts.trims.get(s.place),
            outliers=facts.outliers.get(s.place),
        )
        return TensorTask(s.place[0], s.shape, view.dtype, "", s.params, s.seed, None, (expert,))

    def _remember(self, key: str, fresh: Mapping[str, Fact]) -> Mapping[str, Fact]:
        if fresh:
            self._facts.put_fact(key, fresh)
        return fresh


def analysed_experts(
    warehouse: Warehouse,
    models: Sequence[Model],
    base: Model,
    grid: BlockGrid,
    progress: Progress | None = None,
) -> list[AnalysedExpert]:
    """The experts against one base, complete for all tensors that each shares with it."""
    experts = [
        AnalysedExpert(warehouse, model, base, grid, common_pairs(model, base), progress)
        for model in models
    ]
    complete(experts)
    return experts


def common_pairs(expert: Model, base: Model) -> list[Pair]:
    """The tensors that both have with equal shape and floating dtypes, in the base's order."""
    return [
        (name, name)
        for name, base_view in base.views.items()
        if (view := expert.views.get(name)) is not None
        and view.shape == base_view.shape
        and view.dtype in FLOATING
        and base_view.dtype in FLOATING
    ]


def _counts(kind: Kind, s: Sparsified) -> tuple[int, int]:
    """How many of a tensor's largest |δ| a trim keeps, and how many of these are outliers."""
    if kind == "trim":
        return trim_count(s.numel, s.density), 0
    return band_counts(s.numel, s.density, s.number("gamma"))


def _rescales(params: Params) -> bool:
    by_name = dict(params)
    return bool(by_name.get("rescale", False)) and by_name.get("variant", "mergekit") != "paper"


def _scale_key(kind: Kind, s: Sparsified) -> str:
    """The name of a rescale factor: the elements kept, and for a random drop its numbers.

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
