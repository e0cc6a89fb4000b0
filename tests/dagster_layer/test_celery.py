"""dagster-celery over a real broker: no release follows a gate that refuses."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.soak.cluster import execute, small_warehouse
from tests.support.celery_cluster import celery_cluster, lacking

pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.filterwarnings("ignore::Warning"),
]


def test_workers_of_celery_merge_and_release_and_a_gate_that_refuses_stops_the_release(
    tmp_path: Path,
) -> None:
    home = small_warehouse(tmp_path / "warehouse", layers=2, hidden=16)
    text = home.recipe_path("r").read_text()
    (home.recipes / "eval.py").write_text("print('{\"x\": 1}')")
    with celery_cluster(tmp_path / "cluster", MERGEPIPE_SHARDS="2") as cluster:
        for name in "ab":
            cluster.add(name, home.root)
        ends = [_ends(home, tmp_path / "d", cluster.settings, text, least) for least in (2, 1)]
    assert [end["r__evaluation_gate"] for end in ends] == ["FAILURE", "SUCCESS"]
    assert ["r__release" in end for end in ends] == [False, True]
    assert [ref.number for ref in home.refs.history("r")] == [1]
    shards = {"r__merge.shard_001", "r__merge.shard_002"}
    assert {end[step] for end in ends for step in shards} == {"SUCCESS"}


def _ends(
    home: Warehouse, dagster_home: Path, settings: dict[str, str], text: str, least: int
) -> dict[str, str]:
    """How each step of a run ended with a gate that asks for at least so much."""
    gate = f"evaluate: {{command: [python, eval.py]}}\ngate: {{x: {{min: {least}}}}}\n"
    home.recipe_path("r").write_text(text + gate)
    execute(home, dagster_home, settings)
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        (run, *_) = instance.get_runs()
        steps = instance.get_run_step_stats(run.run_id)
    return {s.step_key: s.status.value for s in steps if s.status is not None}
