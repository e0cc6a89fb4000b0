"""The forms of a parameter's value, against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.recipe.parameters import (
    Rule,
    evaluate,
    interpolate,
    look_up,
    parse_settings,
    position,
)
from mergepipe_pipeline.recipe.problems import Problems
from tests.support.laws import examples

FINITE = st.floats(-1e6, 1e6)


def _read(raw: object) -> tuple[Rule, ...]:
    problems = Problems({})
    read = parse_settings({"weight": raw}, ("parameters",), problems, [])
    assert problems.sentences() == ()
    return read["weight"]


def _refusals(raw: object, name: str = "weight") -> tuple[str, ...]:
    problems = Problems({})
    assert parse_settings({name: raw}, ("parameters",), problems, []) == {}
    return problems.sentences()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=8), st.floats(0, 1))
def test_a_gradient_is_numpys_interpolation_over_evenly_spaced_anchors(
    anchors: list[float], t: float
) -> None:
    expected = np.interp(t, np.linspace(0, 1, len(anchors)), anchors)
    assert interpolate(anchors, t) == pytest.approx(float(expected), rel=1e-9, abs=1e-6)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.floats(0, 1))
def test_a_gradient_never_leaves_the_range_of_its_anchors(anchors: list[float], t: float) -> None:
    assert min(anchors) <= interpolate(anchors, t) <= max(anchors)


@settings(max_examples=examples(50), deadline=None)
@given(FINITE, st.integers(1, 9), st.floats(0, 1))
def test_a_gradient_of_equal_anchors_is_exactly_that_number(x: float, n: int, t: float) -> None:
    assert interpolate([x] * n, t) == x


def test_positions_run_from_zero_to_one_over_the_layers_and_are_zero_outside() -> None:
    assert [position(k, 3) for k in (None, 0, 1, 2, None)] == [0, 0, 0.5, 1, 0]


def test_the_only_layer_stands_at_the_end() -> None:
    assert position(0, 1) == 1.0


@pytest.mark.parametrize(
    ("raw", "value"),
    [(2, 2.0), ("0.5", 0.5), (" 1e-3 ", 0.001), (True, 1.0), (False, 0.0), (["1", True], 1.0)],
)
def test_numbers_and_numeric_texts_are_numbers_and_booleans_are_one_or_zero(
    raw: object, value: float
) -> None:
    assert evaluate(_read(raw), "any", 0.5) == value


def test_the_first_filter_that_is_part_of_the_name_wins() -> None:
    setting = _read(
        [
            {"filter": "self_attn", "value": [0, 1]},
            {"filter": "attn", "value": 5},
            {"filter": "*", "value": 7},
            {"value": 9},
        ]
    )
    assert evaluate(setting, "layers.1.self_attn.q", 0.25) == 0.25
    assert evaluate(setting, "layers.1.cross_attn.q", 0.25) == 5
    assert evaluate(setting, "layers.1.mlp", 0.25) == 7


def test_without_a_match_the_next_level_is_asked_and_then_nobody() -> None:
    own = {"weight": _read([{"filter": "mlp", "value": 1}])}
    recipe = {"weight": _read([{"filter": "norm", "value": 2}])}
    levels = [own, recipe]
    assert look_up("weight", levels, "mlp", 0) == 1
    assert look_up("weight", levels, "norm", 0) == 2
    assert look_up("weight", levels, "embed", 0) is None
    assert look_up("density", levels, "mlp", 0) is None


@pytest.mark.parametrize(("t", "value"), [(0, 0), (0.4, 0), (0.5, 1), (0.99, 1), (1, 0)])
def test_yes_and_no_change_at_the_anchors(t: float, value: float) -> None:
    assert evaluate(_read([False, True, False]), "any", t, stepwise=True) == value


def test_a_bare_filter_entry_is_a_list_of_one_with_a_warning() -> None:
    warnings: list[str] = []
    raw = {"weight": {"filter": "mlp", "value": 2}}
    read = parse_settings(raw, ("models", 0, "parameters"), Problems({}), warnings)
    assert read == {"weight": (Rule("mlp", (2.0,)),)}
    assert warnings == [
        "models[0].parameters.weight: a {filter, value} outside a list is read as a list of one, "
        "which mergekit before 0.1.5 refuses"
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (None, "expected a number or a text, found None"),
        (["paper", 1], "parameters.weight[0]: a gradient is of numbers, found 'paper'"),
        ([{"value": []}], "found an empty list"),
        ([1, [2]], "parameters.weight[1]: expected a number or a text, found [2]"),
        ([1, {"value": 2}], "either numbers or {filter, value} entries, not both"),
        ([{"filter": "mlp"}], "parameters.weight[0]: a {filter, value} entry needs `value:`"),
        ([{"filtre": "mlp", "value": 1}], "unknown key `filtre`; did you mean `filter`?"),
        ([{"filter": 3, "value": 1}], "expected a part of tensor names, found 3"),
        (float("nan"), "expected a finite number, found nan"),
        ("-inf", "expected a finite number, found '-inf'"),
        ("1e999", "expected a finite number, found '1e999'"),
        (1.5e6, "expected a number from -1e6 to 1e6, found 1500000.0"),
    ],
)
def test_what_is_no_value_is_refused_at_its_place(raw: object, problem: str) -> None:
    assert problem in _refusals(raw)[0]


def test_a_density_is_negative_at_no_anchor_and_may_be_above_one_as_in_mergekit() -> None:
    assert _refusals([0.5, 1.5, -1], "density") == (
        "parameters.density: `density` is a share from 0 up, found -1",
    )


def test_a_text_is_a_value_of_its_own_also_behind_a_filter() -> None:
    setting = _read([{"filter": "mlp", "value": "paper"}, {"value": 1}])
    assert evaluate(setting, "layers.1.mlp", 0.5) == "paper"
    assert evaluate(setting, "layers.1.attn", 0.5) == 1.0
