"""A collection takes nothing that a living process, a ref or a standing recipe needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.cli.snapshots import gc as gc_command
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution import plan_leases as leases
from mergepipe_pipeline.execution.plan_leases import lease, staging
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots.leases import Leases
from mergepipe_pipeline.storage import atomic, locks
from mergepipe_pipeline.storage.chain import VersionChain
from mergepipe_pipeline.verbs.deploy import merge_recipe, plan_recipe, snapshot_recipe
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.index import index_expert
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_stages import both, first

RecipeText = Callable[..., str]
#: Merges in a process that stops as soon as a layer is an object without an action.
STOPPING = """
import os, signal, sys
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.snapshots.stores import ObjectStore
record = ObjectStore.record
def stop_first(self, *given):
    os.kill(os.getpid(), signal.SIGSTOP)
    record(self, *given)
ObjectStore.record = stop_first
main()
"""


def command(home: Warehouse, *words: str | Path) -> list[str]:
    return [
        *(sys.executable, "-m", "mergepipe_pipeline.cli.main"),
        *map(str, words),
        *("--json", "--home", str(home.root)),
    ]


def gc(home: Warehouse) -> set[str]:
    return set(collect(home, older_than_s=0).snapshots)


@contextmanager
def stopped_merge(home: Warehouse, recipe: Path) -> Iterator[subprocess.Popen[str]]:
    """A merge that stands still with one finished layer that no action names yet."""
    words = command(home, "merge", recipe)[3:]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, *words], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def goes_on(process: subprocess.Popen[str], home: Warehouse) -> dict[str, object]:
    """Let a stopped merge run to its end, with a collection at each of its stops."""
    while True:
        os.kill(process.pid, signal.SIGCONT)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if os.WIFEXITED(status):
            process.returncode = os.WEXITSTATUS(status)
            break
        collect(home, older_than_s=0)
    assert process.stdout is not None
    assert process.returncode == 0
    found = json.loads(process.stdout.read())
    assert isinstance(found, dict)
    return found


def test_a_merge_keeps_its_layers_through_collections_of_any_age(
    home: Warehouse, tmp_path: Path, recipe_text: RecipeText
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    with stopped_merge(home, recipe) as process:
        before = home.objects.all_objects()
        assert before
        collect(home, older_than_s=0)
        assert home.objects.all_objects() == before
        summary = goes_on(process, home)
    verify(home, str(summary["snapshot_id"]))
    assert not list(home.leases_dir.glob("*.json"))


def test_a_layer_that_was_looked_up_lately_keeps_its_object_however_old_that_is(
    home: Warehouse, recipe_text: RecipeText
) -> None:
    run_plan(home, plan_in_stages(home, parse(recipe_text(), name="r", where="r")))
    for snapshot in home.snapshots.iterdir():
        atomic.remove_tree(snapshot)
    store = home.objects
    for path in (*store.all_actions(), *store.all_objects()):
        os.utime(path, (0, 0))
    used = store.lookup(store.all_actions()[0].stem)
    assert used is not None
    collect(home, older_than_s=3600)
    assert [p.name for p in store.all_objects()] == [used.sha256]
    assert len(store.all_actions()) == 1
    os.utime(store.all_actions()[0], (0, 0))
    collect(home, older_than_s=3600)
    assert not [*store.all_actions(), *store.all_objects()]


def test_layers_that_a_merge_reuses_stay_though_they_are_old(
    home: Warehouse, tmp_path: Path, recipe_text: RecipeText
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    run_plan(home, plan_in_stages(home, parse(recipe_text(), name="r", where="r")))
    for snapshot in home.snapshots.iterdir():
        atomic.remove_tree(snapshot)
    store = home.objects
    store.all_actions()[-1].unlink()
    with stopped_merge(home, recipe) as process:
        for path in (*store.all_actions(), *store.all_objects()):
            os.utime(path, (0, 0))
        collect(home, older_than_s=3600)
        for path in home.leases_dir.glob("*.json"):
            path.write_bytes(path.read_bytes().replace(b"keys", b"kezs"))
        assert any("cannot be read" in note for note in collect(home, older_than_s=0).notes)
        summary = goes_on(process, home)
    assert summary["layers_reused"] == 3


def test_the_mark_of_a_stage_goes_although_a_collection_was_killed_before_it(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.stages.mkdir(exist_ok=True)
    plan = plan_in_stages(home, parse(first(family), name="t", where="t"))
    run_plan(home, plan, is_stage=True)
    with monkeypatch.context() as patched:
        patched.setattr("mergepipe_pipeline.snapshots.stores.Marks.forget", None)
        with pytest.raises(TypeError):
            collect(home, older_than_s=0)
    known = {s.name for s in home.snapshots.iterdir()}
    (left,) = (p for p in home.stages.glob("*.json") if p.stem not in known)
    collect(home, older_than_s=3600)
    assert left.exists()
    assert str(left) in collect(home, older_than_s=0, dry_run=True).paths
    collect(home, older_than_s=0)
    assert {p.stem for p in home.stages.glob("*.json")} <= known


def test_a_killed_merge_keeps_nothing(
    home: Warehouse, tmp_path: Path, recipe_text: RecipeText
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    with stopped_merge(home, recipe) as process:
        staging = list(home.staging.iterdir())
        assert staging
        collect(home, older_than_s=0)
        assert list(home.staging.iterdir()) == staging
        process.kill()
    assert list(home.leases_dir.glob("*.json"))
    collect(home, older_than_s=0)
    for folder in (home.staging, home.objects_dir, home.actions_dir):
        assert not [p for p in folder.rglob("*") if p.is_file()]
    assert not list(home.leases_dir.glob("*.json"))


def test_a_merge_of_stages_succeeds_under_collections_without_end(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(both(family))
    runs = 0
    words = command(home, "merge", recipe, "--window-size", "512")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as merging:
        while merging.poll() is None:
            collect(home, older_than_s=0)
            runs += 1
            time.sleep(0.02)
        assert merging.stdout is not None
        summary = json.loads(merging.stdout.read())
    assert merging.returncode == 0
    assert runs > 5
    verify(home, summary["snapshot_id"])


def test_what_is_being_written_stays_and_what_a_dead_writer_left_goes(home: Warehouse) -> None:
    def hook(step: str) -> None:
        if step == "replace":
            collect(home, older_than_s=0)

    atomic.crash_hook = hook
    atomic.write_atomic(home.plans / "x.json", b"{}")
    assert (home.plans / "x.json").read_bytes() == b"{}"
    left = home.plans / ".y.json.q1.tmp"
    left.write_bytes(b"half")
    collect(home, older_than_s=0)
    assert not left.exists()


def test_what_killed_landings_left_goes_and_what_a_living_one_copies_stays(
    home: Warehouse, family: Path
) -> None:
    names = ("landing-20260101T000000-0123abcd", "landing-0123abcd", "old-0123abcd")
    for name in names:
        for expert in ("here", "gone"):
            (home.inbox / f".{expert}.{name}").mkdir()
    (home.inbox / ".notes").mkdir()
    (home.inbox / "here").mkdir()
    home.arrivals.mkdir(exist_ok=True)
    (home.arrivals / ".here.json.q1.tmp").write_bytes(b"half")

    def hook(step: str) -> None:
        atomic.crash_hook = None if step == "copy" else hook
        if step == "copy":
            collect(home, older_than_s=0)

    atomic.crash_hook = hook
    land(home, str(family / "base"), "here")
    # An older version of which nothing is in its place may be the only copy.
    assert {p.name for p in home.inbox.iterdir()} == {".gone.old-0123abcd", ".notes", "here"}
    assert open_checkpoint(str(home.inbox / "here"), "here").tensors
    assert {p.name for p in home.arrivals.iterdir()} == {".lock", "here.json"}


def test_a_stage_that_nothing_needs_is_collected_and_made_again(
    home: Warehouse, family: Path
) -> None:
    raw = parse(both(family), name="t", where="t")
    result = run_plan(home, plan_in_stages(home, raw)).snapshot.snapshot_id
    leases._until_exit.close()
    (stage,) = {p.name for p in home.snapshots.iterdir()} - {result}
    result_of_gc = CliRunner().invoke(
        gc_command, ["--home", str(home.root), "--older-than", "0", "--dry-run", "--json"]
    )
    assert json.loads(result_of_gc.stdout)["snapshots"] == [stage]
    assert (home.snapshots / stage).exists()
    assert not collect(home, older_than_s=3600).snapshots
    assert gc(home) == {stage}
    assert {p.name for p in home.snapshots.iterdir()} == {result}
    verify(home, result)
    again = run_plan(home, plan_in_stages(home, raw)).summary()
    assert again["snapshot_id"] == result
    assert again["layers_executed"] == 0
    assert {p.name for p in home.snapshots.iterdir()} == {result, stage}


def test_a_stage_stays_while_a_process_that_made_it_lives(home: Warehouse, family: Path) -> None:
    plan_in_stages(home, parse(both(family), name="t", where="t"))
    assert len(list(home.snapshots.iterdir())) == 1
    assert gc(home) == set()
    leases._until_exit.close()
    assert len(gc(home)) == 1


def stage_of(home: Warehouse, family: Path) -> str:
    """The id of a stage's snapshot, made by a process that leases no more."""
    plan_in_stages(home, parse(both(family), name="t", where="t"))
    leases._until_exit.close()
    (stage,) = [p.name for p in home.snapshots.iterdir()]
    return stage


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_stage_that_somebody_merges_as_a_result_is_one(
    home: Warehouse, family: Path, order: str
) -> None:
    raw = parse(first(family), name="t", where="t")
    if order == "before":
        run_plan(home, plan_in_stages(home, raw))
    stage = stage_of(home, family)
    if order == "after":
        run_plan(home, plan_in_stages(home, raw))
    assert [p.name for p in home.snapshots.iterdir()] == [stage]
    assert gc(home) == set()
    verify(home, stage)


@pytest.mark.parametrize("need", ["published", "rolled over", "registered"])
def test_a_stage_that_something_names_stays(
    home: Warehouse, family: Path, recipe_text: RecipeText, need: str
) -> None:
    stage = stage_of(home, family)
    if need == "registered":
        register(home, home.snapshots / stage, "mine")
    else:
        publish(home, stage, "live")
    if need == "rolled over":
        raw = parse(recipe_text(), name="t", where="t")
        other = run_plan(home, plan_in_stages(home, raw)).snapshot
        publish(home, other.snapshot_id, "live")
    assert gc(home) == set()
    verify(home, stage)


def test_versions_of_refs_are_read_before_anybody_waits_but_those_that_came_since(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(home, family)
    for snapshot_id in ("1", "2"):
        home.refs.publish("live", snapshot_id, "before")
    alone, get = Leases.alone, VersionChain.get
    read = list[int]()

    @contextmanager
    def after_another(all_leases: Leases) -> Iterator[None]:
        home.refs.publish("live", stage, "meanwhile")
        read.clear()
        with alone(all_leases):
            yield

    def get_counted(chain: VersionChain, number: int) -> dict[str, Any]:
        if chain._folder == home.refs_dir / "live":
            read.append(number)
        return get(chain, number)

    monkeypatch.setattr(Leases, "alone", after_another)
    monkeypatch.setattr(VersionChain, "get", get_counted)
    assert gc(home) == set()
    assert read == [3]
    verify(home, stage)


def test_what_a_standing_recipe_works_on_stays_between_its_steps(
    home: Warehouse, family: Path
) -> None:
    for name in ("base", "expert_00", "expert_01", "expert_02"):
        register(home, family / name, name)
        index_expert(home, name)
    text = both(family).replace(f"{family}/", "")
    home.recipe_path("r").write_text(text)
    plan_recipe(home, recipe_files(home)[0])
    leases._until_exit.close()
    (stage,) = [p.name for p in home.snapshots.iterdir()]
    layers = recipe_files(home)[0].layers
    for layer in layers:
        assert gc(home) == set()
        (done,) = merge_recipe(home, "r", [layer], EngineOptions())
        assert not done.reused
    assert gc(home) == set()
    snapshot, realised = snapshot_recipe(home, "r")
    assert realised.layers_executed == len(layers)
    home.recipe_path("r").unlink()
    assert gc(home) == {stage}
    verify(home, snapshot.snapshot_id)


def test_a_recipe_whose_plan_is_lost_does_not_stop_a_collection(home: Warehouse) -> None:
    home.recipe_path("r").write_text("x")
    home.current_plan_path("r").write_text("{}")
    home.recipe_path("s").write_text("x")
    home.current_plan_path("s").mkdir()
    assert len(collect(home, older_than_s=0).notes) == 2
    assert recipe_files(home)
    with pytest.raises(Exception, match=r"current\.json"):
        list(merge_recipe(home, "r", ["embed"], EngineOptions()))
    home.current_plan_path("r").write_bytes(seal({"plan_id": "p", "wanted": "", "inputs": {}}))
    with pytest.raises(CorruptionError, match=r"plan_sha256.*materialize r/plan"):
        list(merge_recipe(home, "r", ["embed"], EngineOptions()))
    assert len(collect(home, older_than_s=0).notes) == 2


def test_without_locks_age_decides_and_gc_says_so(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_in_stages(home, parse(first(family), name="t", where="t"))
    monkeypatch.setattr(locks, "_flock", lambda handle, how: False)
    with lease(home, plan), staging(home, "merge") as folder:
        kept = collect(home, older_than_s=3600)
        assert kept.files == 0
        assert any("without locks" in note for note in kept.notes)
        for path in home.leases_dir.iterdir():
            os.utime(path, (0, 0))
        collect(home, older_than_s=3600)
        assert not list(home.leases_dir.glob("*.json"))
        assert folder.exists()


def test_planning_a_standing_recipe_again_frees_its_last_plan(
    home: Warehouse, family: Path
) -> None:
    for name in ("base", "expert_00", "expert_01"):
        register(home, family / name, name)
        index_expert(home, name)
    text = first(family).replace(f"{family}/", "")
    home.recipe_path("r").write_text(text)
    (file,) = recipe_files(home)
    plan_recipe(home, file)
    assert list(merge_recipe(home, "r", [file.layers[1]], EngineOptions()))
    assert collect(home, older_than_s=0).files == 0
    home.recipe_path("r").write_text(text.replace("0.5", "0.6"))
    plan_recipe(home, recipe_files(home)[0])
    assert collect(home, older_than_s=0).files == 2


def test_what_a_killed_process_left_beside_a_mark_goes_although_the_mark_was_read(
    home: Warehouse,
) -> None:
    home.stages.mkdir(exist_ok=True)
    mark, left = home.stages / f"{'0' * 32}.json", home.stages / ".mark.json.x.tmp"
    mark.write_bytes(b"{}")
    (home.snapshots / mark.stem).mkdir()
    os.link(mark, left)  # as between the two names of an exclusive creation
    now = time.time()
    os.utime(mark, (now + 60, now - 60))
    collect(home, older_than_s=0)
    assert [p.name for p in home.stages.iterdir()] == [mark.name]
