"""The verb `analyze`: what it reads, and that a pass cut short is not lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mergepipe_pipeline.catalog.formats import CONTENTS
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.facts import passes
from mergepipe_pipeline.progress import Silent
from mergepipe_pipeline.resolution.locate import locate_registered
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.analysis.pairs import figures
from tests.support.reads import of, tensor_reads

BLOCK = 4096


class CrashError(BaseException):
    """Stands for the end of the process; no handler of the code under test catches it."""


class CrashAfter(Silent):
    """A progress that ends the process when so many bytes are analysed."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    @contextmanager
    def task(self, label: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
        def advance(nbytes: int) -> None:
            self._left -= nbytes
            if self._left < 0:
                raise CrashError(label)

        yield advance


@pytest.fixture
def registered(home: Warehouse, family: Path) -> Warehouse:
    """A home that knows the family by name."""
    register(home, family / "base", "base")
    for i in range(4):
        register(home, family / f"expert_{i:02d}", base="base")
    return home


def nbytes_of(home: Warehouse, name: str) -> int:
    return home.catalog.get(name).checkpoint.nbytes


def stats_of(home: Warehouse, name: str) -> ExpertStats:
    base, expert = (locate_registered(home, n).checkpoint.checkpoint_id for n in ("base", name))
    return home.catalog.facts(base, expert).stats(BLOCK)


def figures_of(home: Warehouse, name: str) -> dict[tuple[str, str], dict[str, object]]:
    return {pair: figures(t) for pair, t in stats_of(home, name).by_pair.items()}


def test_experts_of_one_base_are_read_once_each_and_their_base_once_for_all(
    registered: Warehouse,
) -> None:
    with tensor_reads() as reads:
        found = analyze(registered, block_elems=BLOCK)
    for name in ("base", "expert_00", "expert_01", "expert_02", "expert_03"):
        # The base is registered without a base of its own and is digested first.
        assert of(reads, name) == nbytes_of(registered, name) * (2 if name == "base" else 1)
    assert {a.name: a.fresh for a in found} == {
        "base": True, **{f"expert_{i:02d}": True for i in range(4)}
    }  # fmt: skip


def test_a_second_analysis_reads_nothing(registered: Warehouse) -> None:
    names = ["expert_00", "expert_01"]
    first = analyze(registered, names, block_elems=BLOCK)
    with tensor_reads() as reads:
        again = analyze(registered, names, block_elems=BLOCK)
    assert not reads
    assert [a.fresh for a in again] == [False, False]
    assert [(a.content_sha256, a.norm) for a in again] == [
        (a.content_sha256, a.norm) for a in first
    ]


def test_contents_that_are_lost_are_taken_again_and_equal(registered: Warehouse) -> None:
    analyze(registered, ["expert_00"], block_elems=BLOCK)
    folder = registered.catalog_dir / CONTENTS
    digests = registered.catalog.digests
    before = digests(_id(registered, "expert_00"))
    assert before is not None
    shutil.rmtree(folder)
    analyze(registered, ["expert_00"], block_elems=BLOCK)
    assert digests(_id(registered, "expert_00")) == before


def _id(home: Warehouse, name: str) -> str:
    return locate_registered(home, name).checkpoint.checkpoint_id


def test_the_known_digests_are_listed_a_few_times_whatever_the_number_of_tensors(
    registered: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, real = list[Path](), os.listdir

    def listdir(folder: Path) -> list[str]:
        listed.append(folder)
        return real(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    names = ["expert_00", "expert_01"]
    analyze(registered, names, block_elems=BLOCK)
    checkpoints = [locate_registered(registered, name).checkpoint for name in ("base", *names)]
    tensors = sum(len(c.tensors) for c in checkpoints)
    assert 0 < listed.count(registered.catalog_dir / CONTENTS) < tensors / 2


def test_what_is_found_does_not_depend_on_how_experts_are_put_together(
    registered: Warehouse, tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"expert_{i:02d}" for i in range(4)]
    analyze(registered, names, block_elems=BLOCK)
    other = Warehouse.at(tmp_path / "other").ensure()
    register(other, family / "base", "base")
    for name in reversed(names):
        register(other, family / name, base="base")
    monkeypatch.setattr(passes, "_EXPERTS_PER_PASS", 3)
    with tensor_reads() as reads:
        analyze(other, names[::-1], block_elems=BLOCK)
    assert of(reads, "base") == 2 * nbytes_of(other, "base")
    assert all(figures_of(other, n) == figures_of(registered, n) for n in names)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_a_crash_leaves_what_was_saved_and_the_next_run_reads_only_the_rest(
    registered: Warehouse, family: Path, tmp_path: Path, share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names = ["expert_00", "expert_01", "expert_02"]
    monkeypatch.setattr(passes, "_SAVE_NBYTES", 1)
    total = sum(nbytes_of(registered, n) for n in names)
    with pytest.raises(CrashError, match="analyze"):
        analyze(registered, names, block_elems=BLOCK, progress=CrashAfter(int(share * total)))
    done = {n: set(stats_of(registered, n).by_pair) for n in names}
    assert any(done.values())

    with tensor_reads() as reads:
        analyze(registered, names, block_elems=BLOCK)
    for name in names:
        tensors = registered.catalog.get(name).checkpoint.tensors
        expected = {t.name: t.nbytes for t in tensors if (t.name, t.name) not in done[name]}
        assert {t: n for (where, t), n in reads.items() if where == name} == expected
        # So is the base, for whichever expert still wants it.
        assert all(reads["base", t] == n for t, n in expected.items())
    assert of(reads, "base") < nbytes_of(registered, "base")

    untouched = Warehouse.at(tmp_path / "untouched").ensure()
    register(untouched, family / "base", "base")
    for name in names:
        register(untouched, family / name, base="base")
    analyze(untouched, names, block_elems=BLOCK)
    assert all(figures_of(untouched, n) == figures_of(registered, n) for n in names)


def test_a_pass_continued_after_a_crash_still_yields_digests(
    registered: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_SAVE_NBYTES", 1)
    half = nbytes_of(registered, "expert_00") // 2
    with pytest.raises(CrashError, match="analyze"):
        analyze(registered, ["expert_00"], block_elems=BLOCK, progress=CrashAfter(half))
    catalog = registered.catalog
    ids = [catalog.get(n).checkpoint.checkpoint_id for n in ("base", "expert_00")]
    assert [catalog.digests(i) for i in ids] == [None, None]
    analyze(registered, ["expert_00"], block_elems=BLOCK)
    assert None not in [catalog.digests(i) for i in ids]


def test_without_a_crash_little_is_saved_at_once(registered: Warehouse) -> None:
    analyze(registered, ["expert_00", "expert_01"], block_elems=BLOCK)
    assert len(list(registered.catalog_dir.glob("facts/*/*/*/b*.parquet"))) == 2
