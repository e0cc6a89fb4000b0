"""Waits for quiet after an event and compares what ran and was published with the model."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.lab.soak.events import Scene
from tests.lab.soak.watch import Run

#: Sensors that must have looked once more before a silence counts.
_WATCHED = ("inbox_sensor", "recipe_sensor")
_LONGEST_LOOK_S = 5.0


#: Kind and name of what is lacking, and the number that it waits for.
Lack = tuple[str, str, object]


@dataclass(frozen=True)
class Row:
    """One event: how many runs and indexings it took, how many it needed, what went wrong."""

    event: str
    launched: int
    needed: int
    missed: tuple[str, ...]
    superfluous: tuple[str, ...]
    wrong: tuple[str, ...]
    seconds: float

    @property
    def good(self) -> bool:
        """Nothing needed was missed, nothing else ran, nothing wrong was published."""
        return not (self.missed or self.superfluous or self.wrong)


@dataclass(frozen=True)
class Latency:
    """Seconds from the last byte of an event to an index run's start and to a ref's move."""

    to_index_s: float
    to_ref_s: float


@dataclass
class Judge:
    """Judges one event after the other; what was missed once is not missed again."""

    scene: Scene
    quiet_s: float
    timeout_s: float
    latencies: list[Latency] = field(default_factory=list)
    _given_up: set[Lack] = field(default_factory=set)
    _seen: dict[str, int] = field(default_factory=dict)
    _began: float = field(default_factory=time.time)
    _wanted: dict[str, float] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """An event begins."""
        model = self.scene.world.model
        self._given_up &= self._all_lacking()
        model.mark()
        self.scene.ended.clear()
        self._began, self._wanted = time.time(), model.all_wanted()
        self._steps = {name: len(states) for name, states in model.states.items()}

    def end(self, event: str) -> Row:
        """Wait for quiet, or until time is up, and judge."""
        late = {name for _, name, _ in self._given_up}
        lacking = self.wait()
        self._given_up |= lacking
        missed = tuple(sorted(f"{x} {name} {y}" for x, name, y in lacking if x != "run"))
        runs = self._runs()
        indexed = self.scene.watch.indexed(self._began)
        spare, needed = self._superfluous(runs, indexed, late)
        if not missed:
            self._time(runs)
        seconds = time.time() - self._began
        wrong = tuple(self._wrong())
        return Row(event, len(runs), needed, missed, spare, wrong, seconds)

    def _runs(self) -> list[Run]:
        return self.scene.watch.runs(self._began)

    def wait(self) -> set[Lack]:
        """What is still lacking when the time is up; empty once a silence has been looked at."""
        silent_since: float | None = None
        left_s, looked = self.timeout_s, time.monotonic()
        while left_s > 0:
            lacking = self._lacking()
            if lacking:
                silent_since = None
            elif silent_since is None:
                silent_since = max(time.time(), self.scene.world.last_byte + self.quiet_s + 1)
            elif self._looked_since(silent_since) and not self._lacking():
                return set()  # and what they saw asked for nothing
            time.sleep(0.5)
            # A machine that stood still for a while gave nobody time.
            left_s -= min(time.monotonic() - looked, _LONGEST_LOOK_S)
            looked = time.monotonic()
        return self._lacking()

    def _lacking(self) -> set[Lack]:
        """What the model still waits for, but for what it has waited for in vain."""
        return self._all_lacking() - self._given_up

    def _all_lacking(self) -> set[Lack]:
        """Recipes with their numbers, experts, and runs under way."""
        world, watch = self.scene.world, self.scene.watch
        lacking: set[Lack] = {
            ("recipe", name, value)
            for name, value in world.model.all_wanted().items()
            if not (found := watch.released(name)) or found[-1][1] != (value,)
        }
        done = watch.indexed(self._began)
        here = {n for n in world.model.writes if n in world.model.inbox}
        lacking |= {("expert", n, world.model.inbox[n]) for n in here if n not in done}
        lacking |= {("overdue", n, "release") for n in world.model.overdue - watch.overdue()}
        lacking |= {("quarantine", n, "") for n in world.model.worst() if not watch.is_kept_out(n)}
        lacking |= {("run", r.run_id, "") for r in watch.runs() if not r.over}
        return lacking

    def _looked_since(self, moment: float) -> bool:
        ticks = self.scene.watch.ticks(moment)
        looked = {name for name, began, _ in ticks if began >= moment}
        return all(any(watched in name for name in looked) for watched in _WATCHED)

    def _superfluous(
        self, runs: list[Run], indexed: dict[str, int], late: set[str]
    ) -> tuple[tuple[str, ...], int]:
        """What ran more often than the model asked, and how much was needed at least.

        What the event itself ended may run again, and what an earlier event waited for in vain.
        """
        model, ended = self.scene.world.model, self.scene.ended
        spare, needed = [], 0
        for name in sorted({r.recipe for r in runs if r.recipe} | set(model.states)):
            states = model.states.get(name, [])
            steps = len(states) - self._steps.get(name, 0)
            mine = [r for r in runs if r.recipe == name]
            # What a gate refuses is merged, and traced.
            steps += 2 * model.refused[name]
            more = len(mine) - steps - sum(r.run_id in ended for r in mine) - (name in late)
            spare += [f"{more} of recipe {name}"] * (more > 0)
            needed += 2 * bool(model.refused[name])
            needed += model.wanted(name) is not None and model.wanted(name) != self._wanted.get(
                name
            )
        cut = Counter(e for r in runs if r.run_id in ended for e in r.experts)
        for name, count in sorted(indexed.items()):
            more = count - model.writes[name] - cut[name] - (name in late)
            spare += [f"{more} of expert {name}"] * (more > 0)
        here = {n for n in model.writes if n in model.inbox}
        failed = [r for r in runs if r.recipe is None and r.status == "FAILURE"]
        spare += [f"failed index of {r.experts}" for r in failed if r.run_id not in ended]
        return tuple(spare), needed + len(here)

    def _wrong(self) -> list[str]:
        """Published numbers that nobody ever asked for, crowded pools, and a false alarm."""
        model, watch, found = self.scene.world.model, self.scene.watch, list[str]()
        found += [f"{n} runs at once in {p}" for p, n in watch.crowded_pools(self._began).items()]
        found += [f"{n} is called overdue" for n in sorted(watch.overdue() - model.overdue)]
        found += watch.mixed()
        for name, states in model.states.items():
            versions = self.scene.watch.released(name)
            for _, values in versions[self._seen.get(name, 0) :]:
                if len(values) != 1 or values[0] not in states:
                    found.append(f"{name} published {values[:4]}")
            self._seen[name] = len(versions)
        return found

    def _time(self, runs: list[Run]) -> None:
        """Note how long it took, where one new version led to a release."""
        last = self.scene.world.last_byte
        starts = [r.started for r in runs if r.recipe is None and r.started and r.started > last]
        moves = [
            when
            for name in self.scene.world.model.states
            for when, _ in self.scene.watch.released(name)
            if when > last
        ]
        if len(self.scene.world.model.writes) == 1 and starts and moves and not self.scene.ended:
            self.latencies.append(Latency(min(starts) - last, min(moves) - last))
