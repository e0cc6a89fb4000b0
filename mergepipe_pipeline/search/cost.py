"""What a search costs, told before it begins."""

from __future__ import annotations

from dataclasses import dataclass

from mergepipe_pipeline.domain.layers import layer_count, layer_name
from mergepipe_pipeline.dtypes import FLOATING, itemsize
from mergepipe_pipeline.execution.throughput import expected_s, nbytes_of_recipe
from mergepipe_pipeline.planner.parts import out_dtype, stored_like
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.search.ledger import Search
from mergepipe_pipeline.search.start import resolved_of
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class SearchCost:
    """At most so many evaluations, each of which merges `layers_changed` layers of `layers`.

    `nbytes` are read in all, of sources and base, and `scratch_nbytes` where each candidate is
    merged from scratch; `disk_nbytes` are written, of which the front's share stays after `gc`.
    `analysis_nbytes` are read once to learn what the catalog does not know. `merge_s` is about one
    merge from scratch, None before the first merge here.
    """

    evaluations: int
    layers: int
    layers_changed: int
    layers_merged: int
    nbytes: int
    scratch_nbytes: int
    disk_nbytes: int
    free_nbytes: int
    analysis_nbytes: int
    merge_s: float | None

    @property
    def summary(self) -> str:
        """The worst case in one sentence."""
        merge = "" if self.merge_s is None else f", {self.merge_s:.1f} s a merge from scratch"
        return (
            f"{self.evaluations} evaluations, each of at most {self.layers_changed} changed layers "
            f"of {self.layers}: at most {self.layers_merged} layers, {size(self.nbytes)} to read "
            f"({size(self.scratch_nbytes)} from scratch), {size(self.disk_nbytes)} to write, "
            f"{size(self.free_nbytes)} free{merge}"
        )


def search_cost(warehouse: Warehouse, search: Search) -> SearchCost:
    """The worst case of a whole search, from headers; writes nothing."""
    resolved = resolved_of(warehouse, search)
    file, cost, count = search.file, resolved.cost, search.file.evaluations
    fixed = file.fixed if file.space.density is None else {}
    by_layer = _by_layer(resolved)
    changed = [sizes for layer, sizes in by_layer.items() if layer not in fixed]
    experts, base, out = (sum(sizes[n] for sizes in changed) for n in range(3))
    first = cost.expert_bytes_total
    if cost.budget_bytes is not None:
        experts, first = min(experts, cost.budget_bytes), min(first, cost.budget_bytes)
    first += cost.base_bytes
    return SearchCost(
        evaluations=count,
        layers=len(by_layer),
        layers_changed=len(changed),
        layers_merged=len(by_layer) + (count - 1) * len(changed),
        nbytes=first + (count - 1) * (experts + base),
        scratch_nbytes=count * first,
        disk_nbytes=cost.output_bytes + (count - 1) * out,
        free_nbytes=cost.free_bytes,
        analysis_nbytes=cost.analysis_bytes,
        merge_s=expected_s(warehouse, nbytes_of_recipe(resolved)),
    )


def _by_layer(resolved: ResolvedRecipe) -> dict[str, tuple[int, int, int]]:
    """Bytes of sources and base that each layer reads, and that it writes."""
    recipe, models = resolved.recipe, resolved.models
    n_layers = layer_count(t.name for t in recipe.tensors)
    nbytes_by_layer: dict[str, tuple[int, int, int]] = {}
    for t in recipe.tensors:
        like = stored_like(t, models)
        inputs = t.inputs if like.dtype in FLOATING else ()
        experts = sum(models[i.model].views[i.tensor].nbytes for i in inputs)
        out = like.numel * itemsize(out_dtype(recipe, t, models))
        name = layer_name(t.name, n_layers)
        old = nbytes_by_layer.get(name, (0, 0, 0))
        nbytes_by_layer[name] = (
            old[0] + experts,
            old[1] + (like.nbytes if t.base else 0),
            old[2] + out,
        )
    return nbytes_by_layer
