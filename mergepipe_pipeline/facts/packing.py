"""What an expert's pack is made of: tensors, units and thresholds, from the catalog's statistics.

Steps and thresholds are those of whole tensors as the catalog knows them, so a pack does not depend
on when or with what it was made, and X20 holds exactly what a trim to that density keeps.
"""

from __future__ import annotations

from math import prod

from mergepipe_pipeline.contents.tensor_digests import ensure_digests
from mergepipe_pipeline.domain.model import Model, grid_for
from mergepipe_pipeline.domain.pack import X20_DENSITY, TensorContent
from mergepipe_pipeline.domain.view import moved
from mergepipe_pipeline.facts.analysed import AnalysedExpert, FactTables, Sparsified
from mergepipe_pipeline.packs.codec import unit_of
from mergepipe_pipeline.packs.contents import packed_contents
from mergepipe_pipeline.packs.writer import Packing
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse


def contents_of(
    warehouse: Warehouse, expert: Model, base: Model, progress: Progress | None = None
) -> tuple[TensorContent, ...]:
    """What a pack of an expert against a base is made from; computes missing digests."""
    digests, base_digests = (
        [ensure_digests(warehouse, c, progress) for c in model.checkpoints]
        for model in (expert, base)
    )
    return packed_contents(expert, base, digests, base_digests)


def packings_of(
    warehouse: Warehouse, expert: Model, base: Model, progress: Progress | None = None
) -> tuple[Packing, ...]:
    """The tensors of a pack with their units and thresholds; analyses what the catalog lacks.

    Sources of the views are the expert's checkpoints, then the base's.
    """
    grid = grid_for(base, None)
    contents = contents_of(warehouse, expert, base, progress)
    pairs = [(c.name, c.base_name) for c in contents]
    analysed, tables = AnalysedExpert(warehouse, expert, base, grid, pairs, progress), FactTables()
    analysed.complete()
    stats = analysed.stats(without=("sketch", "sample", "hist"))
    trimmed = [_trimmed(content) for content in contents]
    analysed.add("trim", trimmed, tables, in_full=True)
    return tuple(
        Packing(
            content,
            expert.views[content.name],
            moved(base.views[content.base_name], len(expert.checkpoints)),
            unit_of(tensor_stats.l2sq, tensor_stats.nonzero),
            tables.trims[s.place].threshold_bits,
        )
        for content, s in zip(contents, trimmed, strict=True)
        for tensor_stats in (stats.by_pair[s.pair],)
    )


def _trimmed(content: TensorContent) -> Sparsified:
    """A trim to the density of X20, which a recipe might ask for as well."""
    return Sparsified(
        place=(content.name, 0),
        pair=(content.name, content.base_name),
        position=0,
        seed=0,
        params=(),
        model_params=(("density", X20_DENSITY),),
        shape=content.shape,
        numel=prod(content.shape),
    )
