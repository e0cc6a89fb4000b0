"""Explanations against the plans and snapshots they are of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.verbs.compare import compare
from mergepipe_pipeline.verbs.explain import explain, figures, read_shares, shares_picture
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.support.reads import tensor_reads
from tests.verbs.test_curve import raw_of

Text = Callable[..., str]


@pytest.mark.parametrize("by", ["expert", "layer", "tensor"])
def test_shares_add_up_to_what_the_plan_reads(home: Warehouse, recipe_text: Text, by: str) -> None:
    plan = make_plan(home, raw_of(recipe_text()), budget="35%")
    shares = read_shares(plan, by)
    e = plan.estimates
    assert sum(s.nbytes_read for s in shares) == e.expert_bytes_planned
    assert sum(s.nbytes_total for s in shares) == e.expert_bytes_total
    assert {s.expert for s in shares} == {f"expert_{n:02d}" for n in range(4)}


def test_a_snapshot_is_held_against_what_was_expected_of_it(
    home: Warehouse, recipe_text: Text
) -> None:
    part, full = run(home, recipe_text(), budget="30%"), run(home, recipe_text())
    before = explain(home, part.snapshot.snapshot_id)
    assert (before.comparison, before.is_full) == (None, False)
    assert explain(home, full.snapshot.snapshot_id).is_full
    found = compare(home, part.snapshot.snapshot_id)
    explanation = explain(home, part.snapshot.snapshot_id)
    assert explanation.comparison == found
    rows = {f.figure: (f.expected, f.realised) for f in figures(explanation)}
    e, realised = part.plan.estimates, part.realised
    assert rows["expert_bytes"] == (e.expert_bytes_planned, realised.expert_bytes_read)
    assert rows["error"] == (e.predicted_error, found.whole.error)
    assert rows["error_bound"] == (e.error_bound, found.whole.error)
    assert rows["update_norm"] == (e.update_norm, found.whole.update)
    assert rows["seconds"] == (None, realised.layers_s)
    home.plan_path(part.plan.plan_id).unlink()
    gone = explain(home, part.snapshot.snapshot_id)
    assert (gone.plan, gone.is_full) == (None, None)
    assert figures(gone)[0].expected == e.expert_bytes_planned


def test_a_plan_alone_has_what_is_expected_of_it(home: Warehouse, recipe_text: Text) -> None:
    plan = make_plan(home, raw_of(recipe_text()), budget="30%")
    rows = {f.figure: (f.expected, f.realised) for f in figures(explain(home, plan.plan_id))}
    assert rows["error"] == (plan.estimates.predicted_error, None)


def test_a_damaged_plan_is_named_with_what_to_do(home: Warehouse, recipe_text: Text) -> None:
    plan = make_plan(home, raw_of(recipe_text()), budget="20%")
    home.plan_path(plan.plan_id).write_text("{}")
    with pytest.raises(CorruptionError, match=r"(?s)another form than this version.*plan RECIPE"):
        explain(home, plan.plan_id)


def test_what_is_no_plan_snapshot_or_ref_is_not_found(home: Warehouse) -> None:
    with pytest.raises(NotFoundError, match="Neither a plan, a snapshot nor a ref"):
        explain(home, "what")


def test_explaining_reads_no_weight(home: Warehouse, recipe_text: Text) -> None:
    done = run(home, recipe_text(), budget="30%")
    with tensor_reads() as reads:
        explain(home, done.plan.plan_id)
        explain(home, done.snapshot.snapshot_id)
        assert shares_picture(done.plan).startswith(b"\x89PNG\r\n\x1a\n")
    assert reads.total() == 0
