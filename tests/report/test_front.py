"""The front of a search as pictures: its axes, its legend, names as they are, and small."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.pictures import MOST_IN_PLACE
from mergepipe_pipeline.report.front import DrawnFront, DrawnTrial, front_chart, front_picture
from tests.test_pictures import svg_of, words_of

figures = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, 1e-9, 5e-324]))
names = st.text(max_size=60)


@st.composite
def fronts(draw: st.DrawFn) -> DrawnFront:
    count = draw(st.integers(1, 3))
    trials = [
        DrawnTrial(
            number,
            draw(st.none() | st.tuples(*[figures] * count)),
            draw(st.booleans()),
            draw(names),
            draw(st.floats(0, 1e5)),
            draw(st.floats(0, 2)),
        )
        for number in range(draw(st.integers(0, 60)))
    ]
    objectives = tuple(draw(st.lists(names, min_size=count, max_size=count)))
    return DrawnFront(draw(names), objectives, (True,) * count, tuple(trials))


def example() -> DrawnFront:
    metrics = [(0.2, 9.0), None, (0.9, 18.0), (0.5, 12.0), (0.4, 14.0)]
    return DrawnFront(
        "pair",
        ("accuracy", "tokens"),
        (True, False),
        tuple(
            DrawnTrial(n, m, n in {0, 2, 3}, f"pair.{n}" if n in {0, 2} else "", 60.0 * n, 0.1 * n)
            for n, m in enumerate(metrics)
        ),
    )


@settings(max_examples=50)
@given(fronts())
def test_whatever_is_measured_is_drawn_small(front: DrawnFront) -> None:
    svg_of(front_chart(front))


def test_a_front_has_axes_with_directions_and_a_legend() -> None:
    shown = front_chart(example())
    assert len(shown) <= MOST_IN_PLACE
    assert words_of(shown) >= {
        "accuracy (more is better)",
        "tokens (less is better)",
        "beaten",
        "on the front",
        "published",
    }
    dots = {p.attrib["stroke"]: p.attrib["d"].count("z") for p in svg_of(shown).iterfind("{*}path")}
    assert dots == {"gray": 0, "tan": 1, "blue": 1, "red": 2}


def test_a_picture_of_a_front_is_a_small_png_that_is_the_same_each_time() -> None:
    png = front_picture(example())
    assert png.startswith(b"\x89PNG")
    assert len(png) < 60_000
    assert png == front_picture(example())
    front = example()
    odd = replace(front.trials[0], metrics=(inf, 1.0))
    assert front_picture(replace(front, trials=(odd, *front.trials[1:]))) != png
    assert front_picture(replace(front, search="$x_", trials=()))
