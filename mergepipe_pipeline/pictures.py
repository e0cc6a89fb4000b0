"""Pictures of results as PNG bytes, for files and for the Dagster UI.

Draws what it is given and knows nothing of merges. matplotlib's objects are used directly, without
pyplot, so that nothing is shared between threads; it is imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches per cell, and what titles and one character of a label take.
_CELL, _TITLE, _CHARACTER = 0.34, 0.8, 0.075
#: Inches that cells may take in either direction; more cells become smaller.
_LARGEST = 10.0
#: Most columns and rows whose cells have room for values, and most labels on an axis.
_MOST_WITH_TEXT, _MOST_LABELS = (12, 32), 60
_DOTS_PER_INCH = 90


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


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) with their name for the legend ("": none).

    `marker`, `color` (None: the next one) and `line` ("": single points) are as matplotlib names
    them; with `is_steps` y holds until the next x. `names` stand beside points.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    marker: str = "."
    color: str | None = None
    line: str = "-"
    is_steps: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; `is_from_zero`: both start at 0, else where the values do."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    is_from_zero: bool = False


def heat_maps(maps: Sequence[HeatMap]) -> bytes:
    """Draw heat maps side by side as one PNG."""
    widths, heights = zip(*(m.inches() for m in maps), strict=True)
    label_widths = [_CHARACTER * max(map(len, m.rows), default=0) + 1.1 for m in maps]
    label_height = max(_CHARACTER * max(map(len, m.columns), default=0) for m in maps)
    figure = _figure(sum(widths) + sum(label_widths), max(heights) + label_height + _TITLE)
    ratios = [w + b for w, b in zip(widths, label_widths, strict=True)]
    axes = figure.subplots(1, len(maps), squeeze=False, width_ratios=ratios)[0]
    for axis, heat_map in zip(axes, maps, strict=True):
        _draw_heat_map(axis, heat_map)
    return _png(figure)


def panels_picture(rows: Sequence[Sequence[Panel]], title: str) -> bytes:
    """Draw rows of panels as one PNG on white, readable on a dark page, too."""
    columns = max(map(len, rows))
    width = 6.8 if columns == 1 else 4.6 * columns
    figure = _figure(width, 4.2 if len(rows) == 1 else 3.4 * len(rows))
    for number, row in enumerate(rows):
        for place, panel in enumerate(row):
            _draw_panel(figure.add_subplot(len(rows), columns, number * columns + place + 1), panel)
    figure.suptitle(title, fontsize=11, parse_math=False)
    return _png(figure)


def _draw_heat_map(axis: Axes, drawn: HeatMap) -> None:
    low, high = drawn.limits or (None, None)
    values = np.asarray(drawn.values, np.float64).reshape(len(drawn.rows), len(drawn.columns))
    colors = "RdBu_r" if drawn.diverging else "viridis"
    image: Any = axis.imshow(values, colors, vmin=low, vmax=high, aspect="auto")
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
            color = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
            shown = drawn.text.format(value)
            axis.text(x, y, shown, ha="center", va="center", fontsize=7, color=color)


def _label(set_ticks: Any, names: Sequence[str], **style: Any) -> None:
    """Names along an axis, only every so many of them where they are more than fit."""
    shown = range(0, len(names), -(-len(names) // _MOST_LABELS) or 1)
    set_ticks(list(shown), labels=[names[i] for i in shown], fontsize=7, parse_math=False, **style)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    for s in panel.series:
        style: Any = {"drawstyle": "steps-post"} if s.is_steps else {}
        size = 4 if s.line else 8
        style |= {"label": s.label, "color": s.color, "marker": s.marker, "markersize": size}
        axis.plot(s.x, s.y, linestyle=s.line or "none", **style)
        for x, y, name in zip(s.x, s.y, s.names, strict=False):
            place: Any = {"xytext": (7, 7), "textcoords": "offset points", "parse_math": False}
            axis.annotate(name, (x, y), fontsize=9, color=s.color, **place)
    if panel.is_from_zero:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    axis.margins(0.08)
    axis.grid(alpha=0.3)
    axis.set_xlabel(panel.x_label, fontsize=10, parse_math=False)
    axis.set_ylabel(panel.y_label, fontsize=10, parse_math=False)
    axis.tick_params(labelsize=9)
    if any(s.label for s in panel.series):
        for text in axis.legend(fontsize=9).get_texts():
            text.set_parse_math(False)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def _png(figure: Figure) -> bytes:
    """What a figure shows, in 256 colours: a third of the bytes, and as many as a scale shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    out = BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    return out.getvalue()
