"""Pictures: whole PNG files of bounded size, whatever is drawn."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from mergepipe_pipeline.pictures import (
    HeatMap,
    Line,
    Mark,
    curve_picture,
    heat_maps,
    sketch,
)


def shape(png: bytes) -> tuple[int, ...]:
    return imread(BytesIO(png)).shape


def test_a_heat_map_has_the_colours_of_its_values() -> None:
    png = heat_maps([HeatMap("ab", "xy", [[0.0, 1.0], [1.0, 0.0]], "t", text="")])
    low, high = np.array([68, 1, 84]) / 255, np.array([253, 231, 37]) / 255  # ends of viridis
    pixels = imread(BytesIO(png))[..., :3].reshape(-1, 3)
    for colour in (low, high):
        assert (np.abs(pixels - colour).max(axis=1) < 0.01).sum() > 1000


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e6)), max_size=60),
    st.tuples(st.floats(0, 1), st.floats(0, 1e6)),
)
def test_a_sketch_is_short_whole_xml_and_stays_in_its_frame(
    points: list[tuple[float, float]], mark: tuple[float, float]
) -> None:
    drawn = sketch(points, mark, "predicted error")
    assert len(drawn) <= 700
    root = ElementTree.fromstring(drawn)
    for spot in root.iterfind("{*}polyline"):
        for pair in spot.attrib["points"].split():
            x, y = map(int, pair.split(","))
            assert 8 <= x <= 308
            assert 16 <= y <= 88


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


def test_curves_and_marks_are_drawn_small_and_the_same_each_time() -> None:
    lines = [Line(name, (0, 50, 100), (100, y, 0)) for y, name in enumerate("abcd")]
    marks = [Mark("here", 50, 2, "o")]
    png = curve_picture(lines, marks, "t $x", "bytes", "error")
    assert shape(png)[:2] == (360, 576)
    assert len(png) < 50_000
    assert png == curve_picture(lines, marks, "t $x", "bytes", "error")
    assert png != curve_picture(lines, [], "t $x", "bytes", "error")
