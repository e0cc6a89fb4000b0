"""Which snapshot was made of what, as one query; plans and snapshots are made by hand here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from mergepipe_pipeline.digest import canonical_json, seal, seal_line
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import Source
from mergepipe_pipeline.domain.snapshot import LineageEntry, Manifest, ShardEntry
from mergepipe_pipeline.verbs.ls import query
from mergepipe_pipeline.warehouse import Warehouse
from tests.catalog.facts import checkpoint

ESTIMATES = {
    "strategy": "hash",
    "budget_bytes": 50,
    "expert_bytes_total": 100,
    "expert_bytes_planned": 40,
    "blocks_total": 9,
    "blocks_bought": 4,
    "blocks_zero": 1,
    "error_bound": 0.5,
    "update_norm": None,
}


@pytest.fixture
def home(tmp_path: Path) -> Warehouse:
    return Warehouse.at(tmp_path / "it's a warehouse").ensure()


def publish(home: Warehouse, base: Checkpoint, expert: Checkpoint, plan_id: str) -> str:
    """A plan and a snapshot as `plan` and `merge` would leave them; the snapshot's id."""
    plan = {"recipe_name": "r", "method": "ties", "ref": "prod", "estimates": ESTIMATES}
    home.plan_path(plan_id).write_bytes(seal_line(canonical_json(plan)))
    inputs = [("base", base), ("expert", expert)]
    manifest = Manifest(
        plan_id,
        "ties",
        tuple(LineageEntry(role, c.name, c.layout_sha256) for role, c in inputs),
        (),
        (ShardEntry("f", "l", "1" * 64, "0" * 64, 7, ()),),
        (),
    )
    folder = home.snapshots / manifest.snapshot_id
    folder.mkdir()
    (folder / "manifest.json").write_bytes(seal(manifest.to_json()))
    sources = [asdict(Source(c.name, c.root, c.checkpoint_id, c.stamp)) for _, c in inputs]
    told = {
        **{k: v for k, v in plan.items() if k != "method"},
        "sources": sources,
        "realised": {"expert_bytes_read": 30, "layers_s": 0.25},
        "created": "2025-01-01T00:00:00+00:00",
    }
    (folder / "provenance.json").write_bytes(seal(told))
    home.refs.publish("prod", manifest.snapshot_id, "test")
    return manifest.snapshot_id


@pytest.fixture
def snapshots(home: Warehouse) -> list[str]:
    """One snapshot of each of two versions of the expert `math`."""
    base, catalog = checkpoint("base"), home.catalog
    catalog.register(base, None)
    made = []
    for n in (1, 2):
        expert = checkpoint("math", mtime_ns=n)
        catalog.register(expert, "base")
        made.append(publish(home, base, expert, str(n) * 64))
    return made


def test_which_snapshots_contain_an_expert_at_which_version_is_one_query(
    home: Warehouse, snapshots: list[str]
) -> None:
    columns, rows = query(
        home,
        "SELECT snapshot_id, version FROM snapshot_inputs WHERE name = 'math' ORDER BY version",
    )
    assert columns == ["snapshot_id", "version"]
    assert rows == list(zip(snapshots, (1, 2), strict=True))


def test_an_input_that_is_not_registered_any_more_has_no_version(home: Warehouse) -> None:
    publish(home, checkpoint("base"), checkpoint("gone"), "3" * 64)
    rows = query(home, "SELECT name, version, root FROM snapshot_inputs ORDER BY name")[1]
    assert rows == [("base", None, "/models/base"), ("gone", None, "/models/gone")]


def test_plans_snapshots_and_refs_fit_together(home: Warehouse, snapshots: list[str]) -> None:
    rows = query(
        home,
        "SELECT r.version, r.is_current, s.expert_bytes_read, p.blocks_bought, p.error_bound, "
        "s.nbytes, s.created FROM refs r JOIN snapshots s USING (snapshot_id) "
        "JOIN plans p USING (plan_id) ORDER BY 1",
    )[1]
    created = "2025-01-01T00:00:00+00:00"
    assert rows == [(1, False, 30, 4, 0.5, 7, created), (2, True, 30, 4, 0.5, 7, created)]


def test_a_damaged_provenance_is_told_by_its_file_and_hides_no_other(
    home: Warehouse, snapshots: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = home.snapshots / snapshots[0] / "provenance.json"
    path.write_bytes(path.read_bytes().replace(b"test", b"tent").replace(b"0.25", b"0.35"))
    assert query(home, "SELECT snapshot_id FROM snapshots")[1] == [(snapshots[1],)]
    assert str(path) in caplog.text
    assert query(home, "SELECT count(*) FROM registrations")[1] == [(3,)]
