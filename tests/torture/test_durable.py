"""What is said to be done is still there after a loss of power, and the shim sees every change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.storage import atomic
from tests.torture import child
from tests.torture.shim import Fault, Shim


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
