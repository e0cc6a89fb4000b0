"""Runs the steps of a run on the workers of a dask cluster.

dask decides which worker takes a step, and gives the step of a worker that died to another one.
Dagster decides which steps may begin. dagster-dask leaves that to dask, which also begins what
depends on a step that failed: a release would follow a check that was not passed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import dagster as dg
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.step_delegating import (
    CheckStepHealthResult,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
)
from distributed import Client, Event, Future

from mergepipe_pipeline.cluster.step import run_step
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.settings import SCHEDULER

#: Between two looks at what steps have reported, and at whether they are still with dask.
_LOOK_S, _HEALTH_S = 0.25, 5
_CONNECT_S = 30.0


@dg.executor(
    name="dask",
    config_schema={
        "scheduler": dg.Field(
            str, is_required=False, description="tcp://host:8786; MERGEPIPE_DASK_SCHEDULER else."
        )
    },
    requirements=dg.multiple_process_executor_requirements(),
)
def dask_executor(init: dg.InitExecutorContext) -> dg.Executor:
    """Each step in a process of its own, on a worker of the cluster that `scheduler` names."""
    said = init.executor_config.get("scheduler")
    address = SCHEDULER.read(str(said), "execution > config") if said else SCHEDULER.value()
    if address is None:
        raise MergePipeError(
            "The executor dask has no cluster",
            where=SCHEDULER.variable,
            expected="the address of dask's scheduler",
            found="none",
            next_step="start `dask scheduler` and workers, and give the address",
        )
    return DaskExecutor(address)


class DaskExecutor(StepDelegatingExecutor):
    """Dagster's loop over steps, over a cluster that is asked for as long as a run takes."""

    def __init__(self, address: str) -> None:
        self._address, self._steps = address, _DaskSteps()
        super().__init__(
            self._steps,
            retries=RetryMode.ENABLED,
            sleep_seconds=_LOOK_S,
            check_step_health_interval_seconds=_HEALTH_S,
        )

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        """Run all steps. Raises MergePipeError if no scheduler answers."""
        with self._connected() as client:
            self._steps.client = client
            yield from super().execute(plan_context, execution_plan)

    def _connected(self) -> Client:
        try:
            return Client(self._address, timeout=_CONNECT_S, set_as_default=False)
        except OSError as error:
            raise MergePipeError(
                "Dask's scheduler does not answer",
                where=self._address,
                expected=f"an answer within {_CONNECT_S:g} s",
                found=str(error),
                next_step="start `dask scheduler` there, or correct the address",
            ) from error


class _DaskSteps(StepHandler):
    """One task of dask for each step that runs."""

    client: Client

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[str, Future] = {}

    @property
    def name(self) -> str:
        return "dask"

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        step = _step_of(step_handler_context)
        ((variable),) = step_handler_context.execute_step_args.get_command_env()
        key = f"{step}-{step_handler_context.execute_step_args.run_id}-{uuid.uuid4().hex[:8]}"
        self._tasks[step] = self.client.submit(run_step, variable["value"], key, key=key)
        yield dg.DagsterEvent.step_worker_starting(
            step_handler_context.get_step_context(step),
            message=f"Dask has the step {step} as task {key}.",
            metadata={"dask key": dg.MetadataValue.text(key)},
        )

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        task = self._tasks.get(_step_of(step_handler_context))
        if task is None:
            return CheckStepHealthResult.unhealthy("this process did not start it")
        if task.status in ("pending", "finished"):
            return CheckStepHealthResult.healthy()
        why = task.exception(timeout=_CONNECT_S) if task.status == "error" else task.status
        return CheckStepHealthResult.unhealthy(f"{type(why).__name__}: {why}")

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        task = self._tasks.get(_step_of(step_handler_context))
        if task is not None:
            Event(task.key, client=self.client).set()
        yield from ()


def _step_of(context: StepHandlerContext) -> str:
    (step,) = context.execute_step_args.step_keys_to_execute or ()
    return step
