"""Takes the picture of a project's lineage: `python -m tests.ui.project_pictures docs/pictures`.

Starts `dg dev` over the project of docs/existing-project.md, materializes its trainings, and waits
until what they made is merged and released, by sensors alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from dagster import DagsterRunStatus as Status

from tests.dagster_layer.daemon import Daemon, dg_program
from tests.docs.page import DOCS, ROOT, blocks
from tests.docs.test_examples import PROJECT
from tests.ui.chromium import browser
from tests.ui.pages import View, warehouse
from tests.ui.screenshots import take

_UPSTREAM = "view=lineage&lineageScope=upstream&lineageDepth=9"
VIEWS = {
    "project": View(
        f"/assets/both/release?{_UPSTREAM}", ("math", "code", "expert_index", "release"), 640
    )
}


class Shop(Daemon):
    """`dg dev` in the folder of the page's project, which has its models beside it."""

    def start(self) -> None:
        """Write the project, and start Dagster over it."""
        root = self.home.root.parent
        make = ROOT / "docs" / "examples" / "make_models.py"
        subprocess.run([sys.executable, str(make), "models"], cwd=root, check=True)
        for block in blocks(DOCS / "existing-project.md"):
            if block.title:
                (root / block.title).parent.mkdir(exist_ok=True)
                (root / block.title).write_text(block.text)
        (root / "pyproject.toml").write_text(PROJECT)
        (root / "shop" / "__init__.py").touch()
        self._process = self.dg(
            "dev", "--use-active-venv", "--host", "127.0.0.1", "--port", str(self.port)
        )
        self._sessions.append(self._process.pid)

    def dg(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `dg` in the project; what it says goes to `log`."""
        program = dg_program()
        assert program is not None
        root = self.home.root.parent
        paths = f"{root}{os.pathsep}{self._environment['PYTHONPATH']}"
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [program, *words],
                cwd=root,
                env={**self._environment, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def main(folder: Path) -> None:
    """Write one PNG per view. Raises AssertionError for a page without its words."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        shop = Shop(warehouse(Path(scratch)))
        shop.runs()
        try:
            shop.start()
            trained = shop.dg("launch", "--assets", "training/math,training/code")
            assert trained.wait(600) == 0, shop.log.read_text()
            done = ("mergepipe_merge_both", Status.SUCCESS)
            shop.wait_for("a release", lambda: shop.runs(*done), 900)
            with browser(Path(scratch)) as page:
                take(VIEWS, shop, page, folder)
        finally:
            shop.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
