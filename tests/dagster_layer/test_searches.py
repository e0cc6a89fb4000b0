"""A standing search under Dagster: begun, evaluated by its workers, drawn, published."""

from __future__ import annotations

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.instance import identity_of, own_name
from mergepipe_pipeline.sensors.failures import failure_of
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.search import front, search_of
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import ACTIVE, most_at_once, running_daemon
from tests.dagster_layer.test_experts import jobs
from tests.search.world import EVALUATOR, SEARCH, World

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]
SMALL = "evaluations: 4\ninitial: 4\nworkers: 2\n"


@pytest.fixture
def world(home: Warehouse) -> World:
    """Three registered models beside the warehouse, and an evaluator among its searches."""
    world = World(home.root.parent / "models")
    for name in ("base", "one", "zero"):
        register(home, world.folder / name)
    (home.searches / "eval.py").write_text(EVALUATOR)
    return world


def write(home: Warehouse, name: str = "mix", text: str = SEARCH + SMALL) -> None:
    (home.searches / f"{name}.yml").write_text(text)


def told(ticker: Ticker, name: str = "mix") -> str:
    """What the sensor says of a search."""
    lines = [x.removeprefix("• ") for said in ticker.reasons() for x in said.splitlines()]
    return next(line for line in lines if line.startswith(f"{name}: "))


def metadata_of(instance: dg.DagsterInstance, asset: str) -> dict[str, object]:
    """What the UI shows of an asset of the search, as it was made last."""
    event = instance.get_latest_materialization_event(dg.AssetKey(["mix", asset]))
    assert event is not None
    assert event.asset_materialization is not None
    return {k: v.value for k, v in event.asset_materialization.metadata.items()}


def test_the_sensor_alone_begins_a_search_evaluates_draws_and_publishes_and_mends_its_ledger(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, world: World
) -> None:
    (home.searches / "eval.picky").touch()
    write(home)
    ran = [jobs(ticker.tick()) for _ in range(5)]
    assert ran == [["begin_mix"], ["0001", "0002"], ["0003", "0004"], ["show_mix"], []]
    found = front(home, search_of(home, "mix"))
    failed = [t for t in found.trials if t.failure]
    assert failed
    assert f"mix: 4 of 4 evaluated, {len(failed)} of them failed" in told(ticker)
    shown = metadata_of(instance, "front")
    assert (shown["evaluations"], shown["failures"]) == (4, len(failed))
    assert shown["hypervolume"] == pytest.approx(found.hypervolume, rel=1e-3)
    assert "data:image/png;base64," in str(shown["front"])
    refs = metadata_of(instance, "refs")["refs"]
    assert all(t.ref in str(refs) for t in found.best)
    assert {t.ref for t in found.best} == {f"mix.{k + 1}" for k in range(len(found.best))}

    (home.search_ledgers / "mix" / "results" / "0003.json").unlink()
    assert [jobs(ticker.tick()) for _ in range(3)] == [["0003"], ["show_mix"], []]
    assert metadata_of(instance, "refs")["refs"] == refs


def test_a_search_that_cannot_be_used_says_why_and_harms_no_other(
    home: Warehouse, ticker: Ticker, world: World
) -> None:
    write(home, "other", SEARCH.replace("sources: [one", "sources: [two") + SMALL)
    write(home, "odd", SEARCH + SMALL + "worker: 3\n")
    write(home, "both")
    home.recipe_path("both").write_text("merge_method: linear\nmodels: []\n")
    assert jobs(ticker.tick()) == []
    assert "two is not registered yet" in told(ticker, "other")
    assert "odd: unknown key `worker`; did you mean `workers`?" in told(ticker, "odd")
    assert "the same assets or job as the recipe both" in told(ticker, "both.yml")
    write(home)
    assert jobs(ticker.tick()) == ["begin_mix"]
    write(home, text=SEARCH + SMALL.replace("4", "5"))
    assert jobs(ticker.tick()) == []
    assert "asks for something else than it began with" in told(ticker)
    register(home, world.make("two", 1.0))
    assert jobs(ticker.tick()) == ["begin_other"]


def test_a_lost_run_of_a_search_is_tried_again_and_its_failures_are_told_by_name(
    home: Warehouse, instance: dg.DagsterInstance, ticker: Ticker, world: World
) -> None:
    write(home)
    ticker.tick()
    (home.searches / "eval.py").write_text("another evaluator")
    first, _ = ticker.tick()
    assert not first["success"]
    assert "The evaluator of a search is not what it was" in first["error"]
    assert jobs(ticker.tick()) == []
    assert "evaluate 0001: the next attempt comes in" in told(ticker)
    (run,) = instance.get_runs(dg.RunsFilter(run_ids=[first["run_id"]]))
    assert failure_of(instance, run).text.startswith("The search mix failed: The evaluator")


def test_a_search_whose_daemon_and_runs_are_killed_goes_on_by_itself_and_loses_nothing(
    home: Warehouse, world: World
) -> None:
    (home.searches / "eval.slow").write_text("60")
    write(home, text=SEARCH + SMALL.replace("4", "2"))
    with running_daemon(home, MERGEPIPE_RETRY_S="1") as daemon:
        begun = daemon.wait_for("two evaluations", lambda: log(home, "begun")[1:], 140, 0.05)
        daemon.kill()
        assert (len(begun), log(home, "ended")) == (1, [])
        proposed = numbers(home, "proposals")
        (home.searches / "eval.slow").unlink()
        daemon.start()
        daemon.wait_for("refs", lambda: home.refs.names(), seconds=140)
        daemon.wait_for("quiet", lambda: not daemon.runs(None, *ACTIVE))
        with daemon.instance as instance:
            assert most_at_once(instance)[own_name("search_mix", identity_of(home))] == 2
    assert numbers(home, "proposals") == numbers(home, "results") == proposed == {1, 2}
    assert len(log(home, "ended")) == len(set(log(home, "ended"))) == 2


def log(home: Warehouse, name: str) -> list[str]:
    """The snapshots of which evaluations have `begun` or `ended`."""
    path = home.searches / f"eval.{name}"
    return path.read_text().split() if path.exists() else []


def numbers(home: Warehouse, kind: str) -> set[int]:
    """The candidates that have such a fact."""
    return {int(p.stem) for p in (home.search_ledgers / "mix" / kind).glob("[!.]*.json")}
