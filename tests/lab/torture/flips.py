"""One flipped bit in one file, of the warehouse or of its inputs; size and time stay.

Now and then two sealed files of one kind change places instead.

The flow that uses the file must then end in the right snapshot, or in a named error. What is
published or verified without an error is compared byte by byte with an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.lab.torture import child, judge
from tests.lab.torture.child import Done
from tests.lab.torture.scenes import RECIPES
from tests.lab.torture.shim import Fault, Shim
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import State, copy_place, make_world, state_of

_SHORT, _LONG = 10, 2200
#: Kinds of files that say what they are, and the share of tries in which two of them are swapped.
_SEALED, _SWAPS = ("catalog/", "plans", "actions", "objects", "refs"), 0.2
_INPUTS = ("base", "expert_00", "expert_01", "adapter")


@dataclass(frozen=True)
class Try:
    """One flip; the numbers draw kind, file and bit, and do so again in any run."""

    seed: int

    def __str__(self) -> str:
        return f"flip, seed {self.seed}"


@dataclass(frozen=True)
class Undisturbed:
    """A world of this process, its warehouse after some work, and what comes of more work."""

    world: Path
    place: Path
    ids: dict[str, str]
    state: State


class Flips:
    """The campaign; each worker makes a world of its own, since flipped inputs lie in it."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._folder, self._count = folder, _SHORT if short else _LONG
        self._mine: dict[int, Undisturbed] = {}

    def tries(self, seed: int) -> Iterator[Try]:
        """Flips drawn from `seed`."""
        draw = Random(seed)
        return (Try(draw.randrange(1 << 40)) for _ in range(self._count))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Flip a bit, use what it is in, and compare."""
        ours = self._undisturbed()
        place, draw = folder / "place", Random(one.seed)
        copy_place(ours.place, place)
        kinds = _files(place / "w", ours.world)
        kind = draw.choice(sorted(kinds))
        if kind.startswith(_SEALED) and len(kinds[kind]) > 1 and draw.random() < _SWAPS:
            return self._swapped(one, kind, draw.sample(kinds[kind], 2), folder)
        path = draw.choice(kinds[kind])
        data = path.read_bytes()
        bit = draw.randrange(8 * _end(kind, data)) if data else 0
        where = f"{one}: bit {bit} of {path.name} ({kind})"
        flip = bytearray(data)
        flip[bit // 8] ^= 1 << bit % 8
        _put(path, bytes(flip))
        flow = _Flow(ours, place, folder, where)
        try:
            flow.run(kind, path)
            return Outcome.of(kind, flow.problems())
        finally:
            if ours.world in path.parents:
                _put(path, data)

    def _swapped(self, one: Try, kind: str, files: list[Path], folder: Path) -> Outcome:
        """Let two files change places, use one of them, and compare."""
        where = f"{one}: {files[0].name} and {files[1].name} change places ({kind})"
        data = [file.read_bytes() for file in files]
        targets = [_as_named(files[0], files[1]), _as_named(files[1], files[0])]
        for file in files:
            file.unlink()
        for target, bytes_ in zip(targets, data, strict=True):
            target.write_bytes(bytes_)
        flow = _Flow(self._undisturbed(), folder / "place", folder, where)
        flow.run(kind, files[0])
        return Outcome.of(f"{kind}, swapped", flow.problems())

    def _undisturbed(self) -> Undisturbed:
        if os.getpid() not in self._mine:
            folder = self._folder / f"world-{os.getpid()}"
            self._mine[os.getpid()] = _prepare(folder)
        return self._mine[os.getpid()]


class _Flow:
    """Runs verbs on a place and remembers what they said."""

    def __init__(self, ours: Undisturbed, place: Path, folder: Path, where: str) -> None:
        self._ours, self._place, self._folder, self._where = ours, place, folder, where
        self._published = ""
        self._problems: list[Problem] = []

    def run(self, kind: str, path: Path) -> None:
        """The verbs that use a file of this kind."""
        recipe = "adapted" if "adapter" in path.parent.name else "full"
        if kind.startswith(("plans", "releases", "recipes")):
            self._deploy()
        if kind.startswith("refs"):
            self._verb("history", path.parent.name)
            self._verb("rollback", path.parent.name)
        if kind.startswith(("leases", "staging", "actions", "objects")):
            self._verb("gc", "--older-than", "0")
        self._merge(f"{recipe}, 30%", recipe, "--budget", "30%")
        self._merge(recipe, recipe, "--publish")

    def problems(self) -> list[Problem]:
        """What was found; a snapshot with other bytes is neither published nor verified."""
        now, _ = judge.read(self._place, self._where, strict=False)
        known = self._ours.state.snapshots
        for snapshot_id, digest in now.snapshots.items():
            if known.get(snapshot_id, digest) == digest:
                continue
            if snapshot_id == self._published or self._verb("verify", snapshot_id).code == 0:
                self._add("wrong", f"snapshot {snapshot_id} has other bytes and nobody says so")
        return self._problems

    def _merge(self, expected: str, recipe: str, *more: str) -> None:
        args = ("merge", str(self._ours.world / f"{recipe}.yml"), "--json", *more)
        done = self._verb(*args)
        if done.code:
            return
        told = json.loads(done.out)
        found = told["snapshot_id"]
        self._published = found if "--publish" in more else ""
        packed = told["strategy"] == "packs"
        if found != self._ours.ids[expected] and found != self._fresh(args, packed=packed):
            self._add("wrong", f"{' '.join(args)} gives {found}, not {self._ours.ids[expected]}")

    def _fresh(self, args: tuple[str, ...], *, packed: bool) -> str:
        """What the inputs as they are now give in a new warehouse, which has the pack or none."""
        place = self._folder / "fresh"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if packed:
            _pack(self._ours.world, place, self._folder / "logs")
        done = child.run([*args, "--home", str(place / "w")], self._folder / "logs")
        return "" if done.code else str(json.loads(done.out)["snapshot_id"])

    def _verb(self, *args: str) -> Done:
        done = child.run([*args, "--home", str(self._place / "w")], self._folder / "logs")
        self._problems += judge.ending(done, f"{self._where}, {args[0]}")
        return done

    def _deploy(self) -> None:
        try:
            found = child.call(run_standing, self._place, False)
        except TimeoutError:
            self._add("hangs", "the standing recipe")
        except RuntimeError as error:
            self._add("tracebacks", str(error))
        else:
            if not found.startswith("error") and found != self._ours.ids["full"]:
                self._add("wrong", f"the standing recipe gives {found}")

    def _add(self, column: str, what: str) -> None:
        self._problems.append(Problem(column, self._where, what))


def _prepare(folder: Path) -> Undisturbed:
    """A warehouse in which everything has been used once, and what further merges give.

    The last merge in it was killed.
    """
    world, place, after = make_world(folder / "world"), folder / "place", folder / "after"
    place.mkdir()
    for name in ("base", "expert_00", "expert_01", "adapter"):
        ok(child.run(["register", str(world / name), "--home", f"{place}/w"], folder))
    _pack(world, place, folder)
    ids = {name: _id_of(place, folder, world, name, "--publish") for name in RECIPES}
    ok(child.run(["publish", ids["other"], "--ref", "full", "--home", f"{place}/w"], folder))
    standing = (world / "full.yml").read_text().replace(f"{world}/", "")  # by registered names
    (place / "w" / "recipes" / "full.yml").write_text(standing)
    found = child.call(run_standing, place, True)
    assert found == ids["full"], found
    killed = ["merge", str(world / "other.yml"), "--budget", "50%", "--home", f"{place}/w"]
    assert child.run(killed, folder, before=Shim(place, Fault("kill", 100)).install).code < 0
    copy_place(place, after)
    for name in ("full", "adapted"):
        ids[f"{name}, 30%"] = _id_of(after, folder, world, name, "--budget", "30%")
    state: State = child.call(state_of, after)
    assert not state.damage, state.damage
    return Undisturbed(world, place, ids, state)


def _pack(world: Path, place: Path, logs: Path) -> None:
    """Let one of the experts have a pack."""
    for name in ("base", "expert_00"):
        ok(child.run(["register", str(world / name), "--home", f"{place}/w"], logs))
    ok(child.run(["pack", "expert_00", "--base", "base", "--home", f"{place}/w"], logs))


def _id_of(place: Path, folder: Path, world: Path, recipe: str, *more: str) -> str:
    args = ["merge", str(world / f"{recipe}.yml"), "--json", *more, "--home", f"{place}/w"]
    return str(json.loads(ok(child.run(args, folder)).out)["snapshot_id"])


def ok(done: Done) -> Done:
    if done.code:
        raise RuntimeError(done.err)
    return done


def run_standing(place: Path, plan: bool) -> str:
    """What a standing recipe's steps give: a snapshot, or an error of the product."""
    from mergepipe_pipeline.deploy.recipe_files import recipe_files
    from mergepipe_pipeline.engine.options import EngineOptions
    from mergepipe_pipeline.errors import MergePipeError
    from mergepipe_pipeline.verbs import deploy
    from mergepipe_pipeline.warehouse import Warehouse

    home = Warehouse(place / "w")
    try:
        (recipe_file,) = recipe_files(home)
        if plan:
            deploy.plan_recipe(home, recipe_file)
        names = [layer.name for layer in deploy.current_plan(home, recipe_file.name).layers]
        list(deploy.merge_recipe(home, recipe_file.name, names, EngineOptions()))
        snapshot, _ = deploy.snapshot_recipe(home, recipe_file.name)
        deploy.release_recipe(home, recipe_file)
        deploy.last_release(home, recipe_file.name)
    except MergePipeError as error:
        return f"error: {error}"
    return snapshot.snapshot_id


def _files(home: Path, world: Path) -> dict[str, list[Path]]:
    """Kind to files: of the warehouse by folder, of snapshots by role, of inputs by role."""
    kinds: dict[str, list[Path]] = {}

    def add(kind: str, path: Path) -> None:
        if path.stat().st_size:
            kinds.setdefault(kind, []).append(path)

    for path in sorted(p for p in home.rglob("*") if p.is_file()):
        parts = path.relative_to(home).parts
        kind = "/".join(parts[:2]) if parts[0] == "catalog" else parts[0]
        if parts[:2] == ("catalog", "facts"):
            kind = f"catalog/{'statistics' if re.match(r'b[0-9]', path.name) else 'facts'}"
        if parts[0] == "packs":
            kind = f"packs/{path.suffix[1:]}"
        if parts[0] == "snapshots":
            kind = f"snapshots/{_role(path)}"
        add(kind, path)
    for name in _INPUTS:
        for path in sorted((world / name).iterdir()):
            role = _role(path)
            add(f"inputs/{role}", path)
            if role == "weights":
                add("inputs/header", path)
    return kinds


_ROLES = {
    "manifest.json": "manifest",
    "provenance.json": "provenance",
    "config.json": "config",
    "adapter_config.json": "adapter config",
    "model.safetensors.index.json": "index",
}


def _role(path: Path) -> str:
    return "weights" if path.suffix == ".safetensors" else _ROLES.get(path.name, "side file")


def _end(kind: str, data: bytes) -> int:
    """Bytes from the start that count: all, or a header's."""
    return 8 + int.from_bytes(data[:8], "little") if kind == "inputs/header" else len(data)


def _as_named(file: Path, other: Path) -> Path:
    """The other's path; of a file that is sealed by its name, with the seal of this one's bytes."""
    if other.suffix != ".parquet":
        return other
    stem, _, suffix = other.name.rsplit(".", 2)
    return other.with_name(f"{stem}.{file.name.rsplit('.', 2)[1]}.{suffix}")


def _put(path: Path, data: bytes) -> None:
    """Change bytes in place, as a disk does: size, times and links stay."""
    found = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(found.st_mode & 0o777)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
