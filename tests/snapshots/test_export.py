"""What a killed export leaves is removed by the next one; a living one is left alone."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from mergepipe_pipeline.snapshots.export import export_snapshot
from tests.snapshots.tiny import Store

KILLED = """
import os, sys
from pathlib import Path
from mergepipe_pipeline.snapshots.export import export_snapshot
from mergepipe_pipeline.snapshots.load import list_snapshots
from mergepipe_pipeline.storage import atomic

atomic.crash_hook = lambda step: os._exit(9) if step == "publish" else None
export_snapshot(list_snapshots(Path(sys.argv[1]))[0], Path(sys.argv[2]), {})
"""


def test_what_killed_exports_left_goes_with_the_next_export_to_that_folder(tmp_path: Path) -> None:
    store, out = Store(tmp_path / "w"), tmp_path / "exports" / "out[1]"
    made = store.commit((1,))
    for folder in (out, out.with_name("other")):
        command = [sys.executable, "-c", KILLED, str(store.snapshots), str(folder)]
        assert subprocess.run(command).returncode == 9
    left = {p.name.split(".")[1] for p in out.parent.iterdir()}
    assert left == {"out[1]", "other"}
    export_snapshot(made, out, {})
    assert sorted(p.name.split(".")[1] for p in out.parent.glob(".*")) == ["other"]
    assert (out / "config.json").exists()


def test_what_another_export_writes_now_is_left_alone(tmp_path: Path) -> None:
    made = Store(tmp_path / "w").commit((1,))
    living = tmp_path / ".out.0123abcd.tmp"
    living.mkdir()
    lock = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        export_snapshot(made, tmp_path / "out", {})
        assert living.exists()
    finally:
        os.close(lock)
    assert (tmp_path / "out" / "config.json").exists()
