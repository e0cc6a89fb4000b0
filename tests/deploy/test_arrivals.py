"""What lies in the inbox is compared with what became of it: none is lost, none taken half."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.deploy.arrivals import MAX_FAILURES, Arrival, Work, arrival, ask
from mergepipe_pipeline.deploy.inbox import InboxEntry, Patience, scan_inbox
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    MergePipeError,
    RemoteError,
    StorageFullError,
)
from mergepipe_pipeline.sensors.inbox import MAX_RUNS
from mergepipe_pipeline.sensors.inbox import _parts as parts
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs import index
from mergepipe_pipeline.verbs.index import IndexedExpert, index_arrival, index_expert
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.warehouse import Warehouse
from tests.hostile.corpus import write_full
from tests.support.family import tensors_of, write_model

#: Quiet for 1 s, doubt for 60 s, and a second try at once.
PATIENT, HASTY = Patience(1.0, 0.0), Patience(0.0, 0.0)


def only(home: Warehouse, patience: Patience = HASTY) -> InboxEntry:
    (landed,) = scan_inbox(home, patience)
    return landed


def wait_for_quiet() -> None:
    time.sleep(1.1)


def test_an_expert_is_ready_until_it_is_indexed_and_again_when_it_changes(home: Warehouse) -> None:
    folder = write_full(home.inbox / "a")
    assert only(home).is_ready
    index_arrival(home, "a")
    assert only(home).is_indexed
    shutil.rmtree(home.root / "arrivals")
    assert only(home).is_ready
    index_arrival(home, "a")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert only(home).is_ready


def test_what_was_asked_for_and_did_not_happen_is_asked_for_again_under_another_key(
    home: Warehouse,
) -> None:
    write_full(home.inbox / "a")
    first = only(home)
    keys = {ask(home, "a", first.token)}
    assert "next in" in (only(home, Patience(0.0, 30.0)).waiting or "")
    again = only(home)
    assert again.is_ready
    keys.add(ask(home, "a", again.token))
    assert len(keys) == 2


def test_nothing_is_asked_for_while_a_run_is_under_way(home: Warehouse) -> None:
    write_full(home.inbox / "a")
    (landed,) = scan_inbox(home, HASTY, under_way={"a"})
    assert not landed.is_ready


def test_what_fails_three_times_is_given_up_with_its_reason_until_its_content_changes(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_full(home.inbox / "a")

    def refuse(*_: object) -> None:
        raise MergePipeError("Its weights are odd")

    monkeypatch.setattr(index, "index_expert", refuse)
    for _ in range(MAX_FAILURES):
        assert only(home).is_ready
        with pytest.raises(MergePipeError):
            index_arrival(home, "a")
    assert arrival(home, "a").index.is_given_up
    assert "given up" in (only(home).waiting or "")
    assert "Its weights are odd" in (only(home).waiting or "")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert only(home).is_ready


@pytest.mark.parametrize(
    "error",
    [
        StorageFullError("full"),
        RemoteError("no answer"),
        OSError(errno.EIO, os.strerror(errno.EIO)),
        KeyboardInterrupt(),
    ],
)
def test_what_is_not_the_experts_fault_quarantines_nothing(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_full(home.inbox / "a")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(index, "index_expert", fail)
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises(type(error)):
            index_arrival(home, "a")
    assert only(home).is_ready


#: Indexes an expert in a process that is killed when it writes what it found.
_KILLED = """
import os, signal, sys
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.warehouse import Warehouse
steps = []
def kill(step):
    steps.append(step)
    if steps.count("write") == 2:
        os.kill(os.getpid(), signal.SIGKILL)
atomic.crash_hook = kill
index_arrival(Warehouse.at(sys.argv[1]), "b")
"""


def test_an_expert_whose_index_is_killed_is_tried_for_ever_in_a_run_of_its_own(
    home: Warehouse,
) -> None:
    write_full(home.inbox / "b")
    for n in range(1, MAX_FAILURES + 2):
        landed = only(home)
        assert landed.is_ready
        ask(home, "b", landed.token)
        assert arrival(home, "b").is_under_way is (n <= MAX_FAILURES)
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(home.root)])
        assert killed.returncode == -signal.SIGKILL
        told = only(home, Patience(0.0, 1000.0)).waiting
        assert f"run {n} for it did not end well; the next in" in str(told)
        assert "killed" in str(told)
    for i in range(MAX_RUNS):
        for name in ("a", "c"):
            write_full(home.inbox / f"{name}{i}")
    (first, *others) = parts(scan_inbox(home, HASTY))
    assert [x.name for x in first] == ["b"]
    assert [len(part) for part in others] == [2] * MAX_RUNS
    index_arrival(home, "b")
    assert not arrival(home, "b").was_killed


def test_a_folder_that_goes_with_its_mount_while_it_is_indexed_is_not_at_fault(
    home: Warehouse,
) -> None:
    folder, aside = write_full(home.inbox / "a"), home.root / "aside"
    for _ in range(MAX_FAILURES + 1):

        def unmount(step: str) -> None:
            if step == "replace" and folder.exists():
                folder.rename(aside)

        atomic.crash_hook = unmount
        with pytest.raises((CheckpointError, OSError)):
            index_arrival(home, "a")
        atomic.crash_hook = None
        assert scan_inbox(home, HASTY) == ()
        aside.rename(folder)
        assert only(home).is_ready
    index_arrival(home, "a")
    assert only(home).is_indexed


def asked(tries: int, in_s: float) -> Arrival:
    """What is known of an expert for which a run was asked at a time from now."""
    return Arrival(index=Work(tries=tries), asked_s=time.time() + in_s)


def test_pauses_before_a_run_grow_to_an_hour_however_many_failed() -> None:
    waits = [
        Arrival(index=Work(tries=n), asked_s=time.time()).left_s(30.0)
        for n in (1, 2, 3, 4, 5, 9999)
    ]
    assert [round(wait) for wait in waits] == [30, 120, 480, 1920, 3600, 3600]


def test_an_expert_that_was_asked_for_by_a_clock_that_was_set_back_since_is_asked_for_again() -> (
    None
):
    day_s = 86400.0
    assert asked(1, day_s).left_s(30.0) == 0
    assert asked(1, 1.0).left_s(30.0) == pytest.approx(31.0, abs=5)


def test_a_folder_that_was_written_after_now_says_so_and_how_to_have_it_taken(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(home.inbox / "a", tensors_of(0, 0))
    with monkeypatch.context() as patch:
        now_ns = time.time_ns()
        patch.setattr(time, "time_ns", lambda: now_ns - 3600 * 10**9)
        waiting = only(home, PATIENT).waiting or ""
    assert "its files changed 3600 s after now, as the clock of this machine says" in waiting
    assert "touch" in waiting
    os.utime(folder / "model.safetensors")
    wait_for_quiet()
    assert only(home, PATIENT).is_ready


def test_a_new_version_waits_while_only_some_of_its_shards_are_new(home: Warehouse) -> None:
    folder = write_model(home.inbox / "a", tensors_of(0, 0), shards=2)
    index_arrival(home, "a")
    new = write_model(home.root / "new", tensors_of(0, 1), shards=2)
    one, two = sorted(f.name for f in new.glob("*.safetensors"))
    shutil.copy(new / one, folder)
    wait_for_quiet()
    assert "1 of 2 shards are new" in (only(home, PATIENT).waiting or "")
    shutil.copy(new / two, folder)
    wait_for_quiet()
    assert only(home, PATIENT).is_ready


def test_shards_without_an_index_wait_for_as_many_as_their_names_count(home: Warehouse) -> None:
    folder = write_model(home.inbox / "a", tensors_of(0, 0), shards=2)
    (folder / "model.safetensors.index.json").unlink()
    two = folder / "model-00002-of-00002.safetensors"
    kept = two.read_bytes()
    two.unlink()
    assert two.name in (only(home).waiting or "")
    two.write_bytes(kept)
    assert only(home).is_ready


@pytest.mark.parametrize("how", ["hole", "zeros"])
def test_a_file_that_reserved_its_space_waits(home: Warehouse, how: str) -> None:
    file = write_model(home.inbox / "a", tensors_of(0, 0)) / "model.safetensors"
    nbytes = file.stat().st_size
    os.truncate(file, nbytes // 2)
    if how == "hole":
        os.truncate(file, nbytes)
    else:
        with file.open("ab") as end:
            end.write(bytes(nbytes - nbytes // 2))
    wait_for_quiet()
    assert "model.safetensors h" in (only(home, PATIENT).waiting or "")


@pytest.mark.parametrize("link", [False, True])
def test_what_is_landed_is_taken_at_once_and_replaces_an_older_version(
    home: Warehouse, tmp_path: Path, link: bool
) -> None:
    patience = Patience(3600.0, 0.0)
    for version in range(2):
        source = write_model(tmp_path / str(version), tensors_of(0, version), shards=2)
        done = land(home, str(source), "a", link=link)
        assert done.replaced is bool(version)
        assert only(home, patience).is_ready
        index_arrival(home, "a")
    assert [p.name for p in home.inbox.iterdir()] == ["a"]
    for file in source.iterdir():
        assert (home.inbox / "a" / file.name).read_bytes() == file.read_bytes()


def test_what_is_not_whole_does_not_land(home: Warehouse, tmp_path: Path) -> None:
    source = write_model(tmp_path / "a", tensors_of(0, 0), shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    for path, name in ((source, None), (source, "no name"), (tmp_path / "gone", None)):
        with pytest.raises(MergePipeError):
            land(home, str(path), name)
    assert list(home.inbox.iterdir()) == []


@pytest.mark.parametrize("link", [False, True])
def test_a_model_that_is_saved_again_while_it_is_copied_does_not_land_as_parts_of_two(
    home: Warehouse, tmp_path: Path, link: bool
) -> None:
    source, newer = (write_model(tmp_path / str(v), tensors_of(v, 0), shards=2) for v in range(2))
    first, second = sorted(source.glob("*.safetensors"))

    def save_again_between_the_shards(_: str) -> None:
        if any(home.inbox.glob(f".*/{first.name}")):
            atomic.crash_hook = None
            for shard in (first, second):
                (newer / shard.name).replace(shard)

    atomic.crash_hook = save_again_between_the_shards
    try:
        with pytest.raises(CheckpointChangedError, match=str(source)):
            land(home, str(source), "x", link=link)
        assert atomic.crash_hook is None
    finally:
        atomic.crash_hook = None
    assert list(home.inbox.iterdir()) == []
    land(home, str(source), "x", link=link)
    for file in source.iterdir():
        assert (home.inbox / "x" / file.name).read_bytes() == file.read_bytes()


def test_a_scan_of_a_thousand_indexed_experts_opens_two_small_files_of_each_and_no_weights(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_full(home.inbox / "e0")
    index_arrival(home, "e0")
    record = home.arrival_path("e0").read_bytes()
    checkpoint = home.catalog.get("e0").checkpoint
    for i in range(1, 1000):
        folder = home.inbox / f"e{i}"
        folder.mkdir()
        home.catalog.register(replace(checkpoint, name=f"e{i}", root=str(folder)), None)
        for file in first.iterdir():
            os.link(file, folder / file.name)
        home.arrival_path(f"e{i}").write_bytes(record)
    monkeypatch.setattr("mergepipe_pipeline.deploy.inbox.is_complete", None)
    scan_inbox(home, PATIENT)
    opened: list[str] = []
    is_watched = True

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and is_watched:
            opened.append(str(args[0]))

    sys.addaudithook(watch)
    landed = scan_inbox(home, PATIENT)
    is_watched = False
    assert len(landed) == 1000
    assert all(x.is_indexed for x in landed)
    assert not [path for path in opened if path.startswith(str(home.inbox))]
    assert len(opened) <= 2010


def test_what_lands_while_an_older_version_is_indexed_is_taken_at_once(
    home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(home.inbox / "a", tensors_of(0, 0), shards=2)
    source, real = write_model(tmp_path / "new", tensors_of(0, 1), shards=2), index_expert

    def index_while_it_lands(*given: Any) -> IndexedExpert:
        land(home, str(source), "a")
        return real(*given)

    monkeypatch.setattr(index, "index_expert", index_while_it_lands)
    index_arrival(home, "a")
    assert only(home, Patience(3600.0, 0.0)).is_ready
