"""What a process that merges a shard is told, and what it tells, as JSON.

A container's log may be what carries it, which cuts long lines: a message takes a kilobyte or so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mergepipe_pipeline import errors
from mergepipe_pipeline.domain.outcome import LayerOutcome, Shard
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.storage.forms import record_of


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard of a recipe's plan, and how fast and how big its merge may be."""

    recipe: str
    plan_id: str
    shard: Shard
    options: EngineOptions


def task_of(value: Any) -> ShardTask:
    """The task of which `value` is the JSON. Raises ValueError for what is none."""
    return record_of(ShardTask, value)


def layer_message(done: LayerOutcome) -> dict[str, Any]:
    """A layer that ended, without what is said of each tensor: the warehouse has that."""
    stored = replace(done.stored, tensors=(), non_finite=())
    return {"layer": asdict(replace(done, stored=stored))}


def error_message(error: BaseException) -> dict[str, Any]:
    """An error and its causes: module, name and text of each."""
    chain = errors.causes(error)
    return {"error": [(type(e).__module__, type(e).__name__, str(e)) for e in chain]}


def heard(message: Mapping[str, Any]) -> LayerOutcome | Exception:
    """The layer that a message tells of, or the error. Raises ValueError for another one."""
    if "error" not in message:
        return record_of(LayerOutcome, message.get("layer"))
    told: Exception | None = None
    for module, name, text in reversed(record_of(list[tuple[str, str, str]], message["error"])):
        # Whose fault it is follows from names and texts: no class has to be the very same.
        base = errors.MergePipeError if module == errors.__name__ else Exception
        kind = type(name, (base,), {"__module__": module, "__str__": Exception.__str__})
        cause, told = told, kind(text)
        told.__cause__ = cause
    if told is None:
        raise ValueError("an error of no class")
    return told
