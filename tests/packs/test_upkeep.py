"""Packs in `verify --all`, `repair` and `gc`: damaged ones are taken away, what is used stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.execution.plan_leases import lease
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.models import base_tensors, expert_tensors, warehouse_of
from tests.support.stored import write


def flip(path: Path, at: int = -1) -> None:
    """Damage a file in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def packed(tmp: Path) -> tuple[Warehouse, Path]:
    """A warehouse with a pack of e0, and its folder."""
    warehouse = warehouse_of(tmp)
    (made,) = pack(warehouse, ["e0"])
    return warehouse, warehouse.packs.path(made.pack_id)


def test_a_flipped_frame_is_found_by_tensor_and_chunk_and_repair_takes_the_pack_away(
    tmp_path: Path,
) -> None:
    warehouse, root = packed(tmp_path)
    assert verify_all(warehouse).ok
    flip(frames_path(root, "L1"))
    (finding,) = verify_all(warehouse).findings
    assert (finding.file, finding.is_derivable) == (str(root), True)
    assert "L1.frames, tensor model.layers.1.norm.weight, chunk 0" in finding.where
    done = repair(warehouse)
    assert done.taken == (str(root),)
    assert [told.partition(";")[0] for told in done.not_made] == [
        f"pack {root.name[:16]} of e0: `mergepipe pack e0` makes it again"
    ]
    assert pack(warehouse, ["e0"])[0].fresh
    assert verify_all(warehouse).ok


@pytest.mark.parametrize("stem", ["index", "chunks", "sums"])
def test_a_flipped_index_is_found_and_repaired(tmp_path: Path, stem: str) -> None:
    warehouse, root = packed(tmp_path)
    (path,) = root.glob(f"{stem}.*")
    flip(path, 10)
    (finding,) = verify_all(warehouse, ["structure"]).findings
    assert finding.is_derivable
    (told,) = repair(warehouse).not_made
    assert f"`mergepipe pack {'NAME' if stem == 'index' else 'e0'}` makes it again" in told
    assert not root.exists()


def test_packing_again_takes_the_place_of_a_damaged_pack(tmp_path: Path) -> None:
    warehouse, root = packed(tmp_path)
    flip(next(root.glob("index.*")), 10)
    assert warehouse.packs.find(root.name) is None
    assert pack(warehouse, ["e0"])[0].fresh
    assert verify_all(warehouse).ok
    assert warehouse.packs.ids() == [root.name]


def test_a_damaged_pack_that_stands_for_its_expert_is_left_for_a_person(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    root = warehouse.packs.path(made.pack_id)
    flip(frames_path(root, "L1"))
    flip(next(warehouse.offline_dir.rglob("*.leftover")))
    kept, pack_left = repair(warehouse).left  # by path
    assert "for e0.safetensors of e0" in kept.where
    assert pack_left.file == str(root)
    assert (
        f"copy the files of {tmp_path / 'cold' / 'e0'} to {tmp_path / 'e0'}, with"
        in pack_left.next_step
    )
    next(root.glob("index.*")).write_bytes(b"")
    (found,) = verify_all(warehouse, ["structure"]).findings
    assert found.next_step == pack_left.next_step
    assert root.exists()


def test_gc_keeps_the_packs_of_what_names_mean_and_collects_those_of_older_versions(
    tmp_path: Path,
) -> None:
    warehouse, root = packed(tmp_path)
    collect(warehouse, older_than_s=0)
    assert root.exists()
    write(tmp_path / "e0", "e0", expert_tensors(base_tensors(), 7))
    (newer,) = pack(warehouse, ["e0"])
    collect(warehouse, older_than_s=3600)
    assert root.exists()
    assert str(root) in collect(warehouse, older_than_s=0).paths
    assert warehouse.packs.ids() == [newer.pack_id]


def test_gc_keeps_the_packs_of_a_merge_under_way(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    text = (
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {weight: 1}\n"
        "models: [{model: e}]\nbudget: 60%\n"
    )
    register(home, family / "base", "base")
    register(home, family / "expert_01", "e", "base")
    (made,) = pack(home, ["e"])
    plan = make_plan(home, parse(text, name="r", where="r.yml"))
    assert [p.pack_id for p in plan.packs] == [made.pack_id]
    register(home, family / "expert_02", "e", "base")
    analyze(home, ["e"])
    with lease(home, plan):
        collect(home, older_than_s=0)
        assert home.packs.ids() == [made.pack_id]
    collect(home, older_than_s=0)
    assert home.packs.ids() == []


def test_gc_never_collects_the_pack_of_an_expert_that_is_away(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    (warehouse.catalog_dir / "names" / "e0" / "00000001.json").unlink()
    collect(warehouse, older_than_s=0)
    assert warehouse.packs.ids() == [made.pack_id]
    shutil.copytree(tmp_path / "cold" / "e0", tmp_path / "e0", dirs_exist_ok=True)
    collect(warehouse, older_than_s=0)
    assert warehouse.packs.ids() == []


def test_a_base_that_was_given_once_is_known_afterwards(home: Warehouse, tmp_path: Path) -> None:
    for name, tensors in {"base": base_tensors(), "expert": expert_tensors(base_tensors())}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, name, tensors)
    (made,) = pack(home, [str(tmp_path / "expert")], base=str(tmp_path / "base"))
    (again,) = pack(home, ["expert"])
    assert (again.pack_id, again.fresh) == (made.pack_id, False)


def test_a_base_of_which_nothing_can_be_packed_is_not_remembered(
    home: Warehouse, tmp_path: Path
) -> None:
    wrong = {"other.weight": next(iter(base_tensors().values()))}
    for name, tensors in {"wrong": wrong, "expert": base_tensors()}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, name, tensors)
    with pytest.raises(IncompatibleCheckpointsError):
        pack(home, [str(tmp_path / "expert")], base=str(tmp_path / "wrong"))
    assert home.catalog.get("expert").base is None
