"""What the soak rests on, and its short form."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.storage.locks import is_held
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.guests import origins
from tests.lab.soak.__main__ import main
from tests.lab.soak.deployment import Deployment
from tests.lab.soak.events import Scene
from tests.lab.soak.judge import Judge
from tests.lab.soak.model import BASE, Model, Recipe
from tests.lab.soak.watch import Seat, Watch
from tests.lab.soak.world import World

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]


def test_the_model_asks_nothing_of_a_recipe_whose_expert_is_gone_or_whose_text_is_broken() -> None:
    model = Model({BASE: 10, "a": 14, "b": 11})
    model.recipes = {
        "both": Recipe(("a", "b"), scale=2.0),
        "gone": Recipe(("a", "c")),
        "broken": Recipe(("a",), broken=True),
    }
    assert model.all_wanted() == {"both": 20.0}
    model.lost("b")
    assert model.all_wanted() == {}


def test_the_judge_tells_what_was_missed_and_what_was_superfluous(tmp_path: Path) -> None:
    home = Warehouse(tmp_path / "warehouse").ensure()
    deployment = Deployment(home, tmp_path / "log", {})
    watch = Watch(home, deployment.dagster_home)
    world = World(home, tmp_path / "made", seed=0)
    judge = Judge(Scene(world, deployment, watch), quiet_s=0.0, timeout_s=0.5)
    ticker = Ticker(home, watch.instance)

    judge.begin()
    for name in (BASE, "a"):
        world.land(name)
    world.write("r1", Recipe(("a",)))
    row = judge.end("nobody is there")
    assert [lack.rpartition(" ")[0] for lack in row.missed] == [
        "expert a",
        "expert base",
        "recipe r1",
    ]
    judge.begin()
    world.land("a")
    ticker.tick()
    row = judge.end("a new version, and what was missed")
    assert row.good
    assert (row.launched, row.needed) == (3, 2)

    judge.begin()
    home.release_path("r1").unlink()
    world.model.overdue.add("r1")
    Ticker(home, watch.instance).tick()
    row = judge.end("the record of a release is lost, and nobody says that it is overdue")
    assert (row.superfluous, row.missed) == (("1 of recipe r1",), ("overdue r1 release",))


def test_the_watch_of_a_guest_tells_what_is_mixed_up_with_another_warehouse(
    tmp_path: Path,
) -> None:
    mine, other = (Warehouse(tmp_path / name).ensure() for name in ("mine", "other"))
    (mine.inbox / "a").mkdir()
    watch = Watch(mine, tmp_path, Seat("first", "mergepipe_"))
    instance = watch.instance
    for home in (mine, other):
        instance.add_dynamic_partitions(experts_of(home).name or "", ["a", "b"])
        for place in ("first", "second"):
            tags = {"mergepipe/warehouse": identity_of(home)}
            job = f"mergepipe_{place}"
            instance.add_run(dg.DagsterRun(job, tags=tags, **origins(job, place)))
    *runs, partition = watch.mixed()
    jobs = {told.split(" has ")[0].split()[-1] for told in runs}
    assert jobs == {"mergepipe_first", "mergepipe_second"}  # of the other one, and of this one
    assert (len(runs), partition) == (2, "b is a partition")


def test_after_a_kill_amid_a_merge_everything_needed_runs_once_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["--short", "--form", "components", "--keep", str(tmp_path)])
    told = capfd.readouterr().out
    assert code == 0, told
    home = Warehouse(tmp_path.resolve() / "warehouses" / "first")
    runs = Watch(home, tmp_path / "warehouse" / "dagster").runs()
    ended = {name: [r.status for r in runs if r.recipe == name] for name in (None, "r1")}
    assert ended == {None: ["SUCCESS"], "r1": ["FAILURE", "SUCCESS"]}
    assert not any(home.staging.iterdir())
    assert not any(is_held(lease) for lease in home.leases_dir.glob("*.json"))
