"""Whether a warehouse that something happened to is sound, and whether the verb succeeds again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from tests.lab.torture import child
from tests.lab.torture.child import Done
from tests.lab.torture.scenes import Scene
from tests.lab.torture.tally import Problem
from tests.lab.torture.world import State, leftovers, state_of


def ending(done: Done, where: str) -> list[Problem]:
    """A hang or a traceback, if there was one."""
    if done.hung:
        return [Problem("hangs", where, f"after {done.seconds:.0f} s")]
    if done.has_traceback:
        return [Problem("tracebacks", where, done.err[-700:])]
    if done.code > 0 and "error:" not in done.err.lower():
        return [Problem("tracebacks", where, f"exit {done.code} without an error: {done.err}")]
    return []


def read(place: Path, where: str, *, strict: bool = True) -> tuple[State, list[Problem]]:
    """What is there, and what of it is damaged or cannot be read."""
    try:
        state: State = child.call(_state, place, strict)
    except (RuntimeError, TimeoutError) as error:
        return State(), [Problem("lost", where, f"the warehouse cannot be read: {error}")]
    return state, [Problem("wrong", where, what) for what in state.damage]


def _state(place: Path, strict: bool) -> State:
    return state_of(place, strict=strict)


def verdict(
    scene: Scene, args: Sequence[str], place: Path, logs: Path, done: Done, where: str
) -> list[Problem]:
    """All that is wrong after a disturbed verb, and after the same verb undisturbed."""
    killed = done.code == -signal.SIGKILL and not done.hung
    problems = [] if killed else ending(done, where)
    now, damage = read(place, where)
    problems += damage
    problems += _between(now, scene.old, scene.new, where)
    took_effect = now.results == scene.new.results and now.out == scene.new.out
    if done.code == 0 and not took_effect:
        problems.append(Problem("lost", where, "the verb said that it was done"))
    is_done = not scene.verb.repeats and took_effect
    return problems + _again(args, place, logs, scene.new, where, is_done=is_done)


def _between(now: State, old: State, new: State, where: str) -> list[Problem]:
    """Each result is as it was before the verb, or as after it; none is gone that both have."""
    problems = []
    for what, found in now.results.items():
        before, after = old.results[what], new.results[what]
        assert isinstance(found, dict)
        assert isinstance(before, dict)
        assert isinstance(after, dict)
        for key in {*found, *before, *after}:
            allowed = (before.get(key), after.get(key))
            if found.get(key) not in allowed:
                column = "lost" if key not in found else "wrong"
                told = f"{what} {key}: {found.get(key)}, expected one of {allowed}"
                problems.append(Problem(column, where, told))
    if now.out not in (old.out, new.out):
        problems.append(Problem("wrong", where, f"a part of --out is there: {sorted(now.out)}"))
    return problems


def _again(
    args: Sequence[str], place: Path, logs: Path, new: State, where: str, *, is_done: bool
) -> list[Problem]:
    """The same verb succeeds and leaves what it leaves undisturbed; then gc leaves no rest.

    `is_done`: the verb took effect already and is one that counts (rollback): it is not repeated.
    """
    problems = []
    if not is_done:
        done = child.run(args, logs)
        problems += ending(done, f"{where}, again")
        if done.code:
            told = f"the same verb ends with {done.code}: {done.err[-1000:]}"
            problems.append(Problem("lost", where, told))
    now, damage = read(place, f"{where}, again")
    problems += damage
    wanted = (*new.results.items(), ("out", new.out), ("derived", new.derived))
    for (what, expected), found in zip(
        wanted, (*now.results.values(), now.out, now.derived), strict=True
    ):
        if found != expected:
            told = f"{what} after trying again: {_difference(found, expected)}"
            problems.append(Problem("wrong", where, told))
    gc = child.run(["gc", "--older-than", "0", "--home", str(place / "w")], logs)
    problems += ending(gc, f"{where}, gc")
    kept, damage = read(place, f"{where}, gc")
    problems += damage
    if (kept.refs, kept.names) != (new.refs, new.names) or not (
        kept.snapshots.items() <= new.snapshots.items()
    ):
        problems.append(Problem("lost", where, "gc took a result away"))
    if rest := leftovers(place):
        problems.append(Problem("wrong", where, f"gc leaves {rest}"))
    return problems


def _difference(found: object, expected: object) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [k for k in {*found, *expected} if found.get(k) != expected.get(k)]
        return "; ".join(f"{k}: {found.get(k)} not {expected.get(k)}" for k in sorted(keys)[:4])
    return f"{found} not {expected}"
