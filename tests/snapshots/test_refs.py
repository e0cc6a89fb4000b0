"""Names that readers load: versions only grow, and two publishers cannot both win."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CommitConflictError, MergePipeError, NotFoundError
from mergepipe_pipeline.snapshots.stores import RefStore
from mergepipe_pipeline.storage import atomic
from tests.snapshots.tiny import Crash, crash_at

HOSTILE = ["../x", "a/b", "", ".hidden", "a b", "/etc", "a\n", "x" * 129, "a\0"]


def test_a_ref_stands_for_what_was_published_last(tmp_path: Path) -> None:
    refs = RefStore(tmp_path / "refs")
    assert refs.names() == []
    first, second = refs.publish("prod", "A", "first"), refs.publish("prod", "B", "second")
    assert (first.number, second.number) == (1, 2)
    assert refs.current("prod") == second
    assert refs.history("prod") == [first, second]
    assert refs.names() == ["prod"]


def test_publishing_the_same_snapshot_again_adds_no_version(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    first = refs.publish("prod", "A", "first")
    assert refs.publish("prod", "A", "again") == first
    assert refs.publish("prod", "A", "again", expected=1) == first
    assert len(refs.history("prod")) == 1


def test_publishing_over_an_unseen_version_is_a_conflict(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    refs.publish("prod", "A", "", expected=0)
    for snapshot_id in ("A", "B"):
        with pytest.raises(CommitConflictError, match="Expected version 0, found version 1"):
            refs.publish("prod", snapshot_id, "", expected=0)
    assert refs.current("prod").snapshot_id == "A"


def test_one_of_many_publishers_with_the_same_expectation_wins(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)

    def publish(i: int) -> bool:
        try:
            refs.publish("prod", str(i), "", expected=0)
        except CommitConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(publish, range(16)))
    assert won.count(True) == 1
    assert refs.current("prod").snapshot_id == str(won.index(True))


def test_rolling_back_publishes_the_last_different_or_the_wished_version(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    for snapshot_id in "ABC":
        refs.publish("prod", snapshot_id, "")
    back = refs.rollback("prod", None, "rolled back")
    assert (back.number, back.snapshot_id, back.reason) == (4, "B", "rolled back to version 2")
    assert refs.rollback("prod", 1, "again").snapshot_id == "A"
    with pytest.raises(NotFoundError, match="found 9"):
        refs.rollback("prod", 9, "")


def test_there_must_be_something_to_roll_back_to(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    with pytest.raises(NotFoundError, match=r"No such ref.*'prod'"):
        refs.rollback("prod", None, "")
    refs.publish("prod", "A", "")
    with pytest.raises(NotFoundError, match="nothing to roll back to"):
        refs.rollback("prod", None, "")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    refs = RefStore(tmp_path / "refs")
    for use in (refs.current, refs.history, lambda n: refs.publish(n, "A", "")):
        with pytest.raises(MergePipeError, match="Not a name for a ref"):
            use(name)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_publishing_keeps_the_old_version(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    refs.publish("prod", "A", "")
    for step in range(2):
        crash_at(step)
        with pytest.raises(Crash, match=r"write|link"):
            refs.publish("prod", "B", "")
        atomic.crash_hook = None
        assert refs.current("prod").snapshot_id == "A"
    assert refs.publish("prod", "B", "").number == 2


def test_a_ref_whose_first_publication_crashed_is_no_ref(tmp_path: Path) -> None:
    refs = RefStore(tmp_path)
    crash_at(1)
    with pytest.raises(Crash, match="link"):
        refs.publish("prod", "A", "")
    atomic.crash_hook = None
    assert refs.names() == []
    with pytest.raises(NotFoundError, match="No such ref"):
        refs.current("prod")
