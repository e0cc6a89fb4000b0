"""The recipe files of a warehouse: models, layers of the result, or why they cannot.

Read from recipe text and catalog alone, so that definitions load fast and a recipe that cannot be
used breaks nothing but itself. A `RecipeFile` names the layers that its plan will have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.layers import layer_count, layer_name, layer_order
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.domain.selector import Selected
from mergepipe_pipeline.errors import CorruptionError, RecipeError
from mergepipe_pipeline.recipe.parse import ParsedRecipe
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.origins import folder_of
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.resolution.resolve import foreseen, open_stage
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.snapshots.stores import RefStore
from mergepipe_pipeline.text import escaped
from mergepipe_pipeline.warehouse import Warehouse

#: How the reason of a version begins that a recipe released; the recipe's name follows.
_RELEASED = "recipe "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
#: The layers of recipes by what they follow from, for sensors: they ask at each tick.
_LAYERS: dict[tuple[Hashable, ...], tuple[str, ...]] = {}
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class StandingFile:
    """A file of the warehouse that runs by itself, as definitions need it.

    `members` are the catalog names of its inputs, the base first; `problem` says why it cannot be
    used (yet).
    """

    kind: ClassVar[str]

    name: str
    members: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def identifier(self) -> str:
        """The name in letters, digits and underscores."""
        return identifier_of(self.name)


@dataclass(frozen=True)
class RecipeFile(StandingFile):
    """A recipe of the warehouse; without the names of stages, and with what selectors take.

    `layers` are those of the result, empty where there is a `problem`. Relative paths of its
    evaluator start from `folder`. `job` is the name of the job that runs it.
    """

    kind = "recipe"

    parsed: ParsedRecipe | None = None
    folder: Path = Path()
    job: str = ""
    layers: tuple[str, ...] = ()

    @property
    def recipe(self) -> ParsedRecipe:
        """The parsed recipe of a usable file. Raises RecipeError with the file's problem."""
        if self.parsed is None:
            raise RecipeError(
                "A recipe cannot be used",
                where=self.name,
                found=self.problem or "",
                next_step="mend its file: `mergepipe check FILE` tells all that is wrong",
            )
        return self.parsed

    @property
    def stages(self) -> tuple[ParsedRecipe, ...]:
        """All stages, the last one being the result; empty for a recipe that cannot be read."""
        return () if self.parsed is None else (*self.parsed.before, self.parsed)

    @property
    def selected(self) -> tuple[Selected, ...]:
        """The choices of the selectors of all stages."""
        return () if self.parsed is None else self.parsed.all_selected

    @property
    def pinned(self) -> frozenset[str]:
        """The names of which a stage asks for a certain revision."""
        references = [r for stage in self.stages for r in stage.references]
        adapters = (r.lora for r in references if r.lora is not None and r.lora_revision)
        return frozenset((*(r.model for r in references if r.revision), *adapters))

    @property
    def token(self) -> str:
        """Changes when definitions made from this file would change."""
        text = self.parsed and self.parsed.text
        return digest_json([self.name, text, self.members, self.layers, self.problem])[:16]


def recipe_files(warehouse: Warehouse) -> tuple[RecipeFile, ...]:
    """Every recipe file of the warehouse, usable or not, in name order."""
    catalog = warehouse.catalog
    checkpoint_of = cache(lambda n: catalog.get(n).checkpoint if n in catalog else None)
    choose = Registered(warehouse, warehouse.recipes)
    files: list[RecipeFile] = []
    for path, problem in named_files(warehouse.recipes, {}):
        if problem is None:
            files.append(_file(warehouse, path, choose, checkpoint_of))
        else:
            files.append(RecipeFile(path.name, problem=problem))
    return tuple(_presentable(_with_own_refs(warehouse, files)))


def names_read(warehouse: Warehouse) -> set[str]:
    """The names that readable recipes have for their inputs: names of the catalog, if usable."""
    return {name for file in _read_all(warehouse) for name in file.members}


def standing_recipes(warehouse: Warehouse) -> list[ParsedRecipe]:
    """The recipes of the warehouse that can be read, whether or not their models are there."""
    recipes = (file.parsed for file in _read_all(warehouse))
    return [parsed for parsed in recipes if parsed is not None]


def bases_read(warehouse: Warehouse) -> dict[str, set[str]]:
    """The bases that readable recipes merge each of their models into, by name."""
    bases: dict[str, set[str]] = {}
    for stage in (stage for file in _read_all(warehouse) for stage in file.stages):
        refs = [r for r in stage.references if r.model not in stage.stages_used]
        base = None if stage.base is None else stage.references[stage.base]
        for ref in refs if base in refs else ():
            if base is not None and ref.model != base.model:
                bases.setdefault(ref.model, set()).add(base.model)
    return bases


def yaml_files(folder: Path) -> Iterator[Path]:
    """The YAML files of a folder that may be missing, in name order, but hidden ones."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in {".yml", ".yaml"} and not path.name.startswith("."):
            yield path


def _read_all(warehouse: Warehouse) -> Iterator[RecipeFile]:
    choose = Registered(warehouse, warehouse.recipes)
    for path in yaml_files(warehouse.recipes):
        yield _read(warehouse, path, choose)


def release_reason(recipe: str) -> str:
    """The reason that a ref gives for a version which a recipe released."""
    return f"{_RELEASED}{recipe}"


def released_by_another(refs: RefStore, ref: str, recipe: str, snapshot_id: str) -> bool:
    """Whether another recipe took a ref away from a recipe's snapshot. Raises NotFoundError."""
    try:
        current = refs.current(ref)
    except CorruptionError:  # `verify` and who uses the ref say so
        return False
    is_another = current.reason.startswith(_RELEASED) and current.reason != release_reason(recipe)
    return is_another and current.snapshot_id != snapshot_id


def _with_own_refs(warehouse: Warehouse, files: Sequence[RecipeFile]) -> Iterator[RecipeFile]:
    """The files; of several that publish to one ref, which would take turns, only one is usable.

    A file that cannot be read, as half of one that is being written, keeps the refs that it has.
    """
    owners = dict(_held(warehouse.refs, {f.name for f in files if f.parsed is None}))
    for file in sorted(files, key=lambda c: c.parsed is None or c.parsed.ref != c.name):
        if file.parsed is not None:
            owners.setdefault(file.parsed.ref, file.name)
    for file in files:
        ref = "" if file.parsed is None else file.parsed.ref
        owner = owners.get(ref, file.name)
        if owner == file.name:
            yield file
            continue
        problem = f"it would publish to the ref {ref} of the recipe {owner}: give it another `ref:`"
        yield replace(file, layers=(), problem=file.problem or problem)


def _held(refs: RefStore, recipes: Collection[str]) -> Iterator[tuple[str, str]]:
    """The refs whose current versions some recipes released, each with its recipe."""
    reasons = {release_reason(recipe): recipe for recipe in recipes}
    for ref in refs.names() if recipes else ():
        with suppress(CorruptionError):
            if recipe := reasons.get(refs.current(ref).reason):
                yield ref, recipe


def _presentable(files: Iterable[RecipeFile]) -> Iterator[RecipeFile]:
    """The files in text that can be printed; names that this makes alike stay different."""
    names = set[str]()
    for file in files:
        name = escaped(file.name)
        while name in names:
            name += "'"
        names.add(name)
        yield replace(file, name=name, problem=file.problem and escaped(file.problem))


def named_files(folder: Path, taken: dict[str, str]) -> Iterator[tuple[Path, str | None]]:
    """The YAML files of a folder, each with why its name cannot name assets, if so.

    `taken` says what names assets already, by identifier; these files are added.
    """
    for path in yaml_files(folder):
        identifier = identifier_of(path.stem)
        if problem := name_problem(path):
            yield path, str(problem)
        elif other := taken.get(identifier):
            taken.setdefault(identifier_of(path.name), path.name)  # it is shown by this name
            said = f"{path.name} would have the same assets or job as {other}; rename one of them"
            yield path, said
        else:
            taken[identifier] = path.name
            yield path, None


def name_problem(path: Path) -> RecipeError | None:
    """Why the name of a recipe's or search's file cannot name assets, if so."""
    if _NAME.fullmatch(path.stem):
        return None
    return RecipeError(
        "A file's name cannot name assets",
        where=path.name,
        expected="at most 63 letters, digits, '.', '_' and '-', a letter or digit first",
        found=repr(path.stem),
        next_step="rename the file",
    )


def identifier_of(name: str) -> str:
    """A name in letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def uses(ref: ModelRef, parsed: ParsedRecipe) -> tuple[str, ...]:
    """The catalog names that a stage's reference means: a model's and an adapter's.

    Empty where the model is an earlier stage's result; then only the adapter, if there is one.
    """
    model = () if ref.model in parsed.stages_used else (ref.model,)
    return model if ref.lora is None else (*model, ref.lora)


def _read(warehouse: Warehouse, path: Path, choose: Registered) -> RecipeFile:
    """A recipe file, as its text and the names of the catalog give it."""
    try:
        parsed, folder = load_recipe(path, warehouse, choose), folder_of(path)
    except Exception as error:  # whatever it is, it is this recipe's alone
        return RecipeFile(path.stem, problem=str(error))
    file = RecipeFile(path.stem, parsed=parsed, folder=folder)
    return replace(file, members=tuple(dict.fromkeys(_members(file))))


def _file(
    warehouse: Warehouse,
    path: Path,
    choose: Registered,
    checkpoint_of: Callable[[str], Checkpoint | None],
) -> RecipeFile:
    file = _read(warehouse, path, choose)
    if file.problem is not None:
        return file
    try:
        members = {m: checkpoint_of(m) for m in file.members}
        missing = [m for m, checkpoint in members.items() if checkpoint is None]
        if missing:
            return replace(file, problem=not_registered(missing))
        known = {m: c for m, c in members.items() if c is not None}
        return replace(file, layers=_known_layers(warehouse, file, known))
    except Exception as error:
        return replace(file, problem=str(error))


def _members(file: RecipeFile) -> Iterator[str]:
    for stage in file.stages:
        first = [] if stage.base is None else [stage.references[stage.base]]
        for ref in (*first, *stage.references):
            yield from uses(ref, stage)


def not_registered(names: list[str]) -> str:
    """That models are missing. Paths are not taken: partitions and lineage have names."""
    which = f"{names[0]} is" if len(names) == 1 else f"{', '.join(names)} are"
    paths = [name for name in names if "/" in name]
    how = (
        f"`mergepipe register {paths[0]} --name NAME` and write NAME in the recipe"
        if paths
        else "`mergepipe register PATH`"
    )
    return f"{which} not registered yet. Next: copy to inbox/<name>, or {how}"


def _known_layers(
    warehouse: Warehouse, file: RecipeFile, known: Mapping[str, Checkpoint]
) -> tuple[str, ...]:
    """The layers of the result, found anew only where they may have changed.

    They follow from the recipe and the records of its inputs, unless one is opened by itself, as a
    pinned revision is.
    """
    key = (file.parsed, *((c.name, c.root, c.checkpoint_id, c.config) for c in known.values()))
    layers = _LAYERS.get(key)
    if layers is None:
        layers = _layers(warehouse, file, known)
        if all(r.text in {*known, *s.stages_used} for s in file.stages for r in s.references):
            if len(_LAYERS) >= _MOST_LAYERS:
                _LAYERS.clear()
            _LAYERS[key] = layers
    return layers


def _layers(
    warehouse: Warehouse, file: RecipeFile, known: Mapping[str, Checkpoint]
) -> tuple[str, ...]:
    """The layers of the result. Raises as `check` does for models that do not fit."""
    pending = {m: c for m, c in known.items() if m not in file.pinned}
    names: list[str] = []
    for stage in file.stages:
        recipe, models = open_stage(Places(warehouse, warehouse.recipes, pending), stage)
        pending[recipe.name] = foreseen(recipe, models)
        names = [t.name for t in recipe.tensors]
    n_layers = layer_count(names)
    return tuple(sorted({layer_name(n, n_layers) for n in names}, key=layer_order))
