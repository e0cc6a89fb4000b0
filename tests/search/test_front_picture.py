"""The front of a search as a picture: small, the same each time, whatever was measured."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.search.front import Front, Trial, front_picture
from mergepipe_pipeline.search.search_file import Objective
from tests.support.laws import examples

figures = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, 1e-9, 5e-324]))
names = st.text(st.characters(max_codepoint=126), max_size=60)


def trial(
    number: int,
    metrics: dict[str, float],
    *,
    is_on_front: bool = False,
    ref: str = "",
    ended_s: float = 0.0,
    hypervolume: float = 0.0,
) -> Trial:
    """A result; without metrics a failure."""
    failure = "" if metrics else "it failed"
    made = (None, None, 0.0, "", ended_s, hypervolume, is_on_front, ref)
    return Trial(number, (), (), metrics, failure, *made)


@st.composite
def fronts(draw: st.DrawFn) -> Front:
    metrics = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    trials = [
        trial(
            number,
            draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(metrics, figures))),
            is_on_front=draw(st.booleans()),
            ref=draw(names),
            ended_s=draw(st.floats(0, 1e5)),
            hypervolume=draw(st.floats(0, 2)),
        )
        for number in range(draw(st.integers(0, 60)))
    ]
    objectives = tuple(Objective(m, draw(st.booleans()), 0.0, 1.0) for m in metrics)
    return Front(draw(names), objectives, tuple(trials))


@settings(max_examples=examples(5), deadline=None)
@given(fronts())
def test_whatever_is_measured_is_drawn_small(front: Front) -> None:
    assert len(front_picture(front)) < 150_000


def test_a_picture_of_a_front_is_a_small_png_that_is_the_same_each_time() -> None:
    measured = [(0.2, 9.0), (0.9, 18.0), (0.5, 12.0), (0.4, 14.0)]
    trials = [
        trial(n, {"accuracy": x, "tokens": y}, ref=f"pair.{n}" if n < 2 else "", ended_s=60.0 * n)
        for n, (x, y) in enumerate(measured)
    ]
    objectives = Objective("accuracy", True, 0, 1), Objective("tokens", False, 20, 0)
    front = Front("pair", objectives, (*trials, trial(9, {})))
    png = front_picture(front)
    assert png.startswith(b"\x89PNG")
    assert len(png) < 60_000
    assert png == front_picture(front)
    infinite = replace(trials[0], metrics={"accuracy": inf, "tokens": 1.0})
    assert front_picture(replace(front, trials=(infinite, *trials[1:]))) != png
    assert front_picture(replace(front, search="$x_", trials=()))
