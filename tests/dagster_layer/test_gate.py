"""A worse version lands: the gate refuses it, the ref stays, and a mended version follows."""

from __future__ import annotations

import dagster as dg
import pytest

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, plain, records_of, shown
from tests.dagster_layer.test_attempts import Sensor
from tests.dagster_layer.test_experts import jobs
from tests.dagster_layer.test_release import error_of, materialise
from tests.quality.scored_family import EVALUATOR, set_weight, standing

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
EVALUATION = dg.AssetKey(["n", "evaluation"])


def refusal_of(instance: dg.DagsterInstance) -> dg.AssetCheckEvaluation:
    """The check that failed last."""
    key = dg.AssetCheckKey(EVALUATION, "gate")
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key].event
    assert found is not None
    assert found.dagster_event is not None
    check = found.dagster_event.asset_check_evaluation_data
    assert not check.passed
    return check


def test_a_worse_version_never_reaches_the_ref_and_a_mended_one_does_by_itself(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    standing(home, "n")
    assert jobs(ticker.tick()) == ["base", "expert_00", "merge_n"]
    told = shown(instance, "n", "evaluation")
    assert told["evaluator"] == "python eval.py"
    assert 0 < float(str(told["largest"])) < 1
    assert str(told["log"]).endswith(".log")
    assert shown(instance, "n", "release")["what changed"] == "the first version of n"

    set_weight(home.inbox / "expert_00", 8.0)
    indexed, merged = ticker.tick()
    assert (indexed["success"], merged["success"]) == (True, False)
    assert shown(instance, "n", "evaluation")["largest"] == 4.0
    assert [r.number for r in history(home, "n")] == [1]
    assert ticker.tick() == []
    reason = next(reason for reason in ticker.reasons() if "n: snapshot" in reason)
    assert "is refused: largest is 4, 0.07" in reason
    assert "n stays as it is, until" in reason
    (row,) = records_of(shown(instance, "pipeline_status")["recipes"])
    assert (row["recipe"], row["state"]) == ("n", "refused")
    assert "largest is 4" in str(row["why"])
    assert "mergepipe bisect n" in str(row["next"])

    refusal = refusal_of(instance)
    assert "largest is 4" in str(refusal.description)
    figures = plain(refusal.metadata)
    live = float(str(figures["largest: live"]))
    assert (figures["largest"], figures["largest: max"]) == (4.0, 1.0)
    assert figures["largest: max rise"] == pytest.approx(1.5 * live)
    assert [row["met"] for row in records_of(figures["thresholds"])] == ["NO", "NO"]
    alone = materialise(home, instance, "release")
    assert "snapshot" in error_of(alone)
    assert "is refused: largest is 4" in error_of(alone)
    assert [r.number for r in history(home, "n")] == [1]

    set_weight(home.inbox / "expert_00", 0.02)
    assert jobs(ticker.tick()) == ["expert_00", "merge_n"]
    assert [r.number for r in history(home, "n")] == [1, 2]
    told = shown(instance, "n", "release")
    assert str(told["what changed"]).startswith(
        "since version 1: expert_00 changed from version 1 to version 3; 1 of "
    )
    assert told["largest"] == live
    assert ticker.tick() == []
    ticker.reasons()
    (row,) = records_of(shown(instance, "pipeline_status")["recipes"])
    assert row["state"] == "current"


def test_an_evaluator_that_failed_for_good_is_asked_again_once_it_is_mended(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, drop: Drop
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    ticker.tick()
    standing(home, "n")
    evaluator = home.recipes / "eval.py"
    evaluator.write_text("raise SystemExit(3)\n")
    sensor = Sensor(home, instance)
    for _ in range(3):
        ((request,), _) = sensor.tick()
        job = build_definitions(home).resolve_job_def("merge_n")
        run = job.execute_in_process(instance=instance, tags=request.tags, raise_on_error=False)
        assert "it exits with code 3" in error_of(run)
    requests, said = sensor.tick()
    assert not requests
    assert "failing after 3 attempts, until the recipe or an input changes" in said
    evaluator.write_text(EVALUATOR)
    ((request,), _) = sensor.tick()
    assert request.tags["mergepipe/attempt"] == "1"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('accuracy 0.5')\n", "its last line is no JSON: accuracy 0.5"),
        ("print('{\"smallest\": 1}')\n", "asks for a metric that its evaluator does not give"),
    ],
)
def test_an_evaluator_that_ends_well_without_what_is_asked_for_is_run_once_until_it_is_mended(
    home: Warehouse,
    instance: dg.DagsterInstance,
    ticker: Ticker,
    drop: Drop,
    code: str,
    told: str,
) -> None:
    for name in ("base", "expert_00"):
        drop(name)
    ticker.tick()
    standing(home, "n")
    evaluator = home.recipes / "eval.py"
    evaluator.write_text(f"open('calls', 'a').write('x')\n{code}")
    (run,) = ticker.tick()
    assert not run["success"]
    assert told in run["error"]
    assert ticker.tick() == []
    (said,) = (r for r in ticker.reasons() if "n: " in r)
    assert "failing and would again, until the recipe or an input changes" in said
    assert (home.recipes / "calls").read_text() == "x"
    assert "n" not in home.refs
    evaluator.write_text(EVALUATOR)
    assert jobs(ticker.tick()) == ["merge_n"]
    assert len(history(home, "n")) == 1
