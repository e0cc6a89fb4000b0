"""A search file says all that is wrong with it, and a point is the recipe that it stands for."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.domain.layers import layer_name
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.parameters import evaluate
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.search.prior import grouped, layer_scores
from mergepipe_pipeline.search.search_file import SearchFile, parse_search
from mergepipe_pipeline.search.space import Space, layers_of, numbered
from tests.search.world import SEARCH

TENSORS = [f"model.layers.{n}.{part}.weight" for n in range(12) for part in ("a", "norm")]
TENSORS += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
COORDINATE = st.integers(0, 64).map(lambda n: n / 64)


def _file(extra: str) -> SearchFile:
    return parse_search(SEARCH + "evaluations: 5\n" + extra, "a.yml")


def _problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_search(text, "a.yml")
    return list(caught.value.problems)


def test_every_problem_of_a_search_file_is_told_at_its_key_path() -> None:
    found = _problems(
        "sources: [a]\nbase_model: base\nmerge_method: tis\n"
        "space: {wieghts: mix, head: 3}\n"
        "objectives: {good: {direction: max}}\nevaluate: {comand: [x]}\nevaluations: 4.5\nfoo: 1\n"
    )
    assert found == [
        "line 1, sources: List should have at least 2 items after validation, not 1, found ['a']",
        "line 3, merge_method: expected 'linear', 'task_arithmetic' or 'ties', found 'tis'",
        "line 4, space.head: expected `search` or a number from 0 to 1, found 3",
        "line 4, space.wieghts: unknown key `wieghts`; did you mean `weights`?",
        "line 5, objectives.good.anchors: this key is required and missing",
        "line 6, evaluate.comand: unknown key `comand`; did you mean `command`?",
        "line 7, evaluations: expected a valid integer, found 4.5",
        "line 8, foo: unknown key `foo`; known are sources, base_model, merge_method, parameters, "
        "space, objectives, evaluate, evaluations, workers, initial, seed, budget, failures",
    ]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("space: {range: [0, 2]}", "space.range: `mix` goes from 0 to 1; a range is for `each`"),
        ("space: {density: [0.5, 1]}", "space.density: `task_arithmetic` has no density"),
        ("parameters: {weight: 1}", "parameters.weight: weights are what is searched"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(extra: str, told: str) -> None:
    assert any(told in problem for problem in _problems(SEARCH + "evaluations: 5\n" + extra))


def test_anchors_go_the_way_of_their_direction() -> None:
    (told,) = _problems(SEARCH.replace("anchors: [2, 0]", "anchors: [0, 2]") + "evaluations: 1\n")
    assert "objectives.cost.anchors: expected [worst, best], which go the way of `min`" in told


def test_a_value_is_0_and_1_at_the_anchors_and_never_below_a_failure() -> None:
    file = _file("")
    assert file.values({"good": 0.0, "cost": 2.0}) == (0.0, 0.0)
    assert file.values({"good": 1.0, "cost": 0.0}) == (1.0, 1.0)
    assert file.values({"good": -99.0, "cost": 1.0}) == (-0.2, 0.5)


@given(data=st.data(), blocks=st.integers(1, 12), is_mix=st.booleans(), head=st.booleans())
def test_a_points_recipe_gives_each_tensor_the_weights_of_its_group(
    data: st.DataObject, blocks: int, is_mix: bool, head: bool
) -> None:
    keys = "" if is_mix else "weights: each, range: [-1, 3], "
    keys += "" if head else "head: 0.25, "
    file = _file(f"space: {{{keys} embeddings: 0.75}}")
    layers = layers_of([TENSORS, TENSORS])
    names = numbered(layers)
    runs = np.array_split(np.arange(len(names)), blocks)
    space = Space(file, layers, tuple(tuple(names[n] for n in run) for run in runs))
    point = data.draw(st.tuples(*[COORDINATE] * space.dims))
    parsed = parse(space.recipe("a point", point), name="p", where="p")
    (module,) = parsed.modules
    weights = space.weights(point)
    for tensor in TENSORS:
        settings = [entry.level.settings["weight"] for entry in module.slices[0].entries]
        found = tuple(evaluate(setting, tensor, 0.0) for setting in settings)
        assert found == weights[layer_name(tensor, 12)], tensor


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_blocks_are_runs_with_the_least_squared_error(
    scores: list[int], data: st.DataObject
) -> None:
    count, n = data.draw(st.integers(1, len(scores))), len(scores)
    values = np.array(scores, float)

    def error(cuts: tuple[int, ...]) -> float:
        return sum(float(values[a:b].var() * (b - a)) for a, b in pairwise((0, *cuts, n)))

    runs = grouped(values, count)
    assert [i for run in runs for i in run] == list(range(n))
    assert len(runs) == count
    found = error(tuple(run[0] for run in runs[1:]))
    best = min(error(cuts) for cuts in combinations(range(1, n), count - 1))
    assert found == pytest.approx(best, abs=1e-9)


def test_a_layers_score_is_its_tensors_shares_of_their_roles_mean() -> None:
    norms = {"layers.0.q": 1.0, "layers.1.q": 3.0, "layers.0.big": 100.0, "layers.1.big": 100.0}
    found = layer_scores(norms | {"embed": 9.0}, ("layer.00", "layer.01"))
    assert found == pytest.approx([0.75, 1.25])
