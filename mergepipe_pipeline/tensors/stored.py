"""Reads the stored elements of views: whole tensors, or runs of several tensors put together.

Functions of this package import torch when they compute: it takes a second to load, and a merge of
stored bfloat16 can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.domain.view import Part, TensorView
from mergepipe_pipeline.dtypes import TORCH_NAME, itemsize
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.tensors.verified import Verify

if TYPE_CHECKING:
    import torch

    from mergepipe_pipeline.storage.read_batch import ReadBatch


#: The reader of a source by its number in the views.
Readers = Callable[[int], BlockReader]


def read_stored(
    readers: Readers,
    view: TensorView,
    start_elem: int,
    stop_elem: int,
    out: memoryview,
    verify: Verify | None = None,
    batch: ReadBatch | None = None,
) -> None:
    """Fill `out` with the stored bytes of elements [start, stop) of a view; verify them.

    With a `batch`, this happens when it runs. Raises BudgetError outside an access set,
    CheckpointChangedError if a file is shorter, CorruptionError for bytes that `verify` refuses.
    """
    size = itemsize(view.dtype)
    for part, at, start, stop in _pieces(view, start_elem, stop_elem):
        piece = out[(start - start_elem) * size : (stop - start_elem) * size]
        if batch is None:
            readers(part.source).read_into(part.entry, at, at + stop - start, piece)
        else:
            readers(part.source).put(batch, part.entry, at, at + stop - start, piece)
    if verify and batch is not None:
        batch.then(partial(verify, start_elem, stop_elem, out))
    elif verify:
        verify(start_elem, stop_elem, out)


def announce_stored(readers: Readers, view: TensorView, start_elem: int, stop_elem: int) -> None:
    """Say that `read_stored` will be asked for elements [start, stop) of a view soon."""
    for part, at, start, stop in _pieces(view, start_elem, stop_elem):
        readers(part.source).will_need(part.entry, at, at + stop - start)


def _pieces(
    view: TensorView, start_elem: int, stop_elem: int
) -> Iterator[tuple[Part, int, int, int]]:
    """Where elements [start, stop) are stored: a part, the first element there, and which."""
    if not view.runs:
        yield view.stored[0], start_elem, start_elem, stop_elem
    for run in view.runs:
        a, b = max(start_elem, run.start_elem), min(stop_elem, run.start_elem + run.n_elems)
        if a < b:
            yield view.stored[run.part], run.at_elem + a - run.start_elem, a, b


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    import torch

    dtype = getattr(torch, TORCH_NAME[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


def typed(raw: U8Array, dtype: str) -> torch.Tensor:
    """[n] elements of `dtype` over the same memory as their little-endian bytes."""
    import torch

    return torch.from_numpy(raw).view(torch_dtype(dtype))


def as_float32(raw: U8Array, dtype: str) -> torch.Tensor:
    """[n] float32 from the little-endian bytes of n elements of `dtype`."""
    import torch

    return typed(raw, dtype).to(torch.float32)
