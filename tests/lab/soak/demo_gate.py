"""`python -m tests.lab.soak.demo_gate`: a version made worse never reaches the ref, without a hand.

`mergepipe ui` runs with its own settings over the demo's family and a recipe whose gate counts the
skills. Twice an expert's change is turned around, and its mended version follows: first alone and
copied over the old one in the inbox, then beside a good version of another expert, each version in
a folder of its own. Each step is asserted; prints when, and what the ref's model can do.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
from dagster import DagsterRunStatus as Status
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.demo.family import (
    DEMO_DENSITY,
    DEMO_LAMBDA,
    DEMO_WEIGHT,
    Family,
    build_family,
)
from mergepipe_pipeline.demo.skills import SKILLS, score
from mergepipe_pipeline.facts.quarantine import is_quarantined, quarantine_of
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.daemon import REPOSITORY, Daemon, running_daemon

RECIPE = "skills"
_MERGE, _BISECT = f"merge_{RECIPE}", f"bisect_{RECIPE}"
#: Made worse alone, made worse beside a good one, and that good one.
_BAD_AND_GOOD = ("copy", "rotate", "sort")
#: Every setting as it is for who sets none.
_AS_IT_IS = {
    "MERGEPIPE_INBOX_QUIET_S": "",
    "MERGEPIPE_SENSOR_INTERVAL_S": "",
    "PYTHONPATH": str(REPOSITORY),
}
#: What a landing may take until the ref or a quarantine follows, in seconds.
_MOST_S = 240.0
_WORSE, _MENDED = -1.0, 1.1


@dataclass
class Proof:
    """A warehouse that people give experts to, the daemon over it, and the steps that were seen."""

    home: Warehouse
    family: Family
    daemon: Daemon
    models: Path
    steps: list[tuple[str, float]] = field(default_factory=list)
    merges: list[Status] = field(default_factory=list)
    bisections: int = 0

    def copy(self, name: str, source: Path) -> None:
        """Copy a checkpoint over what the inbox has under its name."""
        shutil.copytree(source, self.home.inbox / name, dirs_exist_ok=True)
        self._began = time.monotonic()

    def register(self, name: str, source: Path) -> None:
        """Put a version into a folder of its own, and say that this is the newest."""
        number = len(list(self.models.glob(f"{name}-*"))) + 1
        shutil.copytree(source, self.models / f"{name}-{number}")
        register(self.home, self.models / f"{name}-{number}", name)
        self._began = time.monotonic()

    def see(self, what: str, look: Callable[[], bool]) -> None:
        """Wait until something is so, and note how long after the last byte."""
        self.daemon.wait_for(what, look, seconds=_MOST_S)
        self.steps.append((what, time.monotonic() - self._began))
        print(f"{self.steps[-1][1]:6.1f} s  {what}", flush=True)

    def see_released(self, what: str) -> dict[str, float]:
        """Wait for the next version of the ref; what its model can do, measured here."""
        self.merges.append(Status.SUCCESS)
        number = self.merges.count(Status.SUCCESS)
        self.see(f"{what} is released", lambda: self._version() == number)
        self.see("its run ends", lambda: self._runs(_MERGE) == self.merges)
        return self.skills()

    def see_kept_out(self, bad: str) -> None:
        """Wait for refusal, bisection, quarantine, and for the sensor to say so; the ref stays."""
        before = self._version()
        self.merges.append(Status.FAILURE)
        self.bisections += 1
        self.see("the gate refuses", lambda: self._runs(_MERGE) == self.merges)
        ended = [Status.SUCCESS] * self.bisections
        self.see("the bisection ends", lambda: self._runs(_BISECT) == ended)
        decision = quarantine_of(self.home, bad)
        assert decision is not None, _report(self.daemon)
        assert f"{bad} is the suspect" in decision.reason, decision.reason
        told = f"{bad} is quarantined since"
        self.see(f"recipe_sensor says that {bad} is quarantined", lambda: self._says(told))
        assert self._version() == before
        print(f"{decision.reason}\n{_report(self.daemon)}")

    def skills(self) -> dict[str, float]:
        """What the model that the ref names can do."""
        return score(self.home.snapshots / self.home.refs.current(RECIPE).snapshot_id)

    def _version(self) -> int:
        refs = self.home.refs
        return refs.current(RECIPE).number if RECIPE in refs.names() else 0

    def _runs(self, job: str) -> list[Status]:
        return [run.status for run in self.daemon.runs(job)]

    def _says(self, words: str) -> bool:
        return any(words in said for said in self.daemon.skips("recipe_sensor"))


def main() -> int:
    """Run it; the exit code. Raises AssertionError with what did not happen."""
    warnings.filterwarnings("ignore")
    family = build_family(print)
    with tempfile.TemporaryDirectory(prefix="demo-gate-") as folder:
        home = Warehouse.at(Path(folder) / "warehouse").ensure()
        _write_recipe(home)
        with running_daemon(home, ui="mergepipe", **_AS_IT_IS) as daemon:
            found = _act(Proof(home, family, daemon, Path(folder) / "models"))
    print(f"{'skill':10} {' '.join(f'{name:>12}' for name in found)}")
    for skill in SKILLS:
        print(f"{skill:10} {' '.join(f'{can[skill]:12.1%}' for can in found.values())}")
    return 0


def _act(proof: Proof) -> dict[str, dict[str, float]]:
    """Everything that happens; what the ref's model can do after each release."""
    family, (alone, beside, good) = proof.family, _BAD_AND_GOOD
    worse, mended = (
        {name: _scaled(family, name, factor, proof.home.root.parent) for name in (alone, beside)}
        for factor in (_WORSE, _MENDED)
    )
    for name, source in {"base": family.base, **family.experts}.items():
        (proof.register if name in (beside, good) else proof.copy)(name, source)
    found = {"first": proof.see_released("the first version")}

    proof.copy(alone, worse[alone])
    proof.see_kept_out(alone)
    assert proof.skills() == found["first"]
    proof.copy(alone, mended[alone])
    found["second"] = proof.see_released(f"the mended {alone}")

    proof.register(beside, worse[beside])
    proof.register(good, family.second)
    proof.see_kept_out(beside)
    assert not is_quarantined(proof.home, good)
    assert proof.skills() == found["second"]
    proof.register(beside, mended[beside])
    found["third"] = proof.see_released(f"the mended {beside}")
    return found


def _report(daemon: Daemon) -> str:
    """The candidates that the asset `bisect` shows."""
    with daemon.instance as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey([RECIPE, "bisect"]))
    assert event is not None
    assert event.asset_materialization is not None
    return str(event.asset_materialization.metadata["candidates"].value)


def _write_recipe(home: Warehouse) -> None:
    models = "".join(f"- {{model: {s}, parameters: {{weight: {DEMO_WEIGHT}}}}}\n" for s in SKILLS)
    gate = "".join(f"  {skill}: {{max_drop: 0.1}}\n" for skill in SKILLS)
    home.recipe_path(RECIPE).write_text(
        f"merge_method: ties\nbase_model: base\nmodels:\n{models}"
        f"parameters: {{density: {DEMO_DENSITY}, lambda: {DEMO_LAMBDA}}}\n"
        f"evaluate: {{python: 'mergepipe_pipeline.demo.skills:score'}}\n"
        f"gate:\n{gate}  on_failure: bisect\n"
    )


def _scaled(family: Family, name: str, factor: float, folder: Path) -> Path:
    """An expert whose every change of the base is multiplied by `factor`."""
    made = folder / f"{name}-{factor}"
    shutil.copytree(family.experts[name], made)
    base = load_file(family.base / "model.safetensors")
    tensors = load_file(made / "model.safetensors")
    for key, tensor in tensors.items():
        origin = base[key].float()
        tensors[key] = (origin + factor * (tensor.float() - origin)).to(tensor.dtype)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


if __name__ == "__main__":
    sys.exit(main())
