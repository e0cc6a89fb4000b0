"""The files of a warehouse's Dagster instance: its settings, and what code it loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.locks import claim_for_life, this_process
from mergepipe_pipeline.warehouse import Warehouse

#: The settings that an instance begins with; each says what it does.
SETTINGS = Path(__file__).resolve().parents[1] / "dagster.yaml"
#: As the repository's workspace.yaml, so that sensors keep their state whoever starts them.
_WORKSPACE = """load_from:
  - python_module:
      module_name: mergepipe_pipeline.definitions
      location_name: mergepipe
"""


#: The file whose lock the process holds that runs an instance's sensors and schedules.
_LOCK = "mergepipe.lock"


def prepare_instance(warehouse: Warehouse, home: Path | None = None) -> Path:
    """Make the instance's folder and settings unless they are there. Returns a workspace file.

    `home` is DAGSTER_HOME, by default a folder of the warehouse.
    """
    home = home or warehouse.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    if not (home / SETTINGS.name).exists():
        shutil.copy(SETTINGS, home)
    warehouse.dagster_home.mkdir(parents=True, exist_ok=True)
    workspace = warehouse.dagster_home / "workspace.yaml"
    write_atomic(workspace, _WORKSPACE.encode())
    return workspace


def claim_instance(home: Path, url: str) -> str | None:
    """Let this process alone run the sensors and schedules of an instance, until it ends.

    Two daemons would start each run twice. Returns None, or who does so already, as it said.
    """
    other = claim_for_life(home / _LOCK, f"{url}, {this_process()}".encode())
    return None if other is None else other.decode(errors="replace")
