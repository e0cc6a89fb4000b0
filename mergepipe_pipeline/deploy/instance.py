"""The files of a warehouse's Dagster instance: its settings, what code it loads, and the name by
which an instance that others use, too, knows the warehouse. And whether a process of it lives.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.atomic import READ_ONLY, create_exclusive, write_atomic
from mergepipe_pipeline.storage.locks import claim_for_life, this_process
from mergepipe_pipeline.warehouse import Warehouse

#: The settings that an instance begins with; each says what it does.
SETTINGS = Path(__file__).resolve().parents[1] / "dagster.yaml"
_IDENTITY = "identity"
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


def identity_of(warehouse: Warehouse) -> str:
    """The identity of a warehouse among all on one Dagster instance: twelve hexadecimal digits.

    Drawn when it is first asked for, and kept: containers of two teams have their warehouses at one
    path, and machines have one warehouse at several. Where none can be kept, as before a warehouse
    is made or where nobody may write, it follows from the path.
    """
    path = warehouse.dagster_home / _IDENTITY
    with suppress(FileNotFoundError):
        return path.read_text()
    if warehouse.is_there:
        try:
            create_exclusive(path, secrets.token_hex(6).encode())
        except FileExistsError:  # another process was faster
            return path.read_text()
        except OSError as error:
            if not is_refused(error):
                raise
        else:
            return path.read_text()
    return digest_json(str(warehouse.root))[:12]


def own_name(what: str, identity: str) -> str:
    """The name of a set of partitions or a pool of a warehouse; it may stand in a URL."""
    return f"mergepipe:{what}:{identity}"


def is_refused(error: OSError) -> bool:
    """Whether the system refuses to write, as to what may only be read."""
    return error.errno in READ_ONLY


def process_age_s(process: int) -> float | None:
    """Seconds since a process of this machine was started; None for one that is not there.

    None as well where the system does not tell.
    """
    try:
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if told[0] == "Z":  # it has ended, and nobody has asked how
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(told[19]) / os.sysconf("SC_CLK_TCK")
