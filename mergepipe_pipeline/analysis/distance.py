"""How two models' tensors differ, and how far one of them is from a base: exact, streamed.

Reads every tensor once per model, window by window; memory is a few windows, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.analysis.pass_windows import GroupWindow
from mergepipe_pipeline.analysis.stream import WINDOW_ELEMS, WindowReader
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.storage.source import open_source


@dataclass(frozen=True)
class Triple:
    """A tensor of two models, and the base's if there is one; all of one shape.

    `part` None: known to be the same bytes as `full`. Sources index one list of checkpoints.
    """

    part: TensorView | None
    full: TensorView
    base: TensorView | None


def squared_distances(
    checkpoints: Sequence[Checkpoint],
    triples: Sequence[Triple],
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[float, float | None]]:
    """‖part − full‖² and ‖full − base‖² (None without a base) of each triple, in float64.

    Elements are widened to float32 first, as a merge does. Raises CheckpointChangedError.
    """
    with WindowReader(checkpoints) as reader:
        for triple in triples:
            yield _squares(reader, triple, progress)
        reader.verify_unchanged()


def _squares(
    reader: WindowReader, triple: Triple, progress: Callable[[int], None] | None
) -> tuple[float, float | None]:
    if triple.part is None and triple.base is None:
        return 0.0, None
    views = (triple.full,) if triple.part is None else (triple.full, triple.part)
    apart = moved = 0.0
    for of_part, of_base, nbytes in reader.groups(
        views, triple.base, triple.full.numel, _window, as_delta=False
    ):
        apart += of_part
        moved += of_base
        if progress:
            progress(nbytes)
    return apart, moved if triple.base else None


def _window(w: GroupWindow) -> tuple[float, float, int]:
    full = w.rows[0].double()
    apart = (w.rows[1].double() - full).square_().sum().item() if len(w.rows) > 1 else 0.0
    base = 0.0 if w.base is None else (full - w.base.double()).square_().sum().item()
    return apart, base, w.nbytes


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor of a model differs from another's.

    `l2sq` is ‖after − before‖² and `before_l2sq` ‖before‖², of elements widened to float32;
    `changed` counts elements of other bits. NaN where an element that changed is not finite.
    """

    l2sq: float
    before_l2sq: float
    changed: int
    max_abs: float


def changes(
    before: Checkpoint,
    after: Checkpoint,
    pairs: Sequence[tuple[TensorView, TensorView]],
    progress: Callable[[int], None] | None = None,
) -> Iterator[Change]:
    """The change of each pair of floating-point tensors, (of source 0, of source 1), of one shape.

    Raises CheckpointChangedError.
    """
    with WindowReader((before, after)) as reader:
        for pair in pairs:
            l2sq = before_l2sq = max_abs = 0.0
            changed = 0
            for part, nbytes in reader.groups(pair, None, pair[0].numel, _change, as_delta=False):
                l2sq += part.l2sq
                before_l2sq += part.before_l2sq
                changed += part.changed
                max_abs = float(np.maximum(max_abs, part.max_abs))
                if progress:
                    progress(nbytes)
            yield Change(l2sq, before_l2sq, changed, max_abs)
        reader.verify_unchanged()


def _change(w: GroupWindow) -> tuple[Change, int]:
    import torch

    before, after = w.rows
    differs = before.view(torch.int32) != after.view(torch.int32)
    apart = (after.double() - before.double()).where(differs, 0.0)
    largest = apart.abs().max().item() if apart.numel() else 0.0
    squares = apart.square_().sum().item(), before.double().square_().sum().item()
    return Change(*squares, int(differs.sum().item()), largest), w.nbytes


def changed_elements(before: Checkpoint, after: Checkpoint, name: str) -> int:
    """How many elements of a tensor differ in their stored bytes; for dtypes without arithmetic.

    Both have it in one shape and dtype. Raises CheckpointChangedError.
    """
    old, new = before.by_name[name], after.by_name[name]
    changed = 0
    with open_source(before.root) as here, open_source(after.root) as there:
        readers = BlockReader(here, before, None), BlockReader(there, after, None)
        for start in range(0, old.numel, WINDOW_ELEMS):
            stop = min(old.numel, start + WINDOW_ELEMS)
            rows = [
                np.frombuffer(reader.read(entry, start, stop), np.uint8)
                for reader, entry in zip(readers, (old, new), strict=True)
            ]
            differs = (rows[0] != rows[1]).reshape(stop - start, itemsize(old.dtype))
            changed += int(differs.any(axis=1).sum())
        for reader in readers:
            reader.verify_unchanged()
    return changed
