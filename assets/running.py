"""Where and how the heavy steps of recipes run: whose executor, in which pool, in which process."""

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

import dagster as dg
from dagster_pipes import PipesMessage

from mergepipe_pipeline.deploy.messages import ShardTask, heard
from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.errors import MergePipeError, ResourceError
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.verbs.deploy import merge_shard
from mergepipe_pipeline.warehouse import Warehouse

#: The pools of steps that read experts, and that merge or write a model.
READ_POOL, WRITE_POOL = "disk_read", "disk_write"
#: What a process of its own runs.
_MODULE = "mergepipe_pipeline.step"

Tell = Callable[[LayerOutcome], None]


class RunOptions(TypedDict, total=False):
    """The keywords of `Running`."""

    executor: dg.ExecutorDefinition | None
    pool: str
    op_tags: Mapping[str, Any]
    pipes: dg.PipesClient | None
    pipes_args: Mapping[str, Any]


@dataclass(frozen=True)
class Running:
    """Where and how the steps of recipes run.

    `executor` is that of their jobs alone. Steps that merge or write a model take a place of `pool`
    and have `op_tags`. With `pipes`, its `run` starts a process for each shard, with `pipes_args`,
    of which `command` is what stands before `-m` (by default python).

    Raises MergePipeError for a client or arguments that do not fit.
    """

    executor: dg.ExecutorDefinition | None = None
    pool: str = WRITE_POOL
    op_tags: Mapping[str, Any] = field(default_factory=dict)
    pipes: dg.PipesClient | None = None
    pipes_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            if self.pipes is not None:
                _heard_by(self.pipes, lambda message: None)
                args = {"command": None, **self.pipes_args}
                inspect.signature(self.pipes.run).bind(context=None, extras=None, **args)
            elif self.pipes_args:
                raise TypeError("pipes_args without pipes")
        except TypeError as error:
            raise MergePipeError(
                "A step cannot be started by these arguments",
                where=f"pipes={type(self.pipes).__name__}, pipes_args",
                expected="a PipesClient with a message reader, and arguments of its `run`",
                found=str(error),
                next_step="correct `pipes` and `pipes_args`",
            ) from error

    def merge(
        self, context: dg.OpExecutionContext, warehouse: Warehouse, task: ShardTask, tell: Tell
    ) -> None:
        """Merge a shard where these options say, and tell of each layer as it ends."""
        if self.pipes is None or not task.shard.layers:
            for done in merge_shard(warehouse, task):
                tell(done)
        else:
            self._in_child(self.pipes, context, warehouse, task, tell)

    def _in_child(
        self,
        pipes: dg.PipesClient,
        context: dg.OpExecutionContext,
        warehouse: Warehouse,
        task: ShardTask,
        tell: Tell,
    ) -> None:
        left, problems = dict.fromkeys(task.shard.layers), list[Exception]()

        def hear(message: Any) -> None:
            said = heard(message)
            if isinstance(said, Exception):
                problems.append(said)
            elif said.name in left:  # a log may be read twice
                tell(said)
                del left[said.name]

        usual = [sys.executable if isinstance(pipes, dg.PipesSubprocessClient) else "python"]
        given = {"command": usual, **self.pipes_args}
        if given["command"]:
            given["command"] = [*given["command"], "-m", _MODULE]
        extras = {"home": str(warehouse.root), "task": asdict(task)}
        ended: Exception | None = None
        try:
            _heard_by(pipes, hear).run(context=context, extras=extras, **given)
        except Exception as error:
            ended = error
        if problems:
            raise problems[0]
        if left or ended:
            raise ResourceError(
                "The process of a step did not start, or ended without a word",
                where=f"shard {task.shard.number} of {task.recipe}",
                expected=f"news of {listed(left, 3)}" if left else "an end without an error",
                found=str(ended or "none"),
                next_step="look at the step's output; layers that it merged are reused",
            ) from ended


def _heard_by(client: dg.PipesClient, hear: Callable[[Any], None]) -> dg.PipesClient:
    """A client whose custom messages are heard as they come; Dagster gives them at the end.

    Raises TypeError for one without a message reader.
    """
    own = copy(client)
    readers = {k: r for k, r in vars(client).items() if isinstance(r, dg.PipesMessageReader)}
    if not readers:
        raise TypeError(f"{type(client).__name__} has no message reader")
    vars(own).update({name: _hearing(reader, hear) for name, reader in readers.items()})
    return own


def _hearing(reader: dg.PipesMessageReader, hear: Callable[[Any], None]) -> dg.PipesMessageReader:
    own = copy(reader)

    def read_messages(handler: Any) -> Any:
        handle = handler.handle_message

        def handle_message(message: PipesMessage) -> None:
            if message["method"] == "report_custom_message":
                hear((message["params"] or {})["payload"])
            else:
                handle(message)

        handler.handle_message = handle_message
        return type(reader).read_messages(own, handler)

    # Not a class around it: clients ask for a reader of their own class.
    own.read_messages = read_messages  # type: ignore[method-assign]
    return own
