"""What comes into an expert's folder while its weight files move is never lost."""

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
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.pack import Packed, pack
from mergepipe_pipeline.verbs.replace import Moved, move_to_cold, unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.test_replace import beside, files_in, with_side_files
from tests.snapshots.tiny import Crash, count_steps, crash_at

INPUTS: tuple[Scope, ...] = ("inputs",)


@pytest.fixture(params=["another file system", "a copy is there", "this file system"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for cold storage."""
    if request.param != "another file system":
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
def packed(tmp_path: Path, cold: Path, request: pytest.FixtureRequest) -> tuple[Warehouse, Packed]:
    """A warehouse with an expert's pack; cold storage may have a copy."""
    home, _ = with_side_files(tmp_path)
    if "a copy" in request.node.name:
        (cold / "e0").mkdir(parents=True)
        shutil.copy2(tmp_path / "e0" / "e0.safetensors", cold / "e0")
    return home, pack(home, ["e0"])[0]


def move(packed: tuple[Warehouse, Packed], cold: Path) -> Moved:
    return move_to_cold(*packed, cold)


def each_step(packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path) -> Iterator[int]:
    """The steps of a move; at each of them all is as it was before the move."""
    home, before, is_copied = packed[0], tmp_path / "before", (cold / "e0").exists()
    shutil.copytree(tmp_path / "e0", before)
    for step in range(count_steps(lambda: move(packed, cold))):
        atomic.crash_hook = None
        for moved in home.offline.ids():
            home.offline.forget(moved)
        for path in (*tmp_path.glob("e0"), *tmp_path.glob(".e0*")):
            shutil.rmtree(path)
        if not is_copied:
            shutil.rmtree(cold / "e0", ignore_errors=True)
        shutil.copytree(before, tmp_path / "e0")
        yield step


def test_what_comes_at_any_step_of_a_move_stays_or_is_in_cold_storage(
    packed: tuple[Warehouse, Packed], cold: Path, tmp_path: Path
) -> None:
    home, root, told = packed[0], tmp_path / "e0", 0
    weights = root / "e0.safetensors"
    before = files_in(root)
    for step in each_step(packed, cold, tmp_path):
        seen = 0

        def write(_: str, step: int = step) -> None:
            nonlocal seen
            if seen == step and weights.exists():
                (root / "new").write_text("new")
                weights.unlink()
                weights.write_bytes(b"a later version")
            seen += 1

        atomic.crash_hook = write
        try:
            move(packed, cold)
        except MergePipeError:
            told += 1
        atomic.crash_hook = None
        kept = files_in(root)
        assert beside(before).items() <= kept.items()
        if "new" in kept:
            assert kept["e0.safetensors"][0] == b"a later version"
        else:
            unpack(home, "e0")
            assert files_in(root) == before
    assert told > 2


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
        if not home.offline.ids():
            assert files_in(root) == before
        elif step % 2:
            checkpoint = Places(home).locate("e0")
            assert checkpoint.checkpoint_id == packed_id(home)
        elif not (root / "e0.safetensors").exists():
            unpack(home, "e0")
            assert files_in(root) == before
        assert move(packed, cold).files == 1
        assert files_in(root) == beside(before)
        assert files_in(cold / "e0") == {"e0.safetensors": before["e0.safetensors"]}


def packed_id(home: Warehouse) -> str:
    return home.catalog.get("e0").checkpoint.checkpoint_id


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
