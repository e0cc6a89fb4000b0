"""Facts of sparsifiers in the catalog: found again, but never those of other random numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from mergepipe_pipeline.analysis import scales
from mergepipe_pipeline.pipeline import facts
from mergepipe_pipeline.pipeline.check import parse
from mergepipe_pipeline.pipeline.merge import merge
from mergepipe_pipeline.pipeline.plan import make_plan
from mergepipe_pipeline.warehouse import Warehouse


def test_scales_are_found_again_until_the_engine_draws_other_numbers(
    home: Warehouse, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    real = scales.l1_scales

    def counted(*given: object, **options: object) -> object:
        passes.append(given)
        return real(*given, **options)  # type: ignore[arg-type]

    def plan() -> int:
        passes.clear()
        text = recipe_text("dare_linear", "{density: 0.5, rescale: true}")
        make_plan(home, parse(text, name="test", where="test"), budget="50%")
        return len(passes)

    monkeypatch.setattr(scales, "l1_scales", counted)
    assert (plan(), plan()) == (4, 0)
    monkeypatch.setattr(facts, "ENGINE_VERSION", "another")
    assert plan() == 4


def test_a_full_merge_finds_its_scales_itself_and_they_are_those_of_the_catalog(
    home: Warehouse, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = parse(recipe_text("dare_ties", "{density: 0.4}"), name="test", where="test")
    with monkeypatch.context() as patch:
        patch.delattr(scales, "l1_scales")
        unlimited = make_plan(home, raw)
        found = merge(home, unlimited).snapshot.manifest
    shutil.rmtree(home.actions)
    whole = make_plan(home, raw, budget="100%")
    experts = [e for layer in whole.layers for task in layer.tasks for e in task.experts]
    assert whole.plan_id == unlimited.plan_id
    assert len({e.scale for e in experts}) > len(experts) / 2
    outcome = merge(home, whole)
    assert outcome.realised.layers_reused == 0
    assert outcome.snapshot.manifest == found
