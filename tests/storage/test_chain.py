"""Versions are numbered without gaps or twins, and a damaged one is found."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.errors import CommitConflictError, CorruptionError, NotFoundError
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.storage.chain import VersionChain
from tests.support.laws import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
VALUES = st.dictionaries(st.text(max_size=4).filter(lambda k: k != "sha256"), JSON, max_size=4)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(VALUES, max_size=4))
def test_appended_values_come_back_in_order(values: list[dict[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        chain = VersionChain(Path(tmp) / "chain")
        assert [chain.append(v) for v in values] == list(range(1, len(values) + 1))
        assert chain.versions() == list(range(1, len(values) + 1))
        assert [chain.get(n) for n in chain.versions()] == values
        assert chain.current() == ((len(values), values[-1]) if values else None)


def test_an_unexpected_current_version_is_a_conflict_that_names_both(tmp_path: Path) -> None:
    chain = VersionChain(tmp_path)
    assert chain.append({}, expected=0) == 1
    assert chain.append({}, expected=1) == 2
    with pytest.raises(CommitConflictError, match="Expected version 1, found version 2"):
        chain.append({}, expected=1)
    assert chain.versions() == [1, 2]


def test_a_writer_that_comes_between_is_a_conflict_or_is_followed(tmp_path: Path) -> None:
    chain, other = VersionChain(tmp_path), VersionChain(tmp_path)

    def come_between(step: str) -> None:
        atomic.crash_hook = None
        other.append({"by": "other"})

    atomic.crash_hook = come_between
    with pytest.raises(CommitConflictError, match="Expected version 0, found version 1"):
        chain.append({"by": "me"}, expected=0)
    atomic.crash_hook = come_between
    assert chain.append({"by": "me"}) == 3
    assert [chain.get(n)["by"] for n in (1, 2, 3)] == ["other", "other", "me"]


def test_concurrent_writers_get_distinct_numbers_and_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda i: VersionChain(tmp_path).append({"i": i}), range(32)))
    chain = VersionChain(tmp_path)
    assert sorted(numbers) == chain.versions() == list(range(1, 33))
    assert [chain.get(n)["i"] for n in numbers] == list(range(32))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_a_flipped_bit_in_a_version_is_corruption_of_that_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        chain = VersionChain(tmp)
        chain.append({"root": "/models/a", "base": None, "n": 7})
        path = Path(tmp, "00000001.json")
        damaged = bytearray(path.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match=r"00000001\.json"):
            chain.current()


def test_a_version_that_is_set_aside_does_not_count_and_its_number_is_not_used_again(
    tmp_path: Path,
) -> None:
    chain = VersionChain(tmp_path)
    for n in range(3):
        chain.append({"n": n})
    (tmp_path / "00000003.json").write_bytes(b"{}")
    assert chain.damaged() == [3]
    assert chain.set_aside(3).read_bytes() == b"{}"
    assert chain.current() == (2, {"n": 1})
    with pytest.raises(CommitConflictError):
        chain.append({"n": 4}, expected=3)
    assert chain.append({"n": 4}, expected=2) == 4
    assert (chain.versions(), chain.aside()) == ([1, 2, 4], [3])


def test_a_version_of_one_name_is_none_of_another_and_has_its_own_number(tmp_path: Path) -> None:
    one, other = VersionChain(tmp_path / "one"), VersionChain(tmp_path / "other")
    for chain in (one, other):
        for n in range(2):
            chain.append({"n": n})
    files = [tmp_path / "one" / "00000002.json", tmp_path / "other" / "00000001.json"]
    for file in files:
        shutil.copy(tmp_path / "one" / "00000001.json", file)
    for chain, number in ((one, 2), (other, 1)):
        assert chain.damaged() == [number]
        with pytest.raises(CorruptionError, match="another's"):
            chain.get(number)
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "00000001.json").write_bytes(seal({"n": 7}))
    assert VersionChain(tmp_path / "older").current() == (1, {"n": 7})


def test_a_version_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert VersionChain(tmp_path / "none").current() is None
    with pytest.raises(NotFoundError, match="Expected none exists yet, found 3"):
        VersionChain(tmp_path / "none").get(3)


def test_foreign_files_in_a_chain_are_not_versions(tmp_path: Path) -> None:
    chain = VersionChain(tmp_path)
    chain.append({})
    for name in (".00000009.json.x.tmp", "9.json", "00000009.json.bak"):
        (tmp_path / name).write_text("junk")
    assert chain.versions() == [1]
