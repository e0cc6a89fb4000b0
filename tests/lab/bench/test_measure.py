"""What is measured is what was done, by all processes, from disk."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mergepipe_pipeline.storage.uncached import cached_nbytes
from tests.lab.bench import limit, measure
from tests.lab.bench.measure import WarmInputsError, make_cold, resident_nbytes, run
from tests.lab.bench.rows import filesystem

pytestmark = pytest.mark.usefixtures("durable_writes")

MIB = 1 << 20


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A file of 8 MiB on a file system that has a page cache to drop."""
    if filesystem(tmp_path).startswith(("tmpfs", "ramfs")):
        pytest.skip("temporary files are in memory")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 * MIB))
    return file


def test_a_dropped_file_is_not_resident(on_disk: Path) -> None:
    assert resident_nbytes(on_disk) == 8 * MIB
    make_cold([on_disk])
    assert resident_nbytes(on_disk) == 0


def test_the_disk_alone_is_read_and_written_past_the_page_cache(on_disk: Path) -> None:
    out = on_disk.with_name("out")
    make_cold([on_disk])
    limit.direct([(str(on_disk), 5 * MIB + 1)], [(str(out), 3 * MIB + 5)])
    assert resident_nbytes(on_disk) == 0
    assert out.stat().st_size == 3 * MIB + 5
    with pytest.raises(EOFError, match="ends before byte"):
        limit.direct([(str(on_disk), 8 * MIB + 1)], [])


def test_memory_is_filled_with_pages_that_give_way(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = on_disk.with_name("filler")
    free = measure._fields(Path("/proc/meminfo"))["MemFree"] << 10
    if free < 512 * MIB:
        pytest.skip("memory is full of other pages already, for which these would give way")
    monkeypatch.setattr(measure, "_LEFT_FREE_NBYTES", free - 64 * MIB)
    monkeypatch.setattr(measure, "_FILL_NBYTES", 4 * MIB)
    run(["true"], cold=[on_disk], filler=filler)
    assert resident_nbytes(on_disk) == 0
    assert filler.stat().st_blocks * 512 < MIB  # it takes no disk
    with open(filler, "rb") as opened:
        assert (cached_nbytes(opened.fileno(), 0, 4 * MIB) or 4 * MIB) == 4 * MIB
    filler.unlink()


def test_half_a_file_read_is_half_resident(on_disk: Path) -> None:
    make_cold([on_disk])
    limit.read(str(on_disk), 4 * MIB, memoryview(bytearray(MIB)))
    assert resident_nbytes(on_disk) == 4 * MIB


def test_inputs_that_someone_keeps_in_memory_are_refused(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_ATTEMPTS", 1)
    with (
        open(on_disk, "rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert len(bytes(mapped)) == 8 * MIB
        with pytest.raises(WarmInputsError, match=f"{on_disk}.*found {8 * MIB}"):
            run(["true"], cold=[on_disk])


def test_bytes_are_counted_once_they_come_from_disk(on_disk: Path) -> None:
    command = ["cat", str(on_disk)]
    cold = run(command, cold=[on_disk], warm_up=command)
    warm = run(command)
    assert 8 * MIB <= cold.storage_read_nbytes < 9 * MIB
    assert warm.storage_read_nbytes < MIB


def test_children_of_children_are_counted() -> None:
    work = "x = bytearray(64 << 20); sum(range(3_000_000)); import time; time.sleep(0.3)"
    command = f"{sys.executable} -c '{work}' & wait"
    found = run(["bash", "-c", command])
    assert 64 * MIB <= found.anon_nbytes < 128 * MIB
    assert found.rss_nbytes >= found.anon_nbytes
    assert found.cpu_s > 0.03
    assert found.wall_s > 0.3
    assert found.stopped is None


def test_a_command_past_its_time_is_ended_and_says_so() -> None:
    found = run(["bash", "-c", "sleep 30 & wait"], timeout_s=0.2)
    assert found.stopped == "timeout"
    assert 0.2 <= found.wall_s < 10
    assert found.exit_code < 0


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        run(["bash", "-c", "exit 3"], log=tmp_path / "log")


def test_the_limit_writes_what_it_is_told(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"x" * (3 * MIB + 5))
    limit.main(["--read", f"{source}:{2 * MIB + 1}", "--write", f"{out}:{MIB + 7}"])
    assert out.stat().st_size == MIB + 7
    with pytest.raises(EOFError, match="ends 1 bytes early"):
        limit.main(["--read", f"{source}:{3 * MIB + 6}"])
