"""What is lost or damaged beside the experts is made again without a person."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.catalog.formats import CONTENTS
from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors import failures
from mergepipe_pipeline.sensors.reload import build_reload_sensor
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.daemon import running_daemon
from tests.dagster_layer.test_experts import jobs, sum_of
from tests.dagster_layer.test_failure_sensor import webhook

pytestmark = [pytest.mark.waits, pytest.mark.filterwarnings("ignore::Warning")]
CURRENT = "n: the release is current"


@pytest.fixture
def released(home: Warehouse, ticker: Ticker, drop: Drop) -> str:
    """Recipe n, released; its snapshot."""
    for name in ("base", "expert_00"):
        drop(name)
    assert jobs(ticker.tick()) == ["base", "expert_00"]
    home.recipe_path("n").write_text(sum_of("base", "expert_00"))
    assert jobs(ticker.tick()) == ["merge_n"]
    assert CURRENT in ticker.reasons()
    return history(home, "n")[-1].snapshot_id


def lose_digests(home: Warehouse) -> None:
    checkpoint_id = home.catalog.get("expert_00").checkpoint.checkpoint_id
    for path in (home.catalog_dir / CONTENTS).glob(f"{checkpoint_id}.*"):
        path.unlink()


def flip_digests(home: Warehouse, name: str = "expert_00") -> None:
    checkpoint_id = home.catalog.get(name).checkpoint.checkpoint_id
    (path,) = (home.catalog_dir / CONTENTS).glob(f"{checkpoint_id}.*")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def lose_catalog(home: Warehouse) -> None:
    shutil.rmtree(home.catalog_dir)


def empty_name(home: Warehouse) -> None:
    (path,) = (home.catalog_dir / "names" / "expert_00").glob("*.json")
    path.write_bytes(b"")


@pytest.mark.parametrize("fault", [lose_digests, flip_digests, lose_catalog, empty_name])
def test_an_expert_whose_facts_are_lost_is_indexed_again_by_itself(
    home: Warehouse, ticker: Ticker, released: str, fault: Callable[[Warehouse], None]
) -> None:
    fault(home)
    for _ in range(3):
        ticker.tick()
    assert CURRENT in ticker.reasons()
    assert last_release(home, "n") is not None
    assert history(home, "n")[-1].snapshot_id == released
    assert verify_all(home).ok == (fault is not empty_name)  # `repair` takes the damaged version


def test_a_recipe_keeps_its_ref_while_its_file_cannot_be_read(
    home: Warehouse, ticker: Ticker, released: str
) -> None:
    path, text = home.recipe_path("n"), home.recipe_path("n").read_text()
    home.recipe_path("a").write_text(f"{sum_of('base', 'expert_00').replace('0.5', '0.1')}ref: n\n")
    for broken in (text, text[: len(text) // 2], text):
        path.write_text(broken)
        assert jobs(ticker.tick()) == []
        assert any(
            "a: it would publish to the ref n of the recipe n" in r for r in ticker.reasons()
        )
    assert history(home, "n")[-1].snapshot_id == released
    assert any(CURRENT in r for r in ticker.reasons())


def test_a_ref_that_another_recipe_took_meanwhile_is_released_again(
    home: Warehouse, ticker: Ticker, released: str
) -> None:
    path, text = home.recipe_path("n"), home.recipe_path("n").read_text()
    home.recipe_path("a").write_text(f"{sum_of('base', 'expert_00').replace('0.5', '0.1')}ref: n\n")
    path.unlink()
    assert jobs(ticker.tick()) == ["merge_a"]
    assert history(home, "n")[-1].snapshot_id != released
    path.write_text(text)
    assert jobs(ticker.tick()) == ["merge_n"]
    assert history(home, "n")[-1].snapshot_id == released
    assert jobs(ticker.tick()) == []


def test_a_recipe_of_another_name_that_gives_what_its_ref_has_is_released_once(
    home: Warehouse, ticker: Ticker, released: str
) -> None:
    home.recipe_path("m").write_text(f"{home.recipe_path('n').read_text()}ref: n\n")
    home.recipe_path("n").unlink()
    assert [jobs(ticker.tick()) for _ in range(3)] == [["merge_m"], [], []]
    assert history(home, "n")[-1].snapshot_id == released


@pytest.mark.parametrize("data", [b"", b"{}", b"[]"])
def test_a_damaged_record_of_a_release_is_made_once_more(
    home: Warehouse, ticker: Ticker, released: str, data: bytes
) -> None:
    home.release_path("n").write_bytes(data)
    assert jobs(ticker.tick()) == ["merge_n"]
    assert any(CURRENT in r for r in ticker.reasons())
    assert history(home, "n")[-1].snapshot_id == released


def test_a_release_of_which_dagster_has_no_event_is_shown_and_not_made_again(
    home: Warehouse, released: str
) -> None:
    key = dg.AssetKey(["n", "release"])
    with dg.DagsterInstance.ephemeral() as another:
        ticker = Ticker(home, another)
        for _ in range(2):
            assert jobs(ticker.tick()) == []
            (event,) = another.fetch_materializations(key, limit=5).records
            shown = event.asset_materialization
            assert shown is not None
            assert (shown.tags or {})["dagster/data_version"] == released


def test_an_expert_that_is_mended_with_its_time_kept_is_merged(
    home: Warehouse, ticker: Ticker, released: str
) -> None:
    path = home.inbox / "expert_00" / "model.safetensors"
    good, stat = path.read_bytes(), path.stat()

    def write(data: bytes) -> None:
        part = path.with_name(".part")
        part.write_bytes(data)
        os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        part.replace(path)

    at = len(good) * 3 // 7  # between the bytes that a look at the file samples
    write(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    home.recipe_path("m").write_text(sum_of("base", "expert_00").replace("0.5", "0.7"))
    (failed,) = ticker.tick()
    assert "not those that were analysed" in str(failed["error"])
    assert jobs(ticker.tick()) == []
    assert any("m: failing and would again" in r for r in ticker.reasons())
    write(good)
    assert jobs(ticker.tick()) == ["merge_m"]
    assert last_release(home, "m") is not None


def test_a_warehouse_whose_disk_is_gone_is_told_and_loses_nothing(
    home: Warehouse, ticker: Ticker, instance: dg.DagsterInstance, released: str
) -> None:
    aside = home.root.with_name("aside")
    home.root.rename(aside)
    with pytest.raises(MergePipeError, match="empty, though Dagster knows of its experts"):
        ticker.tick()
    shutil.rmtree(home.root)
    aside.rename(home.root)
    assert known_experts(instance, home) == ["base", "expert_00"]
    assert jobs(ticker.tick()) == []
    assert any(CURRENT in r for r in ticker.reasons())


def test_a_warehouse_whose_disk_is_gone_keeps_its_schedules_and_a_night_that_is_asked_again(
    home: Warehouse, tmp_path: Path, drop: Drop
) -> None:
    instance = dg.DagsterInstance.local_temp(str(tmp_path))
    for name in ("base", "expert_00"):
        drop(name)
    Ticker(home, instance).tick()
    text = sum_of("base", "expert_00") + "trigger: nightly\nschedule: '0 3 * * *'\n"
    home.recipe_path("n").write_text(text)
    nightly = build_definitions(home).get_repository_def().get_schedule_def("nightly_merge_n")
    reloading, resources = (
        build_reload_sensor(lambda _: True),
        {"mergepipe": MergePipe(home=str(home.root))},
    )
    home.root.rename(home.root.with_name("aside"))
    gone = pytest.raises(MergePipeError, match="mount its disk again")
    # Without recipes there would be no schedules, and Dagster forgets what these asked for.
    with dg.build_sensor_context(instance, resources=resources) as tick, gone:
        reloading(tick)
    with dg.build_schedule_context(instance, resources=resources) as night, gone:
        nightly(night)


def test_what_a_schedule_could_not_get_in_its_minute_is_made_as_soon_as_it_can_be(
    home: Warehouse, tmp_path: Path, drop: Drop
) -> None:
    instance = dg.DagsterInstance.local_temp(str(tmp_path))  # a schedule asks where it lies
    ticker = Ticker(home, instance)
    for name in ("base", "expert_00"):
        drop(name)
    ticker.tick()
    when = "trigger: nightly\nschedule: '0 3 * * *'\n"
    home.recipe_path("n").write_text(sum_of("base", "expert_00") + when)
    assert jobs(ticker.tick()) == []
    assert any("leaves to its schedule" in r for r in ticker.reasons())
    repository = build_definitions(home).get_repository_def()
    schedule = repository.get_schedule_def("nightly_merge_n")
    (home.inbox / "expert_00" / "notes.txt").write_text("being copied")
    with dg.build_schedule_context(
        instance=instance, resources={"mergepipe": MergePipe(home=str(home.root))}
    ) as context:
        skipped = schedule(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "expert_00 waits for its index" in str(skipped.skip_message)
    assert jobs(ticker.tick()) == ["expert_00", "merge_n"]
    assert any(CURRENT in r for r in ticker.reasons())
    shutil.rmtree(home.inbox / "expert_00")
    drop("expert_00", "expert_01")
    assert jobs(ticker.tick()) == ["expert_00"]
    assert any("leaves to its schedule" in r for r in ticker.reasons())
    home.postponed_path("n").touch()
    home.recipe_path("n").write_text(sum_of("base", "expert_00") + "trigger: manual\n")
    assert jobs(ticker.tick()) == []


def test_a_recipe_that_stands_still_for_long_is_told_once_until_it_goes_on(
    home: Warehouse, released: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEPIPE_STALLED_S", "0.01")
    path, good, cursor = home.recipe_path("n"), home.recipe_path("n").read_text(), None
    with webhook() as (url, posted):
        monkeypatch.setattr(failures, "_URL", url)
        for text in ("models: [", "models: [", "models: [", good, "merge_method: t", "models: ["):
            path.write_text(text)
            with dg.build_sensor_context(
                cursor=cursor, resources={"mergepipe": MergePipe(home=str(home.root))}
            ) as context:
                found = failures.build_stalled_sensor()(context)
            assert isinstance(found, dg.SensorResult)
            cursor = found.cursor
            time.sleep(0.02)
    assert [p["recipe"] for p in posted] == ["n", "n"]
    assert "stands still" in posted[0]["text"]
    assert posted[0]["cause"]
    assert posted[0]["next_step"]


def test_a_daemon_finds_lost_facts_again_and_tells_of_a_broken_recipe_and_of_an_outage(
    home: Warehouse, recipe_file: RecipeFile
) -> None:
    with running_daemon(home, MERGEPIPE_STALLED_S="1") as daemon:
        daemon.wait_for("the release", lambda: last_release(home, "n"))
        flip_digests(home, "expert_01")
        daemon.wait_for("another index", lambda: daemon.runs("index_experts", Status.SUCCESS))
        daemon.wait_for(
            "the release to be current", lambda: daemon.skips("recipe_sensor", 1) == [CURRENT]
        )
        home.recipe_path("n").write_text("models: [")
        daemon.wait_for(
            "the recipe to stand still",
            lambda: any("still: n" in s for s in daemon.skips("stalled_sensor")),
        )
        aside = home.root.with_name("aside")
        aside.mkdir()
        for path in (p for p in home.root.iterdir() if p.name != "dagster"):
            path.rename(aside / path.name)
        daemon.wait_for("the outage", lambda: "is empty, though Dagster" in daemon.log.read_text())
        for path in aside.iterdir():
            shutil.rmtree(home.root / path.name, ignore_errors=True)
            path.rename(home.root / path.name)
        daemon.wait_for(
            "the experts", lambda: any("2 experts, 0" in s for s in daemon.skips("inbox_sensor", 1))
        )
    assert len(daemon.runs("merge_n")) == 1
