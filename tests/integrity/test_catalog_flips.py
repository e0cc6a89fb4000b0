"""One flipped bit in any file of the catalog: the plan is the same as before, and it is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.catalog.arrow_tables import encode
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.warehouse import Warehouse
from tests.catalog.flips import flipped
from tests.support.laws import examples

#: Kind to what is in the path of its files.
KINDS = {
    "checkpoint": "/checkpoints/",
    "contents": "/contents/",
    "thresholds": "/keep-largest",
    "statistics": "/b",
}
flips = settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def files(home: Warehouse, kind: str) -> list[Path]:
    """The files of a kind, sorted."""
    found = (p.relative_to(home.catalog_dir) for p in home.catalog_dir.rglob("*.parquet"))
    return sorted(home.catalog_dir / p for p in found if KINDS[kind] in f"/{p}")


@pytest.fixture
def raw(recipe_text: Callable[..., str]) -> ParsedRecipe:
    """Thresholds from magnitudes, and a budget that is spent by block statistics."""
    return parse(recipe_text(experts=2, extra="budget: 50%\n"), name="r", where="r")


@pytest.fixture
def planned(home: Warehouse, raw: ParsedRecipe) -> MergePlan:
    """A plan whose facts are all in the catalog of `home`."""
    return make_plan(home, raw)


@pytest.mark.parametrize("kind", KINDS)
@flips
@given(draw=st.data())
def test_a_flipped_bit_in_the_catalog_is_said_and_changes_no_plan(
    home: Warehouse,
    raw: ParsedRecipe,
    planned: MergePlan,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    draw: st.DataObject,
) -> None:
    if kind == "statistics":  # magnitudes are read where thresholds are not known yet
        for path in files(home, "thresholds"):
            path.unlink()
    paths = files(home, kind)
    path = paths[draw.draw(st.integers(0, 1 << 10)) % len(paths)]
    data = path.read_bytes()
    path.write_bytes(flipped(data, draw.draw(st.integers(0, 1 << 30)) % (8 * len(data))))
    caplog.clear()
    assert make_plan(home, raw) == planned
    told = [m for m in caplog.messages if str(path) in m]
    if not told:  # some parts are not read
        assert kind in ("statistics", "contents")
        path.write_bytes(data)
    caplog.clear()
    assert path.read_bytes() == data
    assert make_plan(home, raw) == planned
    assert caplog.messages == []


def test_a_command_over_a_catalog_of_damaged_files_gives_the_same_snapshot(
    home: Warehouse, raw: ParsedRecipe, planned: MergePlan, tmp_path: Path
) -> None:
    wanted = run_plan(home, planned).snapshot.snapshot_id
    for folder in (home.snapshots, home.objects_dir, home.actions_dir, home.plans):
        shutil.rmtree(folder)
    for path in (path for kind in KINDS for path in files(home, kind)):
        data = path.read_bytes()
        path.write_bytes(flipped(data, 8 * len(data) - 40))
    recipe = tmp_path / "r.yml"
    recipe.write_text(raw.text)
    command = ["--home", str(home.root), "merge", str(recipe), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mergepipe_pipeline.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["snapshot_id"] == wanted
    assert "Traceback" not in done.stderr
    assert "changed after it was written" in done.stderr


def test_false_digests_give_no_false_lineage(
    home: Warehouse, raw: ParsedRecipe, planned: MergePlan
) -> None:
    lineage = run_plan(home, planned).snapshot.manifest.inputs
    for path in files(home, "contents"):
        table = pq.read_table(path)
        wrong = pa.array(["0" * 64] * len(table))
        path.write_bytes(encode(table.set_column(1, "digest", wrong), {}))
    assert run_plan(home, make_plan(home, raw)).snapshot.manifest.inputs == lineage


def test_a_record_that_is_lost_with_its_model_is_told_and_analyzed_models_go_on(
    home: Warehouse, family: Path, tmp_path: Path, planned: MergePlan, raw: ParsedRecipe
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(family / "expert_03", gone)
    analyze(home, [str(gone)], base="base")
    catalog = home.catalog
    (record,) = home.catalog_dir.glob(
        f"checkpoints/v*/{catalog.get('gone').checkpoint.checkpoint_id}*"
    )
    record.write_bytes(b"PAR1")
    assert catalog.get("gone").name == "gone"
    record.write_bytes(b"PAR1")
    shutil.rmtree(gone)
    with pytest.raises(NotFoundError, match=r"not known any more.*mergepipe register"):
        catalog.get("gone")
    assert make_plan(home, raw) == planned
