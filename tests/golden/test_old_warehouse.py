"""Warehouses that earlier releases made, moved to another place, are opened by this one.

FORMATS.md says what each format's version means. `OLDER` was made before the catalog's files and
plans were sealed.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.verbs.deploy import last_release
from mergepipe_pipeline.verbs.export import export
from mergepipe_pipeline.warehouse import Warehouse
from tests.golden.make_warehouse import PLACE, RECIPES, call

OLDER = 0
#: Those whose contents, plans and manifests are as this release writes them; the last has all
#: formats.
ALIKE = (1, 2)
ALL = pytest.mark.parametrize("number", [OLDER, *ALIKE])
#: Name to the folder of its current version.
INPUTS = {"base": "base", "math": "math", "code": "code-2", "lora": "lora"}
#: What `verify --all` can look at without the inputs.
SCOPES = ("structure", "digests", "lineage")


@dataclass(frozen=True)
class Golden:
    """A golden warehouse in a folder of this test; `recorded` as its JSON file has it."""

    home: Path
    inputs: Path
    recorded: dict[str, Any]

    def call(self, *args: str | Path) -> Any:
        """What a command shows."""
        return call(self.home, *args)

    def register(self) -> None:
        """Tell the warehouse where its inputs are."""
        for name, folder in INPUTS.items():
            self.call("register", self.inputs / folder, "--name", name)

    def merge(self, recipe: str) -> Any:
        """What merging a recipe of the warehouse shows."""
        return self.call("merge", self.home / "recipes" / f"{recipe}.yml")

    def merged(self, recipe: str) -> str:
        """The id of the snapshot that the recipe gave when the warehouse was made."""
        return str(self.recorded["merged"][recipe]["snapshot_id"])

    def files(self) -> dict[str, str]:
        """Path to digest of all files but leases and journals, which no reader needs."""
        found = (p for p in self.home.rglob("*") if p.is_file())
        digests = {str(p.relative_to(self.home)): sha256_hex(p.read_bytes()) for p in found}
        return {p: d for p, d in digests.items() if not p.startswith(("leases/", "verify/"))}


@pytest.fixture
def golden(tmp_path: Path, number: int) -> Golden:
    assert not PLACE.exists(), "the place that the records name must be gone"
    stem = Path(__file__).parent / f"warehouse-{number}"
    with tarfile.open(stem.with_suffix(".tar.xz")) as archive:
        archive.extractall(tmp_path, filter="tar")
    recorded = json.loads(stem.with_suffix(".json").read_text())
    return Golden(tmp_path / "warehouse", tmp_path / "inputs", recorded)


@ALL
def test_everything_in_an_old_warehouse_can_be_read_and_reading_changes_nothing(
    golden: Golden, number: int
) -> None:
    before = golden.files()
    listed = golden.call("ls")
    unknown = {d["name"] for d in listed["damaged"]}
    assert unknown == (set() if number in ALIKE else set(INPUTS))
    assert sorted(s["snapshot_id"] for s in listed["snapshots"]) == golden.recorded["snapshots"]
    for ref, versions in golden.recorded["refs"].items():
        found = golden.call("history", ref)
        assert [{k: v for k, v in r.items() if k != "collected"} for r in found] == versions
        assert golden.call("verify", ref)["snapshot_id"] == versions[-1]["snapshot_id"]
    report = golden.call("verify", "--all", *(f"--scope={s}" for s in SCOPES))
    assert report["findings"] == []
    rows = golden.call("sql", "select snapshot_id, expert_bytes_read from snapshots")
    read = {m["snapshot_id"]: m["expert_bytes_read"] for m in golden.recorded["merged"].values()}
    assert read.items() <= {r["snapshot_id"]: r["expert_bytes_read"] for r in rows}.items()
    assert golden.call("diff", "ties@1", "ties@2")["whole"]["changed_elems"] > 0
    home = Warehouse.at(golden.home)
    assert {recipe_file.name for recipe_file in recipe_files(home)} == set(RECIPES)
    released = last_release(home, "ties-half")
    assert released is not None
    assert released.snapshot_id == golden.merged("ties-half")
    assert golden.files() == before


@ALL
def test_names_of_an_old_warehouse_go_on_and_its_snapshots_can_be_exported(
    golden: Golden, tmp_path: Path
) -> None:
    skills = golden.merged("stages")
    assert golden.call("publish", skills, "--ref", "ties")["number"] == 4
    assert golden.call("rollback", "ties", "--to", "2")["snapshot_id"] == golden.merged("ties")
    export(Warehouse.at(golden.home), skills, tmp_path / "out")
    assert golden.call("diff", "skills", tmp_path / "out")["whole"]["changed_elems"] == 0
    golden.call("gc", "--older-than", "0")
    listed = golden.call("ls")["snapshots"]
    assert sorted(s["snapshot_id"] for s in listed) == golden.recorded["snapshots"]
    assert golden.call("verify", "--all", *(f"--scope={s}" for s in SCOPES))["findings"] == []


@ALL
def test_inputs_that_are_registered_at_their_new_place_give_the_same_weights(
    golden: Golden, number: int
) -> None:
    golden.register()
    for recipe in RECIPES:
        again = golden.merge(recipe)
        was = golden.recorded["merged"][recipe]
        if number in ALIKE:  # nothing is read or made again
            assert {key: again[key] for key in ("snapshot_id", "plan_id")} == {
                key: was[key] for key in ("snapshot_id", "plan_id")
            }
            assert (again["layers_executed"], again["expert_bytes_read"]) == (0, 0)
        else:  # contents are digested otherwise, so that ids differ
            assert again["expert_bytes_read"] == was["expert_bytes_read"]
        found = golden.call("diff", was["snapshot_id"], again["snapshot_id"])
        assert {layer["state"] for layer in found["layers"]} == {"same"}
    assert golden.call("verify", "--all")["findings"] == []
    assert golden.call("repair")["taken"] == []


@pytest.mark.parametrize("number", ALIKE)
def test_inputs_are_known_at_their_new_place_and_copies_with_other_times_by_their_content(
    golden: Golden,
) -> None:
    golden.register()
    before = golden.files().keys()
    assert golden.merge("ties-half")["snapshot_id"] == golden.merged("ties-half")
    added = golden.files().keys() - before  # that the inputs were read where they lie
    assert all(name.startswith("catalog/places/") for name in added)
    for file in golden.inputs.rglob("*.safetensors"):
        os.utime(file, (1, 1))
    again = golden.merge("ties-half")
    assert (again["snapshot_id"], again["layers_executed"]) == (golden.merged("ties-half"), 0)
    assert golden.files().keys() > before


@pytest.mark.parametrize("number", ALIKE)
def test_an_old_snapshot_is_explained_and_replayed_from_inputs_elsewhere(golden: Golden) -> None:
    before = golden.files()
    told = golden.call("explain", "snapshot", golden.merged("ties-half"))
    assert told["snapshot_id"] == golden.merged("ties-half")
    for recipe, names in (("ties-half", ("base", "math", "code")), ("stages", tuple(INPUTS))):
        given = [f"--input={name}={golden.inputs / INPUTS[name]}" for name in names]
        again = golden.call("replay", golden.merged(recipe), *given)
        assert again["snapshot_id"] == golden.merged(recipe)
    assert golden.files() == before


@pytest.mark.parametrize("number", [OLDER])
@pytest.mark.parametrize(
    ("command", "next_step"),
    [("explain snapshot", "mergepipe plan RECIPE"), ("replay", "mergepipe diff")],
)
def test_what_an_older_snapshot_cannot_tell_is_refused_with_what_to_do(
    golden: Golden, command: str, next_step: str
) -> None:
    before = golden.files()
    args = ["--home", str(golden.home), *command.split(), golden.merged("ties")]
    done = CliRunner().invoke(main, args)
    assert done.exit_code not in (0, 1), done.output
    assert isinstance(done.exception, SystemExit)
    assert next_step in done.output
    assert golden.files() == before
