"""A result that a disk has no room for is refused before it is begun."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

#: Room of a disk beside what is on it before the merge: for a plan, and not for the result.
_ROOM_NBYTES = 200_000


def _may_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def _merge_on_a_full_disk(home: Path, recipe: Path, disk: Path) -> tuple[dict[str, str], list[str]]:
    """The error of a merge in a copy of `home` with too little room, and the lines of stderr.

    These end with the exit status, then the files of its objects and its statistics.
    """
    used = subprocess.run(["du", "-sb", str(home)], capture_output=True, text=True, check=True)
    nbytes = 2 * int(used.stdout.split()[0]) + _ROOM_NBYTES  # small files take whole pages
    written = f"{disk}/w/objects {disk}/w/catalog/facts"
    merge = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "merge", str(recipe), "--json"]
    disk.mkdir()
    steps = (
        f"mount -t tmpfs -o size={nbytes} none {disk}",
        f"cp -r {home} {disk}/w",
        f"fallocate -l $(($(df -B1 --output=avail {disk} | tail -1) - {_ROOM_NBYTES})) {disk}/full",
        f"{{ {shlex.join(merge)} --home {disk}/w; echo $? >&2; find {written} -type f >&2; }}",
    )
    command = ["unshare", "-m", "sh", "-c", " && ".join(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    error: dict[str, str] = json.loads(done.stdout)["error"]
    return error, done.stderr.splitlines()


@pytest.mark.skipif(not _may_mount(), reason="mounting a small disk needs root")
@pytest.mark.parametrize("are_known", [True, False], ids=["known experts", "unknown experts"])
def test_a_merge_that_does_not_fit_the_disk_is_refused_before_a_layer_is_written(
    tmp_path: Path, recipe_text: Callable[..., str], are_known: bool
) -> None:
    home, recipe = tmp_path / "w", tmp_path / "r.yml"
    recipe.write_text(recipe_text())
    other = home if are_known else tmp_path / "other"
    text = recipe_text()
    plan = make_plan(Warehouse.at(other).ensure(), parse(text, name="r", where=str(recipe)))
    assert sum(task.out_nbytes for layer in plan.layers for task in layer.tasks) > _ROOM_NBYTES
    Warehouse.at(home).ensure()
    error, lines = _merge_on_a_full_disk(home, recipe, tmp_path / "disk")
    assert (error["class"], error["what"]) == (
        "StorageFullError",
        "The disk has no room for the result",
    )
    assert "free" in error["expected"]
    assert "mergepipe gc" in error["next_step"]
    written = lines[lines.index("20") + 1 :]
    assert not [line for line in written if "/objects/" in line]
    if not are_known:  # nor is an expert read
        assert not [line for line in written if "/facts/" in line]


#: Packs an expert on a disk that has less and less room, and says how that ends.
_PACK = """
import subprocess, sys
from pathlib import Path
from mergepipe_pipeline.errors import StorageFullError
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

disk = Path(sys.argv[1])
home, full = Warehouse.at(disk / "w"), disk / "full"
pack(home, ["expert_00"])
for left in range(4096, 1 << 20, 28 << 10):
    for folder in home.packs.ids():
        remove_tree(home.packs.path(folder))
    full.unlink(missing_ok=True)
    free = int(subprocess.check_output(["stat", "-f", "-c", "%a*%S", disk]).split(b"*")[0]) * 4096
    subprocess.run(["fallocate", "-l", str(free - left), full], check=True)
    try:
        pack(home, ["expert_00"])
        print("packed")
    except StorageFullError:
        assert home.packs.ids() == []
        print("full")
"""


@pytest.mark.skipif(not _may_mount(), reason="mounting a small disk needs root")
def test_packing_ends_as_a_full_disk_wherever_it_becomes_full(tmp_path: Path, family: Path) -> None:
    home, disk = Warehouse.at(tmp_path / "w").ensure(), tmp_path / "disk"
    register(home, family / "base")
    register(home, family / "expert_00", None, "base")
    disk.mkdir()
    steps = (
        f"mount -t tmpfs -o size=8m none {disk}",
        f"cp -r {home.root} {disk}/w",
        shlex.join([sys.executable, "-c", _PACK, str(disk)]),
    )
    command = ["unshare", "-m", "sh", "-c", " && ".join(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = done.stdout.split()
    assert ends.count("full") > 2
    assert ends[-1] == "packed"
