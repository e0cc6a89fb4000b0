"""What a standing pipeline asks: which recipes, what they want, what is released.

A recipe's wanted state is a digest of its text and of its inputs' contents as indexed. It is
compared with the state recorded at the last release, so no event can be missed and none is acted on
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog, Registration
from mergepipe_pipeline.digest import digest_json, seal, sha256_hex, unseal
from mergepipe_pipeline.errors import MergePipeError, NotFoundError, RecipeError
from mergepipe_pipeline.pipeline.analyze import (
    common_pairs,
    ensure_digests,
    ensure_stats,
    grid_for,
    open_pair,
)
from mergepipe_pipeline.pipeline.check import load_recipe
from mergepipe_pipeline.pipeline.merge import (
    EngineKnobs,
    LayerOutcome,
    Realised,
    commit,
    merge_layers,
)
from mergepipe_pipeline.pipeline.plan import load_plan, make_plan
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.pipeline.publish import publish
from mergepipe_pipeline.pipeline.register import exists, register, resolve
from mergepipe_pipeline.recipe.load import RawRecipe
from mergepipe_pipeline.snapshots.load import load_snapshot
from mergepipe_pipeline.spec.layers import layer_count, layer_index, layer_name, layer_order
from mergepipe_pipeline.spec.plan import ENGINE_VERSION, MergePlan
from mergepipe_pipeline.spec.snapshot import Ref, Snapshot
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True)
class RecipeCard:
    """A recipe of the warehouse as definitions need it.

    `members` are catalog names, the base first; `layers` is empty until the base is registered.
    `problem` says why the recipe cannot be used, or is None.
    """

    name: str
    raw: RawRecipe | None
    members: tuple[str, ...]
    layers: tuple[str, ...]
    problem: str | None

    @property
    def recipe(self) -> RawRecipe:
        """The parsed recipe of a usable card. Raises RecipeError with the card's problem."""
        if self.raw is None:
            raise RecipeError("A recipe cannot be used", where=self.name, found=self.problem or "")
        return self.raw

    @property
    def token(self) -> str:
        """Changes when definitions made from this card would change."""
        return digest_json([self.name, self.raw and self.raw.text, self.members, self.layers])[:16]


@dataclass(frozen=True, slots=True)
class Indexed:
    """What indexing an expert found; `layers_changed` is against its last version."""

    registration: Registration
    content_sha256: str
    layers_changed: tuple[str, ...]
    layers: int
    bases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """What a recipe last released; `sequence` counts its releases."""

    recipe: str
    sequence: int
    wanted: str
    plan_id: str
    snapshot_id: str


def recipe_cards(home: Warehouse) -> tuple[RecipeCard, ...]:
    """Every recipe file of the warehouse, usable or not, in name order."""
    files = sorted(p for p in home.recipes.iterdir() if p.suffix in {".yml", ".yaml"})
    return tuple(_card(home, str(p), p.stem) for p in files)


def _card(home: Warehouse, path: str, name: str) -> RecipeCard:
    try:
        raw = load_recipe(path)
    except MergePipeError as error:
        return RecipeCard(name, None, (), (), str(error))
    stages = (*raw.before, raw)
    members = tuple(dict.fromkeys(name for stage in stages for name in _members(home, stage)))
    known = set(Catalog(home.catalog).names())
    template = _template(raw)
    if template not in known:
        return RecipeCard(name, raw, members, (), f"{template} is not registered yet")
    tensors = [t.name for t in Catalog(home.catalog).get(template).checkpoint.tensors]
    n = _n_layers(raw, tensors)
    layers = {layer_name(t, n) for t in tensors if layer_index(t) is None}
    layers |= {layer_name(f"layers.{number}.weight", n) for number in range(n)}
    return RecipeCard(name, raw, members, tuple(sorted(layers, key=layer_order)), None)


def _members(home: Warehouse, raw: RawRecipe) -> Iterator[str]:
    """The catalog names (or paths) that a recipe reads, its base first."""
    first = [] if raw.base is None else [raw.references[raw.base]]
    for ref in (*first, *raw.references):
        if ref.text in raw.stages_used:
            continue
        if ref.lora is None or exists(home, ref.text, home.recipes):
            yield ref.text if ref.revision is None else ref.model
        else:
            yield from (ref.model, ref.lora)


def _template(raw: RawRecipe) -> str:
    """The model whose tensors the output has; of a stage's result, that of the stage."""
    ref = raw.references[raw.base if raw.base is not None else 0]
    stage = next((s for s in raw.before if s.stage == ref.text), None)
    return _template(stage) if stage else ref.model


def _n_layers(raw: RawRecipe, tensors: Sequence[str]) -> int:
    """Layers of the output: as many as the slices ask for, else the template's."""
    ranges = [part.entries[0].layers for _, part in raw.slices() if part.entries]
    if ranges and all(ranges):
        return sum(stop - start for start, stop in (r for r in ranges if r))
    return layer_count(tensors)


def index_expert(home: Warehouse, name: str, progress: Progress | None = None) -> Indexed:
    """Register what lies in `inbox/<name>` (or is known as `name`), take digests and statistics.

    Statistics are taken against the base of every recipe that uses the expert and whose base is
    registered. Raises what opening the checkpoint raises.
    """
    catalog = Catalog(home.catalog)
    before = _digests_by_layer(catalog, name)
    folder = home.inbox / name
    registration = register(home, folder, name) if folder.exists() else resolve(home, name)
    checkpoint = registration.checkpoint
    bases: list[str] = []
    for card in recipe_cards(home):
        base = _base_for(card, name)
        if base in catalog.names() and base not in bases and base != name:
            expert, against = open_pair(home, name, base)
            grid = grid_for(against, card.recipe.block_elems)
            ensure_stats(home, expert, against, common_pairs(expert, against), grid, progress)
            bases.append(base)
    ensure_digests(home, checkpoint, progress)
    after = _digests_by_layer(catalog, name)
    changed = tuple(layer for layer in after if after[layer] != before.get(layer))
    return Indexed(
        registration,
        catalog.content_sha256(checkpoint.checkpoint_id),
        tuple(sorted(changed, key=layer_order)),
        len(after),
        tuple(bases),
    )


def _base_for(card: RecipeCard, name: str) -> str | None:
    """The base of a recipe that uses the expert `name`, or None."""
    if card.raw is None or card.raw.base is None:
        return None
    ref = card.raw.references[card.raw.base]
    used = any(name in (r.text, r.model, r.lora) for r in card.raw.references)
    return ref.text if used and ref.lora is None else None


def _digests_by_layer(catalog: Catalog, name: str) -> dict[str, str]:
    if name not in catalog.names():
        return {}
    checkpoint = catalog.get(name).checkpoint
    digests = catalog.digests(checkpoint.checkpoint_id)
    if digests is None:
        return {}
    n = layer_count(digests)
    layers: dict[str, list[str]] = {}
    for tensor, digest in sorted(digests.items()):
        layers.setdefault(layer_name(tensor, n), []).append(digest)
    return {layer: digest_json(parts) for layer, parts in layers.items()}


def wanted(home: Warehouse, card: RecipeCard) -> str | None:
    """The digest of what a release would be made from; None while an input is not indexed."""
    catalog = Catalog(home.catalog)
    known = set(catalog.names())
    contents = []
    for member in card.members:
        if member not in known:
            return None
        checkpoint = catalog.get(member).checkpoint
        if catalog.digests(checkpoint.checkpoint_id) is None:
            return None
        contents.append(catalog.content_sha256(checkpoint.checkpoint_id))
    text = card.raw.text if card.raw else ""
    return digest_json([ENGINE_VERSION, sha256_hex(text.encode()), contents])[:24]


def plan_recipe(home: Warehouse, card: RecipeCard, progress: Progress | None = None) -> MergePlan:
    """Plan a recipe of the warehouse and remember the plan as its current one."""
    state = wanted(home, card)
    plan = make_plan(home, card.recipe, relative_to=home.recipes, progress=progress)
    write_atomic(
        home.current_plan_path(card.name),
        seal({"plan_id": plan.plan_id, "wanted": state or "", "snapshot_id": "", "layers": {}}),
    )
    return plan


def current_plan(home: Warehouse, recipe: str) -> MergePlan:
    """The plan that `plan_recipe` made last. Raises NotFoundError."""
    return load_plan(home, _current(home, recipe)["plan_id"])


def _current(home: Warehouse, recipe: str) -> dict[str, Any]:
    path = home.current_plan_path(recipe)
    if not path.exists():
        raise NotFoundError(
            "A recipe has no plan yet",
            where=recipe,
            found=str(path),
            next_step=f"materialize {recipe}/plan first",
        )
    return unseal(path.read_bytes(), str(path))


def merge_recipe(
    home: Warehouse, recipe: str, layers: Sequence[str], knobs: EngineKnobs
) -> Iterator[LayerOutcome]:
    """Run or reuse layers of the recipe's current plan, and remember what they cost."""
    state = _current(home, recipe)
    costs: dict[str, Any] = dict(state["layers"])
    try:
        for done in merge_layers(home, load_plan(home, state["plan_id"]), layers, knobs=knobs):
            costs[done.name] = asdict(Realised.of([done]))
            yield done
    finally:
        write_atomic(home.current_plan_path(recipe), seal({**state, "layers": costs}))


def snapshot_recipe(home: Warehouse, recipe: str) -> tuple[Snapshot, Realised]:
    """Commit the snapshot of the recipe's current plan and remember it as its current one.

    Returns what the plan's layers cost, over all runs that worked on it.
    """
    state = _current(home, recipe)
    costs = [Realised(**cost) for cost in state["layers"].values()]
    realised = Realised.total(costs)
    snapshot = commit(home, load_plan(home, state["plan_id"]), realised)
    write_atomic(
        home.current_plan_path(recipe), seal({**state, "snapshot_id": snapshot.snapshot_id})
    )
    return snapshot, realised


def current_snapshot(home: Warehouse, recipe: str) -> Snapshot:
    """The snapshot that `snapshot_recipe` committed last. Raises NotFoundError."""
    state = _current(home, recipe)
    if not state["snapshot_id"]:
        raise NotFoundError(
            "A recipe's current plan has no snapshot yet",
            where=recipe,
            found=f"plan {state['plan_id'][:16]}",
            next_step=f"materialize {recipe}/snapshot first",
        )
    return load_snapshot(home.snapshots, state["snapshot_id"])


def release_recipe(home: Warehouse, card: RecipeCard) -> tuple[Ref, Release]:
    """Publish the recipe's current snapshot under its ref and record what it was made from."""
    snapshot, state = current_snapshot(home, card.name), _current(home, card.name)
    last = last_release(home, card.name)
    ref = publish(
        home, snapshot.snapshot_id, card.recipe.ref, reason=f"recipe {card.name}", audit=False
    )
    done = Release(
        card.name,
        (last.sequence if last else 0) + 1,
        state["wanted"],
        snapshot.manifest.plan_id,
        snapshot.snapshot_id,
    )
    write_atomic(home.release_path(card.name), seal(asdict(done)))
    return ref, done


def last_release(home: Warehouse, recipe: str) -> Release | None:
    """What the recipe released last, or None."""
    path = home.release_path(recipe)
    return Release(**unseal(path.read_bytes(), str(path))) if path.exists() else None
