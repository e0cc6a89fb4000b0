"""A snapshot that rotted is set aside and made again when its recipe is merged, however it rotted.

Rot keeps sizes and times: nothing but the bytes tells of it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.domain.snapshot import ShardEntry, Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots import commit as checks
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.deploy import audit_recipe
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.merge import Merged, merge
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse

#: Seconds in which a file may change twice and have one time.
TICK_S = 0.02

STAGES = """{first}
name: first
---
merge_method: task_arithmetic
base_model: {family}/base
models:
  - {{model: first, parameters: {{weight: 0.5}}}}
  - {{model: {family}/expert_02, parameters: {{weight: 0.5}}}}
"""


def rot(path: Path) -> None:
    """Flip a bit in place: size, times and links stay."""
    stat = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    path.chmod(stat.st_mode & 0o777)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def renewed(path: Path) -> None:
    """Put a copy with the same size and times in its place."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


@pytest.fixture(scope="module")
def whole(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse after a merge in two stages."""
    root = tmp_path_factory.mktemp("whole") / "w"
    merge_in(Warehouse.at(root).ensure(), family)
    return root


@pytest.fixture
def home(whole: Path, tmp_path: Path) -> Warehouse:
    """A copy of it, in which shards and objects are one file each, as there."""
    shutil.copytree(whole, tmp_path / "w", symlinks=True)
    home = Warehouse(tmp_path / "w")
    for shard in home.snapshots.glob("*/*.safetensors"):
        (found,) = (p for p in home.objects.all_objects() if p.read_bytes() == shard.read_bytes())
        shard.unlink()
        os.link(found, shard)
    return home


def merge_in(home: Warehouse, family: Path, **asked: bool) -> Merged:
    first = "merge_method: linear\nmodels:\n" + "".join(
        f"  - {{model: {family}/expert_0{n}, parameters: {{weight: 0.5}}}}\n" for n in (0, 1)
    )
    text = STAGES.format(first=first, family=family)
    return merge(home, parse(text, name="r", where="r"), publish_ref=asked.get("publish", False))


def stage_and_result(home: Warehouse) -> tuple[Path, Path]:
    """The two snapshots' folders."""
    stages = {p.stem for p in home.stages.glob("*.json") if "stage" in p.read_text()}
    (stage,) = (p for p in home.snapshots.iterdir() if p.name in stages)
    (result,) = (p for p in home.snapshots.iterdir() if p.name not in stages)
    return stage, result


@pytest.mark.parametrize(
    ("name", "harm", "executed"),
    [
        ("model-00002-of-00004.safetensors", rot, 1),
        ("model-00001-of-00004.safetensors", truncate, 1),
        ("model-00003-of-00004.safetensors", Path.unlink, 0),
        ("config.json", rot, 0),
        ("manifest.json", rot, 0),
    ],
)
@pytest.mark.parametrize("which", ["stage", "result"])
def test_a_merge_sets_a_rotten_snapshot_aside_and_gives_the_right_bytes(
    home: Warehouse,
    family: Path,
    caplog: pytest.LogCaptureFixture,
    which: str,
    name: str,
    harm: Callable[[Path], None],
    executed: int,
) -> None:
    stage, result = stage_and_result(home)
    rotten = stage if which == "stage" else result
    right = {p.name: p.read_bytes() for p in rotten.iterdir()}
    harm(rotten / name)
    harmed = {p.name: p.read_bytes() for p in rotten.iterdir()}
    with pytest.raises(CorruptionError, match=name):
        publish(home, rotten.name, "live")
    assert "live" not in home.refs
    outcome = merge_in(home, family).outcome
    assert outcome.snapshot.snapshot_id == result.name
    if which == "result":
        assert outcome.realised.layers_executed == executed
    for folder in (stage, result):
        verify_snapshot(folder)
    right.pop("provenance.json")
    assert {n: (rotten / n).read_bytes() for n in right} == right
    (aside,) = home.aside.glob(f"*/snapshots/{rotten.name}")
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == harmed
    assert str(aside) in caplog.text
    is_object_rotten = harm is rot and executed
    assert len(list(home.aside.glob("*/objects/*/*"))) == is_object_rotten
    publish(home, rotten.name, "live")


def shards_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers of shards whose bytes are read from now on, each time they are."""
    read, real = list[str](), checks.verify_shard

    def verify(path: Path, shard: ShardEntry, *more: Callable[[int], None] | None) -> None:
        read.append(f"{path.parent.name} {shard.layer}")
        real(path, shard, *more)

    monkeypatch.setattr(checks, "verify_shard", verify)
    return read


def test_a_merge_with_nothing_to_do_reads_each_byte_of_its_result_once_though_it_publishes(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = shards_read(monkeypatch)
    done = merge_in(home, family, publish=True)
    assert done.ref is not None
    assert done.outcome.realised.layers_executed == 0
    assert len(read) == len(set(read)) == 8  # of the stage and of the result


@pytest.mark.parametrize("touch", [rot, os.utime, lambda p: p.chmod(0o400), renewed])
def test_what_was_read_and_found_right_is_read_again_by_a_merge_once_anybody_touches_it(
    home: Warehouse, family: Path, monkeypatch: pytest.MonkeyPatch, touch: Callable[[Path], None]
) -> None:
    time.sleep(2 * TICK_S)  # what was touched just now is not believed
    read = shards_read(monkeypatch)
    merge_in(home, family)
    assert len(read) == 8
    merge_in(home, family)
    assert len(read) == 8
    time.sleep(2 * TICK_S)
    _, result = stage_and_result(home)
    touch(result / "model-00002-of-00004.safetensors")
    merge_in(home, family)
    assert len(read) > 8
    assert {line.partition(" ")[0] for line in read[8:]} == {result.name}
    verify_snapshot(result)


def test_what_a_merge_has_just_written_is_not_read_back_by_the_next(
    tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Warehouse.at(tmp_path / "w").ensure()

    def commit(*given: Any) -> Snapshot:
        time.sleep(2 * TICK_S)
        return checks.commit_snapshot(*given)

    monkeypatch.setattr("mergepipe_pipeline.execution.assemble.commit_snapshot", commit)
    merge_in(home, family)
    read = shards_read(monkeypatch)
    assert merge_in(home, family, publish=True).ref is not None
    assert {line.partition(" ")[0] for line in read} == {stage_and_result(home)[1].name}
    assert len(read) == 4  # what is published is read all the same


def standing(home: Warehouse, family: Path) -> Callable[[], Snapshot]:
    """A standing recipe over experts that have landed; what is called commits its snapshot."""
    for name in ("base", "expert_00"):
        land(home, str(family / name))
        index_arrival(home, name)
    home.recipe_path("n").write_text(
        "merge_method: task_arithmetic\nbase_model: base\n"
        "models: [{model: expert_00, parameters: {weight: 0.5}}]\n"
    )
    (file,) = recipe_files(home)
    plan = deploy.plan_recipe(home, file)
    list(deploy.merge_recipe(home, "n", [x.name for x in plan.layers], EngineOptions()))
    return lambda: deploy.snapshot_recipe(home, "n")[0]


def test_the_standing_pipeline_makes_a_rotten_snapshot_anew_and_never_releases_one(
    tmp_path: Path, family: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Warehouse.at(tmp_path / "w").ensure()
    commit = standing(home, family)
    made = commit()
    (file,) = recipe_files(home)
    audit_recipe(home, "n")
    rot(Path(made.path) / made.manifest.shards[1].file)
    with pytest.raises(CorruptionError, match=made.manifest.shards[1].file):
        deploy.release_recipe(home, file)
    assert commit().snapshot_id == made.snapshot_id
    assert "It is merged again" in caplog.text
    verify_snapshot(Path(made.path))
    audit_recipe(home, "n")
    assert deploy.release_recipe(home, file)[0].snapshot_id == made.snapshot_id
