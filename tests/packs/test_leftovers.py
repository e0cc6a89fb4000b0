"""What stays beside the pack of an expert that is away: if it is damaged, errors say so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.packs.offline import RECORD, OfflineExpert, leftover
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.replace import unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family

RECIPE = """
merge_method: task_arithmetic
base_model: base
models: [{model: e0}, {model: e1}]
parameters: {weight: 0.5}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    write_family(root)
    return root


def recipe() -> ParsedRecipe:
    return parse(RECIPE, name="m", where="m.yml")


def record_of(warehouse: Warehouse) -> OfflineExpert:
    """The record of e0."""
    record = warehouse.offline.find(warehouse.catalog.get("e0").checkpoint.checkpoint_id)
    assert record is not None
    return record


def flip_tensor(path: Path) -> None:
    """Flip a bit of a tensor that no pack holds."""
    flip_at(path, path.stat().st_size - 30)


def flip_name(path: Path) -> None:
    """Flip a bit of a tensor's name in the header, which can be read as before."""
    flip_at(path, path.read_bytes().index(b"norm") + 1)


def flip_brace(path: Path) -> None:
    """Flip a bit of the header, which cannot be read any more."""
    flip_at(path, path.read_bytes().index(b"{"))


def flip_at(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Take the last bytes away."""
    path.write_bytes(path.read_bytes()[:-40])


DAMAGES = [flip_tensor, flip_name, flip_brace, cut, Path.unlink]


def refuse_all(warehouse: Warehouse, path: Path, of: str) -> None:
    """Merge, unpack and verify; each names the file at `path` and nothing else."""
    record = record_of(warehouse)
    (expected,) = (f.leftover_sha256 for f in record.files if f.path == of)
    for act in (
        lambda: merge(warehouse, recipe(), fresh=True),
        lambda: unpack(warehouse, "e0"),
        lambda: unpack(warehouse, "e0", warehouse.root.parent / "elsewhere"),
    ):
        with pytest.raises(CorruptionError) as refused:
            act()
        assert str(refused.value.where).endswith(f"{path}, for {of} of e0")
        assert refused.value.expected == f"sha256 {expected[:16]}"
        assert refused.value.found != refused.value.expected
        assert f"copy the files of {record.cold} to {record.root}" in str(refused.value.next_step)
    assert not list(warehouse.snapshots.iterdir())
    assert not list(Path(record.root).glob("*.safetensors"))
    assert not (warehouse.root.parent / "elsewhere").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_rest_of_weights_is_named_with_what_brings_the_expert_back(
    files: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    record = record_of(warehouse)
    path = leftover(warehouse.offline.path(record.checkpoint_id), 0)
    damage(path)
    refuse_all(warehouse, path, "e0.safetensors")
    for scope in ("digests", "inputs"):
        (finding,) = verify_all(warehouse, [scope]).findings
        assert finding.where == f"{path}, for e0.safetensors of e0"
        assert (finding.what, finding.is_derivable) == (
            "What gives an expert's file back was changed after it was written",
            False,
        )
        assert record.cold in finding.next_step
    # What is said to do helps, and nothing was registered meanwhile.
    assert warehouse.catalog.get("e0").version == 1
    shutil.copytree(record.cold, record.root, dirs_exist_ok=True)
    assert merge(warehouse, recipe()).outcome.snapshot
    assert verify_all(warehouse, ["inputs"]).ok


def test_steps_of_a_merge_on_their_own_name_a_damaged_rest(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    record = record_of(warehouse)
    plan = make_plan(warehouse, recipe())
    path = leftover(warehouse.offline.path(record.checkpoint_id), 0)
    flip_tensor(path)
    with pytest.raises(CorruptionError) as refused:
        list(run_layers(warehouse, plan))
    assert str(path) in str(refused.value)
    shutil.rmtree(warehouse.catalog_dir / "facts")
    with pytest.raises(CorruptionError) as refused:
        analyze(warehouse, ["e0"])
    assert str(path) in str(refused.value)


def test_other_damage_is_not_blamed_on_what_is_whole(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    base = tmp_path / "base" / "base.safetensors"
    stat = base.stat()
    flip_at(base, 200_000)
    import os

    os.utime(base, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptionError) as refused:
        unpack(warehouse, "e0")
    assert str(base.parent) in str(refused.value)
    assert ".leftover" not in str(refused.value)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_count(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"nbytes": ', b'"nbytes": 1', 1))


@pytest.mark.parametrize("damage", [empty, flip_count, Path.unlink])
def test_without_its_record_an_expert_that_is_away_is_missed_and_comes_back_as_told(
    files: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    record = record_of(warehouse)
    path = warehouse.offline.path(record.checkpoint_id) / RECORD
    damage(path)
    wanted = f"copy the files of {record.cold} to {record.root}, with their times (`cp -p`)"
    if damage is not flip_count:  # which tells where they are
        wanted = "copy the files of cold storage to where they were, with their times (`cp -p`)"
    for act in (lambda: merge(warehouse, recipe(), fresh=True), lambda: unpack(warehouse, "e0")):
        with pytest.raises(CorruptionError) as refused:
            act()
        assert str(refused.value.where).endswith(str(path))
        assert "do not remove it" in str(refused.value.next_step)
        assert f"{wanted}, and only then remove {path.parent}" in str(refused.value.next_step)
    for scope in ("structure", "inputs"):
        (finding,) = verify_all(warehouse, [scope]).findings
        assert (finding.where, finding.is_derivable) == (str(path), False)
        assert wanted in finding.next_step
    shutil.copytree(record.cold, record.root, dirs_exist_ok=True)
    shutil.rmtree(path.parent)
    assert merge(warehouse, recipe()).outcome.snapshot
    assert verify_all(warehouse).ok


def test_nothing_is_said_to_lie_where_nothing_lies(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    record = record_of(warehouse)
    shutil.rmtree(warehouse.offline.path(record.checkpoint_id))
    with pytest.raises(NotFoundError) as refused:
        unpack(warehouse, "e0")
    assert refused.value.found == f"no weight file at {record.root}"
    assert refused.value.next_step == f"copy its files back to {record.root}"


def test_a_damaged_name_of_the_base_is_not_blamed_on_an_expert_that_is_away(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    name = warehouse.catalog_dir / "names" / "base" / "00000001.json"
    name.write_bytes(b"")
    found = verify_all(warehouse).findings
    assert {f.where for f in found} == {str(name)}
    assert {f.scope for f in found} == {"structure", "inputs"}
    assert all(f.next_step.startswith("run `mergepipe repair`") for f in found)
