"""Old versions of refs give their space back, and nothing that anybody needs goes with them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs import merge as merging
from mergepipe_pipeline.verbs import publish as publishing
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.publish import publish, rollback
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse

Merge = Callable[[str], str]


@pytest.fixture
def merged(home: Warehouse, recipe_text: Callable[..., str]) -> Merge:
    """Merges under a budget and gives the snapshot's id; another budget, another snapshot."""

    def run(budget: str) -> str:
        parsed = parse(recipe_text(), name="r", where="r.yml")
        return merge(home, parsed, budget=budget).outcome.snapshot.snapshot_id

    return run


@pytest.fixture
def versions(home: Warehouse, merged: Merge) -> list[str]:
    """Four snapshots, published one after the other under `live`."""
    ids = [merged(budget) for budget in ("20%", "40%", "60%", "80%")]
    assert len(set(ids)) == 4
    for snapshot_id in ids:
        publish(home, snapshot_id, "live")
    return ids


def _left(home: Warehouse) -> set[str]:
    return {path.name for path in home.snapshots.iterdir()}


def _objects(home: Warehouse) -> set[str]:
    return {path.name for path in home.objects.all_objects()}


def test_results_of_older_versions_go_with_their_layers_and_the_rest_is_whole(
    home: Warehouse, versions: list[str]
) -> None:
    before = _objects(home)
    dry = collect(home, older_than_s=0, keep_versions=2, dry_run=True)
    assert (_left(home), _objects(home)) == (set(versions), before)
    done = collect(home, older_than_s=0, keep_versions=2)
    assert (set(done.snapshots), done.nbytes) == (set(versions[:2]), dry.nbytes)
    assert done.nbytes > 0
    assert _left(home) == set(versions[2:])
    assert _objects(home) < before
    assert verify_all(home).findings == ()
    assert [r.snapshot_id for r in home.refs.history("live")] == versions
    assert collect(home, older_than_s=0, keep_versions=2).files == 0


def test_without_the_option_and_before_its_time_every_version_stays(
    home: Warehouse, versions: list[str]
) -> None:
    collect(home, older_than_s=0)
    collect(home, older_than_s=3600, keep_versions=1)
    assert _left(home) == set(versions)


def test_going_back_to_what_was_collected_says_so_until_it_is_merged_again(
    home: Warehouse, versions: list[str], merged: Merge
) -> None:
    collect(home, older_than_s=0, keep_versions=2)
    with pytest.raises(
        NotFoundError, match=r"live, version 1.*gc --keep-versions.*merge its recipe"
    ):
        rollback(home, "live", 1)
    shown = CliRunner().invoke(main, ["history", "live", "--json", "--home", str(home.root)])
    assert [r["collected"] for r in json.loads(shown.stdout)] == [True, True, False, False]
    assert merged("20%") == versions[0]
    assert rollback(home, "live", 1).snapshot_id == versions[0]
    assert verify_all(home).findings == ()


def test_what_another_ref_a_name_a_lease_or_nobody_names_stays(
    home: Warehouse, versions: list[str], merged: Merge, recipe_text: Callable[..., str]
) -> None:
    never_published = merged("10%")
    publish(home, versions[0], "stable")
    register(home, home.snapshots / versions[1], "as-expert")
    plan = make_plan(home, parse(recipe_text(), name="r", where="r.yml"), budget="60%")
    with lease(home, plan):
        done = collect(home, older_than_s=0, keep_versions=1)
    assert done.snapshots == ()
    assert _left(home) == {*versions, never_published}
    assert collect(home, older_than_s=0, keep_versions=1).snapshots == (versions[2],)


def test_results_that_were_never_published_go_if_asked_for(
    home: Warehouse, versions: list[str], merged: Merge
) -> None:
    never = merged("10%")
    collect(home, older_than_s=3600, unpublished=True)
    assert never in _left(home)
    assert collect(home, older_than_s=0, unpublished=True).snapshots == (never,)
    collect(home, older_than_s=0)
    assert {path.stem for path in home.stages.iterdir()} == set(versions)
    assert _left(home) == set(versions)
    assert merged("10%") == never


def test_a_version_that_was_published_again_is_among_the_newest(
    home: Warehouse, versions: list[str]
) -> None:
    rollback(home, "live", 1)
    collect(home, older_than_s=0, keep_versions=2)
    assert _left(home) == {versions[0], versions[3]}


def test_a_ref_that_cannot_be_read_keeps_everything(home: Warehouse, versions: list[str]) -> None:
    publish(home, versions[0], "other")
    (home.refs_dir / "other" / "00000001.json").write_bytes(b"{")
    done = collect(home, older_than_s=0, keep_versions=1)
    assert (done.snapshots, _left(home)) == ((), set(versions))
    assert any("other" in note for note in done.notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep-versions", "0"], "not in the range"),
        (["--keep-versions", "2", "--bucket"], "goes alone"),
    ],
)
def test_wrong_numbers_of_versions_are_refused(
    home: Warehouse, words: list[str], said: str
) -> None:
    done = CliRunner().invoke(main, ["gc", *words, "--home", str(home.root)])
    assert done.exit_code == 2
    assert said in done.stderr


def test_the_command_names_what_it_removes(
    home: Warehouse, versions: list[str], tmp_path: Path
) -> None:
    words = ["gc", "--keep-versions", "3", "--older-than", "0", "--home", str(home.root)]
    assert f"snapshot {versions[0]}" in CliRunner().invoke(main, words).stdout


def test_plans_without_a_snapshot_go_after_a_month_and_those_of_snapshots_stay(
    home: Warehouse, versions: list[str], recipe_text: Callable[..., str]
) -> None:
    plan = make_plan(home, parse(recipe_text(), name="r", where="r.yml"), budget="15%")
    collect(home, older_than_s=0)
    assert home.plan_path(plan.plan_id).exists()
    month_ago = time.time() - 31 * 86400
    for path in home.plans.glob("*.json"):
        os.utime(path, (month_ago, month_ago))
    with lease(home, plan):
        assert collect(home, older_than_s=0).files == 0
    collect(home, older_than_s=0)
    assert not home.plan_path(plan.plan_id).exists()
    assert len(list(home.plans.glob("*.json"))) == len(versions)


def test_a_rollback_keeps_what_it_goes_back_to_from_a_collection_meanwhile(
    home: Warehouse, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(folder: Path) -> None:
        collect(home, older_than_s=0, keep_versions=1)
        verify_snapshot(folder)

    monkeypatch.setattr(publishing, "verify_snapshot", verified)
    assert rollback(home, "live", 1).snapshot_id == versions[0]
    assert _left(home) == {versions[0], versions[3]}


def test_a_live_ref_whose_snapshot_is_gone_is_found_though_it_was_collected_once(
    home: Warehouse, versions: list[str], merged: Merge
) -> None:
    collect(home, older_than_s=0, keep_versions=2)
    merged("20%")
    rollback(home, "live", 1)
    Marks(home.stages).collect(versions[0])
    remove_tree(home.snapshots / versions[0])
    (finding,) = verify_all(home).findings
    assert finding.file.endswith("live/00000005.json")


def test_a_result_that_is_merged_again_is_in_use_as_of_then(
    home: Warehouse, versions: list[str], merged: Merge
) -> None:
    month_ago = time.time() - 31 * 86400
    for path in (*home.snapshots.iterdir(), *home.stages.iterdir()):
        os.utime(path, (month_ago, month_ago))
    assert merged("20%") == versions[0]
    done = collect(home, older_than_s=3600, keep_versions=1)
    assert set(done.snapshots) == set(versions[1:3])


def test_a_merge_keeps_its_result_while_it_is_judged(
    home: Warehouse, recipe_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(*given: object) -> None:
        collect(home, older_than_s=0, unpublished=True)

    monkeypatch.setattr(merging, "pass_gate", judged)
    done = merge(home, parse(recipe_text(), name="r", where="r.yml"), publish_ref=True)
    assert _left(home) == {done.outcome.snapshot.snapshot_id}


def test_a_collected_result_that_is_made_as_a_stage_is_a_stage(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    marks.collect("a")
    marks.mark("a", is_stage=True, is_new=True)
    assert marks.unwanted() == {"a"}
