"""Finds the change that made a snapshot worse: merges it with parts of what changed undone.

Each candidate is an ordinary merge by the same planner and engine, kept as a stage of nobody's
result, so that `gc` removes it, and measured by the recipe's evaluator. Layers and measurements are
kept: a bisection that was killed and runs again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from mergepipe_pipeline.domain.evaluation import Evaluator, Gate, Metrics, Verdict
from mergepipe_pipeline.domain.plan import ExpertInput, LayerTask, MergePlan, TensorTask
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.domain.view import renumbered
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import UNMERGEABLE, EvaluationError
from mergepipe_pipeline.execution.lookup import load_plan, store_plan
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.throughput import UNKNOWN, expected_s, nbytes_of_plan
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.quality.judge import judge
from mergepipe_pipeline.quality.measure import evaluate
from mergepipe_pipeline.quality.regression import Regression, Suspect
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse

T = TypeVar("T")
#: Hears of each candidate.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One try: these inputs undone, in these layers alone (None: in all), and how that came out.

    `summary` is the gate's sentence, or why there was nothing to judge.
    """

    undone: tuple[str, ...]
    layers: tuple[str, ...] | None
    snapshot_id: str | None
    metrics: Metrics
    passed: bool
    summary: str


@dataclass(frozen=True, slots=True)
class Bisection:
    """The findings of a bisection.

    `suspects` are the names of the fewest inputs known whose undoing makes the gate pass, `undoing`
    how each is undone, `layers` the fewest in which that is enough; all empty where nothing helps.
    `is_smallest` is False where the candidates ran out.
    """

    recipe: str
    live: str
    refused: str
    verdict: str
    suspects: tuple[str, ...]
    undoing: tuple[str, ...]
    layers: tuple[str, ...]
    is_smallest: bool
    candidates: tuple[Candidate, ...]
    summary: str

    @property
    def suspect(self) -> str | None:
        """The one input that is the suspect, or None."""
        return self.suspects[0] if len(self.suspects) == 1 and self.is_smallest else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material."""
        return {**asdict(self), "suspect": self.suspect}


@dataclass(frozen=True)
class Prepared:
    """A regression that can be traced, by which thresholds, with how many candidates, at what cost.

    `cost` is the worst case. Without `layers` those of the suspect are not searched.
    """

    regression: Regression
    evaluator: Evaluator
    gate: Gate
    most: int
    layers: bool
    cost: Cost


def bisect(
    warehouse: Warehouse,
    prepared: Prepared,
    *,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    tell: Tell = lambda _: None,
) -> Bisection:
    """Find the fewest changes to undo, then the fewest layers in which that is enough.

    Whoever runs it again after a kill goes on where it was. Raises what merging raises, as
    CheckpointChangedError for inputs that changed meanwhile, and EvaluationError where no candidate
    could be measured.
    """
    regression, most = prepared.regression, prepared.most
    with _Bench(warehouse, prepared, options, progress or Silent(), tell) as bench:
        _, verdict = bench.judged(regression.refused)
        narrowed: Narrowed[Suspect] = Narrowed((), True)
        fewest: tuple[str, ...] = ()
        if verdict.passed:
            conclusion = "there is nothing to trace"
        elif not regression.suspects or not bench.repairs(regression.suspects):
            conclusion = _nothing_helps(regression)
        else:
            narrowed = narrow(regression.suspects, bench.repairs, most - bench.spent)
            if prepared.layers and len(narrowed.part) == 1:
                fewest = bench.fewest_layers(narrowed.part, most - bench.spent)
            conclusion = _conclusion(regression, narrowed, fewest)
        bench.refuse_unmeasured()
    is_live = regression.is_live(narrowed.part)
    return Bisection(
        recipe=regression.parsed.name,
        live=regression.live.snapshot_id,
        refused=regression.refused.snapshot_id,
        verdict=verdict.summary,
        suspects=tuple(s.name for s in narrowed.part),
        undoing=tuple("as it is live" if is_live else s.undoing for s in narrowed.part),
        layers=fewest,
        is_smallest=narrowed.is_smallest,
        candidates=tuple(bench.candidates),
        summary=conclusion,
    )


@dataclass
class _Bench:
    """Merges and measures candidates, and keeps all of them until the context ends."""

    _warehouse: Warehouse
    _prepared: Prepared
    _options: EngineOptions | None
    _progress: Progress
    _tell: Tell
    _leases: ExitStack = field(default_factory=ExitStack)
    _failed: list[EvaluationError] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def _regression(self) -> Regression:
        return self._prepared.regression

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._leases.close()

    @property
    def spent(self) -> int:
        """How many candidates were merged or measured for it; the live snapshot is none."""
        live = self._regression.live.snapshot_id
        return sum(c.snapshot_id != live for c in self.candidates)

    def judged(self, snapshot: Snapshot) -> tuple[Metrics, Verdict]:
        """Return what a snapshot measures, and what the gate says of it beside the live one."""
        folder = self._regression.folder
        measured, live = (
            evaluate(self._warehouse, which, self._prepared.evaluator, folder)
            for which in (snapshot, self._regression.live)
        )
        return measured.metrics, judge(self._prepared.gate, measured, live)

    def repairs(self, undone: tuple[Suspect, ...]) -> bool:
        """Whether the gate lets the recipe pass with these changes undone."""
        names = tuple(s.name for s in undone)
        return self._try(lambda: self._plan(undone), names, None)

    def fewest_layers(self, undone: tuple[Suspect, ...], most: int) -> tuple[str, ...]:
        """The fewest layers found in which undoing these changes is enough."""
        plan = load_plan(self._warehouse, self._regression.refused.manifest.plan_id)
        undone_plan, names = self._plan(undone), tuple(s.name for s in undone)

        def repairs(layers: tuple[str, ...]) -> bool:
            return self._try(lambda: stitched(plan, undone_plan, layers), names, layers)

        apart = layers_apart(plan, undone_plan)
        return narrow(apart, repairs, most).part if apart else ()

    def refuse_unmeasured(self) -> None:
        """Raise the last EvaluationError if there was nothing else: then nothing was found out."""
        if self._failed and len(self._failed) == self.spent:
            raise self._failed[-1]

    def _plan(self, undone: tuple[Suspect, ...]) -> MergePlan:
        return self._regression.plan_without(self._warehouse, undone, self._progress)

    def _try(
        self, plan: Callable[[], MergePlan], undone: tuple[str, ...], layers: tuple[str, ...] | None
    ) -> bool:
        snapshot_id, passed = None, False
        metrics: Metrics = {}
        try:
            snapshot = self._merged(plan())
            snapshot_id = snapshot.snapshot_id
            metrics, verdict = self.judged(snapshot)
            passed, outcome = verdict.passed, verdict.summary
        except EvaluationError as error:
            self._failed.append(error)
            outcome = str(error)
        except UNMERGEABLE as error:
            outcome = str(error)
        self.candidates.append(Candidate(undone, layers, snapshot_id, metrics, passed, outcome))
        where = f" in {', '.join(layers)}" if layers is not None else ""
        self._tell(f"without {', '.join(undone)}{where}: {outcome}")
        return passed

    def _merged(self, plan: MergePlan) -> Snapshot:
        self._leases.enter_context(lease(self._warehouse, plan))
        if plan.plan_id == self._regression.live.manifest.plan_id:
            return self._regression.live
        store_plan(self._warehouse, plan)
        outcome = run_plan(
            self._warehouse, plan, options=self._options, progress=self._progress, is_stage=True
        )
        return outcome.snapshot


def _nothing_helps(regression: Regression) -> str:
    if regression.suspects and regression.is_live(regression.suspects):
        return "the live snapshot does not pass either, so that no change is to blame"
    names = ", ".join(s.name for s in regression.suspects)
    tried = f"undoing {names} does not help" if names else "no expert came or changed"
    unmovable = "; ".join(regression.unmovable)
    return f"{tried}; what else differs: {unmovable}" if unmovable else tried


def _conclusion(
    regression: Regression, narrowed: Narrowed[Suspect], layers: tuple[str, ...]
) -> str:
    undone = ", ".join(f"{s.name} ({s.undoing})" for s in narrowed.part)
    lost = ", ".join(s.name for s in narrowed.part if s.previous is None)
    is_live = regression.is_live(narrowed.part)
    if not narrowed.is_smallest:
        return f"the candidates ran out; the gate passes with all of these undone: {undone}"
    if len(narrowed.part) > 1 and is_live and lost:
        names = ", ".join(s.name for s in narrowed.part)
        return (
            f"it is not known which of {names} is to blame: the gate does not pass without {lost} "
            "either, and what is live of them is gone; keep each version in a folder of its own"
        )
    if len(narrowed.part) > 1:
        return f"no single expert is to blame; the gate passes with all of these undone: {undone}"
    (found,) = narrowed.part
    of = len(regression.refused.manifest.shards)
    named = "every layer" if len(layers) == of else f"{', '.join(layers)} (of {of} layers)"
    where = f" in {named}" if layers else ""
    if is_live:
        return f"{found.name} is the suspect: it alone changed, and what is live passes{where}"
    return f"{found.name} is the suspect: the gate passes {found.undoing}{where}"


@dataclass(frozen=True, slots=True)
class Cost:
    """At most so many candidates are evaluated, `merges` of them merged, which runs `layers`.

    `nbytes` are read for it, of experts and base. `seconds` is None before the first merge
    here; `evaluation_s` is what the last evaluation took. What is cached or was
    evaluated before costs nothing.
    """

    candidates: int
    merges: int
    layers: int
    nbytes: int
    evaluation_s: float
    seconds: float | None

    @property
    def summary(self) -> str:
        """The worst case in one sentence."""
        time = UNKNOWN if self.seconds is None else f"{self.seconds:.0f} s"
        return (
            f"{self.candidates} candidates, {self.merges} of them merged: {self.layers} layers and "
            f"{size(self.nbytes)} to read; an evaluation takes {self.evaluation_s:.1f} s "
            f"(time: {time})"
        )


def cost_of(
    warehouse: Warehouse, regression: Regression, most: int, evaluation_s: float, *, layers: bool
) -> Cost:
    """The worst case of tracing a regression with at most `most` candidates; reads no weight.

    With `layers` the suspect's layers are searched, too.
    """
    plan = load_plan(warehouse, regression.refused.manifest.plan_id)
    plans = [plan, *_stages(warehouse, plan)]
    suspects = regression.suspects
    # Undoing all of them is the live snapshot, or one merge more.
    first = 0 if regression.is_live(suspects) else 1
    of_experts = min(most, first + most_questions(len(suspects))) if suspects else 0
    of_layers = min(most - of_experts, most_questions(len(plan.layers))) if suspects else 0
    candidates = of_experts + (of_layers if layers else 0)
    merge_s = expected_s(warehouse, sum(map(nbytes_of_plan, plans)))
    return Cost(
        candidates,
        of_experts,
        of_experts * sum(len(p.layers) for p in plans),
        of_experts * sum(p.read_nbytes for p in plans),
        evaluation_s,
        None if merge_s is None else of_experts * merge_s + candidates * evaluation_s,
    )


def _stages(warehouse: Warehouse, plan: MergePlan) -> Iterator[MergePlan]:
    """The plans of the stages whose results a plan merges, and of the stages before those."""
    input_roots = {model.root for model in plan.request.models}
    for source in plan.sources:
        folder = Path(source.root)
        if source.root not in input_roots and folder.parent == warehouse.snapshots:
            snapshot = load_snapshot(warehouse.snapshots, folder.name)
            stage = load_plan(warehouse, snapshot.manifest.plan_id)
            yield stage
            yield from _stages(warehouse, stage)


def layers_apart(plan: MergePlan, other: MergePlan) -> tuple[str, ...]:
    """The layers that both have and that differ, in plan order."""
    keys = {layer.name: layer.action_key for layer in other.layers}
    return tuple(
        layer.name
        for layer in plan.layers
        if layer.name in keys and keys[layer.name] != layer.action_key
    )


def stitched(plan: MergePlan, donor: MergePlan, layers: Collection[str]) -> MergePlan:
    """The plan with these layers as the other one has them; the rest, files included, stays."""
    sources, numbers = _joined(plan.sources, donor.sources)
    packs, pack_numbers = _joined(plan.packs, donor.packs)
    replacements = {layer.name: layer for layer in donor.layers if layer.name in layers}
    return replace(
        plan,
        recipe_text=f"# layers {', '.join(layers)} are those of plan {donor.plan_id[:16]}\n"
        + plan.recipe_text,
        sources=sources,
        roles=(*plan.roles, *(donor.roles[i] for i, n in numbers.items() if n >= len(plan.roles))),
        packs=packs,
        layers=tuple(
            _moved(replacements[layer.name], numbers, pack_numbers)
            if layer.name in replacements
            else layer
            for layer in plan.layers
        ),
    )


def _joined(first: Sequence[T], second: Sequence[T]) -> tuple[tuple[T, ...], dict[int, int]]:
    """The items of both, each once; and the place of each item of `second` among them."""
    joined = tuple(dict.fromkeys((*first, *second)))
    # If `first` has an item twice, the numbers of its items stay.
    joined = (*first, *(x for x in joined if x not in first))
    return joined, {i: joined.index(x) for i, x in enumerate(second)}


def _moved(layer: LayerTask, numbers: Mapping[int, int], packs: Mapping[int, int]) -> LayerTask:
    def of_expert(e: ExpertInput) -> ExpertInput:
        packed = e.packed and replace(e.packed, pack=packs[e.packed.pack])
        return replace(e, view=renumbered(e.view, numbers), packed=packed)

    def of_task(t: TensorTask) -> TensorTask:
        base = t.base and replace(t.base, view=renumbered(t.base.view, numbers))
        return replace(t, base=base, experts=tuple(map(of_expert, t.experts)))

    return LayerTask(layer.name, tuple(map(of_task, layer.tasks)))


@dataclass(frozen=True, slots=True)
class Narrowed(Generic[T]):
    """A part that repairs; `is_smallest`: without any one of its items it does not."""

    part: tuple[T, ...]
    is_smallest: bool


def most_questions(n: int) -> int:
    """How often `narrow` asks about n items at most."""
    return 0 if n < 2 else n * n + 3 * n


def narrow(items: Sequence[T], repairs: Callable[[tuple[T, ...]], bool], most: int) -> Narrowed[T]:
    """A small part of `items` for which `repairs` is true, as it is of all of them.

    Delta debugging, by ddmin (Zeller and Hildebrandt, IEEE TSE 28, 2002), finds one item of n in
    about 2 log₂ n questions. After `most` different ones the smallest part found is the result.
    """
    answered: dict[tuple[T, ...], bool] = {}

    def ask(part: tuple[T, ...]) -> bool | None:
        if part not in answered:
            if len(answered) >= most:
                return None
            answered[part] = repairs(part)
        return answered[part]

    smallest, n_parts = tuple(items), 2
    while len(smallest) > 1:
        parts = _parts(smallest, n_parts)
        complements = (
            [tuple(i for i in smallest if i not in part) for part in parts] if n_parts > 2 else []
        )
        answers = ((part, ask(part)) for part in (*parts, *complements))
        part, answer = next(((p, a) for p, a in answers if a is not False), (smallest, False))
        if answer is None:
            return Narrowed(smallest, is_smallest=False)
        if answer:
            n_parts = 2 if part in parts else max(n_parts - 1, 2)
            smallest = part
        elif n_parts == len(smallest):
            break
        else:
            n_parts = min(2 * n_parts, len(smallest))
    return Narrowed(smallest, is_smallest=True)


def _parts(items: tuple[T, ...], n_parts: int) -> list[tuple[T, ...]]:
    cuts = [len(items) * i // n_parts for i in range(n_parts + 1)]
    return [items[a:b] for a, b in pairwise(cuts)]
