"""Indexes what landed: registers it, takes its digests, measures it for the recipes there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.deploy.arrivals import attempted, mark_packed, packing
from mergepipe_pipeline.deploy.inbox import PacksWanted
from mergepipe_pipeline.deploy.recipe_files import standing_recipes, uses
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.model import grid_for
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.facts.analysed import analysed_experts
from mergepipe_pipeline.facts.contents import Contents, content_of
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.locate import Places, locate_registered
from mergepipe_pipeline.resolution.open_models import open_models
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

if TYPE_CHECKING:
    from mergepipe_pipeline.verbs.pack import Packed


@dataclass(frozen=True, slots=True)
class IndexedExpert:
    """The findings of indexing an expert; `layers_changed` is against its last version.

    `packs` were made or are there; `pack_error` says why one could not be made.
    """

    registration: Registration
    content_sha256: str
    layers_changed: tuple[str, ...]
    layers: int
    bases: tuple[str, ...]
    packs: tuple[Packed, ...] = ()
    pack_error: str = ""


def index_expert(warehouse: Warehouse, name: str) -> IndexedExpert:
    """Register what lies in `inbox/<name>` (or is known as `name`), take digests and statistics.

    Statistics are taken for every stage of a recipe that merges the expert into a registered base,
    by itself or as an adapter on another model. A recipe that cannot use it does not stop it.
    Raises what opening the checkpoint raises.
    """
    catalog = warehouse.catalog
    before: dict[str, str] = {}
    with suppress(CorruptionError):  # a new version gets past a damaged one
        if name in catalog:
            last = catalog.get(name).checkpoint
            before = _by_layer(last, catalog.digests(last.checkpoint_id) or {})
    folder = warehouse.inbox / name
    registration = (
        register(warehouse, folder, name) if folder.exists() else locate_registered(warehouse, name)
    )
    checkpoint = registration.checkpoint
    bases = dict[str, None]()
    places = Places(warehouse, warehouse.recipes)
    places.found[name, None] = checkpoint  # it was opened a moment ago
    for stage in (s for parsed in standing_recipes(warehouse) for s in (*parsed.before, parsed)):
        for ref, base in _pairs(stage, name):
            if all(used in catalog for used in (*uses(ref, stage), *uses(base, stage))):
                opened = open_models(places, (ref, base), 1, [])
                is_plain = all(c.form is None for m in opened for c in m.checkpoints)
                if opened and is_plain:  # of codes there is nothing to learn
                    grid = grid_for(opened[1], stage.block_elems)
                    analysed_experts(warehouse, opened[:1], opened[1], grid)
                    bases[base.text] = None
    after = _by_layer(checkpoint, Contents(warehouse, checkpoint).learn())
    changed = tuple(layer for layer in after if after[layer] != before.get(layer))
    return IndexedExpert(
        registration,
        content_of(catalog, checkpoint),
        tuple(sorted(changed, key=layer_order)),
        len(after),
        tuple(bases),
    )


def _pairs(stage: ParsedRecipe, name: str) -> Iterator[tuple[ModelRef, ModelRef]]:
    """The stage's models that take something from `name`, each with the base, where both exist."""
    base = None if stage.base is None else stage.references[stage.base]
    if base is None or base.model in stage.stages_used:
        return
    for ref in stage.references:
        if ref is not base and name in uses(ref, stage) and ref.model not in stage.stages_used:
            yield ref, base


def _by_layer(checkpoint: Checkpoint, digests: Mapping[str, str]) -> dict[str, str]:
    """What each layer of a checkpoint holds, by the digests of its tensors."""
    n = layer_count(digests)
    layers: dict[str, list[str]] = {}
    for tensor, digest in sorted(digests.items()):
        layers.setdefault(layer_name(tensor, n), []).append(digest)
    return {
        layer: digest_json([checkpoint.kind, checkpoint.adapter_config, *parts])
        for layer, parts in layers.items()
    }


def index_arrival(warehouse: Warehouse, name: str, *, packs: bool = False) -> IndexedExpert:
    """Index what lies in the inbox under this name, and remember how that ended.

    With `packs` it is packed against each base, too; if that fails, the index stays, and `packs`
    are tried again later. Raises what `index_expert` raises.
    """
    with attempted(warehouse, name):
        done = index_expert(warehouse, name)
    return _packed(warehouse, done) if packs else done


def _packed(warehouse: Warehouse, done: IndexedExpert) -> IndexedExpert:
    """Pack an expert against each base that it is merged into, and remember how that ended.

    Adapters and deltas have no pack, and need none.
    """
    # It loads Numba, a quarter of a second that definitions do without.
    from mergepipe_pipeline.verbs.pack import pack

    name, is_full = done.registration.name, done.registration.checkpoint.kind == "full"
    bases = PacksWanted(warehouse).bases_of(name)
    made: list[Packed] = []
    try:
        with packing(warehouse, name):
            for base in bases if is_full else ():
                made += pack(warehouse, [name], base=base)
    except (MergePipeError, OSError) as error:
        return replace(done, packs=tuple(made), pack_error=str(error))
    mark_packed(warehouse, name, [p.pack_id for p in made], tuple(bases.values()))
    return replace(done, packs=tuple(made))
