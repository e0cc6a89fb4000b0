"""Begins a search: checks its file against its sources, states its cost, writes it down, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.deploy.recipe_files import name_problem
from mergepipe_pipeline.domain.layers import layer_count, layer_name
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.output import out_nbytes, stored_like
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    EvaluationError,
    RecipeError,
    SearchError,
)
from mergepipe_pipeline.execution.throughput import expected_s, nbytes_of_recipe
from mergepipe_pipeline.facts.contents import Contents, content_of
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.quality.evaluators import command_of, evaluator_id
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.recipe.references import identity, parse_reference
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.origins import folder_of
from mergepipe_pipeline.resolution.recipe_text import parse, yaml_file
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe, open_stage, resolve
from mergepipe_pipeline.search.bayes import refuse_without_botorch
from mergepipe_pipeline.search.ledger import Ledger, Search, searches
from mergepipe_pipeline.search.search_file import SearchFile, parse_search
from mergepipe_pipeline.search.space import Space, layers_of, numbered
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.text import size
from mergepipe_pipeline.warehouse import Warehouse


def read_search(warehouse: Warehouse, path: Path) -> Search:
    """The search that a file asks for, held against the headers of its sources; writes nothing.

    Raises RecipeError with the problems of the file, what `check` raises for its recipes, and
    EvaluationError for an evaluator that cannot be had.
    """
    text = yaml_file(path, "search file")
    name, folder = path.stem, folder_of(path)
    if problem := name_problem(path):
        raise problem
    file = parse_search(text, text_of(path))
    command_of(file.evaluator, folder)
    models = models_of(warehouse, file, folder)
    if file.evaluations > file.initial:
        refuse_without_botorch()
    layers = layers_of([models[source].views for source in file.sources])
    n_layers = len(numbered(layers))
    if not n_layers:
        raise RecipeError(
            "The models of a search have no numbered layers",
            where=f"{text_of(path)}, sources",
            expected="tensors of layers, as model.layers.0.mlp.up_proj.weight",
            found=", ".join(layer.name for layer in layers[:3]),
            next_step="a search gives weights to layers: sweep the weights of recipes instead",
        )
    if file.space.blocks is not None and file.space.blocks > n_layers:
        raise RecipeError(
            "A search has more blocks than its models have layers",
            where=f"{text_of(path)}, space.blocks",
            expected=f"at most {n_layers}",
            found=str(file.space.blocks),
            next_step="write fewer, or leave the key out for one per layer",
        )
    search = Search(name, text, str(folder), layers, evaluator_id(file.evaluator, folder))
    resolved_of(warehouse, search)
    return search


def start_search(warehouse: Warehouse, path: Path) -> Search:
    """The search of a file: begun now, or as it was begun, if it is the same file.

    Raises as `read_search` and `begin_search`.
    """
    return begin_search(warehouse, read_search(warehouse, path))


def begin_search(warehouse: Warehouse, asked: Search, progress: Progress | None = None) -> Search:
    """A search that was read from its file, begun now or as it was begun.

    Takes the digests of sources that nobody knows yet. Raises SearchError for another file under
    the same name, and as `refuse_changed`.
    """
    ledger = Ledger(warehouse, asked.name)
    if asked.name not in searches(warehouse):
        contents = _contents(warehouse, asked, progress)
        return ledger.begin(replace(asked, contents=contents))
    begun = ledger.search()
    if (begun.file, begun.folder) != (asked.file, asked.folder):
        raise SearchError(
            "Another search has this name",
            where=str(ledger.folder),
            expected="the file that it began with"
            + ("" if begun.folder == asked.folder else f", in {begun.folder}"),
            found="a file that asks for something else",
            next_step="give the file another name: what was merged and measured for the one that "
            "is there is found again",
        )
    refuse_changed(warehouse, begun, progress)
    return begun


def refuse_changed(warehouse: Warehouse, search: Search, progress: Progress | None = None) -> None:
    """Raise where results would not compare with those that are there: CheckpointChangedError for
    other contents of a source, EvaluationError for another evaluator.
    """
    for text, contents in _contents(warehouse, search, progress).items():
        if contents != search.contents[text]:
            raise CheckpointChangedError(
                "A source of a search is not what it was when the search began",
                where=f"{text}, of the search {search.name}",
                expected=", ".join(c[:16] for c in search.contents[text]),
                found=", ".join(c[:16] for c in contents),
                next_step="bring back what was there, or begin a search of another name",
            )
    refuse_other_evaluator(search)


def refuse_other_evaluator(search: Search) -> None:
    """Raise EvaluationError for another evaluator than the search began with."""
    digest = evaluator_id(search.file.evaluator, search.folder)
    if digest != search.evaluator_id:
        raise EvaluationError(
            "The evaluator of a search is not what it was when the search began",
            where=f"{search.file.evaluator.label}, of the search {search.name}",
            expected=f"evaluator {search.evaluator_id[:8]}",
            found=f"evaluator {digest[:8]}: a file that it names has changed",
            next_step="bring back what was there, or begin a search of another name",
        )


def resolved_of(warehouse: Warehouse, search: Search) -> ResolvedRecipe:
    """A candidate in the middle of the space, checked and with its cost; no weight is read."""
    parsed = parsed_of(search, Space(search.file, (), ()).recipe("a candidate", (0.5,)))
    return resolve(warehouse, parsed, relative_to=search.folder)


def parsed_of(search: Search, text: str, name: str | None = None) -> ParsedRecipe:
    """The recipe of a candidate, parsed. Raises RecipeError, BudgetError."""
    return parse(text, name=name or search.name, where=f"a recipe of the search {search.name}")


def models_of(warehouse: Warehouse, file: SearchFile, folder: Path) -> Mapping[str, Model]:
    """The sources and the base, opened, by their texts in the file; no weight is read."""
    text = Space(file, (), ()).recipe("sources", (0.5,))
    parsed = parse(text, name="search", where=f"the sources of a search in {folder}")
    _, models = open_stage(Places(warehouse, folder), parsed)
    by_identity = {identity(r): model for r, model in zip(parsed.references, models, strict=True)}
    return {
        text: by_identity[identity(parse_reference(text))]
        for text in (*file.sources, file.base_model)
    }


def _contents(
    warehouse: Warehouse, search: Search, progress: Progress | None
) -> dict[str, tuple[str, ...]]:
    """By the text of each model the digests of what it holds, taken where nobody knows them."""
    contents = {}
    for text, model in models_of(warehouse, search.file, search.folder).items():
        for checkpoint in model.checkpoints:
            Contents(warehouse, checkpoint, progress).learn()
        contents[text] = tuple(content_of(warehouse.catalog, c) for c in model.checkpoints)
    return contents


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
        out = out_nbytes(recipe, t, models)
        name = layer_name(t.name, n_layers)
        old = nbytes_by_layer.get(name, (0, 0, 0))
        nbytes_by_layer[name] = (
            old[0] + experts,
            old[1] + (like.nbytes if t.base else 0),
            old[2] + out,
        )
    return nbytes_by_layer
