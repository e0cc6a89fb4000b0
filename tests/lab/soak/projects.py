"""Projects of `dg` with components: two code locations and two warehouses on one instance."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.soak.watch import Seat
from tests.lab.soak.world import put_file

_TYPES = "mergepipe_pipeline.dagster"
#: Their own executor, which starts no process for each step.
_EXECUTOR = """import dagster as dg

@dg.definitions
def executor() -> dg.Definitions:
    return dg.Definitions(executor=dg.in_process_executor)
"""
#: An instance of somebody who has set nothing for merges.
SETTINGS = """telemetry: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 4}}
"""


@dataclass(frozen=True)
class Guest:
    """A warehouse in a project, whose recipes lie in a folder, or as texts in the YAML."""

    home: Warehouse
    seat: Seat
    defs: Path
    reload: Callable[[str], None]
    has_folder: bool = True

    @property
    def beside(self) -> Path:
        """Where programs of recipes lie."""
        return self._folder("merges") / "recipes" if self.has_folder else self._folder("merges")

    def settle(self) -> None:
        """Write the components, but for recipes that stand in YAML."""
        self._component("inbox", "InboxComponent", {})
        self._component("housekeeping", "HousekeepingComponent", {"reload": self.has_folder})
        self.beside.mkdir(parents=True)
        if self.has_folder:
            self._component("merges", "MergeRecipeComponent", {"recipes": "recipes"})

    def put(self, name: str, text: str | None) -> None:
        """Write or take away a recipe; a code location that does not look itself is reloaded."""
        if self.has_folder:
            put_file(self.beside / f"{name}.yml", text)
            return
        path = self._folder("merges") / "defs.yaml"
        had = yaml.safe_load(path.read_text())["attributes"] if path.exists() else {}
        recipes = {**had.get("recipes", {}), name: text}
        left = {n: t for n, t in recipes.items() if t is not None}
        self._component("merges", "MergeRecipeComponent", {"recipes": left})
        self.reload(self.seat.location)

    def _component(self, name: str, kind: str, attributes: dict[str, Any]) -> None:
        folder = self._folder(name)
        folder.mkdir(exist_ok=True)
        own = {"home": str(self.home.root), "key_prefix": list(self.seat.keys), **attributes}
        text = yaml.safe_dump({"type": f"{_TYPES}.{kind}", "attributes": own})
        put_file(folder / "defs.yaml", text)

    def _folder(self, name: str) -> Path:
        return self.defs / f"{self.home.root.name}_{name}"


def make_projects(folder: Path, reload: Callable[[str], None]) -> tuple[Path, list[Guest]]:
    """The workspace of two projects, and who stands in them."""
    first, second = (_project(folder, name) for name in ("first", "second"))

    def home(name: str) -> Warehouse:
        return Warehouse(folder / "warehouses" / name).ensure()

    ours = Seat("second", "our_team_", ("our", "team"))
    guests = [
        Guest(home("first"), Seat("first", "mergepipe_"), first, reload),
        Guest(home("second"), ours, second, reload, has_folder=False),
    ]
    for one in guests:
        one.settle()
    origins = [
        {
            "python_module": {
                "module_name": f"{path.parent.name}.definitions",
                "working_directory": str(path.parents[1]),
                "location_name": path.parent.name,
            }
        }
        for path in (first, second)
    ]
    workspace = folder / "workspace.yaml"
    workspace.write_text(yaml.safe_dump({"load_from": origins}))
    return workspace, guests


def _project(folder: Path, name: str) -> Path:
    """The folder of definitions of a project that `create-dagster` makes."""
    create = Path(sys.executable).with_name("create-dagster")
    command = [str(create), "project", "--no-uv-sync", str(folder / name)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    defs = folder / name / "src" / name / "defs"
    (defs / "executor.py").write_text(_EXECUTOR)
    return defs
