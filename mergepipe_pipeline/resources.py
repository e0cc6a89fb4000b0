"""The resources of assets and sensors: the warehouse, the options of the engine, the executor.

The only place where Dagster configuration becomes core values. Settings are read from the
environment when this module is loaded, so that a wrong one stops definitions from loading.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import not_installed
from mergepipe_pipeline.execution.plan_leases import lease_run, run_lives
from mergepipe_pipeline.settings import (
    BUDGET,
    DEVICE,
    EXECUTOR,
    EXECUTORS,
    INBOX_QUIET,
    INBOX_RETRY,
    MEMORY,
    OF_A_RUN,
    PACK,
    RETRY,
    THREADS,
    Setting,
)
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:  # definitions load in each process of Dagster: a verb is loaded when it is called
    from mergepipe_pipeline.catalog.catalog import Registration
    from mergepipe_pipeline.domain.evaluation import Evaluation
    from mergepipe_pipeline.verbs.land import Landing
    from mergepipe_pipeline.verbs.merge import Merged

#: The tag by which a run of ours is known: the identity of its warehouse.
WAREHOUSE_TAG = "mergepipe/warehouse"

#: What every run may choose, wherever it runs.
_ALWAYS = ("in_process", "multiprocess")
#: Modules that are loaded once a run, and not by each of its processes: it takes seconds.
_LOADED = ["mergepipe_pipeline.definitions", "mergepipe_pipeline.engine.execute"]
#: What an executor is told if nobody says anything.
_CONFIG: dict[str, dict[str, Any]] = {
    "multiprocess": {"start_method": {"forkserver": {"preload_modules": _LOADED}}},
    # Without it ray runs all steps at once beside the head, and on no other machine.
    "ray": {"ray": {"num_cpus": 1}},
}


def _variable(setting: Setting[Any]) -> Any:
    """A field of a run's config: what it says, else the variable, else the default."""
    default = setting.value()
    if setting.text is not None:
        kind = dg.EnvVar.int if isinstance(default, int) else dg.EnvVar
        default = kind(setting.variable)
    return Field(default=default, description=setting.meaning)


class MergePipe(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The warehouse at `home`, and what one's own assets do with it.

    While a run has it, a lease says that the run's process lives, and the run carries the tag of
    the warehouse.
    """

    home: str
    # How patient its sensors are, and whether experts are packed.
    inbox_quiet_s: float = INBOX_QUIET.value()
    inbox_retry_s: float = INBOX_RETRY.value()
    retry_s: float = RETRY.value()
    packs: bool = PACK.value()

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator["MergePipe"]:
        """The resource, with a lease that tells while a run has it that its process lives.

        The run is marked as ours, however it was launched: one that somebody starts by a choice of
        assets has no tags of a job.
        """
        run = context.run
        if run is None:
            yield self
            return
        with lease_run(self.warehouse, run.run_id):
            is_ours = self.tags.items() <= run.tags.items()
            if context.instance and not is_ours:
                context.instance.add_run_tags(run.run_id, self.tags)
            yield self

    def run_lives(self, run_id: str) -> bool | None:
        """Whether a process has such a lease of the run; None if nobody ever had one."""
        return run_lives(self.warehouse, run_id)

    @property
    def tags(self) -> dict[str, str]:
        """The tag of runs that work on this warehouse."""
        return {WAREHOUSE_TAG: identity_of(self.warehouse)}

    @property
    def warehouse(self) -> Warehouse:
        """Every path of the warehouse; one that can only be read is taken as it is."""
        warehouse = Warehouse.at(self.home)
        is_read_only = warehouse.is_there and not os.access(warehouse.root, os.W_OK)
        return warehouse if is_read_only else warehouse.ensure()

    def land(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        link: bool = False,
        tags: Collection[str] = (),
    ) -> "Landing":
        """Put a checkpoint into the inbox whole, by one rename. See `mergepipe land`."""
        from mergepipe_pipeline.verbs.land import land

        return land(self.warehouse, str(path), name, link=link, tags=tags)

    def register(
        self, path: str | Path, name: str | None = None, base: str | None = None
    ) -> "Registration":
        """Make a checkpoint known where it lies. See `mergepipe register`."""
        from mergepipe_pipeline.verbs.register import register

        return register(self.warehouse, path, name, base)

    def merge(self, recipe: str | Path, *, publish: bool = False, **options: Any) -> "Merged":
        """Merge a recipe file through its gate, and `publish` it. See `mergepipe merge`.

        `options` are those of `mergepipe_pipeline.verbs.merge.merge`, as `out`, `budget`, `fresh`.
        """
        from mergepipe_pipeline.verbs.merge import merge

        path = Path(recipe)
        options = {"relative_to": path.resolve().parent, **options}
        return merge(self.warehouse, path, publish_ref=publish, **options)

    def evaluate(self, snapshot: str, recipe: str | Path, *, fresh: bool = False) -> "Evaluation":
        """Measure a snapshot, or what a ref names, as the recipe's `evaluate:` says."""
        from mergepipe_pipeline.verbs.gate import measure

        return measure(self.warehouse, snapshot, Path(recipe), fresh=fresh)


class Engine(dg.ConfigurableResource):  # type: ignore[type-arg]
    """How fast and how big a run's merge may be, and what it may read.

    A `budget` stands for the recipe's own amount in the runs that have it. It is no part of what a
    recipe wants, which is its file and its inputs: sensors take what such a run releases as
    current, and merge again when these change.
    """

    threads: int | None = _variable(THREADS)
    memory_mib: int | None = _variable(MEMORY)
    device: str | None = _variable(DEVICE)
    budget: str | None = _variable(BUDGET)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Raise MergePipeError for a wrong value of a run's config, before any step."""
        for setting in OF_A_RUN:
            value = getattr(self, setting.field)
            if value is not None:
                setting.read(str(value), f"resources > engine > config > {setting.field}")

    def budget_from(self, budget: str | None) -> str:
        """Say who gave a plan its budget; None stands for the recipe's own."""
        if budget is None:
            return "the recipe"
        is_usual = BUDGET.text is not None and BUDGET.value() == budget
        return f"{BUDGET.variable if is_usual else 'the configuration of this run'}: {budget}"

    @property
    def options(self) -> EngineOptions:
        """Threads, buffer memory and device of the engine."""
        nbytes = self.memory_mib and self.memory_mib << 20
        return EngineOptions(threads=self.threads, memory_bytes=nbytes, device=self.device or "cpu")


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
        what, or_else = "An executor is not installed", ", or choose another executor"
        raise not_installed(what, name, error, or_else, where=EXECUTOR.variable) from error
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
