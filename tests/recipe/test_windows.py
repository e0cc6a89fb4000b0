"""Weights of a window: what each checkpoint gets, against updates counted one by one."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.recipe.parse import ParsedRecipe, parse_recipes
from mergepipe_pipeline.recipe.windows import SCHEDULES, window_weights
from tests.recipe.schemas import METHODS
from tests.support.laws import examples

SHAPES = {
    "uniform": lambda x: 1 - x,
    "linear": lambda x: 1 - x,
    "minus_sqrt": lambda x: 1 - sqrt(x),
}


@settings(max_examples=examples(50))
@given(st.integers(1, 300), st.sampled_from(sorted(SHAPES)), st.integers(0, 2**32))
def test_a_window_is_its_first_checkpoint_and_each_update_after_it_as_far_as_it_counts(
    n: int, schedule: str, seed: int
) -> None:
    checkpoints = np.random.default_rng(seed).normal(size=n)
    decayed = checkpoints[0]
    for j in range(1, n):
        decayed += SHAPES[schedule](j / n) * (checkpoints[j] - checkpoints[j - 1])
    weights = window_weights(n, schedule)
    assert np.dot(weights, checkpoints) == pytest.approx(decayed, abs=1e-11)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert min(weights) > 0


@settings(max_examples=examples(25))
@given(st.integers(1, 300), st.floats(0.01, 0.999), st.integers(0, 2**32))
def test_an_exponential_window_is_the_moving_average_step_by_step(
    n: int, decay: float, seed: int
) -> None:
    checkpoints = np.random.default_rng(seed).normal(size=n)
    average = checkpoints[0]
    for checkpoint in checkpoints[1:]:
        average = decay * average + (1 - decay) * checkpoint
    weights = window_weights(n, "exponential", decay)
    assert np.dot(weights, checkpoints) == pytest.approx(average, abs=1e-11)


def choose(place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
    """The five last steps of any run."""
    return Selected(place, selector, tuple(f"{selector.run}.step-{i}" for i in range(5)))


def parse(*models: dict[str, Any], method: str = "linear", **keys: object) -> ParsedRecipe:
    text = yaml.safe_dump({"merge_method": method, "models": list(models), **keys})
    methods = METHODS | {"mean": OPERATORS["mean"].schema}
    return parse_recipes(text, name="r", where="r.yml", methods=methods, choose=choose)[-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recipe_of_a_window_means_the_recipe_with_each_weight_written_out(schedule: str) -> None:
    decay = {"decay": 0.75} if schedule == "exponential" else {}
    weights = {"schedule": schedule, **decay}
    window = parse({"run": "r", "weights": weights}, base_model="b")
    shares = window_weights(5, schedule, decay.get("decay", 0.0))
    written = parse(
        *({"model": f"r.step-{i}", "parameters": {"weight": w}} for i, w in enumerate(shares)),
        base_model="b",
    )
    assert [e.level.settings for e in window.entries()] == [
        e.level.settings for e in written.entries()
    ]
    assert window.references == written.references


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"match": "*", "last": 3}, "last: only the checkpoints of a `run:` have steps"),
        ({"last": 3}, "last: a selector needs `match:`, `tag:` or `run:`"),
        ({"model": "a", "weights": {"schedule": "linear"}}, "weights: only the checkpoints of a"),
        ({"run": "r", "last": 0}, "last: expected greater than or equal to 1, found 0"),
        ({"run": "r", "every": True}, "every: expected a valid integer, found True"),
        ({"run": "r", "weights": {"schedule": "cosine"}}, "expected one of uniform, linear, min"),
        ({"run": "r", "weights": {"schedule": "exponential"}}, "an exponential schedule needs it"),
        ({"run": "r", "weights": {"schedule": "exponential", "decay": 1}}, "less than 1, found 1"),
        ({"run": "r", "weights": {"schedule": "linear", "decay": 0.5}}, "only an exponential"),
        (
            {"run": "r", "weights": {"schedule": "linear"}, "parameters": {"weight": 1}},
            "give either `weights:` or a `weight` of each, not both",
        ),
        ({"run": "r", "weights": {"shape": "linear"}}, "weights.schedule: this key is required"),
    ],
)
def test_what_a_window_cannot_be_is_told_at_its_place(entry: dict[str, Any], said: str) -> None:
    given_weight = {} if "weights" in entry else {"parameters": {"weight": 1}}
    with pytest.raises(RecipeError) as caught:
        parse({**given_weight, **entry})
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("schedule", ["uniform", "linear"])
def test_a_linear_merge_of_a_uniform_window_alone_is_the_mean_that_slides(schedule: str) -> None:
    window = {"run": "r", "weights": {"schedule": schedule}}
    mean = parse({"run": "r"}, method="mean")
    for method in ("linear", "mean"):
        recipe = parse(window, method=method)
        assert (recipe.method, recipe.references) == ("mean", mean.references)
        assert all(not entry.level.settings for entry in recipe.entries())
    assert parse(window, {"model": "a", "parameters": {"weight": 1}}).method == "linear"
    assert parse(window, base_model="a").method == "linear"
    assert parse(window, parameters={"normalize": False}).method == "linear"


def test_a_method_without_weights_has_no_window() -> None:
    with pytest.raises(RecipeError) as caught:
        parse({"run": "r", "weights": {"schedule": "linear"}}, method="passthrough")
    assert "`passthrough` weighs no models; `linear` does" in str(caught.value)
