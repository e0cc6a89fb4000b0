"""A search that is killed or stopped at any moment goes on as if nothing had been."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.search.ledger import Ledger, searches
from mergepipe_pipeline.verbs.search import front, search_of
from tests.search.world import World

#: What a process that is forked finds loaded: it takes the time of ten starts otherwise.
_LOADED = [
    "botorch",
    "mergepipe_pipeline.cli.main",
    "mergepipe_pipeline.verbs.search",
    "mergepipe_pipeline.engine.execute",
    "mergepipe_pipeline.analysis.statistics",
    "torch",
]
Start = Callable[..., ForkServerProcess]


def _search(home: Path, file: Path, log: Path) -> None:
    """Be `mergepipe search`; a kill loses nothing that was written, so that no write waits."""
    os.fsync = os.fstat  # type: ignore[assignment]
    os.chdir(file.parent)
    sys.stdout = sys.stderr = log.open("a")
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    sys.argv = ["mergepipe", "--home", str(home), "search", str(file)]
    from mergepipe_pipeline.cli.main import program

    program()


@pytest.fixture
def start(world: World) -> Iterator[Start]:
    """Starts searches in processes of their own."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    started: list[ForkServerProcess] = []

    def begin(file: Path) -> ForkServerProcess:
        args = (world.home.root, file, world.folder / "log")
        process: ForkServerProcess = context.Process(target=_search, args=args)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join(20)


def _ended(process: ForkServerProcess, world: World) -> None:
    process.join(240)
    if process.is_alive():  # where it hangs stands in its log then
        os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(1)
    assert process.exitcode == 0, (world.folder / "log").read_text()[-9000:]


def _facts(world: World, name: str) -> list[tuple[object, ...]]:
    found = front(world.home, search_of(world.home, name)).trials
    return sorted((t.number, t.point, t.values, t.snapshot_id, t.failure) for t in found)


def _bytes(world: World, name: str) -> dict[Path, bytes]:
    """The facts of a search, byte by byte; what a killed process had no name for yet is none."""
    folder = world.home.search_ledgers / name
    found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(folder): p.read_bytes() for p in found}


@pytest.mark.parametrize(("initial", "workers"), [(8, 1), (6, 3)])
def test_a_search_that_is_killed_at_random_moments_loses_nothing_and_does_nothing_twice(
    world: World, start: Start, initial: int, workers: int
) -> None:
    keys = f"evaluations: 8\ninitial: {initial}\nworkers: {workers}\n"
    if initial < 8:
        pytest.importorskip("botorch", reason="needs the extra `search`")
    draw, kills, kept = random.Random(7), 5, dict[Path, bytes]()
    killed = world.write(keys, name="killed")
    for kill in range(kills):
        process = start(killed)
        _wait_for_results(world, "killed", kill, process)
        time.sleep(draw.random())
        process.kill()
        process.join(20)
        _is_whole(world, "killed")
        kept |= _bytes(world, "killed")
    _ended(start(killed), world)
    _is_whole(world, "killed")
    assert kept.items() <= _bytes(world, "killed").items()
    assert len(_facts(world, "killed")) == 8
    # Of each kill at most the evaluations that ran, and one that had just ended, are had again.
    ended = world.log("ended")
    assert len(set(ended)) == 8
    assert len(ended) <= 8 + kills * workers
    assert len(world.log("begun")) <= 8 + kills * workers
    if initial == 8:
        _ended(start(world.write(keys, name="undisturbed")), world)
        assert _facts(world, "undisturbed") == _facts(world, "killed")
        assert _bytes(world, "undisturbed").keys() == _bytes(world, "killed").keys()


def _wait_for_results(world: World, name: str, count: int, process: ForkServerProcess) -> None:
    folder = world.home.search_ledgers / name / "results"
    for _ in range(6000):
        if len(list(folder.glob("*.json"))) >= count or not process.is_alive():
            return
        time.sleep(0.02)
    pytest.fail("it gives no results")


def _is_whole(world: World, name: str) -> None:
    """Every fact can be read, and nobody holds a candidate any more."""
    ledger = Ledger(world.home, name)
    assert not ledger.folder.exists() or name in searches(world.home) or not _bytes(world, name)
    proposals, results = ledger.proposals(), ledger.results()
    assert results.keys() <= proposals.keys()
    assert sorted(proposals) == list(range(1, len(proposals) + 1))
    assert len({p.point for p in proposals.values()}) == len(proposals)
    assert all(results[n].point == proposals[n].point for n in results)
    # A child between fork and exec keeps a killed parent's locks for that moment.
    late = time.monotonic() + 10
    while any(ledger.is_claimed(n) for n in proposals):
        assert time.monotonic() < late, "a candidate is held by nobody who lives"
        time.sleep(0.02)


def test_ctrl_c_ends_a_search_at_once_and_it_goes_on_later(world: World, start: Start) -> None:
    path = world.write("evaluations: 3\ninitial: 3\nworkers: 2\n")
    world.flag("slow", "30")
    process = start(path)
    for _ in range(6000):
        if len(world.log("begun")) == 2:
            break
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 130
    assert "stopped by SIGINT; what was finished is kept" in (world.folder / "log").read_text()
    assert list(world.home.staging.iterdir()) == []
    _is_whole(world, "mix")
    assert _facts(world, "mix") == []
    world.flag("slow", "0")
    _ended(start(path), world)
    assert [fact[0] for fact in _facts(world, "mix")] == [1, 2, 3]
    assert world.log("ended").__len__() == 3


def test_two_processes_share_a_search(world: World, start: Start) -> None:
    path = world.write("evaluations: 4\ninitial: 4\n")
    one, other = start(path), start(path)
    _ended(one, world)
    _ended(other, world)
    assert [fact[0] for fact in _facts(world, "mix")] == [1, 2, 3, 4]
    assert len(world.log("begun")) == 4
