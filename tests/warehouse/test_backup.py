"""A plain copy of a warehouse in use is a backup: the command of the page for platform teams."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.docs.page import DOCS, ROOT, blocks
from tests.warehouse.test_roots import recipe

#: Merges and publishes under ever other weights until it is killed; says each id.
_BUSY = """
import sys
from itertools import count
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse

for n in count(1):
    text = sys.argv[1].replace("weight: 0.5", f"weight: 0.{n:05d}")
    done = merge(Warehouse.at(), parse(text, name="busy", where="busy"), publish_ref=True)
    print(done.outcome.snapshot.snapshot_id, flush=True)
"""


def publishing(home: Warehouse, text: str) -> Callable[[], int]:
    """Merges a recipe under ever other weights, and publishes it; gives the version."""
    numbers = count(50_001)

    def publish() -> int:
        other = text.replace("weight: 0.5", f"weight: 0.{next(numbers):05d}")
        ref = merge(home, parse(other, name="busy", where="busy"), publish_ref=True).ref
        assert ref is not None
        return ref.number

    return publish


@contextmanager
def busy(home: Warehouse, text: str) -> Iterator[None]:
    """A process that merges and publishes, from its second release on; killed in the end."""
    environment = {**os.environ, "MERGEPIPE_HOME": str(home.root), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        (sys.executable, "-c", _BUSY, text), env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        try:
            assert said.readline()
            assert said.readline()
            yield
        finally:
            process.kill()
            process.wait(timeout=20)


def page_command() -> str:
    """The command of the page."""
    (command,) = (b.text for b in blocks(DOCS / "platform.md") if b.text.startswith("cp -a"))
    return command


def slowly() -> list[str]:
    """The same, a folder at a time in its order, as if each took long."""
    before, folders, behind = re.split("[{}]", page_command())
    return [f"{before}{folder}{behind}" for folder in folders.split(",")]


def copy(
    home: Warehouse, backup: Path, commands: Iterable[str], publish: Callable[[], int]
) -> None:
    """Run commands, and after each publish something.

    That a temporary file vanished is all that they may complain of.
    """
    backup.mkdir()
    environment = {**os.environ, "MERGEPIPE_HOME": str(home.root), "BACKUP": str(backup)}
    for command in commands:
        done = subprocess.run(
            ("bash", "-c", command), capture_output=True, text=True, timeout=60, env=environment
        )
        told = done.stderr.splitlines()
        assert all("No such file" in line and ".tmp" in line for line in told), done.stderr
        publish()


def test_copies_made_while_merges_run_are_whole_and_work_goes_on_in_them(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    for name in ("base", "expert_00", "expert_01"):
        land(home, str(family / name))
        index_arrival(home, name)
    text = recipe("base", "expert_00", "expert_01")
    home.recipe_path("n").write_text(text)
    (recipe_file,) = recipe_files(home)
    deploy.plan_recipe(home, recipe_file)
    list(deploy.merge_recipe(home, "n", recipe_file.layers, EngineOptions()))
    snapshot, _ = deploy.snapshot_recipe(home, "n")
    deploy.release_recipe(home, recipe_file)

    made = {path.name for path in home.root.iterdir() if path.is_dir()}
    assert set(re.split("[{},]", page_command())[1:-1]) == made - {"staging", "leases"}
    ways = {"at-once": [page_command()], "slowly": slowly()}
    said = text + "ref: busy\n"
    with busy(home, said):
        copy(home, tmp_path / "at-once", ways["at-once"], int)
    copy(home, tmp_path / "slowly", ways["slowly"], publishing(home, said))
    shutil.rmtree(home.root)

    for name in ways:
        restored = Warehouse.at(shutil.copytree(tmp_path / name, tmp_path / f"new-{name}"))
        restored.ensure()
        report = verify_all(restored)
        assert report.ok, report
        (recipe_file,) = recipe_files(restored)
        assert deploy.due(restored, recipe_file) == deploy.current(recipe_file)
        again = merge(restored, parse(text, name="n", where="n")).summary()
        assert again["snapshot_id"] == snapshot.snapshot_id
        assert again["layers_executed"] == 0
        assert restored.refs.current("busy").number >= 2
