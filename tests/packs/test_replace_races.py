"""What comes into an expert's folder while its files move to another file system is never lost."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CheckpointError, MergePipeError
from mergepipe_pipeline.integrity.auditor import Scope
from mergepipe_pipeline.progress import Advance, Silent
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.pack import Packed, pack
from mergepipe_pipeline.verbs.replace import Moved, move_to_cold, unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.test_replace import files_in, with_side_files
from tests.snapshots.tiny import Crash, count_steps, crash_at

INPUTS: tuple[Scope, ...] = ("inputs",)


@pytest.fixture(params=["another file system", "a copy is there"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for cold storage to which nothing of the expert's can be renamed."""
    if request.param == "a copy is there":
        yield tmp_path / "cold"
        return
    here = tmp_path.stat().st_dev
    others = [p for p in ("/tmp", "/var/tmp", "/dev/shm") if os.path.isdir(p)]
    other = next((p for p in others if os.stat(p).st_dev != here), None)
    if other is None:
        pytest.skip("this machine has one file system")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        yield Path(folder)


@pytest.fixture
def packed(tmp_path: Path, cold: Path) -> tuple[Warehouse, Packed]:
    """A warehouse with an expert's pack; cold storage has a copy if it is on this file system."""
    home, _ = with_side_files(tmp_path)
    if cold.is_relative_to(tmp_path):
        shutil.copytree(tmp_path / "e0", cold / "e0")
    return home, pack(home, ["e0"])[0]


def move(packed: tuple[Warehouse, Packed], cold: Path) -> Moved:
    return move_to_cold(*packed, cold)


def each_step(packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path) -> Iterator[int]:
    """The steps of a move; at each of them all is as it was before the move."""
    home, before = packed[0], tmp_path / "before"
    shutil.copytree(tmp_path / "e0", before)
    for step in range(count_steps(lambda: move(packed, cold))):
        atomic.crash_hook = None
        for moved in home.replaced.ids():
            home.replaced.forget(moved)
        for path in (*tmp_path.glob("e0"), *tmp_path.glob(".e0*")):
            shutil.rmtree(path)
        if not cold.is_relative_to(tmp_path):
            shutil.rmtree(cold / "e0", ignore_errors=True)
        shutil.copytree(before, tmp_path / "e0")
        yield step


def test_what_comes_at_any_step_of_a_move_stays_and_is_named(
    packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path
) -> None:
    root, named = tmp_path / "e0", 0
    before = files_in(root)
    for step in each_step(packed, cold, tmp_path):
        seen = 0

        def write(_: str, step: int = step) -> None:
            nonlocal seen
            if seen == step and root.is_dir():
                (root / "new").write_text("new")
                with (root / "config.json").open("a") as file:
                    file.write(" ")
            seen += 1

        atomic.crash_hook = write
        try:
            move(packed, cold)
        except MergePipeError as error:
            named += "config.json, new" in str(error)
        atomic.crash_hook = None
        kept = {**files_in(root)} if root.is_dir() else {}
        if "new" in kept:
            assert kept["config.json"][0].endswith(b" ")
        else:
            assert files_in(cold / "e0") == before
    assert named > 2


def test_a_move_that_is_killed_at_any_step_leaves_the_files_or_what_gives_them_back(
    packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path
) -> None:
    home, root = packed[0], tmp_path / "e0"
    before = files_in(root)
    for step in each_step(packed, cold, tmp_path):
        crash_at(step)
        with pytest.raises(Crash):
            move(packed, cold)
        atomic.crash_hook = None
        if root.exists():
            assert files_in(root) == before
        else:
            unpack(home, "e0")
            assert files_in(root) == before
        assert move(packed, cold).nbytes == sum(len(data) for data, _ in before.values())
        assert not list(tmp_path.glob("*e0*"))
        assert files_in(cold / "e0") == before


def test_what_reads_an_expert_from_its_pack_while_it_is_unpacked_is_told_no_corruption(
    packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path
) -> None:
    home, _ = packed
    move(packed, cold)
    waits, goes_on = threading.Event(), threading.Event()

    class Waiting(Silent):
        @contextmanager
        def task(self, label: str, total_nbytes: int) -> Iterator[Advance]:
            """As `Silent`, while others go on."""
            waits.set()
            assert goes_on.wait(30)
            yield lambda nbytes: None

    with ThreadPoolExecutor() as pool:
        elsewhere = pool.submit(unpack, home, "e0", tmp_path / "elsewhere", Waiting())
        assert waits.wait(30)
        unpack(home, "e0")
        goes_on.set()
        with pytest.raises(CheckpointError, match="came back meanwhile"):
            elsewhere.result()
        move(packed, cold)
        for event in (waits, goes_on):
            event.clear()
        verified = pool.submit(lambda: verify_all(home, INPUTS, progress=Waiting()))
        assert waits.wait(30)
        unpack(home, "e0")
        goes_on.set()
        report = verified.result()
    assert report.findings == ()
    assert "came back meanwhile, and not compared: e0" in report.notes
