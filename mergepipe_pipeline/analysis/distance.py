"""How far two models' tensors are apart, and how far one of them is from a base: exact, streamed.

Reads every tensor once per model, window by window; memory is a few windows, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.analysis.stream import GroupWindow, WindowReader
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.view import TensorView


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
