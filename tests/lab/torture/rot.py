"""Snapshots rot: bits flip, files vanish or end early, and times stay; then verbs in drawn order.

Whatever a verb says with exit 0 of a snapshot is compared byte by byte with an undisturbed run. In
the end each recipe is merged again: the snapshots that it needs are right again, and have their
ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random

from tests.lab.torture import child, judge
from tests.lab.torture.child import Done
from tests.lab.torture.flips import ok, run_standing
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import copy_place

_SHORT, _LONG = 6, 2000
_RECIPES = ("full", "other", "staged")
_HARMS = ("flip", "flip", "vanish", "end")
_VERBS = ("merge", "merge", "publish", "verify", "out", "gc", "deploy", "release")
#: Of a snapshot's files, those that may differ from one making to the next.
_OF_THE_RUN = "provenance.json"


@dataclass(frozen=True)
class Try:
    """Some files that rot, and some verbs; the numbers draw the same in any run."""

    seed: int

    def __str__(self) -> str:
        return f"rot, seed {self.seed}"


@dataclass(frozen=True)
class Undisturbed:
    """A place with results, a stage and a release; ids by recipe, and digests by id and file."""

    world: Path
    place: Path
    ids: dict[str, str]
    right: dict[str, dict[str, str]]


class Rot:
    """The campaign over one world, which all workers share."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._count = _SHORT if short else _LONG
        self._ours = _prepare(world, folder / "undisturbed")

    def tries(self, seed: int) -> Iterator[Try]:
        """Tries drawn from `seed`."""
        draw = Random(seed)
        return (Try(draw.randrange(1 << 40)) for _ in range(self._count))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Let files rot, run verbs, and compare what they said was done."""
        place, draw = folder / "place", Random(one.seed)
        copy_place(self._ours.place, place)
        harmed = [_harm(place / "w", draw) for _ in range(draw.randint(1, 3))]
        told = f"{one}: {', '.join(harmed)}"
        flow = _Flow(self._ours, place, folder / "logs", told, draw)
        for verb in draw.choices(_VERBS, k=draw.randint(2, 5)):
            flow.run(verb)
        flow.mend()
        return Outcome.of(harmed[0].partition(" of ")[0], flow.problems)


class _Flow:
    """Runs verbs on a place and compares what they said."""

    def __init__(self, ours: Undisturbed, place: Path, logs: Path, where: str, draw: Random):
        self._ours, self._place, self._logs, self._draw = ours, place, logs, draw
        self._where = where
        self.problems: list[Problem] = []

    def run(self, verb: str) -> None:
        """One verb on what chance names."""
        snapshot_id, recipe = self._draw.choice(sorted(self._ours.right)), self._recipe()
        self._where += f"; {verb}"
        if verb == "gc":
            before = set(self._ours.ids.values()) & set(os.listdir(self._place / "w/snapshots"))
            self._verb("gc", "--older-than", "0")
            for lost in before - set(os.listdir(self._place / "w/snapshots")):
                self._add("lost", f"gc takes {lost} away")
        elif verb in ("deploy", "release"):
            self._deploy(verb == "deploy")
        elif verb == "merge":
            self._merge(recipe, *self._draw.choice([(), ("--publish",)]))
        elif verb == "out":
            out = self._place / f"out-{len(list(self._place.iterdir()))}"
            self._merge(recipe, "--out", str(out))
            if out.exists():
                self._compare(out, self._ours.ids[recipe], verb)
        else:
            words = (verb, snapshot_id, *(("--ref", "drawn") if verb == "publish" else ()))
            if self._verb(*words).code == 0:
                self._compare(self._place / "w" / "snapshots" / snapshot_id, snapshot_id, verb)

    def mend(self) -> None:
        """Merge each recipe again: nothing that it needs is wrong then."""
        self._where += "; mended"
        for recipe in _RECIPES:
            if self._merge(recipe, "--publish").code:
                self._add("lost", f"{recipe} cannot be merged any more")
        for folder in (self._place / "w" / "snapshots").iterdir():
            self._compare(folder, folder.name, "merging all again")

    def _recipe(self) -> str:
        return self._draw.choice(_RECIPES)

    def _merge(self, recipe: str, *more: str) -> Done:
        done = self._verb("merge", str(self._ours.world / f"{recipe}.yml"), "--json", *more)
        if done.code == 0:
            found, expected = json.loads(done.out)["snapshot_id"], self._ours.ids[recipe]
            if found != expected:
                self._add("wrong", f"{recipe} gives {found}, not {expected}")
            self._compare(self._place / "w" / "snapshots" / found, found, f"merge {recipe}")
        return done

    def _deploy(self, plan: bool) -> None:
        """The steps of a standing recipe, all or its release alone."""
        try:
            found = child.call(run_standing if plan else _release, self._place, plan)
        except TimeoutError:
            self._add("hangs", "the standing recipe")
        except RuntimeError as error:
            self._add("tracebacks", str(error)[-700:])
        else:
            if not found.startswith("error"):
                self._compare(self._place / "w" / "snapshots" / found, found, "the standing recipe")

    def _compare(self, folder: Path, snapshot_id: str, verb: str) -> None:
        """Whether a folder that a verb vouches for has the bytes of an undisturbed run."""
        for name, digest in self._ours.right.get(snapshot_id, {}).items():
            path = folder / name
            if folder.name != snapshot_id and name == "README.md":
                continue  # the card of a copy says more
            if not path.is_file() or _sha256(path) != digest:
                self._add("wrong", f"{verb}: {folder.name}/{name} is not what it was")

    def _verb(self, *args: str) -> Done:
        done = child.run([*args, "--home", str(self._place / "w")], self._logs)
        self.problems += judge.ending(done, f"{self._where}, {args[0]}")
        return done

    def _add(self, column: str, what: str) -> None:
        self.problems.append(Problem(column, self._where, what))


def _harm(home: Path, draw: Random) -> str:
    """Let one file of one snapshot rot, and the object that it is with it; what was done."""
    path = draw.choice(sorted(p for p in home.glob("snapshots/*/*") if p.is_file()))
    how, stat = draw.choice(_HARMS), path.stat()
    told = f"{how} of {path.parent.name[:8]}/{path.name}"
    if how == "vanish":
        path.unlink()
        return told
    path.chmod(0o644)
    with path.open("r+b") as file:
        if how == "flip":
            file.seek(at := draw.randrange(max(1, stat.st_size)))
            bits = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([bits[0] ^ 1 << draw.randrange(8)]))
        else:
            file.truncate(draw.randrange(max(1, stat.st_size)))
    path.chmod(stat.st_mode & 0o777)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return told


def _prepare(world: Path, folder: Path) -> Undisturbed:
    """Merge all, publish it, and release a standing recipe."""
    place, ids = folder / "place", dict[str, str]()
    place.mkdir(parents=True)
    home = ("--home", str(place / "w"))
    for name in ("base", "expert_00", "expert_01"):
        ok(child.run(["register", str(world / name), *home], folder))
    for recipe in _RECIPES:
        done = child.run(
            ["merge", str(world / f"{recipe}.yml"), "--publish", "--json", *home], folder
        )
        ids[recipe] = str(json.loads(ok(done).out)["snapshot_id"])
    standing = (world / "full.yml").read_text().replace(f"{world}/", "")
    (place / "w" / "recipes" / "full.yml").write_text(standing)
    found = child.call(run_standing, place, True)
    assert found == ids["full"], found
    right = {
        folder.name: {p.name: _sha256(p) for p in folder.iterdir() if p.name != _OF_THE_RUN}
        for folder in (place / "w" / "snapshots").iterdir()
    }
    return Undisturbed(world, place, ids, right)


def _release(place: Path, _: bool) -> str:
    """What a release by itself publishes, or an error of the product."""
    from mergepipe_pipeline.deploy.recipe_files import recipe_files
    from mergepipe_pipeline.errors import MergePipeError
    from mergepipe_pipeline.verbs import deploy as verbs
    from mergepipe_pipeline.warehouse import Warehouse

    home = Warehouse(place / "w")
    try:
        (recipe_file,) = recipe_files(home)
        return verbs.release_recipe(home, recipe_file)[0].snapshot_id
    except MergePipeError as error:
        return f"error: {error}"


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
