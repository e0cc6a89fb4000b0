"""A damaged pack costs a merge this pack and nothing else, unless the pack is all there is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mergepipe_pipeline.deploy.retry import Fault, fault_of_exception
from mergepipe_pipeline.domain.pack import TIERS
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.facts.damaged_packs import irreplaceable_packs
from mergepipe_pipeline.packs.index import frames_path, write_index
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.replace import unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family
from tests.support.told import Told

RECIPE = """
merge_method: task_arithmetic
base_model: base
models: [{model: e0}, {model: e1}]
parameters: {weight: 0.5}
budget: 12.5%
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    write_family(root)
    return root


def recipe() -> ParsedRecipe:
    return parse(RECIPE, name="m", where="m.yml")


def pack_of(warehouse: Warehouse, name: str) -> Path:
    """The folder of an expert's pack."""
    (made,) = pack(warehouse, [name])
    return warehouse.packs.path(made.pack_id)


def damage(root: Path) -> None:
    """Flip a bit of every byte of a pack's frames."""
    for path in root.glob("*.frames"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def test_a_merge_begins_again_without_a_pack_that_turns_out_to_be_damaged(
    files: Path, tmp_path: Path
) -> None:
    warehouse, without = (packed_family(tmp_path / name, files) for name in ("a", "b"))
    root, told = pack_of(warehouse, "e0"), Told()
    damage(root)
    found = merge(warehouse, recipe(), progress=told).outcome
    remove_tree(pack_of(without, "e0"))
    wanted = merge(without, recipe()).outcome
    assert found.snapshot.snapshot_id == wanted.snapshot.snapshot_id
    assert [w for w in told.warnings if "pack of e0 is damaged" in w and ".frames, tensor " in w]
    assert len(told.warnings) == len(set(told.warnings)) > 1
    assert not root.exists()
    assert [p.name for p in warehouse.aside.glob("*/packs/*")] == [root.name]
    assert verify_all(warehouse).ok
    assert pack(warehouse, ["e0"])[0].fresh


def test_layers_on_their_own_end_with_an_error_that_passes_by_itself(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    damage(pack_of(warehouse, "e0"))
    with pytest.raises(DamagedPackError, match="mergepipe pack e0") as refused:
        list(run_layers(warehouse, make_plan(warehouse, recipe())))
    assert fault_of_exception(refused.value) is Fault.SURROUNDINGS
    assert list(run_layers(warehouse, make_plan(warehouse, recipe())))


def test_what_to_do_about_a_damaged_pack_that_stands_for_its_expert_works_as_told(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    damage(warehouse.packs.path(next(iter(irreplaceable_packs(warehouse)))))
    with pytest.raises(CorruptionError) as refused:
        merge(warehouse, recipe())
    cold, home = tmp_path / "cold" / "e0", tmp_path / "e0"
    assert type(refused.value) is CorruptionError
    told = str(refused.value.next_step)
    assert f"copy the files of {cold} to {home}" in told
    assert told.endswith("then run `mergepipe repair` and `mergepipe pack e0`")
    with pytest.raises(CorruptionError, match=f"copy the files of {cold} to {home}"):
        unpack(warehouse, "e0")
    shutil.copytree(cold, home, dirs_exist_ok=True)
    repair(warehouse)
    assert pack(warehouse, ["e0"])[0].fresh
    assert merge(warehouse, recipe()).outcome.plan.packs


def test_a_pack_of_other_contents_than_it_names_is_set_aside_and_not_its_expert_blamed(
    files: Path, tmp_path: Path
) -> None:
    warehouse, without = (packed_family(tmp_path / name, files) for name in ("a", "b"))
    root, other = pack_of(warehouse, "e0"), pack_of(warehouse, "e1")
    mine, theirs = (warehouse.packs.open(path.name) for path in (root, other))
    forged = [replace(t, digest=mine.contents[n].digest) for n, t in theirs.tensors.items()]
    for path in root.iterdir():
        path.unlink()
    for tier in TIERS:
        shutil.copy(frames_path(other, tier), root)
    write_index(root, root, forged)
    exact, told = parse(RECIPE.replace("budget: 12.5%", ""), name="m", where="m.yml"), Told()
    found = merge(warehouse, exact, progress=told).outcome
    wanted = merge(without, exact, no_packs=True).outcome
    assert found.snapshot.snapshot_id == wanted.snapshot.snapshot_id
    assert any("pack of e0 is damaged, and was set aside" in w for w in told.warnings)
    assert not root.exists()
