"""What a selector of a run takes: the steps of that run alone, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.windows import window_weights
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.register import register, tag
from mergepipe_pipeline.warehouse import Warehouse

STEPS = (500, 1000, 1500, 2000, 10000)


@pytest.fixture
def known(home: Warehouse, family: Path) -> Warehouse:
    """A warehouse that knows steps of the run `math`, and names that are near to such."""
    for i, step in enumerate(STEPS):
        register(home, family / f"expert_{i % 4:02d}", f"math.step-{step}")
    for name in ("math", "math.1", "math.step-0500", "math-2.step-1000", "math.step-"):
        register(home, family / "expert_00", name)
    return home


def write(folder: Path, entry: str, head: str = "merge_method: linear") -> Path:
    path = folder / "r.yml"
    path.write_text(f"{head}\nmodels:\n{entry}\n")
    return path


def taken(home: Warehouse, folder: Path, entry: str) -> list[int]:
    parsed = load_recipe(write(folder, f"- {{{entry}, parameters: {{weight: 1}}}}"), home)
    return [int(ref.model.removeprefix("math.step-")) for ref in parsed.references]


def test_a_run_is_its_steps_in_their_order_as_far_as_last_every_and_tags_say(
    known: Warehouse, tmp_path: Path
) -> None:
    assert taken(known, tmp_path, "run: math") == list(STEPS)
    assert taken(known, tmp_path, "run: math, last: 2") == [2000, 10000]
    assert taken(known, tmp_path, "run: math, every: 1000") == [1000, 2000, 10000]
    assert taken(known, tmp_path, "run: math, every: 1000, last: 2") == [2000, 10000]
    assert taken(known, tmp_path, "run: math, last: 9, exclude: ['*-10000']") == list(STEPS[:-1])
    tag(known, "math.step-1500", add=["good"])
    assert taken(known, tmp_path, "run: math, tag: good") == [1500]


def test_what_is_left_out_of_a_run_says_why(known: Warehouse, tmp_path: Path) -> None:
    entry = "- {run: math, every: 1000, last: 2, weights: {schedule: linear}}"
    (selected,) = load_recipe(write(tmp_path, entry), known).selected
    assert selected.label == "models[0]: run math, last 2, every 1000"
    assert dict(selected.left) == {
        "math.step-500": "1000 does not divide its step",
        "math.step-1500": "1000 does not divide its step",
        "math.step-1000": "it is not of the last 2",
    }


def test_a_selector_of_names_takes_no_step_and_says_who_does(
    known: Warehouse, tmp_path: Path
) -> None:
    entry = "- {match: 'math*', parameters: {weight: 1}}"
    (selected,) = load_recipe(write(tmp_path, entry), known).selected
    assert selected.taken == ("math", "math.1", "math.step-", "math.step-0500")
    assert dict(selected.left)["math.step-500"] == "it is a step of a run, which `run: math` takes"


def test_an_unknown_run_is_refused_with_those_that_are_near(
    known: Warehouse, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, "- {run: mtah, parameters: {weight: 1}}"), known)
    (problem,) = caught.value.problems
    near = "no registered name is a step of 'mtah'; did you mean `math`?; runs are math, math-2"
    assert problem.endswith(near)


@pytest.mark.parametrize("base", ["", "\nbase_model: base"])
@pytest.mark.parametrize("schedule", ["minus_sqrt", "uniform"])
def test_a_window_has_the_ids_of_the_recipe_with_its_weights_written_by_hand(
    known: Warehouse, family: Path, tmp_path: Path, schedule: str, base: str
) -> None:
    register(known, family / "base", "base")
    method = "task_arithmetic" if base else "linear"
    head = f"merge_method: {method}{base}\nparameters: {{normalize: false}}"
    entry = f"- {{run: math, last: 3, weights: {{schedule: {schedule}}}}}"
    window = merge(known, write(tmp_path, entry, head), fresh=True).outcome
    by_hand = "\n".join(
        f"- {{model: math.step-{step}, parameters: {{weight: {weight!r}}}}}"
        for step, weight in zip(STEPS[-3:], window_weights(3, schedule), strict=True)
    )
    written = merge(known, write(tmp_path, by_hand, head), fresh=True).outcome
    assert window.plan.plan_id == written.plan.plan_id
    assert window.snapshot.snapshot_id == written.snapshot.snapshot_id
