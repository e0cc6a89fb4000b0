"""The front of a search as SVG: what every evaluation gave, and how the front grew.

Written by hand, since it is small so, the same each time, and needs no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape as escape_markup
from itertools import pairwise
from math import floor, isfinite, log10

from mergepipe_pipeline.text import in_one_line

_WIDTH, _HEIGHT = 380, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 30, 44
_PALE, _STRONG, _AXIS = "#b9c4d8", "#2244aa", "#888"
#: Evaluations that the small picture shows: as many as 700 characters hold.
_MOST_IN_SKETCH = 40


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


def front_picture(front: DrawnFront) -> str:
    """SVG: each objective against the last one, and beneath it the hypervolume.

    Evaluations that another one beats in everything are pale; beside a published one stands what
    its ref ends with. The hypervolume stands over evaluations and over time.
    """
    shown = max(1, len(front.objectives) - 1)
    above = [_scatter(front, n) for n in range(shown)]
    ended = [t.ended_s for t in front.trials]
    unit, scale = _time_unit(max(ended, default=0.0))
    heights = [t.hypervolume for t in front.trials]
    beneath = [
        _growth([*range(1, 1 + len(heights))], heights, "evaluations"),
        _growth([s / scale for s in ended], heights, unit),
    ]
    panels = [
        f'<g transform="translate({_WIDTH * column},{_HEIGHT * row})">{panel}</g>'
        for row, some in enumerate((above, beneath))
        for column, panel in enumerate(some)
    ]
    width, height = _WIDTH * max(shown, 2), 2 * _HEIGHT
    title = _escape(f"{front.search}: {len(front.trials)} evaluations; k is {front.search}.k")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<title>{title}</title><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_LEFT}" y="16" font-size="13">{title}</text>{"".join(panels)}</svg>\n'
    )


def front_sketch(front: DrawnFront) -> str:
    """SVG of at most 700 characters: the first objective over the last one, the front dark.

    So short that the Dagster UI shows it in its place.
    """
    spots = [(m[-1], m[0], t.is_on_front) for t, m in front.measured]
    kept = sorted(spots, key=lambda spot: spot[2])[-_MOST_IN_SKETCH:]
    x_of = _Scale.around([x for x, _, _ in spots], 12, 308)
    y_of = _Scale.around([y for _, y, _ in spots], 80, 12)
    paths = {
        color: "".join(f"M{x_of(x):.0f} {y_of(y):.0f}h0" for x, y, on in kept if on == is_on_front)
        for is_on_front, color in ((False, "#bcd"), (True, "#24a"))
    }
    drawn = "".join(f'<path stroke="{c}" d="{d}"/>' for c, d in paths.items() if d)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="320" height="90">'
        '<path d="M6 6V86H314" fill="none" stroke="#999"/>'
        f'<g stroke-width="6" stroke-linecap="round">{drawn}</g></svg>'
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values `low` to `high` along pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def around(values: Sequence[float], start: float, end: float) -> _Scale:
        """A scale on which all values lie a little inside."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return _Scale(low - margin, high + margin, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        """Two to seven round values."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** floor(log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first = -floor(-self.low / step)
        return [n * step for n in range(first, floor(self.high / step) + 1)]


def _scatter(front: DrawnFront, objective: int) -> str:
    """A panel of one objective over the last one."""
    spots = [(t, m[-1], m[objective]) for t, m in front.measured]
    x_of, y_of = _scales([x for _, x, _ in spots], [y for _, _, y in spots])
    pale, strong, names = [], [], []
    for trial, x, y in spots:
        place = f'cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"'
        title = f"<title>{_escape(_told(front, trial))}</title>"
        if trial.is_on_front:
            strong.append(f'<circle {place} r="4.5" fill="{_STRONG}">{title}</circle>')
        else:
            pale.append(f'<circle {place} r="3.5" fill="{_PALE}">{title}</circle>')
        if trial.ref:
            names.append(_name(trial.ref, x_of(x), y_of(y)))
    axes = _axes(x_of, y_of, front.label(len(front.objectives) - 1), front.label(objective))
    return axes + "".join((*pale, *strong, *names))


def _name(ref: str, x: float, y: float) -> str:
    """The end of a name, above its point."""
    end = _escape(ref.rpartition(".")[2])
    return f'<text x="{x:.1f}" y="{y - 7:.1f}" text-anchor="middle" fill="{_STRONG}">{end}</text>'


def _told(front: DrawnFront, trial: DrawnTrial) -> str:
    """A trial in words: what a browser shows where the mouse is."""
    figures = zip(front.objectives, trial.metrics or (), strict=True)
    words = ", ".join(f"{name} {value:.4g}" for name, value in figures)
    return f"{trial.number}{f' {trial.ref}' if trial.ref else ''}: {words}"


def _growth(along: Sequence[float], heights: Sequence[float], label: str) -> str:
    """A panel of steps: the hypervolume holds until the next result."""
    x_of, y_of = _scales([0.0, *along], [*heights])
    points = list(zip(along, heights, strict=True))
    line = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points[:1]]
    for (_, before), (x, y) in pairwise(points):
        line += [f"{x_of(x):.1f},{y_of(before):.1f}", f"{x_of(x):.1f},{y_of(y):.1f}"]
    drawn = f'<polyline points="{" ".join(line)}" fill="none" stroke="{_STRONG}"/>'
    return _axes(x_of, y_of, label, "hypervolume") + drawn


def _scales(along: Sequence[float], heights: Sequence[float]) -> tuple[_Scale, _Scale]:
    """The scales of a panel, x and y."""
    return (
        _Scale.around(along, _LEFT, _WIDTH - _RIGHT),
        _Scale.around(heights, _HEIGHT - _BOTTOM, _TOP),
    )


def _axes(x_of: _Scale, y_of: _Scale, x_label: str, y_label: str) -> str:
    """Frame, ticks and labels of a panel."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    marks = [
        f'<path d="M{x:.1f} {bottom}v4"/><text x="{x:.1f}" y="{bottom + 16}" '
        f'text-anchor="middle" stroke="none">{tick:.4g}</text>'
        for tick in x_of.ticks()
        for x in [x_of(tick)]
    ]
    marks += [
        f'<path d="M{_LEFT} {y:.1f}h-4"/><text x="{_LEFT - 7}" y="{y + 4:.1f}" '
        f'text-anchor="end" stroke="none">{tick:.4g}</text>'
        for tick in y_of.ticks()
        for y in [y_of(tick)]
    ]
    middle = (_TOP + bottom) / 2
    return (
        f'<g stroke="{_AXIS}" fill="#333"><path d="M{_LEFT} {_TOP}V{bottom}H{right}" '
        f'fill="none"/>{"".join(marks)}</g>'
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 34}" '
        f'text-anchor="middle">{_escape(x_label)}</text>'
        f'<text transform="translate(14,{middle}) rotate(-90)" '
        f'text-anchor="middle">{_escape(y_label)}</text>'
    )


def _time_unit(longest_s: float) -> tuple[str, float]:
    """The unit that suits a span, and its seconds."""
    for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
        if longest_s > 2 * seconds:
            return unit, seconds
    return "seconds", 1.0


def _escape(text: str) -> str:
    """Text that XML takes, whatever a name holds."""
    return escape_markup(in_one_line(text))
