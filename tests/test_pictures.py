"""Pictures: whole PNG files of bounded size, whatever is drawn."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from mergepipe_pipeline.pictures import (
    MOST_IN_PLACE,
    HeatMap,
    Line,
    Panel,
    Series,
    Spots,
    chart,
    heat_maps,
    panels_picture,
)
from mergepipe_pipeline.text import in_one_line


def shape(png: bytes) -> tuple[int, ...]:
    return imread(BytesIO(png)).shape


def test_a_heat_map_has_the_colours_of_its_values() -> None:
    png = heat_maps([HeatMap("ab", "xy", [[0.0, 1.0], [1.0, 0.0]], "t", text="")])
    low, high = np.array([68, 1, 84]) / 255, np.array([253, 231, 37]) / 255  # ends of viridis
    pixels = imread(BytesIO(png))[..., :3].reshape(-1, 3)
    for colour in (low, high):
        assert (np.abs(pixels - colour).max(axis=1) < 0.01).sum() > 1000


labels = st.text(max_size=60)
points = st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6) | st.just(math.nan)))


def svg_of(chart: str) -> ElementTree.Element:
    """The picture that is the address in a chart's Markdown."""
    address = chart.removeprefix("![chart](<data:image/svg+xml,").removesuffix(">)")
    assert not re.search(r"[\n`&#|]|(?<!\\)[<>]", address)  # what Markdown ends an address at
    return ElementTree.fromstring(unquote(re.sub(r"\\([<>])", r"\1", address)))


def words_of(chart: str) -> set[str]:
    """The words in a chart."""
    return {e.text or "" for e in svg_of(chart).iter() if e.tag.endswith(("text", "tspan"))}


@given(st.lists(st.tuples(labels, points, st.booleans()), max_size=3), labels, labels)
def test_a_chart_is_shown_in_its_place_whatever_it_shows(
    series: list[tuple[str, list[tuple[float, float]], bool]], x_label: str, y_label: str
) -> None:
    drawn = [Series(in_one_line(a), "blue", some, line) for a, some, line in series]
    shown = chart(drawn, in_one_line(x_label), in_one_line(y_label), is_from_zero=False)
    svg_of(shown)
    # A label whose letters are escaped may alone be longer.
    assert len(shown) <= MOST_IN_PLACE or "%" in shown


def test_a_chart_has_axes_with_names_ticks_a_legend_and_its_points_inside() -> None:
    line = [(float(n), 100.0 / (1 + n)) for n in range(100)]
    shown = chart(
        [Series("", "blue", line, is_line=True), Series("this: 40 %", "red", [(20.0, 40.0)])],
        "read, MiB",
        "loss, %",
        is_from_zero=True,
    )
    assert len(shown) <= MOST_IN_PLACE
    assert words_of(shown) >= {"read, MiB", "loss, %", "this: 40 %", "0", "100"}
    root = svg_of(shown)
    width, height = (int(root.attrib[side]) for side in ("width", "height"))
    _, curve, dot = root.iterfind("{*}path")
    (x, y), *steps = (
        tuple(map(int, pair)) for pair in re.findall(r"(-?\d+) ?(-?\d+)", curve.attrib["d"])
    )
    for dx, dy in steps:
        x, y = x + dx, y + dy
        assert 0 < x < width
        assert 0 < y < height
    assert len(steps) > 20
    assert dot.attrib["stroke"] == "red"


def test_the_same_values_give_the_same_bytes() -> None:
    maps = [HeatMap("abc", "abc", np.eye(3), "t")]
    assert heat_maps(maps) == heat_maps(maps)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 8), (300, 8), (8, 100), (100, 100)])
def test_pictures_stay_small_however_much_they_show(rows: int, columns: int) -> None:
    names = [f"name_{i:03d}" for i in range(max(rows, columns))]
    values = np.random.default_rng(0).standard_normal((rows, columns))
    png = heat_maps([HeatMap(names[:rows], names[:columns], values, "t", diverging=True)])
    height, width, _ = shape(png)
    assert max(height, width) < 1200
    assert len(png) < 200_000


def test_maps_stand_side_by_side() -> None:
    one = HeatMap("ab", "xy", np.eye(2), "one")
    assert shape(heat_maps([one, one]))[1] == pytest.approx(
        2 * shape(heat_maps([one]))[1], rel=0.01
    )


def test_cells_without_a_value_and_names_that_look_like_formulas_are_drawn() -> None:
    assert heat_maps([HeatMap(["$a", "b_$"], ["$x^", "y"], [[np.nan, 1.0], [0.5, np.nan]], "$t")])


def test_drawing_needs_neither_pyplot_nor_a_display() -> None:
    code = (
        "import sys, mergepipe_pipeline.pictures as p\n"
        "assert 'matplotlib' not in sys.modules\n"
        "p.heat_maps([p.HeatMap('a', 'b', [[1.0]], 't')])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_panels_are_drawn_small_and_the_same_each_time() -> None:
    lines = [Line(name, (0, 50, 100), (100, y, 0)) for y, name in enumerate("abcd")]
    spots = [Spots("here $x", [50], [2], "o", "red", ["$n"])]
    panel = Panel("bytes $", "error", lines, spots, is_from_zero=True)
    png = panels_picture([[panel]], "t $x")
    assert len(png) < 50_000
    assert png == panels_picture([[panel]], "t $x")
    assert png != panels_picture([[replace(panel, spots=[])]], "t $x")
    assert shape(panels_picture([[panel], [panel, panel]], "t"))[1] < 1000
