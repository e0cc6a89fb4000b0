"""A base is read while a plan is made, and nothing but time depends on that."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep

import pytest

from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.execution import planning
from mergepipe_pipeline.execution.planning import is_worth_prefetching, make_plan, prefetch_base
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe, resolve
from mergepipe_pipeline.storage.source import LocalSource
from mergepipe_pipeline.storage.uncached import cached_nbytes
from mergepipe_pipeline.warehouse import Warehouse

RecipeText = Callable[..., str]


def known(home: Warehouse, recipe_text: RecipeText, budget: str | None) -> ResolvedRecipe:
    raw = parse(recipe_text(), name="r", where="r")
    make_plan(home, raw)
    return resolve(home, raw, budget=budget)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Places that are read: file, first byte, bytes."""
    found: list[tuple[str, int, int]] = []
    real = LocalSource.read_into

    def counted(self: LocalSource, path: str, start: int, buffer: memoryview) -> None:
        found.append((path, start, len(buffer)))
        real(self, path, start, buffer)

    monkeypatch.setattr(LocalSource, "read_into", counted)
    monkeypatch.setattr(LocalSource, "has", lambda *_: False)
    return found


def wait_for(done: Callable[[], bool]) -> None:
    until = monotonic() + 10
    while not done() and monotonic() < until:
        sleep(0.005)
    assert done()


def test_every_byte_of_the_base_is_read_once_while_a_plan_is_made(
    home: Warehouse, recipe_text: RecipeText, reads: list[tuple[str, int, int]]
) -> None:
    checked = known(home, recipe_text, "50%")
    assert checked.base is not None
    entries = checked.base.checkpoint.tensors
    reads.clear()
    with prefetch_base(checked):
        wait_for(lambda: len(reads) >= len(entries))
    assert sorted(reads) == sorted((e.file, e.start_byte, e.nbytes) for e in entries)


def test_nothing_is_read_that_the_page_cache_has_and_everything_that_it_has_not(
    home: Warehouse, recipe_text: RecipeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = known(home, recipe_text, "50%")
    assert checked.base is not None
    (entry, *_), root = checked.base.checkpoint.tensors, checked.base.checkpoint.root
    with open(f"{root}/{entry.file}", "rb") as file:
        pages = partial(cached_nbytes, file.fileno(), entry.start_byte, entry.nbytes)
        if pages() is None:
            pytest.skip("this kernel counts no pages of a file")

        def dropped() -> bool:  # what was in use a moment ago stays at the first try
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return not pages()

        os.fsync(file.fileno())
        wait_for(dropped)
        with prefetch_base(checked):
            wait_for(lambda: (pages() or 0) >= entry.nbytes)
        monkeypatch.setattr(LocalSource, "read_into", lambda *_: pytest.fail("it reads"))
        with prefetch_base(checked):
            sleep(0.05)


def test_it_ends_with_the_planning(
    home: Warehouse,
    recipe_text: RecipeText,
    reads: list[tuple[str, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = known(home, recipe_text, "50%")
    monkeypatch.setattr(planning, "_STEP_NBYTES", 1)
    reads.clear()
    with prefetch_base(checked):
        wait_for(lambda: bool(reads))
    after = len(reads)
    sleep(0.05)
    assert 0 < after == len(reads) < checked.cost.base_bytes


def test_so_it_is_before_a_merge_without_a_budget(home: Warehouse, recipe_text: RecipeText) -> None:
    assert is_worth_prefetching(known(home, recipe_text, None))


def test_a_merge_whose_experts_are_still_to_be_analysed_reads_nothing_early(
    home: Warehouse, recipe_text: RecipeText
) -> None:
    raw = parse(recipe_text(), name="r", where="r")
    assert not is_worth_prefetching(resolve(home, raw, budget="50%"))


def test_nor_does_one_whose_base_the_page_cache_cannot_hold(
    home: Warehouse, recipe_text: RecipeText, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = known(home, recipe_text, "50%")
    assert is_worth_prefetching(checked)
    monkeypatch.setattr(planning, "fits_page_cache", lambda nbytes: False)
    assert not is_worth_prefetching(checked)


@pytest.mark.parametrize("error", [OSError(5, "broken"), CheckpointChangedError("shorter")])
def test_what_is_wrong_with_a_file_is_left_to_the_merge(
    home: Warehouse,
    recipe_text: RecipeText,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    checked = known(home, recipe_text, "50%")
    asked = []

    def broken(*args: object) -> None:
        asked.append(args)
        raise error

    monkeypatch.setattr(LocalSource, "read_into", broken)
    monkeypatch.setattr(LocalSource, "has", lambda *_: False)
    with prefetch_base(checked):
        wait_for(lambda: bool(asked))
    assert len(asked) == 1
