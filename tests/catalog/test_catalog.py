"""Names, contents and statistics as a warehouse keeps them."""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from tests.catalog.facts import checkpoint, checkpoints, put_contents, same, some_stats
from tests.support.laws import examples


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog")


@settings(max_examples=examples(30), deadline=None)
@given(checkpoints())
def test_a_registered_checkpoint_comes_back_equal(c: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        made = Catalog(Path(tmp)).register(c, None)
        again = Catalog(Path(tmp))
        assert made == Registration(c.name, 1, c, None)
        assert again.get(c.name) == made
        assert again.names() == [c.name]
        assert again.history(c.name) == [made]


def test_a_changed_checkpoint_is_a_new_version_and_an_equal_one_is_not(catalog: Catalog) -> None:
    old, new = checkpoint(mtime_ns=1), checkpoint(mtime_ns=2)
    assert [catalog.register(c, None).version for c in (old, old, new, new)] == [1, 1, 2, 2]
    assert [r.checkpoint for r in catalog.history("m")] == [old, new]
    assert catalog.get("m").checkpoint == new


def test_a_moved_checkpoint_and_another_base_are_new_versions(catalog: Catalog) -> None:
    catalog.register(checkpoint(), None)
    moved = replace(checkpoint(), root="/elsewhere")
    assert catalog.register(moved, None).version == 2
    assert catalog.register(moved, "base").version == 3
    assert catalog.get("m").base == "base"
    assert catalog.get("m").checkpoint.root == "/elsewhere"


def test_a_known_base_is_kept_when_none_is_given(catalog: Catalog) -> None:
    catalog.register(checkpoint(mtime_ns=1), "base")
    assert catalog.register(checkpoint(mtime_ns=1), None).version == 1
    assert catalog.register(checkpoint(mtime_ns=2), None).base == "base"


def test_two_names_share_one_content(catalog: Catalog, tmp_path: Path) -> None:
    for name in ("one", "two"):
        catalog.register(checkpoint(name), None)
    assert catalog.names() == ["one", "two"]
    assert len(list((tmp_path / "catalog" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x", "a b", "x\n", "x" * 129])
def test_a_name_that_could_leave_the_folder_is_refused(
    catalog: Catalog, tmp_path: Path, name: str
) -> None:
    with pytest.raises(MergePipeError, match="Not a name for a checkpoint"):
        catalog.register(checkpoint(name), None)
    with pytest.raises(NotFoundError, match="No checkpoint of this name"):
        catalog.get(name)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_gets_the_nearest_ones(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError, match=r"none is registered yet.*mergepipe register"):
        catalog.get("mistral-code")
    for name in ("mistral-code", "mistral-math", "gemma"):
        catalog.register(checkpoint(name), None)
    with pytest.raises(NotFoundError, match="did you mean 'mistral-code'"):
        catalog.get("mistral-coder")
    with pytest.raises(NotFoundError, match="No checkpoint of this name"):
        catalog.history("zzz")


@pytest.mark.parametrize("damage", [b"junk", None])
def test_a_checkpoint_record_that_is_damaged_or_lost_is_made_again_by_registering(
    catalog: Catalog, tmp_path: Path, damage: bytes | None
) -> None:
    c = checkpoint()
    catalog.register(c, None)
    (path,) = (tmp_path / "catalog" / "checkpoints").rglob(f"{c.checkpoint_id}.*.parquet")
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(NotFoundError, match=r"not known any more.*mergepipe register /models/m"):
        catalog.get("m")
    assert catalog.root("m") == c.root
    assert catalog.history("m") == []
    assert catalog.register(c, None).version == 1
    assert catalog.get("m").checkpoint == c


def test_digests_are_kept_and_give_one_content_digest(catalog: Catalog) -> None:
    assert catalog.digests("c") is None
    with pytest.raises(NotFoundError, match="run `mergepipe analyze`"):
        catalog.content_sha256("c")
    put_contents(catalog, "c", w="0", v="1")
    put_contents(catalog, "d", v="1", w="0")
    put_contents(catalog, "e", v="0", w="1")
    digests = catalog.digests("c")
    assert digests is not None
    assert digests["v"] == Segments(COARSE_ELEMS, b"1" * 16).content
    assert catalog.content_sha256("c") == catalog.content_sha256("d")
    assert catalog.content_sha256("c") != catalog.content_sha256("e")


def test_statistics_are_found_under_their_own_key_only(catalog: Catalog) -> None:
    stats = some_stats()
    facts = catalog.facts(stats.base_id, stats.checkpoint_id)
    assert facts.stats(4096).tensors == ()
    facts.put_stats(stats)
    assert same(facts.stats(4096), stats)
    assert facts.stats(8192).tensors == ()
    assert catalog.facts(stats.checkpoint_id, stats.base_id).stats(4096).tensors == ()


def test_statistics_of_several_passes_are_united(catalog: Catalog, tmp_path: Path) -> None:
    first, second = some_stats(), some_stats(seed=1, names=["u"], blocks=7)
    facts = catalog.facts(first.base_id, first.checkpoint_id)
    for stats in (first, second, first):
        facts.put_stats(stats)
    found = facts.stats(4096)
    wanted = sorted((*first.tensors, *second.tensors), key=lambda t: t.tensor)
    in_order = tuple(sorted(found.tensors, key=lambda t: t.tensor))
    assert same(replace(found, tensors=in_order), replace(first, tensors=tuple(wanted)))
    assert len(list((tmp_path / "catalog").rglob("*.parquet"))) == 2


def test_facts_of_one_key_are_united_and_keys_do_not_mix(catalog: Catalog) -> None:
    catalog.facts("b", "c").put_fact("trim-0.2", {"w": (1, 2, 0.0)})
    catalog.facts("b", "c").put_fact("trim-0.2", {"v": (3, 4, 0.0)})
    catalog.facts("b", "c").put_fact("trim-0.2", {"v": (3, 4, 0.0)})
    catalog.facts("b", "c").put_fact("trim-0.25", {"w": (5, 6, 0.0)})
    catalog.facts("b", "c").put_fact("trim-0.2.5", {"w": (7, 8, 0.0)})
    catalog.facts("b", "c").put_fact("trim-0", {"w": (9, 9, 0.0)})
    assert catalog.facts("b", "c").fact("trim-0.2") == {"w": (1, 2, 0.0), "v": (3, 4, 0.0)}
    assert catalog.facts("b", "c").fact("trim-0.25") == {"w": (5, 6, 0.0)}
    assert catalog.facts("b", "c").fact("trim-0.2.5") == {"w": (7, 8, 0.0)}
    assert catalog.facts("b", "c").fact("trim-0x2") == {}
    assert catalog.facts("c", "b").fact("trim-0.2") == {}


def test_facts_of_experts_and_of_groups_hold_any_count_of_numbers(catalog: Catalog) -> None:
    catalog.facts("b", "group-1").put_fact("gram-delta", {"w": (0.1,) * 9, "v": ()})
    catalog.facts("b", "c").put_fact("gram-delta", {"w": (2.0,)})
    assert catalog.facts("b", "group-1").fact("gram-delta") == {"w": (0.1,) * 9, "v": ()}
    assert catalog.facts("b", "c").fact("gram-delta") == {"w": (2.0,)}


def test_a_damaged_fact_is_said_and_unknown_until_it_is_put_again(
    catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {"w": (1.0, 2.0, 0.0)}
    catalog.facts("b", "c").put_fact("trim-0.2", facts)
    (path,) = (tmp_path / "catalog").rglob("trim*.parquet")
    path.write_bytes(b"junk")
    for _ in range(2):
        assert catalog.facts("b", "c").fact("trim-0.2") == {}
    assert [str(path) in m for m in caplog.messages] == [True]
    catalog.facts("b", "c").put_fact("trim-0.2", facts)
    assert catalog.facts("b", "c").fact("trim-0.2") == facts


def _put(folder: str, times: int) -> None:
    for _ in range(times):
        stats = some_stats(blocks=500)
        Catalog(Path(folder)).facts(stats.base_id, stats.checkpoint_id).put_stats(stats)
        Catalog(Path(folder)).register(checkpoint(), None)


def test_two_processes_that_write_the_same_at_once_leave_readable_files(
    catalog: Catalog, tmp_path: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_put, args=(str(tmp_path / "catalog"), 20)) for _ in range(2)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    assert [w.exitcode for w in writers] == [0, 0]
    wanted = some_stats(blocks=500)
    found = catalog.facts(wanted.base_id, wanted.checkpoint_id).stats(4096)
    assert same(found, wanted)
    assert {r.checkpoint for r in catalog.history("m")} == {checkpoint()}
    assert not list((tmp_path / "catalog").rglob("*.tmp"))
