"""Models that no name, size, time, header or sample tells from others that are known.

A drawn input gets a twin: some bytes differ where nothing samples. It comes in a drawn way after
drawn work with the other one; a drawn verb then gives what a warehouse gives that knows neither, or
it is refused, and the step that the refusal names can be taken.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from tests.lab.torture import child, judge
from tests.lab.torture.child import Done
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import recipes

_SHORT, _LONG = 6, 600
_INPUTS = {
    "base": ("full", "budget", "staged", "adapted"),
    "expert_00": ("full", "other", "budget", "staged", "adapted"),
    "expert_01": ("full", "other", "budget", "staged"),  # in two files
    "adapter": ("adapted",),
}
_HISTORIES = ("registered", "analysed", "planned", "merged", "packed", "landed")
_WAYS = ("another folder", "renamed over", "rewritten", "hard links", "hub cache", "linked folder")
_VERBS = ("merge", "plan", "analyze", "pack", "land", "verify", "diff", "replay")
#: Of a tensor its middle is in its checkpoint's id.
_SAMPLE_NBYTES = 256
_TIME_NS = 1_000_000_000  # as Nix gives every file


@dataclass(frozen=True)
class Try:
    """One twin, and all that is drawn for it."""

    seed: int
    model: str
    recipe: str
    nbytes: int
    history: str
    way: str
    verb: str

    def __str__(self) -> str:
        what = f"{self.model} differs in {self.nbytes} bytes, {self.history}, {self.way}"
        return f"twins: {what}: {self.verb} of {self.recipe}, seed {self.seed}"


class Twins:
    """The campaign; each try has inputs and warehouses of its own."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._count = world, _SHORT if short else _LONG

    def tries(self, seed: int) -> Iterator[Try]:
        """Every verb, history and way after the other, the rest as it comes."""
        draw = Random(seed)
        for number in range(self._count):
            model = draw.choice(list(_INPUTS))
            recipe = draw.choice(_INPUTS[model])
            history = _HISTORIES[(number + number // len(_VERBS)) % len(_HISTORIES)]
            verb = _VERBS[number % len(_VERBS)]
            if recipe == "budget" and (history == "packed" or verb == "pack"):
                recipe = "full"  # a budget buys other parts of experts that have packs
            yield Try(
                draw.randrange(1 << 30),
                model,
                recipe,
                draw.randint(1, 40),
                history,
                draw.choice(_WAYS),
                verb,
            )

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Work with a model, let its twin come, and compare what the verb gives."""
        scene = _Scene(one, self._world, folder)
        try:
            kind = scene.play()
        except _BrokenError as error:
            return Outcome.of("broken", [error.problem])
        return Outcome.of(f"{one.verb}, {kind}", [])


class _BrokenError(AssertionError):
    def __init__(self, column: str, one: Try, what: str) -> None:
        super().__init__(what)
        self.problem = Problem(column, str(one), what)


class _Scene:
    """One try: `world` holds the inputs, and `twin` is where the twin lies after it came."""

    def __init__(self, one: Try, world: Path, folder: Path) -> None:
        self._one, self._folder = one, folder
        self._world, self._home = folder / "world", folder / "w"
        shutil.copytree(world, self._world)
        for path in self._world.rglob("*"):
            os.utime(path, ns=(_TIME_NS, _TIME_NS))
        self._place = self._world / one.model
        self._twin = self._world / "more" / one.model
        self._made = folder / "made" / one.model
        shutil.copytree(self._place, self._made)
        self._differ(Random(one.seed))

    def play(self) -> str:
        """Whether the verb was right, or refused and right after the step that it named."""
        one = self._one
        before = self._work()
        self._come()
        expected = self._weights(self._folder / "fresh", self._recipe(self._twin))
        done, weights = self._verb(before)
        if done.code == 0:
            if weights is not None and weights != expected:
                raise _BrokenError("wrong", one, f"another result than {expected}: {done.out}")
            return "right"
        if "next" not in done.err:
            raise _BrokenError("wrong", one, f"no step is named: {done}")
        # As the refusal says: with a time of their own, which needs no right to write there.
        copy = self._folder / "copy" / one.model
        shutil.copytree(self._twin, copy, copy_function=shutil.copyfile)
        if self._weights(self._home, self._recipe(copy)) != expected:
            raise _BrokenError("wrong", one, "another result after the step that is named")
        return "refused"

    def _work(self) -> str:
        """What is done with the model before; the id of its result, if there is one."""
        one, run = self._one, self._run
        for name in ("base", one.model):
            run("register", str(self._world / name), "--name", name)
        if one.history == "analysed":
            run("analyze", one.model)
        if one.history == "planned":
            run("plan", self._recipe(self._place))
        if one.history == "landed":
            run("land", str(self._place))
            run("register", str(self._home / "inbox" / one.model))
        if one.history in ("merged", "packed", "landed"):
            done = run("merge", self._recipe(self._place), "--json")
            if one.history == "packed":
                run("pack", "expert_00", "--base", "base")
            return str(json.loads(done.out)["snapshot_id"])
        return ""

    def _come(self) -> None:
        """The twin comes; where it takes the model's place it has that path."""
        way = self._one.way
        files = [p for p in self._made.iterdir() if p.is_file()]
        if way in ("renamed over", "rewritten"):
            for path in (p for p in files if p.suffix == ".safetensors"):
                target = self._place / path.name
                if way == "renamed over":
                    shutil.copy2(path, target.with_suffix(".new"))
                    target.with_suffix(".new").replace(target)
                else:
                    target.write_bytes(path.read_bytes())
                    os.utime(target, ns=(_TIME_NS, _TIME_NS))
            self._twin = self._place
            return
        if way == "another folder":
            shutil.copytree(self._made, self._twin)
        elif way == "linked folder":
            self._twin.parent.mkdir()
            self._twin.symlink_to(self._made)
        elif way == "hard links":
            self._twin.mkdir(parents=True)
            for path in files:
                os.link(path, self._twin / path.name)
        else:
            cache = self._twin.parent / "models--twins--twin"
            shutil.copytree(self._made, cache / "blobs")
            self._twin = cache / "snapshots" / "0123456789abcdef"
            self._twin.mkdir(parents=True)
            for path in files:
                (self._twin / path.name).symlink_to(f"../../blobs/{path.name}")

    def _verb(self, before: str) -> tuple[Done, str | None]:
        """How the verb ends, and the weights that it gives if it gives some."""
        one, try_ = self._one, self._try
        recipe = self._recipe(self._twin)
        if one.verb in ("analyze", "pack", "verify"):
            done = try_("register", str(self._twin), "--name", "twin")
            if done.code:
                return done, None
        first: dict[str, list[str]] = {
            "plan": ["plan", recipe],
            "analyze": ["analyze", "twin"],
            "pack": ["pack", "twin", "--base", "base"],
            "verify": ["verify", "--all"],
            "land": ["land", str(self._twin), "--name", one.model],
        }
        if one.verb == "replay" and before and self._twin == self._place:
            done = try_("replay", before)
            if done.code == 0:
                raise _BrokenError("wrong", one, f"it is replayed from others: {done.out}")
            return done, None
        if one.verb in first and not (one.verb == "pack" and one.model in ("base", "adapter")):
            done = try_(*first[one.verb])
            if done.code:
                return done, None
        if one.verb == "land":
            recipe = self._recipe(self._home / "inbox" / one.model)
        done = try_("merge", recipe, "--json")
        weights = self._read(self._home, done) if done.code == 0 else None
        if one.verb == "diff" and before and done.code == 0:
            after = str(json.loads(done.out)["snapshot_id"])
            same = weights == self._weights_of(self._home, before)
            told = json.loads(try_("diff", before, after, "--json").out)
            if not same and before == after:
                raise _BrokenError("wrong", one, f"diff: {told}")
        return done, weights

    def _differ(self, draw: Random) -> None:
        """Change bytes of the twin that are in no sample."""
        wanted = open_checkpoint(str(self._place), "x").checkpoint_id
        checkpoint = open_checkpoint(str(self._made), "x")
        large = [t for t in checkpoint.tensors if t.nbytes > _SAMPLE_NBYTES]
        for _ in range(self._one.nbytes):
            entry = draw.choice(large)
            path = self._made / entry.file
            data, size = bytearray(path.read_bytes()), entry.nbytes // entry.numel
            # Of the lower half of a number, so that none becomes infinite.
            at = entry.start_byte + draw.randrange(entry.numel) * size
            old = data[at]
            data[at] ^= 1 << draw.randrange(8)
            for content in (bytes(data), bytes(data[:at]) + bytes([old]) + bytes(data[at + 1 :])):
                path.write_bytes(content)
                os.utime(path, ns=(_TIME_NS, _TIME_NS))
                if open_checkpoint(str(self._made), "x").checkpoint_id == wanted:
                    break

    def _recipe(self, model: Path) -> str:
        """The file of the recipe with this folder in the model's place."""
        path = self._folder / f"{sha256(str(model).encode()).hexdigest()[:8]}.yml"
        text = recipes(self._world)[self._one.recipe].replace(str(self._place), str(model))
        path.write_text(text)
        return str(path)

    def _weights(self, home: Path, recipe: str) -> str:
        return self._read(home, self._run("merge", recipe, "--json", home=home))

    def _read(self, home: Path, done: Done) -> str:
        return self._weights_of(home, str(json.loads(done.out)["snapshot_id"]))

    def _weights_of(self, home: Path, snapshot_id: str) -> str:
        files = sorted((home / "snapshots" / snapshot_id).glob("*.safetensors"))
        return sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:16]

    def _run(self, *args: str, home: Path | None = None) -> Done:
        done = self._try(*args, home=home)
        if done.code:
            raise _BrokenError("lost", self._one, f"{' '.join(args)}: {done.err}")
        return done

    def _try(self, *args: str, home: Path | None = None) -> Done:
        done = child.run([*args, "--home", str(home or self._home)], self._folder / "logs")
        if args[0] == "verify":  # its findings are its answer
            done = replace(done, err=f"{done.err}error: {done.out}".lower())
        for problem in judge.ending(done, str(self._one)):
            raise _BrokenError(problem.column, self._one, problem.what)
        return done
