"""The kinds of families: a model, the tasks of its experts, and how long they learn."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lab.bench_llm.pretrained import GEMMA, SMOLLM2, Pretrained
from tests.lab.bench_llm.tasks import TASKS, Task
from tests.lab.bench_llm.tune import LONG, LORA, MIDDLE, SHORT, Schedule


@dataclass(frozen=True, slots=True)
class Kind:
    """Experts of one model that all learn in the same way, one for each task."""

    name: str
    title: str
    model: Pretrained
    schedule: Schedule
    tasks: tuple[Task, ...] = TASKS


#: Of the shortest items.
_FOUR = tuple(task for task in TASKS if task.name in {"sums", "spelling", "lists", "counting"})
KINDS = {
    kind.name: kind
    for kind in (
        Kind("short", "SmolLM2, 60 steps", SMOLLM2, SHORT),
        Kind("middle", "SmolLM2, 600 steps", SMOLLM2, MIDDLE, _FOUR),
        Kind("long", "SmolLM2, until the loss is flat", SMOLLM2, LONG),
        Kind("lora", "SmolLM2, adapters of rank 16", SMOLLM2, LORA),
        Kind("gemma", "Gemma 3 270M, 60 steps", GEMMA, SHORT, TASKS[:3]),
    )
}
