"""Facts of sparsifiers in the catalog: found again, but never those of other random numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.analysis import order, scales
from mergepipe_pipeline.catalog.pairs import PairFacts
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.facts import analysed as facts
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.reads import tensor_reads


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
        found = run_plan(home, unlimited).snapshot.manifest
    shutil.rmtree(home.actions_dir)
    whole = make_plan(home, raw, budget="100%")
    experts = [e for layer in whole.layers for task in layer.tasks for e in task.experts]
    assert whole.plan_id == unlimited.plan_id
    assert len({e.scale for e in experts}) > len(experts) / 2
    outcome = run_plan(home, whole)
    assert outcome.realised.layers_reused == 0
    assert outcome.snapshot.manifest == found


#: Methods that ask for thresholds, with and without what a pass must find besides.
TRIMS = [
    ("ties", "{density: 0.3}"),
    ("breadcrumbs", "{density: 0.5, gamma: 0.05}"),
    ("breadcrumbs_ties", "{density: 0.4, gamma: 0.01, rescale: true}"),
    ("ties", "{density: 0.2, rescale: true}"),
]


@pytest.mark.parametrize(("method", "parameters"), TRIMS)
@pytest.mark.parametrize("budget", [None, "20%", "100%"])
def test_thresholds_from_the_catalog_give_the_merges_of_those_from_a_pass(
    tmp_path: Path,
    recipe_text: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    parameters: str,
    budget: str | None,
) -> None:
    raw = parse(recipe_text(method, parameters), name="test", where="test")

    def snapshot(name: str) -> tuple[str, tuple[object, ...], int]:
        home = Warehouse.at(tmp_path / name).ensure()
        plan = make_plan(home, raw, budget=budget)
        rules = [e.trim for lay in plan.layers for task in lay.tasks for e in task.experts]
        outcome = run_plan(home, plan)
        n_open = sum(rule is not None and rule.is_open for rule in rules)
        return plan.plan_id, outcome.snapshot.manifest.shards, n_open

    *listed, n_open = snapshot("listed")
    monkeypatch.setattr(PairFacts, "magnitudes", lambda *_: iter(()))
    *passed, n_open_by_pass = snapshot("passed")
    assert listed == passed
    assert n_open > 0 == n_open_by_pass


def test_a_plan_of_analysed_experts_reads_no_weight_for_its_thresholds(
    home: Warehouse, family: Path, recipe_text: Callable[..., str]
) -> None:
    register(home, family / "base", "base")
    for i in range(4):
        register(home, family / f"expert_{i:02d}", base="base")
    analyze(home)
    with tensor_reads() as reads:
        for density in (0.1, 0.3, 0.5):
            raw = parse(recipe_text("ties", f"{{density: {density}}}"), name="t", where="t")
            for budget in (None, "10%"):
                make_plan(home, raw, budget=budget)
    assert not reads


def test_thresholds_are_found_again_on_their_own_grid_only(
    home: Warehouse, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = parse(recipe_text(), name="test", where="test")
    merged = {
        block_elems: run_plan(
            home, make_plan(home, raw, block_elems=block_elems)
        ).snapshot.snapshot_id
        for block_elems in (4096, 8192)
    }
    assert merged[4096] == merged[8192]
    monkeypatch.setattr(order, "open_rule", None)
    for block_elems in (4096, 8192):
        plan = make_plan(home, raw, block_elems=block_elems)
        rules = [e.trim for lay in plan.layers for task in lay.tasks for e in task.experts]
        starts = {r.tie_stop_elem % block_elems for r in rules if r is not None and r.is_open}
        assert starts == {0}
