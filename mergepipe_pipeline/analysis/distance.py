"""How two models' tensors differ, and how far one of them is from a base: exact, streamed.

Reads every tensor once per model, window by window; memory is a few windows, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mergepipe_pipeline.analysis.stream import WINDOW_ELEMS, GroupWindow, WindowReader
from mergepipe_pipeline.checkpoints.reader import open_reader
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize


@dataclass(frozen=True, slots=True)
class Triple:
    """A tensor of two models, and the base's if there is one; all of one shape.

    `before` None: known to be the same bytes as `after`. Sources index one list of checkpoints.
    """

    before: TensorView | None
    after: TensorView
    base: TensorView | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a comparison reads."""
        return sum(v.nbytes for v in (self.before, self.after, self.base) if v)


@dataclass(frozen=True, slots=True)
class Change:
    """How one tensor of a model differs from another's.

    `l2sq` is ‖after − before‖², `before_l2sq` ‖before‖² and `update_l2sq` ‖after − base‖², in
    float64, of elements widened to float32; `changed` counts elements of other bits. NaN where an
    element that changed is not finite.
    """

    l2sq: float
    before_l2sq: float
    update_l2sq: float
    changed: int
    max_abs: float


def changes(
    checkpoints: Sequence[Checkpoint], triples: Sequence[Triple], advance: Callable[[int], None]
) -> Iterator[Change]:
    """Yield the change of each triple of floating-point tensors. Raises CheckpointChangedError."""
    with WindowReader(checkpoints) as reader:
        for t in triples:
            sums, largest = np.zeros(4), 0.0
            views = (t.after,) if t.before is None else (t.after, t.before)
            windows = reader.groups(views, t.base, t.after.numel, _change, as_delta=False)
            for of_window, max_abs, nbytes in windows if len(views) > 1 or t.base else ():
                sums += of_window
                largest = float(np.maximum(largest, max_abs))
                advance(nbytes)
            l2sq, before_l2sq, update_l2sq, changed = sums.tolist()
            yield Change(l2sq, before_l2sq, update_l2sq, int(changed), largest)
        reader.verify_unchanged()


def _change(w: GroupWindow) -> tuple[tuple[float, ...], float, int]:
    """The first four figures of a `Change`, the last one, and the bytes of a window."""
    import torch

    after = w.rows[0]  # [elements], float32, as are the others
    update = 0.0 if w.base is None else (after.double() - w.base.double()).square_().sum().item()
    if len(w.rows) == 1:
        return (0.0, 0.0, update, 0), 0.0, w.nbytes
    before = w.rows[1]
    differs = before.view(torch.int32) != after.view(torch.int32)
    apart = (after.double() - before.double()).where(differs, 0.0)
    largest = apart.abs().max().item() if apart.numel() else 0.0
    squares = apart.square_().sum().item(), before.double().square_().sum().item()
    return (*squares, update, int(differs.sum().item())), largest, w.nbytes


def changed_elements(before: Checkpoint, after: Checkpoint, name: str) -> int:
    """How many elements of a tensor differ in their stored bytes; for dtypes without arithmetic.

    Both have it in one shape and dtype. Raises CheckpointChangedError.
    """
    old, new = before.by_name[name], after.by_name[name]
    changed = 0
    with open_reader(before) as here, open_reader(after) as there:
        for start in range(0, old.numel, WINDOW_ELEMS):
            stop = min(old.numel, start + WINDOW_ELEMS)
            rows = [
                np.frombuffer(reader.read(entry, start, stop), np.uint8)
                for reader, entry in ((here, old), (there, new))
            ]
            differs = (rows[0] != rows[1]).reshape(stop - start, itemsize(old.dtype))
            changed += int(differs.any(axis=1).sum())
        here.verify_unchanged()
        there.verify_unchanged()
    return changed
