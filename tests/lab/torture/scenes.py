"""The verbs under test, each with what ran before it and what it leaves undisturbed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.lab.torture import child
from tests.lab.torture.shim import Shim, Step
from tests.lab.torture.world import State, copy_place, state_of

Args = tuple[str, ...]
RECIPES = ("full", "other", "budget", "staged", "adapted")


@dataclass(frozen=True)
class Verb:
    """`args` after `before`; in both `{w}` is the world, `{p}` the place of warehouse and out."""

    name: str
    args: Args
    before: tuple[Args, ...] = ()
    repeats: bool = True

    def at(self, world: Path, place: Path) -> list[str]:
        """The arguments for one place."""
        return _filled(self.args, world, place)


@dataclass(frozen=True)
class Scene:
    """A verb, its `steps`, the place as it is before it, and the states before and after."""

    verb: Verb
    place: Path
    old: State
    new: State
    steps: tuple[Step, ...]


def _merge(recipe: str, *more: str) -> Args:
    return ("merge", f"{{w}}/{recipe}.yml", *more)


_KNOWN = (("register", "{w}/base"), ("register", "{w}/expert_00", "--base", "base"))
_LIVE = (_merge("full", "--publish"), _merge("other"))
VERBS = (
    Verb("register", ("register", "{w}/expert_01")),
    Verb(
        "analyze",
        ("analyze", "expert_00", "expert_01", "--base", "base"),
        tuple(("register", f"{{w}}/{name}") for name in ("base", "expert_00", "expert_01")),
    ),
    Verb("pack", ("pack", "expert_00"), _KNOWN),
    Verb("merge, packs", _merge("budget"), (*_KNOWN, ("pack", "expert_00"))),
    Verb("plan", ("plan", "{w}/budget.yml"), (("register", "{w}/base"),)),
    Verb("merge", _merge("full")),
    Verb("merge --publish", _merge("full", "--publish"), (_merge("other", "--publish"),)),
    Verb("merge, budget", _merge("budget"), (_merge("full"),)),
    Verb("merge, stages", _merge("staged")),
    Verb("merge, adapter", _merge("adapted")),
    Verb("publish", ("publish", "{full}", "--ref", "live"), (_merge("full"),)),
    Verb("publish over", ("publish", "{other}", "--ref", "full"), _LIVE),
    Verb(
        "rollback",
        ("rollback", "full"),
        (*_LIVE, ("publish", "{other}", "--ref", "full")),
        repeats=False,
    ),
    Verb("gc", ("gc", "--older-than", "0"), (_merge("full"), _merge("other"), ("drop", "{other}"))),
    Verb("export", _merge("full", "--out", "{p}/out"), (_merge("full"),)),
    Verb("merge --out", _merge("other", "--out", "{p}/out"), (_merge("full"),)),
)


#: Those of the short form: one of each that writes in another way.
_SHORT = ("merge --publish", "rollback", "gc", "export")


@cache
def scenes_of(world: Path, folder: Path, *, short: bool) -> tuple[Scene, ...]:
    """The scenes of all verbs, or of a few, made in `folder`."""
    verbs = [v for v in VERBS if v.name in _SHORT or not short]
    return tuple(scene_of(verb, world, folder / f"scene-{n}") for n, verb in enumerate(verbs))


def scene_of(verb: Verb, world: Path, folder: Path) -> Scene:
    """Run what comes before the verb, then the verb on a copy, undisturbed and watched."""
    place, after, logs = folder / "before", folder / "after", folder / "logs"
    place.mkdir(parents=True)
    for args in verb.before:
        if args[0] == "drop":
            shutil.rmtree(place / "w" / "snapshots" / _filled(args, world, place)[1])
        else:
            _must(child.run(_filled(args, world, place), logs))
    copy_place(place, after)
    steps = folder / "steps"
    shim = Shim(after)
    asked = verb.at(world, after)
    _must(child.run(asked, logs, before=shim.install, after=lambda: _save(steps, shim.steps)))
    told = [Step(*line.split("\t")) for line in steps.read_text().splitlines()]
    old, new = child.call(state_of, place), child.call(state_of, after)
    return Scene(verb, place, old, new, tuple(told))


def _save(path: Path, steps: Sequence[Step]) -> None:
    path.write_text("".join(f"{s.kind}\t{s.path}\t{s.module}\n" for s in steps))


def _filled(args: Sequence[str], world: Path, place: Path) -> list[str]:
    ids = world / "ids"
    known = dict(line.split() for line in ids.read_text().splitlines()) if ids.exists() else {}
    return [a.format(w=world, p=place, **known) for a in args] + ["--home", f"{place}/w"]


def learn_ids(world: Path, folder: Path) -> None:
    """Merge every recipe once, so that scenes may name the snapshots."""
    import json

    lines = []
    for recipe in RECIPES:
        args = ["merge", str(world / f"{recipe}.yml"), "--json", "--home", str(folder / "w")]
        done = child.run(args, folder)
        _must(done)
        lines.append(f"{recipe} {json.loads(done.out)['snapshot_id']}\n")
    (world / "ids").write_text("".join(lines))


def _must(done: child.Done) -> None:
    if done.code:
        raise RuntimeError(f"an undisturbed run ends with {done.code}: {done.err}")
