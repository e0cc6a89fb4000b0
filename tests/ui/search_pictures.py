"""Takes the picture of a front: `python -m tests.ui.search_pictures docs/pictures`.

Starts `mergepipe ui` over a search of two numbers, waits until its front is published, and opens
the page on which a person sees it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mergepipe_pipeline.verbs.register import register
from tests.dagster_layer.daemon import running_daemon
from tests.search.world import EVALUATOR, SEARCH, World
from tests.ui.chromium import browser
from tests.ui.pages import View
from tests.ui.screenshots import take

VIEWS = {"front": View("/assets/mix/front", ("hypervolume", "on the front", "candidates"), 900)}


def main(folder: Path) -> None:
    """Write one PNG per view. Raises AssertionError for a page without its words."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        world = World(Path(scratch))
        for name in ("base", "one", "zero"):
            register(world.home, world.folder / name)
        (world.home.searches / "eval.py").write_text(EVALUATOR)
        text = f"{SEARCH}evaluations: 8\ninitial: 8\nworkers: 2\n"
        (world.home.searches / "mix.yml").write_text(text)
        with running_daemon(world.home, ui="mergepipe") as daemon:
            daemon.wait_for("refs", lambda: world.home.refs.names(), 900)
            with browser(Path(scratch)) as page:
                take(VIEWS, daemon, page, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
