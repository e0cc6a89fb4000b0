"""Whatever is doubtful in the action cache counts as unknown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.collection import collect
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.export import export_snapshot
from mergepipe_pipeline.snapshots.find import load_snapshot, scan_snapshots
from mergepipe_pipeline.snapshots.model_folder import RECIPE_FILE
from mergepipe_pipeline.snapshots.stores import ObjectStore
from mergepipe_pipeline.storage import atomic
from tests.snapshots.tiny import Crash, Store, count_steps, crash_at


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "w")


def test_a_recorded_layer_is_found_again_with_its_digests(store: Store) -> None:
    shard = store.shard(1)
    found = store.objects.lookup(shard.layer_key)
    assert found is not None
    assert (found.sha256, found.nbytes, found.tensors) == (
        shard.sha256,
        shard.nbytes,
        shard.tensors,
    )
    assert store.objects.lookup("f" * 64) is None


def test_actions_that_change_places_are_unknown(store: Store) -> None:
    keys = [store.shard(n).layer_key for n in (1, 2)]
    one, other = store.objects.all_actions()
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    assert [store.objects.lookup(key) for key in keys] == [None, None]


@pytest.mark.parametrize("change", ["flip", "cut", "empty"])
def test_a_damaged_action_is_unknown(store: Store, change: str) -> None:
    key = store.shard(1).layer_key
    (action,) = store.objects.all_actions()
    data = bytearray(action.read_bytes())
    if change == "flip":
        data[len(data) // 2] ^= 1
    action.write_bytes({"flip": bytes(data), "cut": bytes(data[:-5]), "empty": b""}[change])
    assert store.objects.lookup(key) is None
    assert store.shard(1).layer_key == key
    assert store.objects.lookup(key) is not None


def test_a_missing_or_short_object_is_unknown_and_made_again(store: Store) -> None:
    shard = store.shard(1)
    path = store.objects.path_of(shard.sha256)
    path.chmod(0o644)
    os.truncate(path, shard.nbytes - 1)
    assert store.objects.lookup(shard.layer_key) is None
    path.unlink()
    assert store.objects.lookup(shard.layer_key) is None
    assert store.shard(1) == shard
    assert path.stat().st_size == shard.nbytes


def gc(store: Store, older_than_s: float = 0.0, dry_run: bool = False) -> set[str]:
    found = collect(
        store.objects, store.snapshots, store.staging, older_than_s=older_than_s, dry_run=dry_run
    )
    assert found.files == len(found.paths)
    return {Path(p).name for p in found.paths}


def test_gc_removes_what_no_snapshot_needs_and_nothing_else(store: Store) -> None:
    made = store.commit((1, 2))
    idle = store.shard(3)
    half = store.stage((1, 3), run=7).parent
    expected = {idle.sha256, f"{idle.layer_key}.json", "7", "0"}
    assert gc(store, dry_run=True) == expected
    assert half.exists()
    assert gc(store) == expected
    assert gc(store) == set()
    assert not half.exists()
    verify_snapshot(Path(made.path))
    for shard in made.manifest.shards:
        assert store.objects.lookup(shard.layer_key) is not None
    assert store.objects.lookup(idle.layer_key) is None


def test_gc_leaves_young_files(store: Store) -> None:
    store.stage((1,))
    assert gc(store, older_than_s=3600) == set()


def test_gc_forgives_what_another_process_removed_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = store.shard(1)
    gone = store.root / "actions" / "aa" / "gone.json"
    there = store.objects.all_actions()
    monkeypatch.setattr(ObjectStore, "all_actions", lambda self: [gone, *there])
    assert gc(store) == {idle.sha256, f"{idle.layer_key}.json"}


def test_gc_of_nothing_removes_nothing(store: Store) -> None:
    assert gc(store) == set()


@pytest.mark.parametrize("damage", ["flip", "empty", "lost", "folder", "fifo"])
def test_gc_keeps_what_a_damaged_snapshot_links_to_and_goes_on(store: Store, damage: str) -> None:
    made, other = store.commit((1, 2)), store.commit((3,), run=2)
    idle = store.shard(4)
    manifest = Path(made.path, "manifest.json")
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.unlink()
    match damage:
        case "flip":
            manifest.write_bytes(data)
        case "empty":
            manifest.write_bytes(b"")
        case "folder":
            manifest.mkdir()
        case "fifo":
            os.mkfifo(manifest)
    whole, (damaged,) = scan_snapshots(store.snapshots)
    assert whole == [other]
    assert damaged.folder == Path(made.path)
    removed = gc(store)
    assert {idle.sha256, f"{idle.layer_key}.json"} <= removed
    for shard in (*made.manifest.shards, *other.manifest.shards):
        assert store.objects.lookup(shard.layer_key) is not None
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        load_snapshot(store.snapshots, made.snapshot_id)
    shutil.rmtree(made.path)
    assert store.commit((1, 2), run=3) == made


def test_an_export_is_a_copy_with_the_recipe_and_repeating_it_changes_nothing(
    store: Store, tmp_path: Path
) -> None:
    made = store.commit((1, 2))
    out = tmp_path / "deep" / "out"
    export_snapshot(made, out)
    names = {p.name for p in Path(made.path).iterdir()}
    assert {p.name for p in out.iterdir()} == names | {RECIPE_FILE}
    for name in names:
        assert (out / name).read_bytes() == Path(made.path, name).read_bytes()
    before = {p.name: p.stat().st_ino for p in out.iterdir()}
    export_snapshot(made, out)
    assert {p.name: p.stat().st_ino for p in out.iterdir()} == before
    (out / "model-1.safetensors").write_bytes(b"edited")
    verify_snapshot(Path(made.path))
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_an_export_refuses_foreign_folders_files_and_other_snapshots(
    store: Store, tmp_path: Path
) -> None:
    made, other = store.commit((1,)), store.commit((2,), run=2)
    foreign, file = tmp_path / "foreign", tmp_path / "file"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    file.write_text("x")
    for out, told in ((foreign, "folder is not empty"), (file, "in the output folder's place")):
        with pytest.raises(MergePipeError, match=told):
            export_snapshot(made, out)
    assert (foreign / "thesis.tex").read_text() == "years of work"
    export_snapshot(made, tmp_path / "out")
    with pytest.raises(MergePipeError, match="holds another snapshot"):
        export_snapshot(other, tmp_path / "out")


def test_an_export_that_crashes_shows_nothing_and_can_be_repeated(
    store: Store, tmp_path: Path
) -> None:
    made = store.commit((1,))
    steps = count_steps(lambda: export_snapshot(made, tmp_path / "calm"))
    for step in range(steps - 1):  # the last one is the removal of staging
        out = tmp_path / f"out{step}"
        crash_at(step)
        with pytest.raises(Crash, match=r"\w"):
            export_snapshot(made, out)
        atomic.crash_hook = None
        assert not out.exists()
        export_snapshot(made, out)
        assert (out / RECIPE_FILE).exists()
