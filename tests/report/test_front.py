"""The front of a search as SVG: every result in its place, names as they are, and small."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.report.front import DrawnFront, DrawnTrial, front_picture, front_sketch

SVG = "{http://www.w3.org/2000/svg}"
PANEL_WIDTH, PANEL_HEIGHT = 380, 300
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


def circles(drawn: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter(f"{SVG}circle"))


def words(drawn: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


@settings(max_examples=50)
@given(fronts())
def test_every_result_is_drawn_inside_its_panel_whatever_is_measured(front: DrawnFront) -> None:
    measured = sum(t.metrics is not None for t in front.trials)
    found = circles(front_picture(front))
    assert len(found) == measured * max(1, len(front.objectives) - 1)
    for circle in found:
        assert 62 <= float(circle.attrib["cx"]) <= PANEL_WIDTH
        assert 0 <= float(circle.attrib["cy"]) <= PANEL_HEIGHT
    sketch = front_sketch(front)
    assert len(sketch) <= 700
    ElementTree.fromstring(sketch)


def test_what_another_beats_is_pale_and_what_is_published_is_named() -> None:
    drawn = front_picture(example())
    by_color = {c.attrib["fill"]: 0 for c in circles(drawn)}
    for circle in circles(drawn):
        by_color[circle.attrib["fill"]] += 1
    assert by_color == {"#b9c4d8": 1, "#2244aa": 3}
    colored = [e for e in ElementTree.fromstring(drawn).iter(f"{SVG}text") if "fill" in e.attrib]
    assert [e.text for e in colored] == ["0", "2"]
    assert words(drawn)[0] == "pair: 5 evaluations; k is pair.k"
    assert "accuracy (more is better)" in words(drawn)
    assert "tokens (less is better)" in words(drawn)


def test_a_better_result_stands_higher_and_a_cheaper_one_further_left() -> None:
    strong = [c.attrib for c in circles(front_picture(example())) if c.attrib["fill"] == "#2244aa"]
    places = sorted((float(a["cx"]), float(a["cy"])) for a in strong)
    assert all(a[1] > b[1] for a, b in pairwise(places))


def test_the_hypervolume_is_drawn_over_evaluations_and_over_time_and_failures_count() -> None:
    lines = list(ElementTree.fromstring(front_picture(example())).iter(f"{SVG}polyline"))
    assert {"evaluations", "minutes"} <= set(words(front_picture(example())))
    assert len(lines) == 2
    for line in lines:
        places = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        assert len(places) == 2 * len(example().trials) - 1
        assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(places))


def test_a_metric_that_is_no_number_and_a_search_without_results_are_drawn_too() -> None:
    front = example()
    odd = replace(front.trials[0], metrics=(inf, 1.0))
    assert len(circles(front_picture(replace(front, trials=(odd, *front.trials[1:]))))) == 3
    assert "0 evaluations" in front_picture(replace(front, trials=()))


def test_the_same_results_give_the_same_picture() -> None:
    assert front_picture(example()) == front_picture(example())
