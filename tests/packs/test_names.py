"""What `repair` does about a damaged name whose expert can still be found."""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.replace import unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family

RECIPE = """
merge_method: task_arithmetic
base_model: base
models: [{model: e0}, {model: e1}]
parameters: {weight: 0.5}
budget: 50%
"""


def damage(warehouse: Warehouse, name: str) -> None:
    """Empty the only version of a name."""
    (warehouse.catalog_dir / "names" / name / "00000001.json").write_bytes(b"")


def family(tmp: Path, *away: str) -> Warehouse:
    write_family(tmp / "family")
    return packed_family(tmp, tmp / "family", away=away)


def test_the_name_of_an_expert_in_cold_storage_comes_back_from_its_record(tmp_path: Path) -> None:
    warehouse = family(tmp_path, "e0")
    before = warehouse.catalog.get("e0")
    damage(warehouse, "e0")
    wanted = (
        "name e0: version 1 damaged, set aside; registered again, in cold storage: "
        f"{tmp_path / 'cold' / 'e0'}"
    )
    assert repair(warehouse, dry_run=True).aside == (wanted,)
    assert repair(warehouse).aside == (wanted,)
    after = warehouse.catalog.get("e0")
    assert (after.version, after.base) == (2, "base")
    assert after.checkpoint == before.checkpoint
    assert verify_all(warehouse).ok
    assert merge(warehouse, parse(RECIPE, name="m", where="m.yml")).outcome.snapshot
    unpack(warehouse, "e0")
    assert verify_all(warehouse).ok


def test_of_another_name_it_is_said_where_it_was_merged_from_and_against_what(
    tmp_path: Path,
) -> None:
    warehouse = family(tmp_path)
    merge(warehouse, parse(RECIPE, name="m", where="m.yml"))
    damage(warehouse, "e0")
    damage(warehouse, "base")
    root = tmp_path / "e0"
    assert (
        repair(warehouse, dry_run=True)
        .aside[1]
        .endswith(f"no version is left: `mergepipe register {root} --name e0`")
    )
    register(warehouse, tmp_path / "base", "base")
    assert (
        repair(warehouse)
        .aside[1]
        .endswith(f"no version is left: `mergepipe register {root} --name e0 --base base`")
    )


def test_a_name_that_comes_back_from_the_inbox_has_its_base_again(tmp_path: Path) -> None:
    warehouse = family(tmp_path)
    os.rename(tmp_path / "e1", warehouse.inbox / "e1")
    damage(warehouse, "e1")
    assert repair(warehouse).aside[0].endswith(f"registered again: {warehouse.inbox / 'e1'}")
    assert warehouse.catalog.get("e1").base == "base"


def test_a_name_whose_versions_were_removed_is_told_and_comes_back_where_it_can(
    tmp_path: Path,
) -> None:
    warehouse = family(tmp_path, "e0")
    for name in ("e0", "e1"):
        (warehouse.catalog_dir / "names" / name / "00000001.json").unlink()
    notes = [n for n in verify_all(warehouse, ["structure"]).notes if "without a version" in n]
    assert [f"names/{name};" in note for name, note in zip(("e0", "e1"), notes, strict=True)]
    assert repair(warehouse).aside == (
        f"name e0: registered again, in cold storage: {tmp_path / 'cold' / 'e0'}",
        "name e1: no version is left: `mergepipe register PATH --name e1`",
    )
    assert warehouse.catalog.get("e0").base == "base"
