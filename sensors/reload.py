"""Has the definitions loaded anew when recipe files, or what they are made from, changed.

The code server is asked, not the webserver: what it loads, the daemon and every webserver show
within seconds, whatever their ports are.
"""

import logging
import os
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

from mergepipe_pipeline.assets.place import ALONE, IsKnown, Place
from mergepipe_pipeline.deploy.instance import identity_of, process_age_s
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.guard import RELOAD_TIMEOUT_S, client_of, guard
from mergepipe_pipeline.sensors.ticks import Ours, refuse_empty, standing_sensor
from mergepipe_pipeline.verbs.search import StandingSearch, standing_searches
from mergepipe_pipeline.warehouse import Warehouse

#: Held from when this process asked for its successor: asked twice, the server loads twice.
_ASKED = threading.Lock()
#: Seconds that a daemon takes at least to know definitions that were loaded anew: it looks each
#: second whether there are some.
_SPREADING_S = 5.0


def build_reload_sensor(
    is_changed: Callable[[Warehouse], bool], place: Place = ALONE
) -> dg.SensorDefinition:
    """The sensor that reloads definitions where `is_changed` says that they would be others."""

    @standing_sensor(
        "Loads the definitions anew when a recipe, or what it is made from, changed.",
        15,
        place=place,
    )
    def reload_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SkipReason:
        """Has this process replaced by one that loads the recipes as they are now."""
        server = code_server()
        if server is not None:
            guard(server)
        if not is_changed(mergepipe.warehouse):
            return dg.SkipReason("recipes are loaded as they are")
        # Dagster forgets since when a schedule is on that is not there, and with it the night.
        refuse_empty(Ours.of(context, mergepipe, place), mergepipe.warehouse)
        if server is None:
            return dg.SkipReason(
                "recipes changed; no code server runs above this process, so that the daemon loads "
                "definitions anew by itself, within a minute, and a webserver at its Reload button"
            )
        if not _ASKED.acquire(blocking=False):
            return dg.SkipReason("recipes changed; the code server is about to have loaded them")
        # The server replaces this process and waits for its ticks: nobody may wait for the server.
        threading.Thread(target=_reload, args=(server,), daemon=True).start()
        return dg.SkipReason("recipes changed; the code server loads definitions anew")

    return reload_sensor


def spreading() -> IsKnown:
    """Return what says whether the daemon knows the definitions that this process loaded just now.

    A request for a job that it does not know fails its tick. It gets them in less than a quarter of
    the time in which they were loaded, however busy the machine is. That counts from the first
    question: it belongs to a tick that began before this process took over. What a tick may ask for
    was settled as the daemon's look at all sensors began, which may be long ago where others are
    slow, but not before the sensor's tick before.
    """
    wait_s, asked_s = max(_SPREADING_S, _age_s() / 4), list[float]()

    def is_known(context: dg.SensorEvaluationContext) -> bool:
        if not asked_s:
            asked_s.append(time.monotonic())
        before = context.last_tick_completion_time  # when it began, in truth
        age_s = 0.0 if before is None else time.time() - before
        return time.monotonic() - age_s - asked_s[0] >= wait_s

    return is_known


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    return process_age_s(os.getpid()) or 0.0


def definitions_token(warehouse: Warehouse) -> str:
    """Changes when any definitions would change."""
    recipes = recipe_files(warehouse)
    searches = standing_searches(warehouse, recipes)
    return files_token(identity_of(warehouse), (*recipes, *searches))


def files_token(identity: str, files: Sequence[RecipeFile | StandingSearch]) -> str:
    """Changes when the definitions of any of these would, of the warehouse of this identity."""
    return "-".join((identity, *(c.token for c in files)))


def code_server() -> Namespace | None:
    """Where the code server listens that started this process: `port` and `host`, or `socket`.

    None where a daemon or webserver started it without one.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    except (OSError, UnicodeDecodeError):
        return None
    return listening(command, os.environ)


def listening(
    command: Sequence[str], environment: os._Environ[str] | dict[str, str]
) -> Namespace | None:
    """The code server's place, from a command line and the environment that it was given."""
    if "code-server" not in command:
        return None
    names = ("port", "socket", "host")
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        default = environment.get(f"DAGSTER_CODE_SERVER_{name.upper()}")
        parser.add_argument(f"-{name[0]}", f"--{name}", default=default)
    options = parser.parse_known_args(list(command))[0]
    return options if options.port or options.socket else None


def _reload(server: Namespace) -> None:
    try:
        client_of(server).reload_code(timeout=RELOAD_TIMEOUT_S)
    except Exception:
        logging.getLogger(__name__).exception("The code server did not load definitions anew.")
        _ASKED.release()  # the next tick tries again
