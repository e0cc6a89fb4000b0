"""Every change of the file system of every verb goes wrong once, in every way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.lab.torture import child, judge
from tests.lab.torture.scenes import Scene, scenes_of
from tests.lab.torture.shim import KINDS, Fault, Shim
from tests.lab.torture.tally import Outcome
from tests.lab.torture.world import copy_place

_SHORT = 10


@dataclass(frozen=True)
class Try:
    """One fault in one scene; says how to see it again."""

    scene: Scene
    fault: Fault

    def __str__(self) -> str:
        f = self.fault
        return f"{self.scene.verb.name}: {f.kind} at step {f.at}, seed {f.seed}"


class Faults:
    """The campaign over one world; scenes are made before the workers are."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._short = world, short
        self._scenes = scenes_of(world, world.parent / "scenes", short=short)

    def tries(self, seed: int) -> Iterator[Try]:
        """Each step of each verb in one of the ways, and power loss after each verb's end.

        Seeds draw the ways, so that as many runs find them all; of one, a sample in the short form.
        Shuffled, so that a run that is cut short has seen all verbs.
        """
        draw = Random(seed)
        every = [
            Try(scene, Fault(draw.choice(KINDS), at, draw.randrange(1 << 30)))
            for scene in self._scenes
            for at in range(len(scene.steps))
        ]
        every += [
            Try(scene, Fault("power", len(scene.steps), seed))
            for scene in self._scenes
            for seed in range(3)
        ]
        return iter(draw.sample(every, _SHORT if self._short else len(every)))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Run the verb with the fault, look at what is left, run it again without."""
        scene, fault = one.scene, one.fault
        place, logs, where = folder / "place", folder / "logs", str(one)
        copy_place(scene.place, place)
        shim = Shim(place, fault)

        def ended() -> None:
            if fault.kind == "power":
                shim.power_off()

        args = scene.verb.at(self._world, place)
        done = child.run(args, logs, before=shim.install, after=ended)
        if (lost := folder / "lost").exists():
            shutil.rmtree(place)
            lost.rename(place)
        return Outcome.of(fault.kind, judge.verdict(scene, args, place, logs, done, where))
