"""Pictures: whole PNG files of bounded size, whatever is drawn."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from matplotlib.image import imread

from mergepipe_pipeline.pictures import HeatMap, Panel, Series, heat_maps, panels_picture


def shape(png: bytes) -> tuple[int, ...]:
    return imread(BytesIO(png)).shape


def test_a_heat_map_has_the_colours_of_its_values() -> None:
    png = heat_maps([HeatMap("ab", "xy", [[0.0, 1.0], [1.0, 0.0]], "t", text="")])
    low, high = np.array([68, 1, 84]) / 255, np.array([253, 231, 37]) / 255  # ends of viridis
    pixels = imread(BytesIO(png))[..., :3].reshape(-1, 3)
    for colour in (low, high):
        assert (np.abs(pixels - colour).max(axis=1) < 0.01).sum() > 1000


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
    lines = [Series(name, (0, 50, 100), (100, y, math.nan)) for y, name in enumerate("abcd")]
    spot = Series("here $x", [50], [2], "o", "red", line="", names=["$n"])
    panel = Panel("bytes $", "error", [*lines, spot], is_from_zero=True)
    png = panels_picture([[panel]], "t $x")
    assert len(png) < 50_000
    assert png == panels_picture([[panel]], "t $x")
    assert png != panels_picture([[replace(panel, series=lines)]], "t $x")
    assert shape(panels_picture([[panel], [panel, panel]], "t"))[1] < 1000
