"""One damaged file harms itself: everything else can be listed, merged, queried and collected."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.publish import history, publish
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def ids(home: Warehouse, recipe_text: Callable[..., str]) -> list[str]:
    """Two snapshots, the first published as `one`, the second as `two`."""
    found = []
    for ref, experts in (("one", 1), ("two", 2)):
        plan = make_plan(home, parse(recipe_text(experts=experts), name="t", where="t"))
        found.append(run_plan(home, plan).snapshot.snapshot_id)
        publish(home, found[-1], ref)
    return found


def cli(home: Warehouse, *words: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, words), "--home", str(home.root)])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)


def victim(home: Warehouse, ids: list[str], kind: str) -> tuple[Path, str]:
    """The file that tells of the first snapshot, ref or name, and what that is called."""
    match kind:
        case "snapshot":
            return home.snapshots / ids[0] / "manifest.json", ids[0]
        case "ref":
            return home.refs_dir / "one" / "00000001.json", "one"
        case _:
            return home.catalog_dir / "names" / "expert_01" / "00000001.json", "expert_01"


@pytest.mark.parametrize("damage", ["flip", "folder"])
@pytest.mark.parametrize("kind", ["snapshot", "ref", "checkpoint"])
def test_verbs_about_others_go_on_and_ls_lists_the_damaged(
    home: Warehouse,
    ids: list[str],
    tmp_path: Path,
    recipe_text: Callable[..., str],
    kind: str,
    damage: str,
) -> None:
    path, name = victim(home, ids, kind)
    if damage == "flip":
        flip(path)
    else:
        path.unlink()
        path.mkdir()
    listed = json.loads(cli(home, "ls", "--json"))
    (damaged,) = listed["damaged"]
    assert (damaged["kind"], damaged["name"]) == (kind, name)
    assert str(path) in damaged["reason"]
    assert len(listed[f"{kind}s"]) == {"snapshot": 1, "ref": 1, "checkpoint": 2}[kind]
    assert "damaged" in cli(home, "ls")
    cli(home, "gc", "--older-than", "0")
    assert "two" in cli(home, "history", "two", "--json")
    for view in ("snapshots", "snapshot_inputs", "refs", "registrations", "plans"):
        cli(home, "sql", f"select * from {view}")
    recipe = tmp_path / "r.yml"
    recipe.write_text(recipe_text(experts=1, parameters="{density: 0.9}"))
    cli(home, "merge", recipe)
    cli(home, "verify", ids[1])


def test_damaged_provenance_hides_its_snapshot_from_sql_alone(
    home: Warehouse, ids: list[str]
) -> None:
    flip(home.snapshots / ids[0] / "provenance.json")
    found = json.loads(cli(home, "sql", "select snapshot_id from snapshots", "--json"))
    assert [row["snapshot_id"] for row in found] == [ids[1]]


def test_a_ref_whose_newest_version_is_damaged_is_an_error_and_not_the_version_before(
    home: Warehouse, ids: list[str]
) -> None:
    publish(home, ids[1], "one")
    flip(home.refs_dir / "one" / "00000002.json")
    refs = home.refs
    with pytest.raises(CorruptionError, match=r"one/00000002\.json"):
        refs.current("one")
    with pytest.raises(CorruptionError, match=r"one/00000002\.json"):
        refs.publish("one", ids[0], "")
    assert refs.current("two").snapshot_id == ids[1]


def test_repair_sets_a_damaged_version_of_a_ref_aside_and_the_newest_good_one_is_live(
    home: Warehouse, ids: list[str]
) -> None:
    publish(home, ids[1], "one")
    flip(home.refs_dir / "one" / "00000002.json")
    (home.refs_dir / "two" / "00000001.json").unlink()
    (home.refs_dir / "two" / "00000001.json").mkdir()
    with pytest.raises(CorruptionError, match="mergepipe repair"):
        publish(home, ids[0], "two")
    assert len(repair(home, dry_run=True).aside) == 2
    one, two = repair(home).aside
    assert one.startswith(
        f"ref one: version 2 damaged, set aside; version 1 counts: snapshot {ids[0]}"
    )
    assert "mergepipe publish SNAPSHOT --ref two" in two
    assert [r.snapshot_id for r in history(home, "one")] == [ids[0]]
    assert publish(home, ids[1], "one").number == 3
    assert publish(home, ids[1], "two").number == 2
    report = verify_all(home, ("structure", "lineage"))
    assert report.ok
    assert len(report.notes) == 2


def test_repair_registers_a_damaged_name_again_where_it_can_and_says_where_it_cannot(
    home: Warehouse, family: Path, ids: list[str]
) -> None:
    path, name = victim(home, ids, "checkpoint")
    for n in ("landed", "twice"):
        shutil.copytree(family / "expert_02", home.inbox / n)
        register(home, home.inbox / n)
    register(home, family / "expert_03", "twice")
    for damaged in (path, *(path.parents[1] / n / "00000001.json" for n in ("landed", "twice"))):
        flip(damaged)
    with pytest.raises(CorruptionError, match="mergepipe repair"):
        register(home, family / name)
    told = repair(home).aside
    assert [t.partition("; ")[2].partition(":")[0] for t in told] == [
        "no version is left",
        "registered again",
        "version 2 counts",
    ]
    assert register(home, family / name).version == 2
    catalog = home.catalog
    assert catalog.root("landed") == str(home.inbox / "landed")
    assert catalog.root("twice") == str(family / "expert_03")
    assert verify_all(home, ["structure"]).ok


def test_registering_again_gets_past_a_damaged_name(
    home: Warehouse, family: Path, ids: list[str]
) -> None:
    path, name = victim(home, ids, "checkpoint")
    flip(path)
    catalog = home.catalog
    with pytest.raises(CorruptionError, match=r"00000001\.json"):
        catalog.get(name)
    assert register(home, family / name, name).version == 2
    assert catalog.get(name).version == 2
    assert (name, 2) in {row[:2] for row in catalog.registrations()}
    assert len(catalog.damaged()) == 1


def test_names_that_are_not_utf8_are_listed_as_damaged(home: Warehouse, ids: list[str]) -> None:
    for folder in (home.snapshots, home.refs_dir, home.catalog_dir / "names"):
        strange = os.path.join(os.fsencode(folder), b"caf\xe9")
        os.mkdir(strange)
        Path(os.fsdecode(strange), "00000001.json").write_bytes(b"{}")
    listed = json.loads(cli(home, "ls", "--json"))
    assert [d["name"] for d in listed["damaged"]] == [r"caf\udce9"] * 3
    assert len(listed["snapshots"]) == 2
    cli(home, "ls")
    cli(home, "gc", "--older-than", "0")
