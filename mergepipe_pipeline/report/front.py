"""The front of a search as pictures: what every evaluation gave, and how the front grew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from mergepipe_pipeline.pictures import Line, Panel, Series, Spots, chart, panels_picture
from mergepipe_pipeline.text import in_one_line


@dataclass(frozen=True, slots=True)
class DrawnTrial:
    """One result of a search.

    `metrics` are as measured, one per objective, None for a failure; `ref` is "" unless it is
    published; `ended_s` are seconds since the search began; `hypervolume` is that of this and all
    earlier results.
    """

    number: int
    metrics: tuple[float, ...] | None
    is_on_front: bool
    ref: str
    ended_s: float
    hypervolume: float

    @property
    def kind(self) -> str:
        """What the legend calls it."""
        return "published" if self.ref else "on the front" if self.is_on_front else "beaten"


@dataclass(frozen=True, slots=True)
class DrawnFront:
    """A search with its results in the order in which they came.

    `objectives` are names, the last one being what the others cost; `maximise` says of each
    whether more is better.
    """

    search: str
    objectives: tuple[str, ...]
    maximise: tuple[bool, ...]
    trials: tuple[DrawnTrial, ...]

    @property
    def measured(self) -> Iterator[tuple[DrawnTrial, tuple[float, ...]]]:
        """The results that are no failures and whose metrics can be drawn."""
        for trial in self.trials:
            if trial.metrics is not None and all(map(isfinite, trial.metrics)):
                yield trial, trial.metrics

    def label(self, objective: int) -> str:
        """An objective and its direction."""
        better = "more" if self.maximise[objective] else "less"
        return f"{self.objectives[objective]} ({better} is better)"


def front_picture(front: DrawnFront) -> bytes:
    """PNG: each objective against the last one, and beneath it the hypervolume.

    Evaluations that another one beats in everything are pale; beside a published one stands what
    its ref ends with. The hypervolume stands over evaluations and over time.
    """
    last = len(front.objectives) - 1
    above = [
        Panel(front.label(last), front.label(n), spots=list(_spots(front, n)))
        for n in range(max(1, last))
    ]
    ended = [t.ended_s for t in front.trials]
    unit, scale = _time_unit(max(ended, default=0.0))
    heights = [t.hypervolume for t in front.trials]
    beneath = [
        _growth([*range(1, 1 + len(heights))], heights, "evaluations"),
        _growth([s / scale for s in ended], heights, unit),
    ]
    title = f"{front.search}: {len(front.trials)} evaluations; k is {front.search}.k"
    return panels_picture([above, beneath], in_one_line(title))


def front_chart(front: DrawnFront) -> str:
    """Markdown that the Dagster UI shows in its place: the first objective over the last one.

    Of more results than have room only some are drawn.
    """
    series = [
        Series(s.label, color, [*zip(s.x, s.y, strict=True)])
        for s, color in zip(_spots(front, 0), ("tan", "blue", "red"), strict=True)
    ]
    x_label, y_label = front.label(len(front.objectives) - 1), front.label(0)
    return chart(series, in_one_line(x_label), in_one_line(y_label), is_from_zero=False)


def _spots(front: DrawnFront, objective: int) -> Iterator[Spots]:
    """An objective over the last one: what is beaten, what lies on the front, what is published."""
    kinds = (("beaten", "o", "#b9c4d8"), ("on the front", "o", "#2244aa"))
    for label, shape, color in (*kinds, ("published", "D", "#c02020")):
        some = [(t, m) for t, m in front.measured if t.kind == label]
        yield Spots(
            label if some else "",
            [m[-1] for _, m in some],
            [m[objective] for _, m in some],
            shape,
            color,
            [in_one_line(t.ref.rpartition(".")[2]) for t, _ in some],
        )


def _growth(along: Sequence[float], heights: Sequence[float], label: str) -> Panel:
    """A panel of steps: the hypervolume holds until the next result."""
    return Panel(label, "hypervolume", [Line("", along, heights, is_steps=True)])


def _time_unit(longest_s: float) -> tuple[str, float]:
    """The unit that suits a span, and its seconds."""
    for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
        if longest_s > 2 * seconds:
            return unit, seconds
    return "seconds", 1.0
