"""Names, contents and statistics as a warehouse keeps them."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from tests.catalog.facts import checkpoint, checkpoints, same, some_stats


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "catalog")


@settings(max_examples=30, deadline=None)
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
    catalog.put_digests("c", {"w": "0", "v": "1"})
    catalog.put_digests("d", {"v": "1", "w": "0"})
    catalog.put_digests("e", {"v": "0", "w": "1"})
    assert catalog.digests("c") == {"w": "0", "v": "1"}
    assert catalog.content_sha256("c") == catalog.content_sha256("d")
    assert catalog.content_sha256("c") != catalog.content_sha256("e")


def test_statistics_are_found_under_their_own_key_only(catalog: Catalog) -> None:
    stats = some_stats()
    key = (stats.base_id, stats.checkpoint_id)
    assert catalog.stats(*key, 4096) is None
    catalog.put_stats(stats)
    found = catalog.stats(*key, 4096)
    assert found is not None
    assert same(found, stats)
    assert catalog.stats(*key, 8192) is None
    assert catalog.stats(key[1], key[0], 4096) is None


def test_statistics_of_several_passes_are_united(catalog: Catalog, tmp_path: Path) -> None:
    first, second = some_stats(), some_stats(seed=1, names=["u"], blocks=7)
    for stats in (first, second, first):
        catalog.put_stats(stats)
    found = catalog.stats("b" * 24, "c" * 24, 4096)
    assert found is not None
    wanted = sorted((*first.tensors, *second.tensors), key=lambda t: t.tensor)
    in_order = tuple(sorted(found.tensors, key=lambda t: t.tensor))
    assert same(replace(found, tensors=in_order), replace(first, tensors=tuple(wanted)))
    assert len(list((tmp_path / "catalog").rglob("*.parquet"))) == 4


def test_statistics_whose_blocks_are_not_there_yet_are_not_known(
    catalog: Catalog, tmp_path: Path
) -> None:
    catalog.put_stats(some_stats())
    catalog.put_stats(some_stats(names=["u"]))
    (lost,) = [
        path
        for path in (tmp_path / "catalog").rglob("*.tensors.*.parquet")
        if "u" in pq.read_table(path)["tensor"].to_pylist()
    ]
    named = json.loads(pq.read_schema(lost).metadata[b"mergepipe"])["blocks"]
    (blocks,) = lost.parent.glob(f"*.blocks.{named}.parquet")
    blocks.unlink()
    found = catalog.stats("b" * 24, "c" * 24, 4096)
    assert found is not None
    assert same(found, some_stats())


@pytest.mark.parametrize("part", ["tensors", "blocks"])
def test_damaged_statistics_are_said_and_unknown_until_they_are_put_again(
    catalog: Catalog, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    stats = some_stats()
    ids = stats.base_id, stats.checkpoint_id, 4096
    catalog.put_stats(stats)
    (path,) = (tmp_path / "catalog").rglob(f"*.{part}.*.parquet")
    path.write_bytes(b"PAR1")
    assert catalog.known_pairs(*ids) == set()
    assert [str(path) in m for m in caplog.messages] == [True]
    catalog.put_stats(stats)
    assert catalog.known_pairs(*ids) == set(stats.by_pair)
    found = catalog.stats(*ids)
    assert found is not None
    assert same(found, stats)


def test_facts_of_one_key_are_united_and_keys_do_not_mix(catalog: Catalog) -> None:
    catalog.put_fact("b", "c", "trim-0.2", {"w": (1, 2, 0.0)})
    catalog.put_fact("b", "c", "trim-0.2", {"v": (3, 4, 0.0)})
    catalog.put_fact("b", "c", "trim-0.2", {"v": (3, 4, 0.0)})
    catalog.put_fact("b", "c", "trim-0.25", {"w": (5, 6, 0.0)})
    catalog.put_fact("b", "c", "trim-0.2.5", {"w": (7, 8, 0.0)})
    catalog.put_fact("b", "c", "trim-0", {"w": (9, 9, 0.0)})
    assert catalog.fact("b", "c", "trim-0.2") == {"w": (1, 2, 0.0), "v": (3, 4, 0.0)}
    assert catalog.fact("b", "c", "trim-0.25") == {"w": (5, 6, 0.0)}
    assert catalog.fact("b", "c", "trim-0.2.5") == {"w": (7, 8, 0.0)}
    assert catalog.fact("b", "c", "trim-0x2") == {}
    assert catalog.fact("c", "b", "trim-0.2") == {}


def test_facts_of_experts_and_of_groups_hold_any_count_of_numbers(catalog: Catalog) -> None:
    catalog.put_fact("b", "group-1", "gram-delta", {"w": (0.1,) * 9, "v": ()})
    catalog.put_fact("b", "c", "gram-delta", {"w": (2.0,)})
    assert catalog.fact("b", "group-1", "gram-delta") == {"w": (0.1,) * 9, "v": ()}
    assert catalog.fact("b", "c", "gram-delta") == {"w": (2.0,)}


def test_a_damaged_fact_is_said_and_unknown_until_it_is_put_again(
    catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {"w": (1.0, 2.0, 0.0)}
    catalog.put_fact("b", "c", "trim-0.2", facts)
    (path,) = (tmp_path / "catalog").rglob("trim*.parquet")
    path.write_bytes(b"junk")
    for _ in range(2):
        assert catalog.fact("b", "c", "trim-0.2") == {}
    assert [str(path) in m for m in caplog.messages] == [True]
    catalog.put_fact("b", "c", "trim-0.2", facts)
    assert catalog.fact("b", "c", "trim-0.2") == facts


def _put(folder: str, times: int) -> None:
    for _ in range(times):
        Catalog(Path(folder)).put_stats(some_stats(blocks=500))
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
    found = catalog.stats(wanted.base_id, wanted.checkpoint_id, 4096)
    assert found is not None
    assert same(found, wanted)
    assert {r.checkpoint for r in catalog.history("m")} == {checkpoint()}
    assert not list((tmp_path / "catalog").rglob("*.tmp"))
