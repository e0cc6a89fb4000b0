"""`ls`: what a person sees of a warehouse, also when some of it is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.domain.snapshot import PROVENANCE
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model


def run(tmp: Path, *words: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, ["--home", str(tmp / "home"), *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def warehouse_of(tmp: Path, experts: int) -> Warehouse:
    """A base and so many experts of it, registered."""
    warehouse = Warehouse.at(tmp / "home").ensure()
    for name, number in (("base", None), *((f"e{n}", n) for n in range(experts))):
        write_model(tmp / name, tensors_of(0, number))
        register(warehouse, tmp / name, name, None if number is None else "base")
    return warehouse


def listed(tmp: Path) -> Any:
    """What `ls --json` prints."""
    return json.loads(run(tmp, "ls", "--json"))


def merged(tmp: Path, name: str, experts: int, *options: str) -> str:
    """The id of a snapshot of so many experts."""
    models = "".join(f"- {{model: e{n}, parameters: {{weight: 0.5}}}}\n" for n in range(experts))
    recipe = tmp / f"{name}.yml"
    recipe.write_text(f"merge_method: task_arithmetic\nbase_model: base\nmodels:\n{models}")
    return str(json.loads(run(tmp, "merge", str(recipe), *options, "--json"))["snapshot_id"])


def test_packs_and_moved_files_are_told_beside_their_expert(tmp_path: Path) -> None:
    warehouse_of(tmp_path, experts=3)
    run(tmp_path, "pack", "e0")
    cold = str(tmp_path / "cold")
    told = json.loads(run(tmp_path, "pack", "e1", "--replace", "--cold", cold, "--json"))
    (made,) = told["packs"]
    of = {c["name"]: c for c in listed(tmp_path)["checkpoints"]}
    assert of["e1"]["pack_nbytes"] == sum(made["tier_nbytes"].values())
    assert of["e0"]["pack_nbytes"] > 0
    assert of["e2"]["pack_nbytes"] is None
    assert of["base"]["pack_nbytes"] is None
    assert [n for n, c in of.items() if c["moved_to"]] == ["e1"]
    assert f"(moved to {of['e1']['moved_to']})" in run(tmp_path, "ls")
    assert Path(of["e1"]["moved_to"]).is_relative_to(tmp_path / "cold")


def test_snapshots_come_in_the_order_of_their_time_with_what_was_read(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path, experts=7)
    full = merged(tmp_path, "full", 7)
    half = merged(tmp_path, "half", 2, "--budget", "50%")
    for snapshot_id, created in ((full, "2026-01-02"), (half, "2026-01-03")):
        path = warehouse.snapshots / snapshot_id / PROVENANCE
        path.write_bytes(seal(unseal(path.read_bytes(), "") | {"created": created}))
    found = listed(tmp_path)["snapshots"]
    assert [(s["recipe"], s["created"]) for s in found] == [
        ("full", "2026-01-02"),
        ("half", "2026-01-03"),
    ]
    assert found[0]["budget_bytes"] is None
    assert found[0]["expert_bytes_planned"] == found[0]["expert_bytes_total"]
    assert found[1]["expert_bytes_planned"] <= found[1]["budget_bytes"]
    text = run(tmp_path, "ls")
    assert ", 100.0 %" in text
    assert "e0, e1, e2, e3 and 3 more, base" in text


def test_a_damaged_pack_and_a_lost_provenance_hide_nothing_else(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path, experts=2)
    run(tmp_path, "pack")
    lost, kept = merged(tmp_path, "one", 1), merged(tmp_path, "two", 2)
    pack_id, _ = warehouse.packs.ids()
    shutil.rmtree(warehouse.packs.path(pack_id))
    warehouse.packs.path(pack_id).mkdir()
    (warehouse.snapshots / lost / PROVENANCE).unlink()
    found = listed(tmp_path)
    assert {(d["kind"], d["name"]) for d in found["damaged"]} == {
        ("pack", pack_id),
        ("snapshot", lost),
    }
    assert [s["snapshot_id"] for s in found["snapshots"]] == [kept]
    assert [bool(c["pack_nbytes"]) for c in found["checkpoints"]].count(True) == 1
