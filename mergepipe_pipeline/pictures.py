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

#: Inches per cell, and what titles and one character of a label take.
_CELL, _TITLE, _CHARACTER = 0.34, 0.8, 0.075
#: Inches that cells may take in either direction; more cells become smaller.
_LARGEST = 10.0
#: Most columns and rows whose cells have room for values, and most labels on an axis.
_MOST_WITH_TEXT, _MOST_LABELS = (12, 32), 60


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
    """A line through points (x, y), with its name for the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Mark:
    """One point that stands out; `shape` is a marker as matplotlib names it."""

    label: str
    x: float
    y: float
    shape: str


def curve_picture(
    lines: Sequence[Line],
    marks: Sequence[Mark],
    title: str,
    x_label: str,
    y_label: str,
    *,
    dots_per_inch: int = 90,
) -> bytes:
    """Lines over one pair of axes that start at 0, with marked points, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=dots_per_inch, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axis = figure.subplots()
    for line in lines:
        axis.plot(line.x, line.y, label=line.label, marker=".", markersize=3, linewidth=1.2)
    style: Any = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": "black"}
    for mark in marks:
        axis.plot([mark.x], [mark.y], mark.shape, label=mark.label, linestyle="none", **style)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.set_xlabel(x_label, fontsize=8)
    axis.set_ylabel(y_label, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.set_title(title, fontsize=9, parse_math=False)
    axis.legend(fontsize=7)
    return _png(canvas)


def sketch(points: Sequence[tuple[float, float]], mark: tuple[float, float], label: str) -> str:
    """A falling curve over 0 to 100 % with one marked point, as SVG of at most 700 characters.

    So short that the Dagster UI shows it in its place. `points` and `mark` are shares of 1 along x;
    the scale of y ends at the highest. `label` says what y is; it is short and plain.
    """
    top = max((y for _, y in (*points, mark)), default=0.0) or 1.0

    def place(x: float, y: float) -> str:
        return f"{8 + 300 * x:.0f},{88 - 72 * y / top:.0f}"

    line = " ".join(place(x, y) for x, y in points[:: -(-len(points) // 16) or 1])
    x, y = place(*mark).split(",")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="320" height="106" font-size="11" '
        'font-family="sans-serif"><path d="M8 12V88H310" fill="none" stroke="#999"/>'
        f'<polyline points="{line}" fill="none" stroke="#35c" stroke-width="2"/>'
        f'<circle cx="{x}" cy="{y}" r="4" fill="none" stroke="#000"/>'
        f'<text x="14" y="11">{100 * top:.0f} % {label}</text>'
        '<text x="8" y="103">0</text><text x="210" y="103">100 % of bytes</text></svg>'
    )


def _png(canvas: Any) -> bytes:
    """What a canvas shows, in 256 colours: a third of the bytes, and as many as a scale shows."""
    from PIL import Image

    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    out = BytesIO()
    drawn.quantize(256, dither=Image.Dither.NONE).save(out, format="png", optimize=True)
    return out.getvalue()
