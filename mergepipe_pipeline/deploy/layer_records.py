"""What each layer of a recipe's current plan cost: a file per layer, written by who merged it.

Several workers merge the layers of one plan at once, on machines of their own, and one of them may
be killed at any moment. A file that all of them rewrite would lose what the others wrote.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.domain.outcome import LayerOutcome, Realised
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import remove_tree, write_atomic
from mergepipe_pipeline.storage.forms import record_of


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What a layer cost in shard `shard` of the plan, and who merged it.

    `worker` is a machine and a process, `held_nbytes` the most memory it had held until then.
    """

    plan_id: str
    shard: int
    worker: str
    held_nbytes: int
    cost: Realised


class LayerRecords:
    """The records of one recipe, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def forget(self) -> None:
        """Begin with none, for a plan that was made anew."""
        remove_tree(self._folder)

    def keep(self, plan: MergePlan, shard: int, done: LayerOutcome, held_nbytes: int) -> None:
        """Record a layer; one that is reused keeps what this plan has paid for it before."""
        if done.reused and self._read(done.name, plan) is not None:
            return
        worker = f"{platform.node()}:{os.getpid()}"
        record = LayerRecord(plan.plan_id, shard, worker, held_nbytes, Realised.of([done]))
        write_atomic(self._path(done.name), seal(asdict(record)))

    def of(self, plan: MergePlan) -> Iterator[LayerRecord]:
        """The records of a plan's layers, in its order, as far as there are any."""
        for layer in plan.layers:
            record = self._read(layer.name, plan)
            if record is not None:
                yield record

    def _read(self, layer: str, plan: MergePlan) -> LayerRecord | None:
        """A record of this plan; None for another's, or where nothing readable is there."""
        path = self._path(layer)
        with suppress(FileNotFoundError, CorruptionError, KeyError, ValueError):
            value = unseal(path.read_bytes(), str(path))
            if value["plan_id"] == plan.plan_id:
                return record_of(LayerRecord, value)
        return None

    def _path(self, layer: str) -> Path:
        return self._folder / f"{layer}.json"
