"""Takes pictures of a refusal: `python -m tests.ui.gate_pictures docs/pictures`.

Starts `mergepipe ui`, lets it release a recipe with a gate, lands a version that is worse beside a
good one of another expert, and opens the pages on which a person reads what became of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from dagster import DagsterRunStatus as Status

from tests.dagster_layer.daemon import running_daemon
from tests.quality.world import EXPERTS, World
from tests.ui.chromium import browser
from tests.ui.pages import View, warehouse
from tests.ui.screenshots import take

VIEWS = {
    "gate": View(
        "/assets/mix/evaluation?view=checks&checkDetail=gate", ("gate", "distance is 2", "the gate")
    ),
    "bisect": View(
        "/assets/mix/bisect", ("c is the suspect", "undone", "cost at most"), height=1000
    ),
}


def main(folder: Path) -> None:
    """Write one PNG per view. Raises AssertionError for a page without its words."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        world = World(warehouse(Path(scratch)))
        world.write("{distance: {max: 0.7}, on_failure: bisect}")
        for name in ("base", *EXPERTS):
            world.land(name, float(name != "base"))
        with running_daemon(world.home, ui="mergepipe") as daemon:
            daemon.wait_for("a release", lambda: daemon.runs("merge_mix", Status.SUCCESS), 900)
            world.land("a", 1.1)
            world.land("c", 1.0, layer_3=9.0)
            daemon.wait_for("a bisection", lambda: daemon.runs("bisect_mix", Status.SUCCESS), 900)
            with browser(Path(scratch)) as page:
                take(VIEWS, daemon, page, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
