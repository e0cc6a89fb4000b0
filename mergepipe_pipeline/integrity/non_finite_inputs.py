"""Which inputs of a merge hold the NaN or infinity that its result holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

import numpy as np

from mergepipe_pipeline.checkpoints.finite import count_non_finite
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.plan import MergePlan, TensorTask
from mergepipe_pipeline.domain.view import Part
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.storage.source import open_source

#: A multiple of every element's size.
_PIECE_NBYTES = 4 << 20


def non_finite_inputs(plan: MergePlan, tensors: Collection[str]) -> list[str]:
    """The names of a plan's sources that hold NaN or infinity in these output tensors' inputs.

    Reads them, but nothing from an address; sources that are gone are left out.
    """
    parts = {
        (part.source, part.entry): None
        for layer in plan.layers
        for task in layer.tasks
        if task.name in tensors
        for part in _parts(task)
    }
    names: dict[str, None] = {}
    for number, entry in parts:
        source = plan.sources[number]
        if source.name not in names and not is_address(source.root):
            with suppress(MergePipeError, OSError):
                if _holds(source.root, entry):
                    names[source.name] = None
    return list(names)


def _parts(task: TensorTask) -> Iterator[Part]:
    for view in (*(e.view for e in task.experts), *([task.base.view] if task.base else ())):
        yield from view.stored
        yield from view.low_rank.parts if view.low_rank else ()


def _holds(root: str, entry: TensorEntry) -> bool:
    with open_source(root, "exact") as files:
        for start in range(0, entry.nbytes, _PIECE_NBYTES):
            raw = np.empty(min(_PIECE_NBYTES, entry.nbytes - start), np.uint8)
            files.read_into(entry.file, entry.start_byte + start, raw.data)
            if count_non_finite(raw, entry.dtype):
                return True
    return False
