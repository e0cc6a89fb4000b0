"""Runs sensors and what they request in one process: `python -m mergepipe_pipeline.tick`.

For each line on standard input: evaluates the inbox and recipe sensors of MERGEPIPE_HOME as the
daemon would, executes every requested run in this process on the instance at DAGSTER_HOME, and
prints one JSON line with what ran. For demos, tests and cron; a standing pipeline uses `dagster
dev` or the daemon.
"""

import json
import sys
import time
from typing import Any

import dagster as dg

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.reload import definitions_token
from mergepipe_pipeline.warehouse import Warehouse

#: The last two are there where a recipe has its refusals traced, and where there is a search.
SENSORS = ("inbox_sensor", "recipe_sensor", "bisect_sensor", "search_sensor")


class Ticker:
    """The sensors of one warehouse with their cursors, over one Dagster instance."""

    def __init__(self, home: Warehouse, instance: dg.DagsterInstance, quiet_s: float = 0.0) -> None:
        self._home, self._instance = home, instance
        self._resource = MergePipe(home=str(home.root), inbox_quiet_s=quiet_s)
        self._cursors: dict[str, str | None] = {}
        self._run_keys: set[str] = set()
        self._token = ""
        self._defs = dg.Definitions()

    def tick(self) -> list[dict[str, Any]]:
        """Evaluate each sensor once and execute what it requests.

        Definitions are loaded anew whenever the recipes, or what they are made from, have changed.
        """
        done: list[dict[str, Any]] = []
        for name in SENSORS:
            defs = self._definitions()
            if name not in _sensors(defs):
                continue
            result = self._evaluate(defs, name)
            for request in result.run_requests or []:
                if request.run_key and request.run_key not in self._run_keys:
                    self._run_keys.add(request.run_key)
                    done.append(self._execute(defs, name, request))
        return done

    def reasons(self) -> list[str]:
        """Why nothing is requested now, per sensor."""
        defs = self._definitions()
        results = [self._evaluate(defs, name) for name in SENSORS if name in _sensors(defs)]
        return [r.skip_reason.skip_message or "" for r in results if r.skip_reason]

    def _definitions(self) -> dg.Definitions:
        token = definitions_token(self._home)
        if token != self._token:
            self._defs = build_definitions(self._home, self._resource)
            self._token = token
        return self._defs

    def _evaluate(self, defs: dg.Definitions, name: str) -> dg.SensorResult:
        repository = defs.get_repository_def()
        with dg.build_sensor_context(
            instance=self._instance,
            cursor=self._cursors.get(name),
            repository_def=repository,
            resources={"mergepipe": self._resource},
        ) as context:
            result = repository.get_sensor_def(name)(context)
        assert isinstance(result, dg.SensorResult)
        self._cursors[name] = result.cursor or self._cursors.get(name)
        for request in result.dynamic_partitions_requests or []:
            keys = list(request.partition_keys)
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self._instance.add_dynamic_partitions(request.partitions_def_name, keys)
            else:
                for key in keys:
                    self._instance.delete_dynamic_partition(request.partitions_def_name, key)
        for event in result.asset_events:
            self._instance.report_runless_asset_event(event)
        return result

    def _execute(self, defs: dg.Definitions, sensor: str, request: dg.RunRequest) -> dict[str, Any]:
        job = request.job_name or "index_experts"
        started = time.monotonic()
        result = defs.resolve_job_def(job).execute_in_process(
            instance=self._instance,
            partition_key=request.partition_key,
            run_config=request.run_config,
            asset_selection=request.asset_selection,
            tags={**request.tags, "dagster/sensor_name": sensor},
            raise_on_error=False,
        )
        reused = {}
        for event in result.get_asset_materialization_events():
            if event.asset_key and event.partition and event.asset_key.path[-1] == "layers":
                metadata = event.step_materialization_data.materialization.metadata
                reused[event.partition] = metadata["reused"].value
        return {
            "job": job,
            "partition": request.partition_key,
            "run_id": result.run_id,
            "success": result.success,
            "seconds": round(time.monotonic() - started, 2),
            "layers_reused": reused,
            "error": _error(result),
        }


def _sensors(defs: dg.Definitions) -> set[str]:
    return {sensor.name for sensor in defs.get_repository_def().sensor_defs}


def _error(result: dg.ExecuteInProcessResult) -> str | None:
    """The text of what first failed in a run, None if nothing did."""
    for event in result.all_events:
        if event.is_step_failure:
            error = event.step_failure_data.error
            while error and error.cause:
                error = error.cause
            return error.message.strip() if error else event.message
    return None


def main() -> None:
    """Tick once per line of standard input."""
    ticker = Ticker(Warehouse.at().ensure(), dg.DagsterInstance.get())
    for _ in sys.stdin:
        print(json.dumps(ticker.tick()), flush=True)


if __name__ == "__main__":
    main()
