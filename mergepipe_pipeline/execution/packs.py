"""Which packs a recipe's experts have, and what they offer block by block; reads no weight.

A pack is found by the digests of expert and base. It serves a tensor of the
recipe where both digests are those of what it was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.pack import TIERS, TIERS_OF, PackSource, TensorContent
from mergepipe_pipeline.domain.recipe import TensorRecipe, pairs_of
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.contents import packed_contents
from mergepipe_pipeline.packs.index import tails_from
from mergepipe_pipeline.packs.store import Pack, PackStore, warn_damaged
from mergepipe_pipeline.planner.packed_rows import (
    PackedRow,
    PackGrid,
    Packs,
    pack_grid,
    packed_row,
)
from mergepipe_pipeline.resolution.open_models import packable
from mergepipe_pipeline.warehouse import Warehouse

#: (expert's model number, base's), and (expert's tensor, base's).
Numbers = tuple[int, int]
Pair = tuple[str, str]
#: Of each checkpoint of a model.
Digests = Sequence[Mapping[str, str]]
#: The digests of a checkpoint by its id; None if they are not known.
Known = Callable[[str], Mapping[str, str] | None]


@dataclass(frozen=True, slots=True)
class PackedCost:
    """The bytes that packs spare a merge, of which `experts` have one.

    An exact merge reads at most `exact_nbytes` of all experts, each tensor from where it is fewer
    bytes; less where tier X20 is enough, which only thresholds tell.
    """

    experts: int
    exact_nbytes: int


@dataclass(frozen=True)
class _Served:
    """A pack, and the pairs of a recipe's tensors that it serves, by the digests of both."""

    numbers: Numbers
    pack: Pack
    pairs: Mapping[tuple[str, str], Sequence[Pair]]

    def of(self, content: TensorContent) -> Sequence[Pair]:
        """The pairs that a packed tensor serves."""
        return self.pairs.get((content.digest, content.base_digest), ())


def find_packs(
    packs: PackStore,
    known: Known,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    grid: BlockGrid,
    originals: Sequence[Model],
) -> Packs | None:
    """Find the packs of the experts of `merged` tensors, and their levels on a `pack_grid`.

    `originals` are the models before the output's tokenizer gave them other rows: packs are of
    these, or of the expert below an adapter. None where there is none. A damaged one is
    reported, and counts as absent.
    """
    n_elems = sum(models[i.model].views[i.tensor].numel for t in merged for i in t.inputs)
    blocks = pack_grid(grid, n_elems)
    sources: list[PackSource] = []
    rows: dict[Numbers, Mapping[Pair, PackedRow]] = {}
    all_served = list(_served(packs, known, models, merged, originals))
    with Workers(threads.CATALOG) as workers:
        each = workers.map(partial(_rows, grid=blocks), all_served)
        for served, packed_rows in zip(all_served, each, strict=True):
            if packed_rows:
                number = len(sources)
                rows[served.numbers] = {p: replace(r, pack=number) for p, r in packed_rows.items()}
                sources.append(served.pack.source)
    if not rows:
        return None
    return Packs(sources=tuple(sources), grid=blocks, rows=rows)


def packed_cost(
    warehouse: Warehouse,
    models: Sequence[Model],
    merged: Sequence[TensorRecipe],
    originals: Sequence[Model],
) -> PackedCost | None:
    """Return what packs spare a merge of `merged` tensors; None where there is none."""
    stored = [i for t in merged for i in t.inputs]
    exact_nbytes = sum(models[i.model].views[i.tensor].nbytes for i in stored)
    uses = Counter((i.model, t.base.model, i.tensor) for t in merged if t.base for i in t.inputs)
    experts = set()
    known = warehouse.catalog.digests
    for served in _served(warehouse.packs, known, models, merged, originals):
        expert, base = served.numbers
        for row in served.pack.rows:
            nbytes = sum(row.nbytes[TIERS.index(t)] for t in TIERS_OF["X"])
            for tensor, _ in served.of(row.content):
                view, count = models[expert].views[tensor], uses[expert, base, tensor]
                experts.add(expert)
                exact_nbytes -= count * max(0, view.nbytes - nbytes)
    return PackedCost(len(experts), exact_nbytes) if experts else None


def known_digests(known: Known, model: Model) -> Digests | None:
    """The digests of all of a model's checkpoints; None if some are not known."""
    digests = [known(c.checkpoint_id) for c in model.checkpoints]
    present = [d for d in digests if d is not None]
    return present if len(present) == len(digests) else None


def _served(
    packs: PackStore,
    known: Known,
    models: Sequence[Model],
    merged: Iterable[TensorRecipe],
    originals: Sequence[Model],
) -> Iterator[_Served]:
    """The pack of each expert of `merged` tensors, against each base of theirs.

    It serves tensors whose contents in `models` are those that it was made from.
    """
    if not packs.ids():
        return
    digests: dict[int, Digests | None] = {}
    for numbers, tensors in pairs_of(merged).items():
        expert, base = packable(*(originals[number] for number in numbers))
        for number, model in zip(numbers, (expert, base), strict=True):
            if number not in digests:
                digests[number] = known_digests(known, model)
        expert_digests, base_digests = (digests[number] for number in numbers)
        if expert_digests is None or base_digests is None:
            continue
        pack = packs.of(packed_contents(expert, base, expert_digests, base_digests))
        if pack is None:
            continue
        served: dict[tuple[str, str], list[Pair]] = {}
        for a, b in tensors:
            if _is_own(models[numbers[0]], expert, a) and _is_own(models[numbers[1]], base, b):
                of = (
                    view_digest(expert.views[a], expert_digests),
                    view_digest(base.views[b], base_digests),
                )
                served.setdefault(of, []).append((a, b))
        yield _Served(numbers, pack, served)


def _is_own(model: Model, stored: Model, tensor: str) -> bool:
    """Whether a tensor of a model is a whole one as its file has it."""
    view = model.views[tensor]
    return view.is_plain and view == stored.views.get(tensor)


def _rows(served: _Served, grid: PackGrid) -> dict[Pair, PackedRow]:
    """Return the rows of a pack, as number 0, by the pairs of tensors that it serves."""
    rows: dict[Pair, PackedRow] = {}
    try:
        for row, nbytes, residual_sq in served.pack.sizes(grid.block_elems):
            pairs = served.of(row.content)
            if pairs:
                place = 0, row.content.name, row.unit, row.factors, row.threshold_bits
                of = packed_row(*place, tails_from(row), nbytes, residual_sq)
                rows |= dict.fromkeys(pairs, of)
    except CorruptionError as error:
        warn_damaged(served.pack.root, error)
        return {}
    return rows
