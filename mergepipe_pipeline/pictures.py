"""Pictures of results as PNG bytes, for files and for the Dagster UI.

Draws what it is given and knows nothing of merges. matplotlib's objects are used directly, without
pyplot, so that nothing is shared between threads; it is imported when the first picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches per cell, and what titles and one character of a label take.
_CELL, _TITLE, _CHARACTER = 0.34, 0.8, 0.075
#: Inches that cells may take in either direction; more cells become smaller.
_LARGEST = 10.0
#: Most columns and rows whose cells have room for values, and most labels on an axis.
_MOST_WITH_TEXT, _MOST_LABELS = (12, 32), 60
#: Characters of a chart as the Dagster UI gets it; Markdown of 1000 is shown after a click only.
MOST_IN_PLACE = 999
#: Pixels of a chart: its size, and where its axes begin and end.
_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 270, 56, 466, 30, 228
#: Characters that a label of a chart may have, and points that a series may begin with.
_MOST_IN_LABEL, _MOST_POINTS = 40, 60
#: Beside letters and digits, what stays as it is where a chart is the address of a picture.
_PLAIN = " '=/:;,()"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A table drawn as colours.

    `values` [rows, columns], NaN for an empty cell; colours span `limits` (default: those of the
    values), around 0 in two hues if `diverging`. Cells show values in `text` format where they fit.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: npt.ArrayLike
    title: str
    limits: tuple[float, float] | None = None
    diverging: bool = False
    text: str = "{:z.2f}"

    def inches(self) -> tuple[float, float]:
        """Width and height that the cells take."""
        width = min(_LARGEST, _CELL * 1.4 * max(2, len(self.columns)))
        return width, min(_LARGEST, _CELL * max(2, len(self.rows)))


def heat_maps(maps: Sequence[HeatMap], *, dots_per_inch: int = 90) -> bytes:
    """Heat maps side by side as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widths, heights = zip(*(m.inches() for m in maps), strict=True)
    label_widths = [_CHARACTER * max(map(len, m.rows), default=0) + 1.1 for m in maps]
    label_height = max(_CHARACTER * max(map(len, m.columns), default=0) for m in maps)
    size = (sum(widths) + sum(label_widths), max(heights) + label_height + _TITLE)
    figure = Figure(figsize=size, dpi=dots_per_inch, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    ratios = [w + b for w, b in zip(widths, label_widths, strict=True)]
    axes = figure.subplots(1, len(maps), squeeze=False, width_ratios=ratios)[0]
    for axis, heat_map in zip(axes, maps, strict=True):
        _draw(axis, heat_map)
    return _png(canvas)


def _draw(axis: Axes, drawn: HeatMap) -> None:
    low, high = drawn.limits or (None, None)
    values = np.asarray(drawn.values, np.float64).reshape(len(drawn.rows), len(drawn.columns))
    image: Any = axis.imshow(
        values,
        cmap="RdBu_r" if drawn.diverging else "viridis",
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )
    width, height = drawn.inches()
    axis.set_box_aspect(height / width)
    axis.set_anchor("N")
    axis.set_title(drawn.title, fontsize=9, parse_math=False)
    _label(axis.set_xticks, drawn.columns, rotation=90)
    _label(axis.set_yticks, drawn.rows)
    scale = axis.inset_axes((1 + 0.1 / width, 0, 0.12 / width, 1))
    axis.figure.colorbar(image, cax=scale).ax.tick_params(labelsize=7)
    if len(drawn.columns) > _MOST_WITH_TEXT[0] or len(drawn.rows) > _MOST_WITH_TEXT[1]:
        return
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            color = "white" if dark else "black"
            shown = drawn.text.format(value)
            axis.text(x, y, shown, ha="center", va="center", fontsize=7, color=color)


def _label(set_ticks: Any, names: Sequence[str], **style: Any) -> None:
    """Names along an axis, only every so many of them where they are more than fit."""
    every = -(-len(names) // _MOST_LABELS) or 1
    shown = range(0, len(names), every)
    set_ticks(list(shown), labels=[names[i] for i in shown], fontsize=7, parse_math=False, **style)


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points (x, y), with its name for the legend; `is_steps`: y holds until the
    next x.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_steps: bool = False


@dataclass(frozen=True, slots=True)
class Spots:
    """Single points, with their name for the legend ("": none).

    `shape` is a marker and `color` a colour as matplotlib names them; `names` stand beside points.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    shape: str
    color: str
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; `is_from_zero`: both start at 0, else where the values do."""

    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    spots: Sequence[Spots] = ()
    is_from_zero: bool = False


def panels_picture(
    rows: Sequence[Sequence[Panel]], title: str, *, dots_per_inch: int = 90
) -> bytes:
    """Rows of panels as one PNG on white, readable on a dark page, too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(map(len, rows))
    size = (6.8 if columns == 1 else 4.6 * columns, 4.2 if len(rows) == 1 else 3.4 * len(rows))
    figure = Figure(figsize=size, dpi=dots_per_inch, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    for number, row in enumerate(rows):
        for place, panel in enumerate(row):
            _draw_panel(figure.add_subplot(len(rows), columns, number * columns + place + 1), panel)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return _png(canvas)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    for line in panel.lines:
        style = "steps-post" if line.is_steps else "default"
        axis.plot(
            line.x, line.y, label=line.label, drawstyle=style, marker=".", ms=4, linewidth=1.4
        )
    for spots in panel.spots:
        axis.plot(
            spots.x, spots.y, spots.shape, label=spots.label, color=spots.color, ms=8, ls="none"
        )
        for x, y, name in zip(spots.x, spots.y, spots.names, strict=False):
            place: Any = {"xytext": (7, 7), "textcoords": "offset points", "parse_math": False}
            axis.annotate(name, (x, y), fontsize=9, color=spots.color, **place)
    if panel.is_from_zero:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    axis.margins(0.08)
    axis.grid(alpha=0.3)
    axis.set_xlabel(panel.x_label, fontsize=10, parse_math=False)
    axis.set_ylabel(panel.y_label, fontsize=10, parse_math=False)
    axis.tick_params(labelsize=9)
    if any([*(line.label for line in panel.lines), *(spots.label for spots in panel.spots)]):
        for text in axis.legend(fontsize=9).get_texts():
            text.set_parse_math(False)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a chart in a colour that SVG names; `label` is what the legend says, "" nothing."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]
    is_line: bool = False


def chart(series: Sequence[Series], x_label: str, y_label: str, *, is_from_zero: bool) -> str:
    """A chart as Markdown that is so short that the Dagster UI shows it in its place.

    SVG by hand: what matplotlib makes of the same is longer in any format. Where not all points
    have room, the longest series lose some; what is not finite is left out. Where labels alone take
    the room, as long ones of letters beyond ASCII do, it is longer and has all points.
    """
    kept = [_finite(s.points) for s in series]  # from left to right: steps are shorter
    xs = _Scale.around([x for p in kept for x, _ in p], _LEFT, _RIGHT, is_from_zero)
    ys = _Scale.around([y for p in kept for _, y in p], _BOTTOM, _TOP, is_from_zero)
    some = kept = [_some(p, _MOST_POINTS) for p in kept]
    while True:
        drawn = _chart([*zip(series, some, strict=True)], xs, ys, (x_label, y_label))
        if len(drawn) <= MOST_IN_PLACE:
            return drawn
        most = max(map(len, some), default=0) - 1
        if most < 1:
            return _chart([*zip(series, kept, strict=True)], xs, ys, (x_label, y_label))
        some = [_some(p, most) for p in some]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(p for p in points if all(map(math.isfinite, p)))


def _some(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(n * (len(points) - 1) / max(1, most - 1))] for n in range(most)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values `low` to `high` along pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def around(values: Sequence[float], start: float, end: float, is_from_zero: bool) -> _Scale:
        """A scale on which all values lie, a little inside or above zero."""
        high = max(values, default=1.0)
        if is_from_zero:
            return _Scale(0.0, high or 1.0, start, end)
        low = min(values, default=0.0)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return _Scale(low - margin, high + margin, start, end)

    def __call__(self, value: float) -> int:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share)

    def ticks(self) -> list[float]:
        """Two or three round values, the first and the last that there are."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first, last = -math.floor(-self.low / step), math.floor(self.high / step)
        return [n * step for n in dict.fromkeys((first, (first + last) // 2, last))]


def _chart(
    drawn: Sequence[tuple[Series, list[tuple[float, float]]]],
    xs: _Scale,
    ys: _Scale,
    labels: tuple[str, str],
) -> str:
    x_label, y_label = map(_label_text, labels)
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDE}' height='{_HIGH}' "
        "style='font:13px arial;background:white;stroke-linecap:round;stroke-width:8'>"
        f"<path d='M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}' fill='none' stroke='gray' stroke-width='1'/>"
    )
    for series, points in drawn:
        style = " fill='none' stroke-width='2'" if series.is_line else ""
        if points:
            path = _path([(xs(x), ys(y)) for x, y in points], series.is_line)
            svg += f"<path d='{path}' stroke='{series.color}'{style}/>"
    svg += "<g text-anchor='end'>"
    svg += "".join(f"<text x='50' y='{ys(t)}'>{t:.4g}</text>" for t in ys.ticks())
    legend = [(s.color, _label_text(s.label)) for s, points in drawn if s.label and points]
    told = " ".join(f"<tspan fill='{color}'>{text}</tspan>" for color, text in legend)
    svg += f"<text x='{_RIGHT}' y='16'>{told}</text></g><g text-anchor='middle'>"
    svg += "".join(f"<text x='{xs(t)}' y='245'>{t:.4g}</text>" for t in xs.ticks())
    svg += f"<text x='260' y='264'>{x_label}</text></g><text x='4' y='16'>{y_label}</text></svg>"
    # Markdown reads entities and code before it reads where a link leads to.
    address = quote(svg, safe=_PLAIN).replace("%3C", r"\<").replace("%3E", r"\>")
    return f"![chart](<data:image/svg+xml,{address}>)"


def _path(places: Sequence[tuple[int, int]], is_line: bool) -> str:
    """A line through places, or a dot at each: a round cap of no length. Relative is shorter."""
    end, move = ("", "l") if is_line else ("z", "m")
    steps = [f"{move}{x - u} {y - v}{end}" for (u, v), (x, y) in pairwise(places)]
    return f"M{places[0][0]} {places[0][1]}{end}{''.join(steps)}".replace(" -", "-")


def _label_text(text: str) -> str:
    """A label as XML takes it, whatever a name holds."""
    shown = text if len(text) <= _MOST_IN_LABEL else f"{text[: _MOST_IN_LABEL - 1]}…"
    return escape(shown, quote=False)


def _png(canvas: Any) -> bytes:
    """What a canvas shows, in 256 colours: a third of the bytes, and as many as a scale shows."""
    from PIL import Image

    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    out = BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    return out.getvalue()
