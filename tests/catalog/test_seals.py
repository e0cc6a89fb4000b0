"""Sealed files: a flipped bit anywhere is seen, whether a file is read whole or in parts."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.catalog.arrow_tables import encode_groups
from mergepipe_pipeline.catalog.row_groups import RowGroups
from mergepipe_pipeline.catalog.seals import (
    drop,
    find_sealed,
    is_good,
    name_parts,
    read_facts,
    read_sealed,
    sealed_path,
    verify_sealed,
    version,
    write_sealed,
)
from mergepipe_pipeline.errors import CorruptionError
from tests.catalog.flips import flipped

SCHEMA = pa.schema([("run", pa.int64()), ("digest", pa.binary(16))])


def table(seed: int, rows: int) -> pa.Table:
    digests = [bytes([(seed + r) % 256]) * 16 for r in range(rows)]
    return pa.table({"run": range(rows), "digest": digests}, schema=SCHEMA)


GROUPS = [((f"t{n}", "x"), table(n, 3 + n)) for n in range(4)]
PARTS = encode_groups(SCHEMA, GROUPS, {"elems": 8}, encoding={"run": "DELTA_BINARY_PACKED"})


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_flipped_bit_is_seen_when_a_file_is_read(data: bytes, draw: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = write_sealed(Path(tmp), "a.b", data)
        assert read_sealed(path) == data
        path.write_bytes(flipped(data, draw.draw(st.integers(0, 8 * len(data) - 1))))
        with pytest.raises(CorruptionError, match="changed after it was written"):
            read_sealed(path)
        assert write_sealed(Path(tmp), "a.b", data) == path
        assert read_sealed(path) == data


@pytest.mark.parametrize("target", ["v1/other/a", "v1/other/b", "v2/base/b"])
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_file_that_got_the_name_of_another_is_as_wrong_as_a_flipped_bit(
    tmp_path: Path, in_parts: bool, target: str
) -> None:
    """Whose facts a file holds, the folder's name and the stem say."""
    folder, (other, stem) = tmp_path / "v1" / "base", target.rsplit("/", 1)
    path = write_sealed(folder, "a", PARTS)
    renamed = sealed_path(tmp_path / other, stem, name_parts(path)[1])
    renamed.parent.mkdir(parents=True, exist_ok=True)
    moved = path.rename(tmp_path / "moved")
    for place, is_right in ((renamed, False), (path, True)):
        shutil.copy(moved, place)
        assert is_good(place) is is_right
        with nullcontext() if is_right else pytest.raises(CorruptionError, match=str(place)):
            if in_parts:
                RowGroups(place, SCHEMA).__exit__()
            else:
                read_sealed(place)


def test_files_are_found_by_exactly_their_stem(tmp_path: Path) -> None:
    paths = {s: write_sealed(tmp_path, s, s.encode()) for s in ("k-0.2", "k-0.2.5", "k-0", "k")}
    (tmp_path / "k.parquet").write_bytes(b"")
    assert {s: find_sealed(tmp_path, s) for s in paths} == {s: [p] for s, p in paths.items()}
    assert find_sealed(tmp_path) == sorted(paths.values())
    assert find_sealed(tmp_path / "nothing") == []


def test_row_groups_come_back_equal_and_equal_ones_are_equal_bytes(tmp_path: Path) -> None:
    again = encode_groups(SCHEMA, GROUPS, {"elems": 8}, encoding={"run": "DELTA_BINARY_PACKED"})
    assert again == PARTS
    with RowGroups(write_sealed(tmp_path, "m", PARTS), SCHEMA) as file:
        assert file.meta == {"elems": 8}
        assert file.keys == tuple(key for key, _ in GROUPS)
        for key, rows in reversed(GROUPS):
            assert file.read(key).equals(rows)


def test_a_file_of_no_row_group_is_one(tmp_path: Path) -> None:
    with RowGroups(write_sealed(tmp_path, "m", encode_groups(SCHEMA, [], {})), SCHEMA) as file:
        assert file.keys == ()


@given(st.integers(0, 8 * len(PARTS) - 1))
def test_a_flipped_bit_changes_nothing_that_is_read_in_parts_and_a_check_sees_it(bit: int) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = write_sealed(Path(tmp), "m", PARTS)
        verify_sealed(path)
        path.write_bytes(flipped(PARTS, bit))
        with suppress(CorruptionError), RowGroups(path, SCHEMA) as file:
            for key, rows in GROUPS:
                with suppress(CorruptionError):
                    assert file.read(key).equals(rows)
        for check in (verify_sealed, read_sealed):
            with pytest.raises(CorruptionError, match="changed after it was written"):
                check(path)


@given(st.integers(0, len(PARTS) - 1))
def test_a_file_that_was_cut_is_seen_at_once(nbytes: int) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = write_sealed(Path(tmp), "m", PARTS)
        path.write_bytes(PARTS[:nbytes])
        with pytest.raises(CorruptionError, match=r"m\..*parquet"):
            RowGroups(path, SCHEMA)


def test_a_file_that_could_not_be_opened_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sealed(tmp_path, "a", b"facts")

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            read_facts(path, bytes)
    assert read_facts(path, bytes) == b"facts"


def test_what_another_process_mended_meanwhile_stays(tmp_path: Path) -> None:
    path = write_sealed(tmp_path, "a", b"facts")
    path.write_bytes(b"other")
    seen = version(path)
    with pytest.raises(CorruptionError) as told:
        read_sealed(path)
    write_sealed(tmp_path, "a", b"facts")
    drop(path, told.value, seen)
    assert read_facts(path, bytes) == b"facts"


def test_a_disk_that_cannot_read_a_sector_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_sealed(tmp_path, "a", b"facts")

    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert read_facts(path, bytes) is None
    assert [str(path) in m for m in caplog.messages] == [True]
    assert not path.exists()
