"""A snapshot is whole or not there, and every wrong bit in it is found and named."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.snapshots.commit import Checked, commit_snapshot, verify_snapshot
from mergepipe_pipeline.snapshots.find import list_snapshots, load_snapshot
from mergepipe_pipeline.storage import atomic
from tests.snapshots.tiny import Crash, Store, count_steps, crash_at
from tests.support.laws import examples
from tests.support.listed import folders_listed


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "w")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """One committed snapshot with two shards; tests copy it."""
    return Store(tmp_path_factory.mktemp("snapshot")).commit((1, 2))


def copy_of(snapshot: Snapshot, into: Path) -> Path:
    return Path(shutil.copytree(snapshot.path, into / snapshot.snapshot_id))


def test_a_committed_snapshot_is_found_loaded_and_verified(store: Store) -> None:
    made = store.commit((1, 2))
    assert list_snapshots(store.snapshots) == [made]
    assert load_snapshot(store.snapshots, made.snapshot_id[:6]) == made
    found = verify_snapshot(Path(made.path))
    files = list(Path(made.path).iterdir())
    assert (found.snapshot_id, found.files) == (made.snapshot_id, len(files))
    assert found.nbytes == sum(p.stat().st_size for p in files)
    weights = load_file(Path(made.path, "model-2.safetensors"))
    assert weights["l2.b"].tolist() == [2, 2, 2]


def test_a_snapshot_is_loaded_by_its_id_without_a_look_at_any_other(store: Store) -> None:
    made = store.commit((1,))
    with folders_listed() as listed:
        assert load_snapshot(store.snapshots, made.snapshot_id) == made
    assert listed == []


def test_progress_counts_the_bytes_of_all_shards(snapshot: Snapshot) -> None:
    seen: list[int] = []
    verify_snapshot(Path(snapshot.path), seen.append)
    assert sum(seen) == sum(s.nbytes for s in snapshot.manifest.shards)


def test_shards_are_links_to_read_only_objects(store: Store) -> None:
    made = store.commit((1,))
    shard = made.manifest.shards[0]
    path = Path(made.path, shard.file)
    assert path.samefile(store.objects.path_of(shard.sha256))
    assert path.stat().st_mode & 0o777 == 0o444


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_and_its_place_is_named(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        folder = copy_of(snapshot, Path(tmp))
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        damaged = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        file.chmod(0o644)
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=file.name) as caught:
            verify_snapshot(folder)
        if file.suffix == ".safetensors":
            number = file.name[len("model-")]
            start = len(damaged) - 19
            # A header bit shows in the first prefix digest, a tensor bit in its tensor's.
            owner = f"tensor l{number}." + ("b" if at >= start + 16 else "w")
            assert owner in str(caught.value) or (at < start and "header" in str(caught.value))


def test_shards_that_were_just_read_are_read_again_only_if_anybody_touched_them_since(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    folder, seen = copy_of(snapshot, tmp_path), list[int]()
    one, two = snapshot.manifest.shards
    checked = Checked(frozenset([one.sha256, two.sha256]), time.time_ns())
    verify_snapshot(folder, seen.append, checked=checked)
    assert seen == []
    for old in (Checked(checked.digests, 1), Checked(checked.digests, checked.at_ns - 4 * 10**12)):
        seen.clear()
        verify_snapshot(folder, seen.append, checked=old)
        assert sum(seen) == one.nbytes + two.nbytes
    verify_snapshot(folder, seen.append, checked=Checked(frozenset([one.sha256]), checked.at_ns))
    assert sum(seen) == one.nbytes + 2 * two.nbytes
    file = folder / two.file
    stat = file.stat()
    time.sleep(0.02)  # a tick of the clock that files have
    file.chmod(0o644)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptionError, match=file.name):
        verify_snapshot(folder, checked=checked)


def test_a_truncated_shard_and_a_longer_one_are_found(snapshot: Snapshot, tmp_path: Path) -> None:
    for i, change in enumerate([lambda b: b[:-1], lambda b: b + b"\0"]):
        folder = copy_of(snapshot, tmp_path / str(i))
        file = folder / "model-1.safetensors"
        file.chmod(0o644)
        file.write_bytes(change(file.read_bytes()))
        with pytest.raises(CorruptionError, match=r"wrong length.*model-1\.safetensors"):
            verify_snapshot(folder)


@pytest.mark.parametrize(
    "name", ["manifest.json", "provenance.json", "config.json", "model-2.safetensors"]
)
def test_a_missing_file_is_found(snapshot: Snapshot, tmp_path: Path, name: str) -> None:
    folder = copy_of(snapshot, tmp_path)
    (folder / name).unlink()
    with pytest.raises(CorruptionError, match=name.replace(".", r"\.")):
        verify_snapshot(folder)


def test_an_extra_file_is_found(snapshot: Snapshot, tmp_path: Path) -> None:
    folder = copy_of(snapshot, tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CorruptionError, match=r"pytorch_model\.bin"):
        verify_snapshot(folder)


def test_a_snapshot_under_a_foreign_id_is_found(snapshot: Snapshot, tmp_path: Path) -> None:
    folder = copy_of(snapshot, tmp_path)
    other = folder.rename(tmp_path / ("0" * 32))
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        verify_snapshot(other)
    with pytest.raises(CorruptionError, match="manifest is not its own"):
        load_snapshot(tmp_path, "0" * 32)


def test_committing_the_same_result_twice_gives_the_same_snapshot(store: Store) -> None:
    first = store.commit((1, 2), run=1)
    assert store.commit((1, 2), run=2) == first
    assert list_snapshots(store.snapshots) == [first]


def test_committing_over_a_damaged_snapshot_is_corruption(store: Store) -> None:
    made = store.commit((1,))
    Path(made.path, "config.json").write_text("{}")
    with pytest.raises(CorruptionError, match=r"config\.json"):
        store.commit((1,), run=2)


def test_an_id_that_is_unknown_ambiguous_or_empty_is_not_found(store: Store) -> None:
    store.snapshots.mkdir(parents=True)
    (store.snapshots / ".hidden").mkdir()
    assert list_snapshots(store.snapshots) == []
    made = store.commit((1,))
    (store.snapshots / (made.snapshot_id[:4] + "0" * 28)).mkdir()
    for wanted, what in (
        ("zz", "No such"),
        ("", "No such"),
        (".", "No such"),
        ("..", "No such"),
        (made.snapshot_id[:4], "More than"),
    ):
        with pytest.raises(NotFoundError, match=what):
            load_snapshot(store.snapshots, wanted)


def test_a_crash_at_any_step_shows_no_half_snapshot_and_a_retry_succeeds(tmp_path: Path) -> None:
    steps = count_steps(lambda: Store(tmp_path / "calm").commit((1, 2)))
    (calm,) = list_snapshots(tmp_path / "calm" / "snapshots")
    for step in range(steps):
        store = Store(tmp_path / str(step))
        crash_at(step)
        with pytest.raises(Crash, match=r"\w"):
            store.commit((1, 2), run=1)
        atomic.crash_hook = None
        for found in list_snapshots(store.snapshots):
            verify_snapshot(Path(found.path))
        made = store.commit((1, 2), run=2)
        assert made.manifest == calm.manifest
        verify_snapshot(Path(made.path))


def test_a_lost_object_is_made_again_before_it_is_staged(store: Store) -> None:
    shard = store.shard(1)
    store.objects.path_of(shard.sha256).unlink()
    staged = store.stage((1,))
    assert commit_snapshot(staged, store.snapshots).manifest.shards == (shard,)
