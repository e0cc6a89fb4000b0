"""The repository's dagster.yaml starts an instance that does what its comments say."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.run_coordinator import QueuedRunCoordinator

FILE = Path(__file__).parents[2] / "mergepipe_pipeline" / "dagster.yaml"


def test_the_instance_queues_limits_monitors_and_forgets(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert isinstance(instance.run_coordinator, QueuedRunCoordinator)
        assert instance.run_coordinator.dequeue_interval_seconds == 1
        concurrency = instance.get_concurrency_config()
        assert concurrency.pool_config.default_pool_limit == 2
        queue = concurrency.run_queue_config
        assert queue is not None
        assert queue.max_concurrent_runs == 4
        (one_each,) = queue.tag_concurrency_limits
        assert (one_each["key"], one_each["limit"]) == ("mergepipe/recipe", 1)
        assert one_each["value"] == {"applyLimitPerUniqueValue": True}
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_runtime_seconds == 86400
        assert instance.run_retries_max_retries == 0
        threads = {"use_threads": True, "num_workers": 4}
        assert instance.get_sensor_settings() == threads | {"num_submit_workers": 4}
        assert instance.get_scheduler_settings() == threads
        sensors = instance.get_tick_retention_settings(InstigatorType.SENSOR)
        assert {s.value: days for s, days in sensors.items() if days > 0} == {
            "SKIPPED": 1,
            "SUCCESS": 30,
            "FAILURE": 30,
        }
        schedules = instance.get_tick_retention_settings(InstigatorType.SCHEDULE)
        assert set(schedules.values()) == {90}


def test_every_value_has_a_comment_above_it() -> None:
    bare = [
        line.strip()
        for above, line in pairwise(FILE.read_text().splitlines())
        if ": " in line.partition("#")[0] and not above.lstrip().startswith("#")
    ]
    # These two belong to the limit whose comment stands above its first line.
    assert bare == ["applyLimitPerUniqueValue: true", "limit: 1"]
