"""An export is the snapshot or does not exist; what a killed one leaves goes with the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.export import export_snapshot
from tests.snapshots.tiny import Store

KILLED = """
import os, sys
from pathlib import Path
from mergepipe_pipeline.snapshots.export import export_snapshot
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.storage import atomic

atomic.crash_hook = lambda step: os._exit(9) if step == "publish" else None
export_snapshot(list_snapshots(Path(sys.argv[1]))[0], Path(sys.argv[2]))
"""


def test_what_killed_exports_left_goes_with_the_next_export_to_that_folder(tmp_path: Path) -> None:
    store, out = Store(tmp_path / "w"), tmp_path / "exports" / "out[1]"
    made = store.commit((1,))
    for folder in (out, out.with_name("other")):
        command = [sys.executable, "-c", KILLED, str(store.snapshots), str(folder)]
        assert subprocess.run(command).returncode == 9
    left = {p.name.split(".")[1] for p in out.parent.iterdir()}
    assert left == {"out[1]", "other"}
    export_snapshot(made, out)
    assert sorted(p.name.split(".")[1] for p in out.parent.glob(".*")) == ["other"]
    assert (out / "config.json").exists()


def test_what_another_export_writes_now_is_left_alone(tmp_path: Path) -> None:
    made = Store(tmp_path / "w").commit((1,))
    living = tmp_path / ".out.0123abcd.tmp"
    living.mkdir()
    lock = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        export_snapshot(made, tmp_path / "out")
        assert living.exists()
    finally:
        os.close(lock)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    "name",
    ["model-1.safetensors", "config.json", "README.md", "provenance.json", "manifest.json"],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_of_the_snapshot_is_named_and_nothing_appears(
    tmp_path: Path, name: str, damage: str
) -> None:
    made, out = Store(tmp_path / "w").commit((1, 2)), tmp_path / "out"
    export_snapshot(made, tmp_path / "good")
    file = Path(made.path, name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    if damage != "gone":
        file.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(CorruptionError) as caught:
        export_snapshot(made, out)
    assert str(file) in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "w"]


def test_each_difference_of_an_earlier_export_is_named(tmp_path: Path) -> None:
    made, good = Store(tmp_path / "w").commit((1, 2)), tmp_path / "good"
    export_snapshot(made, good)
    names = sorted(p.name for p in good.iterdir())
    assert len(names) == 7
    for name in names:
        out = tmp_path / "edited"
        shutil.copytree(good, out)
        data = bytearray((out / name).read_bytes() or b"x")
        data[len(data) // 2] ^= 1
        (out / name).write_bytes(data)
        with pytest.raises(MergePipeError) as caught:
            export_snapshot(made, out)
        if name != "manifest.json":  # then the folder claims nothing
            assert f"{name} is edited" in str(caught.value)
        for change, told in ((Path.unlink, "is missing"), (Path.mkdir, "is no file of its own")):
            change(out / name)
            with pytest.raises(MergePipeError) as caught:
                export_snapshot(made, out)
            if name != "manifest.json":
                assert f"{name} {told}" in str(caught.value)
        shutil.rmtree(out)
    (good / "added.txt").write_text("mine")
    (good / "config.json").unlink()
    with pytest.raises(MergePipeError) as caught:
        export_snapshot(made, good)
    assert "config.json is missing, added.txt is not of it" in str(caught.value)
    assert (good / "added.txt").read_text() == "mine"


def test_another_run_of_the_same_snapshot_may_be_there(tmp_path: Path) -> None:
    made = Store(tmp_path / "a").commit((1,), run=1)
    other = Store(tmp_path / "b").commit((1,), run=2)
    assert made.snapshot_id == other.snapshot_id
    export_snapshot(made, tmp_path / "out")
    export_snapshot(other, tmp_path / "out")
