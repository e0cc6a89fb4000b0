"""What is said to be done is still there after a loss of power, and the shim sees every change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.snapshots.collection import Roots, collect
from mergepipe_pipeline.snapshots.export import export_snapshot
from mergepipe_pipeline.snapshots.stores import Marks
from mergepipe_pipeline.storage import atomic
from tests.lab.torture import child
from tests.lab.torture.shim import Fault, Shim
from tests.snapshots.tiny import Store


def put_folder(path: Path) -> None:
    staged = path.parents[2] / "staged"
    staged.mkdir()
    (staged / "inner").write_bytes(b"x")
    atomic.publish_dir(staged, path)


def put_file(path: Path) -> None:
    temp = path.parents[2] / "temp"
    temp.write_bytes(b"x")
    atomic.adopt_file(temp, path)


WAYS: dict[str, Callable[[Path], object]] = {
    "write_atomic": lambda path: atomic.write_atomic(path, b"x"),
    "create_exclusive": lambda path: atomic.create_exclusive(path, b"x"),
    "adopt_file": put_file,
    "publish_dir": put_folder,
}


def lose_power_after(work: Callable[[], object], root: Path, seed: int) -> None:
    def watched() -> None:
        shim = Shim(root, Fault("power", 1_000_000, seed))
        shim.install()
        work()
        shim.power_off()

    child.call(watched)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_name_in_new_folders_outlives_a_loss_of_power(
    tmp_path: Path, way: str, seed: int
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    lose_power_after(lambda: WAYS[way](root / "new" / "deep" / "file"), root, seed)
    kept = tmp_path / "lost" / "new" / "deep" / "file"
    assert (kept / "inner" if kept.is_dir() else kept).read_bytes() == b"x"


@pytest.mark.parametrize("seed", range(3))
def test_an_export_to_a_new_folder_and_a_collection_outlive_a_loss_of_power(
    tmp_path: Path, seed: int
) -> None:
    root = tmp_path / "root"
    store = Store(root / "w")
    made = store.commit((1,))
    marks = Marks(root / "w" / "stages")
    marks.mark(made.snapshot_id, is_stage=True, is_new=True)

    def work() -> None:
        export_snapshot(made, root / "new" / "deep" / "model")
        roots = Roots(marks=marks)
        done = collect(
            store.objects, store.snapshots, store.staging, (), roots, older_than_s=0, dry_run=False
        )
        assert done.snapshots == (made.snapshot_id,)

    lose_power_after(work, root, seed)
    kept = tmp_path / "lost" / "new" / "deep" / "model"
    assert {p.name: p.read_bytes() for p in kept.iterdir()} == {
        p.name: p.read_bytes() for p in (root / "new" / "deep" / "model").iterdir()
    }
    assert not list((tmp_path / "lost" / "w" / "snapshots").iterdir())


def test_what_is_only_written_is_lost_with_the_power(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    found = set()
    for seed in range(24):
        (root / "file").unlink(missing_ok=True)
        lose_power_after(lambda: (root / "file").write_bytes(b"x"), root, seed)
        file = tmp_path / "lost" / "file"
        found.add(file.read_bytes() if file.exists() else None)
        (tmp_path / "lost").rename(tmp_path / f"seen-{seed}")
    assert found == {None, b"", b"\0"}
