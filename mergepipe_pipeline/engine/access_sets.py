"""What layers read, by source or pack: the ranges that the gate lets through or that may be
fetched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe_pipeline.domain.blocks import Range, clip, coalesce
from mergepipe_pipeline.domain.pack import TIERS_OF, Tier
from mergepipe_pipeline.domain.plan import ExpertInput, LayerTask, TensorTask
from mergepipe_pipeline.domain.view import Part, TensorView
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.packs.reader import Allowed
from mergepipe_pipeline.storage.source import FileRange


def access_sets(layers: Sequence[LayerTask]) -> dict[int, dict[str, tuple[Range, ...]]]:
    """By source, stored tensor to the element ranges that the layers read as an expert's."""
    ranges: dict[int, dict[str, list[Range]]] = {}
    for e in _experts(layers):
        for part, part_ranges in _parts_read(e):
            ranges.setdefault(part.source, {}).setdefault(part.entry.name, []).extend(part_ranges)
    return {n: {name: coalesce(r) for name, r in of.items()} for n, of in ranges.items()}


def file_ranges(layers: Sequence[LayerTask], source: int, *, gated: bool) -> Iterator[FileRange]:
    """Bytes of a source's files that layers read as an expert's (`gated`) or the base's, in order.

    Of the base only tensors that are always read: an operator on values may do without it.
    """
    for task in (task for layer in layers for task in layer.tasks):
        parts = [p for e in task.experts for p in _parts_read(e)] if gated else _base_parts(task)
        for part, ranges in parts:
            size, at = itemsize(part.entry.dtype), part.entry.start_byte
            for a, b in coalesce(ranges) if part.source == source else ():
                yield FileRange(part.entry.file, at + a * size, at + b * size)


def _base_parts(task: TensorTask) -> list[tuple[Part, Sequence[Range]]]:
    base, operator = task.base, OPERATORS.get(task.operator)
    is_update = operator is None or operator.schema.space == "delta"
    if base is None or not (is_update or (operator and operator.schema.base != "none")):
        return []
    return list(_parts(base.view, ((0, base.view.numel),)))


def packed_access_sets(layers: Sequence[LayerTask]) -> dict[int, Allowed]:
    """By pack, tensor and tier to the elements that the layers read of it."""
    ranges: dict[int, dict[tuple[str, Tier], list[Range]]] = {}
    for packed in (e.packed for e in _experts(layers) if e.packed is not None):
        of = ranges.setdefault(packed.pack, {})
        for r in packed.ranges:
            for tier in TIERS_OF[r.level]:
                of.setdefault((packed.tensor, tier), []).append((r.start_elem, r.stop_elem))
    return {n: {key: coalesce(elems) for key, elems in of.items()} for n, of in ranges.items()}


def _experts(layers: Sequence[LayerTask]) -> Iterator[ExpertInput]:
    return (e for layer in layers for task in layer.tasks for e in task.experts)


def _parts_read(e: ExpertInput) -> Iterator[tuple[Part, Sequence[Range]]]:
    """The stored tensors of one input, with the ranges of their elements that it reads."""
    return _parts(e.view, e.read)


def _parts(view: TensorView, read: Sequence[Range]) -> Iterator[tuple[Part, Sequence[Range]]]:
    """The stored tensors of a view, with the ranges of their elements that `read` covers.

    Factors of a low-rank update are read in whole.
    """
    if read and view.low_rank:
        for part in view.low_rank.parts:
            yield part, [(0, part.entry.numel)]
    if view.stored and not view.runs:
        yield view.stored[0], read
    for run in view.runs:
        shift = run.at_elem - run.start_elem
        inside = clip(read, run.start_elem, run.start_elem + run.n_elems)
        yield view.stored[run.part], [(a + shift, b + shift) for a, b in inside]
