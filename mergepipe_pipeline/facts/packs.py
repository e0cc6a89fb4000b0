"""Which packs a recipe's experts have, and what they offer block by block; reads no weight.

A pack is found by the digests that the catalog has of expert and base. It serves a tensor of the
recipe where both digests are those of what it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe_pipeline.catalog.seals import said
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.contents import packed_contents
from mergepipe_pipeline.packs.pace import DECODE_EXACT_ELEM_S
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.planner.packed_rows import (
    PackedRow,
    PackPace,
    Packs,
    pack_grid,
    packed_row,
)
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.machine_profile import DEFAULT_READ_BYTES_PER_S
from mergepipe_pipeline.spec.model import Model, view_digest
from mergepipe_pipeline.spec.pack import PackSource
from mergepipe_pipeline.spec.recipe import TensorRecipe
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.warehouse import Warehouse

#: (expert's model number, base's), and (expert's tensor, base's).
Numbers = tuple[int, int]
Pair = tuple[str, str]
#: Of each checkpoint of a model.
Digests = Sequence[Mapping[str, str]]


def find_packs(
    warehouse: Warehouse, models: Sequence[Model], merged: Iterable[TensorRecipe], grid: BlockGrid
) -> Packs | None:
    """What the packs of the experts of `merged` tensors offer, on the `pack_grid` of `grid`.

    None where there is none. One that is damaged is said, and counts as not there.
    """
    if not warehouse.packs.ids():
        return None
    pairs: dict[Numbers, set[Pair]] = {}
    for t in merged:
        for i in t.inputs:
            if t.base is not None:
                pairs.setdefault((i.model, t.base.model), set()).add((i.tensor, t.base.tensor))
    digests: dict[int, Digests | None] = {}
    sources: list[PackSource] = []
    rows: dict[Numbers, Mapping[Pair, PackedRow]] = {}
    for numbers, wanted in pairs.items():
        for number in numbers:
            digests.setdefault(number, _digests(warehouse, models[number]))
        mine, theirs = (digests[number] for number in numbers)
        if mine is None or theirs is None:
            continue
        expert, base = (models[number] for number in numbers)
        pack = warehouse.packs.best(packed_contents(expert, base, mine, theirs))
        if pack is None:
            continue
        served: dict[tuple[str, str], list[Pair]] = {}
        for a, b in wanted:
            if expert.views[a].whole and base.views[b].whole:
                of = view_digest(expert.views[a], mine), view_digest(base.views[b], theirs)
                served.setdefault(of, []).append((a, b))
        found = _rows(pack, len(sources), served, pack_grid(grid))
        if found:
            sources.append(pack.source)
            rows[numbers] = found
    if not rows:
        return None
    return Packs(sources=tuple(sources), rows=rows, pace=pace_of(warehouse))


def pace_of(warehouse: Warehouse) -> PackPace:
    """How fast this machine reads, as far as it was measured, and decodes."""
    profile = load_profile(warehouse.profile_path)
    measured = profile.engine.read_bytes_per_s if profile and profile.engine else None
    return PackPace(
        read_bytes_per_s=measured or DEFAULT_READ_BYTES_PER_S,
        decode_elem_s=DECODE_EXACT_ELEM_S / threads.cores(),
    )


def _digests(warehouse: Warehouse, model: Model) -> Digests | None:
    """The digests of all of a model's checkpoints; None if the catalog lacks some."""
    found = [warehouse.catalog.digests(c.checkpoint_id) for c in model.checkpoints]
    known = [d for d in found if d is not None]
    return known if len(known) == len(found) else None


def _rows(
    pack: Pack, number: int, served: Mapping[tuple[str, str], Sequence[Pair]], grid: BlockGrid
) -> dict[Pair, PackedRow]:
    """What a pack offers to the pairs of tensors that it serves, by their digests."""
    rows: dict[Pair, PackedRow] = {}
    try:
        for row, nbytes, residual_sq in pack.sizes():
            of = row.content
            pairs = served.get((of.digest, of.base_digest), ())
            if pairs:
                known = number, of.name, row.unit, row.threshold_bits
                rows |= dict.fromkeys(pairs, packed_row(*known, nbytes, residual_sq, grid))
    except CorruptionError as error:
        said(pack.root, error)
        return {}
    return rows
