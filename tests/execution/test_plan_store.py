"""Stored plans: what is loaded is what was planned, or an error that names the file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.digest import canonical_json, seal_line
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.ls import query
from mergepipe_pipeline.warehouse import Warehouse
from tests.catalog.flips import flipped
from tests.support.laws import examples

Text = Callable[..., str]


@pytest.fixture
def plans(home: Warehouse, recipe_text: Text) -> tuple[MergePlan, MergePlan]:
    """Two stored plans of one recipe."""
    raw = parse(recipe_text(), name="test", where="test")
    return make_plan(home, raw, budget="20%"), make_plan(home, raw, budget="40%")


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(draw=st.data())
def test_a_flipped_bit_anywhere_in_a_plan_is_seen_when_it_is_loaded(
    home: Warehouse, plans: tuple[MergePlan, MergePlan], draw: st.DataObject
) -> None:
    path = home.plan_path(plans[0].plan_id)
    data = path.read_bytes()
    path.write_bytes(flipped(data, draw.draw(st.integers(0, 8 * len(data) - 1))))
    try:
        with pytest.raises(CorruptionError, match=rf"{path.name}.*mergepipe plan RECIPE"):
            load_plan(home, plans[0].plan_id)
    finally:
        path.write_bytes(data)
    assert load_plan(home, plans[0].plan_id) == plans[0]


def test_a_plan_under_the_name_of_another_is_seen(
    home: Warehouse, plans: tuple[MergePlan, MergePlan]
) -> None:
    one, other = (home.plan_path(plan.plan_id) for plan in plans)
    one.write_bytes(other.read_bytes())
    with pytest.raises(CorruptionError, match=f"(?s){plans[0].plan_id}.*{plans[1].plan_id}"):
        load_plan(home, plans[0].plan_id)


@pytest.mark.parametrize("value", [[], {}, {"layers": 1}, "plan", None])
def test_a_sealed_file_that_is_no_plan_is_refused(
    home: Warehouse, plans: tuple[MergePlan, MergePlan], value: object
) -> None:
    home.plan_path(plans[0].plan_id).write_bytes(seal_line(canonical_json(value)))
    with pytest.raises(CorruptionError, match="mergepipe plan RECIPE"):
        load_plan(home, plans[0].plan_id)
    assert [row[0] for row in query(home, "SELECT plan_id FROM plans")[1]] == [plans[1].plan_id]


def test_a_damaged_plan_is_named_and_the_others_are_told(
    home: Warehouse, plans: tuple[MergePlan, MergePlan], caplog: pytest.LogCaptureFixture
) -> None:
    path = home.plan_path(plans[0].plan_id)
    path.write_bytes(flipped(path.read_bytes(), 1000))
    assert query(home, "SELECT plan_id FROM plans")[1] == [(plans[1].plan_id,)]
    assert [str(path) in m for m in caplog.messages] == [True]
