"""The front of a search: its results, what they cover, and what of them is published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from math import isfinite
from typing import Any

import numpy as np

from mergepipe_pipeline.domain.evaluation import figure
from mergepipe_pipeline.errors import SearchError
from mergepipe_pipeline.pictures import Panel, Series, panels_picture
from mergepipe_pipeline.search.ledger import Ledger, Point, Result, Search
from mergepipe_pipeline.search.pareto import REFERENCE, hypervolume
from mergepipe_pipeline.search.pareto import front as on_front
from mergepipe_pipeline.search.search_file import Objective
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Trial(Result):
    """One result of a search, beside the others.

    `ended_s` are seconds since the search began, `hypervolume` is that of this and all earlier
    results, `ref` the name under which it is published, "" if it is not.
    """

    ended_s: float
    hypervolume: float
    is_on_front: bool
    ref: str


@dataclass(frozen=True, slots=True)
class Front:
    """All results of a search in the order in which they came, and which are on its front."""

    search: str
    objectives: tuple[Objective, ...]
    trials: tuple[Trial, ...]

    @property
    def best(self) -> tuple[Trial, ...]:
        """The trials on the front, the best of the first objective first."""
        on_front = (t for t in self.trials if t.is_on_front)
        return tuple(sorted(on_front, key=lambda t: (*(-v for v in t.values), t.number)))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The candidates on the front, in the order of `best`."""
        return tuple(t.number for t in self.best)

    @property
    def hypervolume(self) -> float:
        """The volume that the front covers."""
        return self.trials[-1].hypervolume if self.trials else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """The objectives of which a search learns nothing: all results count alike in them."""
        good = [t for t in self.trials if not t.is_failure]
        return tuple(
            f"nothing is learned of {o.metric}: all results lie far beyond its worst anchor, "
            f"{figure(o.worst)} (the nearest is {figure(_best(good, o))}), and count alike; begin "
            "a search of another name, with anchors that results lie between"
            for k, o in enumerate(self.objectives)
            if good and all(t.values[k] <= REFERENCE for t in good)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material."""
        return {**asdict(self), "front": self.numbers, "hypervolume": self.hypervolume} | {
            "warnings": self.warnings
        }


def front(warehouse: Warehouse, search: Search) -> Front:
    """The results of a search so far. Raises CorruptionError for a damaged fact."""
    by_number = Ledger(warehouse, search.name).results()
    results = sorted(by_number.values(), key=lambda r: (r.ended, r.number))
    values = np.array([r.values for r in results], float)
    good = np.array([not r.is_failure for r in results], bool)
    best = np.zeros_like(good)
    if good.any():
        places = np.flatnonzero(good)[on_front(values[good])]
        best[list(_one_of_each(search, results, places.tolist()))] = True
    published = {snapshot: ref for ref, snapshot in _published(warehouse, search)}
    trials = tuple(
        Trial(
            **{f.name: getattr(r, f.name) for f in fields(r)},
            ended_s=_seconds(search.began, r.ended),
            hypervolume=hypervolume(values[: n + 1][good[: n + 1]]),
            is_on_front=bool(best[n]),
            ref=published.get(r.snapshot_id or "", ""),
        )
        for n, r in enumerate(results)
    )
    return Front(search.name, search.file.objectives, trials)


def _one_of_each(search: Search, results: list[Result], places: list[int]) -> Iterable[int]:
    """Of results with equal values one: the others are no other trade-off.

    It is the best as measured, since values tell nothing beneath −0.2; of equal ones the first.
    """
    chosen: dict[Point, int] = {}
    for place in places:
        result = results[place]
        other = results[chosen.setdefault(result.values, place)]
        if search.file.shares(result.metrics) > search.file.shares(other.metrics):
            chosen[result.values] = place
    return chosen.values()


def _best(trials: Iterable[Trial], objective: Objective) -> float:
    metrics = (t.metrics[objective.metric] for t in trials)
    return (max if objective.is_max else min)(metrics)


def ref_name(search: Search, k: int) -> str:
    """The ref of the k-th candidate along the front, from 1."""
    return f"{search.name}.{k}"


def _published(warehouse: Warehouse, search: Search) -> Iterator[tuple[str, str]]:
    """The refs of a search, and the snapshots that they name."""
    for name in warehouse.refs.names():
        start, _, k = name.rpartition(".")
        if start == search.name and k.isdecimal():
            yield name, warehouse.refs.current(name).snapshot_id


def _seconds(began: str, ended: str) -> float:
    passed = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
    return round(passed.total_seconds(), 3)


@dataclass(frozen=True, slots=True)
class Bound:
    """A metric is to be at least (`is_min`), or at most, a limit."""

    metric: str
    is_min: bool
    limit: float

    def holds(self, trial: Trial) -> bool:
        """Whether a result keeps to it."""
        value = trial.metrics.get(self.metric)
        if value is None:
            return False
        return value >= self.limit if self.is_min else value <= self.limit

    def __str__(self) -> str:
        return f"{self.metric} at {'least' if self.is_min else 'most'} {figure(self.limit)}"


def cheapest(front: Front, bounds: Sequence[Bound], cost: str | None) -> Trial:
    """Of the results that keep to all bounds on metrics, the best by the objective `cost`.

    By default the last objective is the cost. Raises SearchError where there is none, with the best
    that there is.
    """
    objectives = {o.metric: o for o in front.objectives}
    cost = cost or front.objectives[-1].metric
    if cost not in objectives:
        raise SearchError(
            "The cost is no objective of the search",
            where=front.search,
            expected=" or ".join(objectives),
            found=cost,
            next_step="name an objective",
        )
    good = [t for t in front.trials if not t.is_failure]
    _refuse_unmeasured(front, good, bounds)
    fit = [t for t in good if all(b.holds(t) for b in bounds)]
    if not fit:
        raise SearchError(
            "No candidate keeps to these bounds",
            where=front.search,
            expected=", ".join(map(str, bounds)),
            found="; ".join(_best_there_is(good, bounds)),
            next_step="ask for less, or search further",
        )
    # As measured: values tell nothing beneath −0.2.
    asked = (objectives[cost], *front.objectives)
    return max(fit, key=lambda t: (*(o.share(t.metrics) for o in asked), -t.number))


def _refuse_unmeasured(front: Front, good: list[Trial], bounds: Sequence[Bound]) -> None:
    measured = {name for t in good for name in t.metrics}
    for bound in bounds:
        if bound.metric not in measured:
            raise SearchError(
                "Nothing of the search has this metric" if good else "The search has no result yet",
                where=front.search,
                expected=", ".join(sorted(measured)) or "a result",
                found=bound.metric,
                next_step="name a metric that its evaluator prints" if good else "let it go on",
            )


def _best_there_is(good: list[Trial], bounds: Sequence[Bound]) -> Iterator[str]:
    """Per bound the best metric of those that keep to the others; of all, where none does."""
    for bound in bounds:
        name, sign = bound.metric, 1 if bound.is_min else -1
        others = [b for b in bounds if b.metric != name]
        there = [t for t in good if name in t.metrics]
        fit = [t for t in there if all(b.holds(t) for b in others)]
        best = max(fit or there, key=lambda t: sign * t.metrics[name])
        who = "with the other bounds " if fit and len(bounds) > 1 else ""
        start = f"the {'highest' if bound.is_min else 'lowest'} {name} {who}is"
        yield f"{start} {figure(best.metrics[name])}, of candidate {best.number}"


def front_picture(front: Front) -> bytes:
    """Draw each objective against the last one, and beneath it the hypervolume, as PNG.

    Evaluations that another one beats in everything are pale; beside a published one stands what
    its ref ends with. The hypervolume stands over evaluations and over time.
    """
    others = front.objectives[:-1] or front.objectives
    above = [Panel(_label(front.objectives[-1]), _label(o), [*_series(front, o)]) for o in others]
    ended = [t.ended_s for t in front.trials]
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    unit, scale = next(u for u in units if u[0] == "seconds" or max(ended, default=0) > 2 * u[1])
    heights = [t.hypervolume for t in front.trials]
    beneath = [
        Panel(label, "hypervolume", [Series("", along, heights, is_steps=True)])
        for label, along in (
            ("evaluations", [*range(1, 1 + len(heights))]),
            (unit, [s / scale for s in ended]),
        )
    ]
    title = f"{front.search}: {len(front.trials)} evaluations; k is {front.search}.k"
    return panels_picture([above, beneath], in_one_line(title))


def _series(front: Front, objective: Objective) -> Iterator[Series]:
    """An objective over the last one: what is beaten, what lies on the front, what is published."""
    last = front.objectives[-1].metric
    drawn = [
        (t, x, y)
        for t in front.trials
        if not t.is_failure and isfinite(x := t.metrics[last])
        if isfinite(y := t.metrics[objective.metric])
    ]
    for label, marker, color, some in (
        ("beaten", "o", "#b9c4d8", [d for d in drawn if not d[0].ref and not d[0].is_on_front]),
        ("on the front", "o", "#2244aa", [d for d in drawn if not d[0].ref and d[0].is_on_front]),
        ("published", "D", "#c02020", [d for d in drawn if d[0].ref]),
    ):
        names = [in_one_line(t.ref.rpartition(".")[2]) for t, _, _ in some]
        points = [x for _, x, _ in some], [y for _, _, y in some]
        yield Series(label if some else "", *points, marker, color, line="", names=names)


def _label(objective: Objective) -> str:
    """An objective and its direction."""
    better = "more" if objective.is_max else "less"
    return in_one_line(f"{objective.metric} ({better} is better)")
