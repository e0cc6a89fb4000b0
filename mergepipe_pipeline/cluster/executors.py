"""The executor of all jobs, as the environment or a run's config chooses it.

Executors come by name, and are imported when they are chosen: a machine needs the packages of the
one that it uses.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import dagster as dg

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.plan_leases import lease_run
from mergepipe_pipeline.settings import EXECUTOR, EXECUTORS
from mergepipe_pipeline.warehouse import Warehouse

#: What every run may choose, wherever it runs.
_ALWAYS = ("in_process", "multiprocess")
#: Modules that are loaded once a run, and not by each of its processes: it takes seconds.
_LOADED = ["mergepipe_pipeline.definitions", "mergepipe_pipeline.engine.execute"]
#: What an executor is told if nobody says anything.
_CONFIG = {"multiprocess": {"start_method": {"forkserver": {"preload_modules": _LOADED}}}}


def build_executor(home: Warehouse) -> dg.ExecutorDefinition:
    """The executor that MERGEPIPE_EXECUTOR names; a run's config may say another of those here.

    Raises MergePipeError if it is not installed.
    """
    usual = EXECUTOR.value()
    offered = {name: _definition(name) for name in dict.fromkeys((*_ALWAYS, usual))}
    fields: Any = {
        name: definition.config_schema.as_field() for name, definition in offered.items()
    }
    selector: Any = dg.Selector

    def requirements(config: Any) -> Any:
        ((name, own),) = config.items()
        return offered[name].get_requirements(own)

    @dg.executor(
        name="mergepipe",
        config_schema=dg.Field(selector(fields), default_value={usual: _CONFIG.get(usual, {})}),
        requirements=requirements,
    )
    def chosen(init: Any) -> dg.Executor:
        ((name, own),) = init.executor_config.items()
        inner: Any = offered[name]
        made: dg.Executor = inner.executor_creation_fn(
            init._replace(executor_def=inner, executor_config=own)
        )
        return made if name == "in_process" else _leased(made, home)

    return chosen


def _definition(name: str) -> dg.ExecutorDefinition:
    module, _, attribute = EXECUTORS[name].partition(":")
    try:
        definition: dg.ExecutorDefinition = getattr(import_module(module), attribute)
    except ImportError as error:
        raise MergePipeError(
            "An executor is not installed",
            where=EXECUTOR.variable,
            expected=f"what {name} needs",
            found=str(error),
            next_step="install the extra `cluster` for dask, `celery` or `k8s` for these, "
            "or choose another executor",
        ) from error
    return definition


def _leased(executor: dg.Executor, home: Warehouse) -> dg.Executor:
    """The executor, with a lease of each run while it executes steps in other processes.

    Each step has a lease of its own; between two of them the run would look dead.
    """
    execute = executor.execute

    def leasing(plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        with lease_run(home, plan_context.run_id):
            yield from execute(plan_context, execution_plan)

    # Not a class around it: some executors ask a run for an executor of their own class.
    executor.execute = leasing  # type: ignore[method-assign]
    return executor
