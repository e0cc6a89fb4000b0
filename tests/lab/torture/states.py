"""All verbs in any order, with crashes between and in them, against a plain model."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.lab.torture import child, judge
from tests.lab.torture.scenes import RECIPES
from tests.lab.torture.shim import KINDS, Fault, Shim
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import State, copy_place, new_version, recipes, state_of

_SHORT, _LONG = (2, 1, 10), (24, 5, 20)  # runs, examples of each, steps of each
_MODELS = st.sampled_from(["base", "expert_00", "expert_01"])
_NAMES = st.sampled_from(RECIPES)
_BUDGETS = st.sampled_from([None, None, "0", "35%", "70%"])
_FAULTS = st.none() | st.builds(
    Fault, st.sampled_from(KINDS), st.integers(0, 220), st.integers(0, 1 << 30)
)
#: What can be made again.
_DERIVED = ["actions", "plans", "catalog/facts", "catalog/contents", "catalog/places"]


@dataclass(frozen=True)
class Try:
    """One run of the machine: some examples of some steps, drawn from `seed`."""

    seed: int
    examples: int
    steps: int

    def __str__(self) -> str:
        return f"states, seed {self.seed}, {self.examples} examples of {self.steps} steps"


class States:
    """The campaign; each worker has a place of its own, where inputs change."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._folder, self._size = world, folder, _SHORT if short else _LONG

    def tries(self, seed: int) -> Iterator[Try]:
        """Runs with seeds of their own."""
        draw = Random(seed)
        runs, examples, steps = self._size
        return (Try(draw.randrange(1 << 30), examples, steps) for _ in range(runs))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Run the machine; what fails ends the run, and its steps are the report."""
        Machine.base, Machine.live = self._world, self._folder / f"live-{os.getpid()}"
        Machine.done, Machine.states = Counter(), set()
        found = settings(
            max_examples=one.examples,
            stateful_step_count=one.steps,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        problems = []
        try:
            run_state_machine_as_test(seed(one.seed)(Machine), settings=found)
        except Exception as error:
            told = "\n".join([*Machine.told, traceback.format_exc()[-1500:]])
            column = getattr(error, "column", "wrong")
            problems = [Problem(column, str(one), told)]
        return Outcome(Machine.done, problems, frozenset(Machine.states))


class Broken(AssertionError):
    """A promise was broken; `column` of the table."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.column}: {problem.where}: {problem.what}")
        self.column = problem.column


class Machine(RuleBasedStateMachine):
    """`refs`: what each name stood for; `must`: snapshots that are there, with their digests."""

    base: ClassVar[Path]
    live: ClassVar[Path]
    done: ClassVar[Counter[str]]
    states: ClassVar[set[str]]
    told: ClassVar[list[str]]
    oracle: ClassVar[dict[tuple[object, ...], tuple[str, State]]] = {}

    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.live, ignore_errors=True)
        copy_place(self.base, self.live / "world")
        for name, text in recipes(self.live / "world").items():
            (self.live / "world" / f"{name}.yml").write_text(text)
        self.place.mkdir()
        Machine.told = []
        self.versions = [0, 0]
        self.registered: set[str] = set()
        self.refs: dict[str, list[str]] = {}
        self.must: dict[str, str] = {}
        self.known: dict[str, str] = {}

    @initialize(recipe=_NAMES)
    def begin(self, recipe: str) -> None:
        self.merge(recipe, None, None, True, False)

    @property
    def place(self) -> Path:
        """Where warehouse and exports are."""
        return self.live / "place"

    @rule(model=_MODELS, fault=_FAULTS)
    def register(self, model: str, fault: Fault | None) -> None:
        if self._verb(fault, "register", str(self.live / "world" / model)):
            self.registered.add(model)

    @precondition(lambda self: {"base", "expert_00"} <= self.registered)
    @rule(fault=_FAULTS)
    def analyze(self, fault: Fault | None) -> None:
        self._verb(fault, "analyze", "expert_00", "--base", "base")

    @rule(expert=st.integers(0, 1))
    def train_again(self, expert: int) -> None:
        self.versions[expert] = (self.versions[expert] + 1) % 3
        new_version(self.live / "world", expert, self.versions[expert])
        Machine.told.append(f"new version {self.versions[expert]} of expert {expert}")

    @rule(recipe=_NAMES, budget=_BUDGETS, fault=_FAULTS)
    def plan(self, recipe: str, budget: str | None, fault: Fault | None) -> None:
        self._expected(recipe, budget)  # stages are merged for a plan
        self._verb(fault, "plan", *self._recipe(recipe, budget))

    @rule(recipe=_NAMES, budget=_BUDGETS, fault=_FAULTS, live=st.booleans(), out=st.booleans())
    def merge(
        self, recipe: str, budget: str | None, fault: Fault | None, live: bool, out: bool
    ) -> None:
        expected, _ = self._expected(recipe, budget)
        shutil.rmtree(self.place / "out", ignore_errors=True)
        more = ["--publish"] * live + ["--out", str(self.place / "out")] * out
        if self._verb(fault, "merge", *self._recipe(recipe, budget), *more, ref=(recipe, expected)):
            self.must[expected] = self.known[expected]
            if live and self.refs.get(recipe, [])[-1:] != [expected]:
                raise Broken(Problem("lost", "merge --publish", f"{recipe} is not {expected}"))
            if out and not (self.place / "out").exists():
                raise Broken(Problem("lost", "merge --out", "nothing is there"))

    @precondition(lambda self: self.must)
    @rule(data=st.data(), name=_NAMES, fault=_FAULTS)
    def publish(self, data: st.DataObject, name: str, fault: Fault | None) -> None:
        wanted = data.draw(st.sampled_from(sorted(self.must)))
        done = self._verb(fault, "publish", wanted, "--ref", name, ref=(name, wanted))
        if done and self.refs[name][-1] != wanted:
            raise Broken(Problem("lost", "publish", f"{name} is not {wanted}"))

    @precondition(lambda self: any(len(set(v)) > 1 for v in self.refs.values()))
    @rule(data=st.data(), fault=_FAULTS)
    def roll_back(self, data: st.DataObject, fault: Fault | None) -> None:
        names = sorted(n for n, v in self.refs.items() if len(set(v)) > 1)
        name = data.draw(st.sampled_from(names))
        older = next(v for v in self.refs[name][::-1] if v != self.refs[name][-1])
        done = self._verb(fault, "rollback", name, ref=(name, older))
        if done and self.refs[name][-1] != older:
            raise Broken(Problem("lost", "rollback", f"{name} is not {older}"))

    @rule(fault=_FAULTS)
    def gc(self, fault: Fault | None) -> None:
        self._verb(fault, "gc", "--older-than", "0")

    @precondition(lambda self: (self.place / "w").exists())
    @rule(data=st.data(), kind=st.sampled_from(_DERIVED))
    def damage(self, data: st.DataObject, kind: str) -> None:
        files = [p for p in (self.place / "w" / kind).rglob("*") if p.is_file()]
        if not files:
            return
        path = data.draw(st.sampled_from(sorted(files)))
        if data.draw(st.booleans()):
            content = bytearray(path.read_bytes())
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
        else:
            path.unlink()
        Machine.told.append(f"damage {path.relative_to(self.place)}")

    @invariant()
    def results_are_there_and_right(self) -> None:
        now, problems = judge.read(self.place, "reading", strict=False)
        for problem in problems:
            raise Broken(problem)
        if now.refs != self.refs:
            raise Broken(Problem("lost", "refs", f"{now.refs}, expected {self.refs}"))
        for snapshot_id, digest in {**self.must, **now.snapshots}.items():
            if snapshot_id not in now.snapshots:
                raise Broken(Problem("lost", "snapshots", snapshot_id))
            if self.known.get(snapshot_id) != digest:
                raise Broken(Problem("wrong", "snapshots", snapshot_id))
        shown = json.dumps([now.snapshots, now.refs, now.names, sorted(now.derived)])
        self.states.add(sha256(shown.encode()).hexdigest()[:16])

    def teardown(self) -> None:
        shutil.rmtree(self.live, ignore_errors=True)

    def _recipe(self, recipe: str, budget: str | None) -> list[str]:
        path = str(self.live / "world" / f"{recipe}.yml")
        return [path, *(["--budget", budget] if budget else [])]

    def _expected(self, recipe: str, budget: str | None) -> tuple[str, State]:
        """The id of what a recipe gives now, and all snapshots on the way, undisturbed."""
        key = (recipe, budget, *self.versions)
        if key not in self.oracle:
            place = self.live / "oracle"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            args = ["merge", *self._recipe(recipe, budget), "--json", "--home", f"{place}/w"]
            done = child.run(args, self.live / "logs")
            assert done.code == 0, done.err
            self.oracle[key] = json.loads(done.out)["snapshot_id"], child.call(state_of, place)
        self.known |= self.oracle[key][1].snapshots
        return self.oracle[key]

    def _verb(self, fault: Fault | None, *args: str, ref: tuple[str, str] | None = None) -> bool:
        """Run a verb, with a fault if one is given; whether it said that it is done.

        `ref`: the name, and what it may stand for afterwards.
        """
        self.done[f"{args[0]}, {fault.kind}" if fault else args[0]] += 1
        Machine.told.append(f"{' '.join(args)} with {fault}")
        shim = Shim(self.place, fault) if fault else None

        def power_off() -> None:
            if shim and shim.disk:
                shim.power_off()

        all_args = [*args, "--home", str(self.place / "w")]
        logs = self.live / "logs"
        done = child.run(all_args, logs, before=shim.install if shim else None, after=power_off)
        if (lost := self.live / "lost").exists():
            shutil.rmtree(self.place)
            lost.rename(self.place)
        if done.code != -9 or done.hung:
            for problem in judge.ending(done, " ".join(args)):
                raise Broken(problem)
        if done.code and fault is None:
            raise Broken(Problem("lost", " ".join(args), f"ends with {done.code}: {done.err}"))
        now, _ = judge.read(self.place, "reading", strict=False)
        if ref is not None:
            name, target = ref
            before = self.refs.get(name, [])
            if now.refs.get(name, []) == [*before, target]:
                self.refs[name] = [*before, target]
        return done.code == 0
