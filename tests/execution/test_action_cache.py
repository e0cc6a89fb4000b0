"""A layer is reused only if the plan obeys the same facts and its bytes are those written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan, TrimRule
from mergepipe_pipeline.errors import DamagedLayerError
from mergepipe_pipeline.execution.assemble import commit
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse


def changed(plan: MergePlan, change: Callable[[ExpertInput], ExpertInput]) -> MergePlan:
    """The plan with a fact of every expert's tensors changed."""
    layers = tuple(
        replace(
            layer,
            tasks=tuple(
                replace(t, experts=tuple(change(e) for e in t.experts)) for t in layer.tasks
            ),
        )
        for layer in plan.layers
    )
    return replace(plan, layers=layers)


def lower_trim(e: ExpertInput) -> ExpertInput:
    return e if e.trim is None else replace(e, trim=TrimRule(e.trim.threshold_bits >> 1, 0))


def halve_scale(e: ExpertInput) -> ExpertInput:
    return replace(e, scale=e.scale / 2, l1=None)


@pytest.mark.parametrize(
    ("method", "parameters", "change"),
    [
        ("ties", "{density: 0.3}", lower_trim),
        ("breadcrumbs", "{density: 0.8, gamma: 0.05}", lower_trim),
        ("dare_linear", "{density: 0.5, rescale: true}", halve_scale),
    ],
)
def test_a_layer_made_from_a_wrong_fact_is_not_found_by_the_right_one(
    home: Warehouse,
    recipe_text: Callable[..., str],
    method: str,
    parameters: str,
    change: Callable[[ExpertInput], ExpertInput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = make_plan(home, parse(recipe_text(method, parameters), name="r", where="r"))
    wrong = changed(right, change)
    assert wrong.plan_id == right.plan_id
    bad = run_plan(home, wrong).snapshot
    good = run_plan(home, right)
    assert good.realised.layers_executed > 0
    clean = Warehouse.at(home.root.parent / "clean").ensure()
    plan = make_plan(clean, parse(recipe_text(method, parameters), name="r", where="r"))
    assert good.snapshot.snapshot_id == run_plan(clean, plan).snapshot.snapshot_id
    assert good.snapshot.snapshot_id != bad.snapshot_id
    assert "Two executions of one layer differ" in caplog.text


def test_a_stored_layer_whose_bits_flipped_is_made_again_and_not_linked(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    raw = parse(recipe_text(), name="r", where="r")
    plan = make_plan(home, raw)
    first = run_plan(home, plan)
    # Another result that shares the layers: only its config differs.
    other = replace(plan, side=replace(plan.side, config=(("note", "x"),)))
    layer = plan.layers[0]
    stored = home.objects.lookup(layer.action_key)
    assert stored is not None
    path = home.objects.path_of(stored.sha256)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(DamagedLayerError, match=layer.name):
        commit(home, other)
    path = home.objects.path_of(stored.sha256)
    assert not path.exists()
    path.write_bytes(data)
    home.objects.record(layer.action_key, stored)
    done = run_plan(home, other)
    assert done.realised.layers_executed == 1
    assert done.snapshot.snapshot_id != first.snapshot.snapshot_id
    verify(home, done.snapshot.snapshot_id)


def test_a_fresh_merge_runs_every_layer_and_gives_the_same_snapshot(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    plan = make_plan(home, parse(recipe_text(), name="r", where="r"))
    first, again = run_plan(home, plan), run_plan(home, plan, fresh=True)
    assert again.snapshot.snapshot_id == first.snapshot.snapshot_id
    assert (again.realised.layers_reused, again.realised.layers_executed) == (0, len(plan.layers))
    assert again.realised.expert_bytes_read == first.realised.expert_bytes_read
