"""Finds the change that made a snapshot worse: merges it with parts of what changed undone.

Each candidate is an ordinary merge by the same planner and engine, kept as a stage of nobody's
result, so that `gc` removes it, and measured by the recipe's evaluator. Layers and measurements are
kept: a bisection that was killed and runs again goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from mergepipe_pipeline.domain.evaluation import Evaluator, Gate, Metrics, Verdict
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import UNMERGEABLE, EvaluationError
from mergepipe_pipeline.evaluation.judge import judge
from mergepipe_pipeline.evaluation.run import evaluate
from mergepipe_pipeline.execution.lookup import load_plan, store_plan
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.tracing.regression import Regression, Suspect
from mergepipe_pipeline.tracing.search import Narrowed, narrow
from mergepipe_pipeline.tracing.stitch import layers_apart, stitched
from mergepipe_pipeline.warehouse import Warehouse

#: Hears of each candidate.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One try: these inputs undone, in these layers alone (None: in all), and how that came out.

    `told` is the gate's sentence, or why there was nothing to judge.
    """

    undone: tuple[str, ...]
    layers: tuple[str, ...] | None
    snapshot_id: str | None
    metrics: Metrics
    passed: bool
    told: str


@dataclass(frozen=True, slots=True)
class Bisection:
    """What a bisection found.

    `guilty` are the names of the fewest inputs known whose undoing makes the gate pass, `undoing`
    how each is undone, `layers` the fewest in which that is enough; all empty where nothing helps.
    `is_smallest` is False where the candidates ran out.
    """

    recipe: str
    live: str
    refused: str
    verdict: str
    guilty: tuple[str, ...]
    undoing: tuple[str, ...]
    layers: tuple[str, ...]
    is_smallest: bool
    candidates: tuple[Candidate, ...]
    told: str

    @property
    def culprit(self) -> str | None:
        """The one input that is guilty, or None."""
        return self.guilty[0] if len(self.guilty) == 1 and self.is_smallest else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material."""
        return {**asdict(self), "culprit": self.culprit}


def bisect(
    warehouse: Warehouse,
    regression: Regression,
    evaluator: Evaluator,
    gate: Gate,
    *,
    most: int,
    layers: bool = True,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    tell: Tell = lambda _: None,
) -> Bisection:
    """Find the fewest changes to undo, then, with `layers`, the fewest layers in which that is
    enough; with at most `most` candidates.

    Raises what merging raises, and EvaluationError where no candidate could be measured.
    """
    with _Bench(warehouse, regression, evaluator, gate, options, progress, tell) as bench:
        _, verdict = bench.judged(regression.refused)
        if verdict.passed:
            return _ended(bench, verdict, Narrowed((), True), (), "there is nothing to trace")
        if not regression.suspects or not bench.repairs(regression.suspects):
            bench.refuse_unmeasured()
            return _ended(bench, verdict, Narrowed((), True), (), _nothing_helps(regression))
        narrowed = narrow(regression.suspects, bench.repairs, most - bench.spent)
        fewest: tuple[str, ...] = ()
        if layers and len(narrowed.part) == 1:
            fewest = bench.fewest_layers(narrowed.part, most - bench.spent)
        bench.refuse_unmeasured()
        return _ended(bench, verdict, narrowed, fewest, _conclusion(regression, narrowed, fewest))


class _Bench:
    """Merges and measures candidates, and keeps all of them until the context ends."""

    def __init__(
        self,
        warehouse: Warehouse,
        regression: Regression,
        evaluator: Evaluator,
        gate: Gate,
        options: EngineOptions | None,
        progress: Progress | None,
        tell: Tell,
    ) -> None:
        self._warehouse, self.regression = warehouse, regression
        self._evaluator, self._gate = evaluator, gate
        self._options, self._progress, self._tell = options, progress or Silent(), tell
        self._leases, self._failed = ExitStack(), list[EvaluationError]()
        self.candidates: list[Candidate] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._leases.close()

    @property
    def spent(self) -> int:
        """How many candidates were merged or measured for it; the live snapshot is none."""
        live = self.regression.live.snapshot_id
        return sum(c.snapshot_id != live for c in self.candidates)

    def judged(self, snapshot: Snapshot) -> tuple[Metrics, Verdict]:
        """What a snapshot measures, and what the gate says of it beside the live one."""
        folder = self.regression.folder
        measured, live = (
            evaluate(self._warehouse, which, self._evaluator, folder)
            for which in (snapshot, self.regression.live)
        )
        return measured.metrics, judge(self._gate, measured, live)

    def repairs(self, undone: tuple[Suspect, ...]) -> bool:
        """Whether the gate lets the recipe pass with these changes undone."""
        names = tuple(s.name for s in undone)
        return self._try(lambda: self._plan(undone), names, None)

    def fewest_layers(self, undone: tuple[Suspect, ...], most: int) -> tuple[str, ...]:
        """The fewest layers found in which undoing these changes is enough."""
        plan = load_plan(self._warehouse, self.regression.refused.manifest.plan_id)
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
        return self.regression.plan_without(self._warehouse, undone, self._progress)

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
        if plan.plan_id == self.regression.live.manifest.plan_id:
            return self.regression.live
        store_plan(self._warehouse, plan)
        outcome = run_plan(
            self._warehouse, plan, options=self._options, progress=self._progress, is_stage=True
        )
        return outcome.snapshot


def _ended(
    bench: _Bench,
    verdict: Verdict,
    narrowed: Narrowed[Suspect],
    layers: tuple[str, ...],
    conclusion: str,
) -> Bisection:
    r = bench.regression
    is_live = r.is_live(narrowed.part)
    return Bisection(
        recipe=r.parsed.name,
        live=r.live.snapshot_id,
        refused=r.refused.snapshot_id,
        verdict=verdict.summary,
        guilty=tuple(s.name for s in narrowed.part),
        undoing=tuple("as it is live" if is_live else s.undoing for s in narrowed.part),
        layers=layers,
        is_smallest=narrowed.is_smallest,
        candidates=tuple(bench.candidates),
        told=conclusion,
    )


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
            f"it cannot be told which of {names} is guilty: the gate does not pass without {lost} "
            "either, and what is live of them is gone; keep each version in a folder of its own"
        )
    if len(narrowed.part) > 1:
        return f"no single expert is guilty; the gate passes with all of these undone: {undone}"
    (guilty,) = narrowed.part
    of = len(regression.refused.manifest.shards)
    named = "every layer" if len(layers) == of else f"{', '.join(layers)} (of {of} layers)"
    where = f" in {named}" if layers else ""
    if is_live:
        return f"{guilty.name} is guilty: it alone changed, and what is live passes{where}"
    return f"{guilty.name} is guilty: the gate passes {guilty.undoing}{where}"
