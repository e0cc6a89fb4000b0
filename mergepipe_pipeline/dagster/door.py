"""What a project of somebody else puts among its own definitions.

Nothing here sets an executor, or takes a name that others may have: keys have the prefix, names of
jobs, sensors and resources begin with it, or with mergepipe.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import dagster as dg
import yaml

from mergepipe_pipeline.assets.place import ALONE, Maker, MergePipeTranslator, Place
from mergepipe_pipeline.assets.running import Running, RunOptions
from mergepipe_pipeline.dagster.parts import (
    of_housekeeping,
    of_inbox,
    of_landings,
    of_recipes,
    of_searches,
    resources,
)
from mergepipe_pipeline.deploy.copies import Source, are_changed, is_several, written
from mergepipe_pipeline.deploy.instance import identity_of
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, identifier_of, recipe_files
from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.domain.training_run import member_name
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.resources import Engine, MergePipe
from mergepipe_pipeline.sensors.reload import build_reload_sensor, spreading
from mergepipe_pipeline.settings import SHARDS
from mergepipe_pipeline.storage.atomic import link_path
from mergepipe_pipeline.verbs.search import standing_searches
from mergepipe_pipeline.warehouse import Warehouse

#: What starts a recipe.
Automation = Literal["sensor", "condition"]
#: An asset: its key, as Dagster's users write it, or its definition.
Asset = dg.AssetKey | str | Sequence[str] | dg.AssetsDefinition
#: What makes an expert: an asset, or one partition of it, as a dep that is mapped to that.
Made = Asset | dg.AssetDep


def build_inbox_defs(
    *,
    home: str | Path,
    key_prefix: str | Sequence[str] = (),
    group_name: str | None = None,
    translator: MergePipeTranslator | None = None,
) -> dg.Definitions:
    """What makes checkpoints known that land: `expert_index`, its check, jobs and sensor."""
    warehouse, place = _placed(home, key_prefix, group_name, translator)
    return _with_resources(warehouse, place, of_inbox(warehouse, place))


def build_recipe_defs(
    recipes: Source,
    *,
    home: str | Path,
    key_prefix: str | Sequence[str] = (),
    group_name: str | None = None,
    translator: MergePipeTranslator | None = None,
    experts: Mapping[str, Made] | None = None,
    shards: int | None = None,
    automation: Automation = "sensor",
    name: str = "",
    relative_to: str | Path | None = None,
    **running: Unpack[RunOptions],
) -> dg.Definitions:
    """The chain, job, schedule and sensor of each recipe of a file, a folder, or texts by name.

    They are written into the warehouse, whose inbox `build_inbox_defs` watches. Plans follow the
    assets that make `experts`, by the experts' names, and what these say in `mergepipe/checkpoint`
    lands; `shards` steps share a merge. With `automation="condition"` a plan has the condition
    `recipe_wants`, by which the sensor starts the chain's assets. `name` tells the sensors of calls
    with several recipes apart. Paths of evaluators in texts start from `relative_to`, those in
    files from where the file is. `running` says where and how the heavy steps run: `executor`,
    `pool`, `op_tags`, `pipes` and `pipes_args` of `Running`.

    Raises RecipeError where there is no recipe, or none that uses such an expert, and for a recipe
    of the warehouse of the same name; MergePipeError for what cannot start a step.
    """
    how = Running(**running)
    warehouse, place = _placed(home, key_prefix, group_name, translator, experts, running=how)
    names = written(recipes, warehouse.recipes, place.prefix, relative_to)
    found = (file for file in recipe_files(warehouse) if file.name in names)
    files = [_foreseen(warehouse, file) for file in found]
    _refuse_unused(place.makers, files)
    by_condition, steps = _is_condition(automation, how), shards or SHARDS.value()
    place = replace(place, of=_sensor_name(recipes, names, name), is_known=spreading())
    made = of_recipes(files, steps, place, by_condition=by_condition)
    return _with_resources(warehouse, place, made, of_landings(files, place))


def build_window_defs(
    run: str | Path,
    *,
    home: str | Path,
    name: str = "window",
    last: int = 8,
    every: int | None = None,
    schedule: str = "minus_sqrt",
    decay: float | None = None,
    recipe: Mapping[str, Any] | None = None,
    key_prefix: str | Sequence[str] = (),
    group_name: str | None = None,
    translator: MergePipeTranslator | None = None,
    training: Asset | None = None,
    shards: int | None = None,
    automation: Automation = "sensor",
    relative_to: str | Path | None = None,
    **running: Unpack[RunOptions],
) -> dg.Definitions:
    """The recipe `name` of the last checkpoints of a training run, merged anew as they are saved.

    A link to the run's folder, which may come later, lies in the inbox. `recipe` has other keys, as
    `gate`; the plan follows the asset `training`. `automation` and `running`: as of
    `build_recipe_defs`.
    """
    folder = Path(run).resolve()
    weights = {"schedule": schedule, **({} if decay is None else {"decay": decay})}
    window = {"run": folder.name, "last": last, "weights": weights}
    window |= {} if every is None else {"every": every}
    text = {"merge_method": "linear", "models": [window], **(recipe or {})}
    _link_run(folder, Warehouse.at(home).ensure().inbox / folder.name)
    return build_recipe_defs(
        {name: yaml.safe_dump(text, sort_keys=False)},
        home=home,
        key_prefix=key_prefix,
        group_name=group_name,
        translator=translator,
        experts=None if training is None else {folder.name: training},
        shards=shards,
        automation=automation,
        relative_to=relative_to,
        **running,
    )


def build_search_defs(
    searches: Source,
    *,
    home: str | Path,
    key_prefix: str | Sequence[str] = (),
    group_name: str | None = None,
    translator: MergePipeTranslator | None = None,
    experts: Mapping[str, Made] | None = None,
    name: str = "",
    relative_to: str | Path | None = None,
) -> dg.Definitions:
    """The assets, jobs and sensor of each search of a file, a folder, or texts by name.

    `name` and `relative_to` as of `build_recipe_defs`.
    """
    warehouse, place = _placed(home, key_prefix, group_name, translator, experts)
    names = written(searches, warehouse.searches, place.prefix, relative_to)
    found = standing_searches(warehouse, recipe_files(warehouse))
    files = [search for search in found if search.name in names]
    place = replace(place, of=_sensor_name(searches, names, name), is_known=spreading())
    made = of_searches(files, identity_of(warehouse), place)
    landings = of_landings(files, replace(place, of=place.of.replace("{}", "search_{}")))
    return _with_resources(warehouse, place, made, landings)


def build_housekeeping(
    *,
    home: str | Path,
    key_prefix: str | Sequence[str] = (),
    group_name: str | None = None,
    translator: MergePipeTranslator | None = None,
    only_own: bool = True,
    reload: bool = False,
) -> dg.Definitions:
    """What keeps disk and instance in order: `gc`, ends of dead runs, old runs, told failures.

    Runs that are touched are those that our sensors and jobs start; unless `only_own`, all that use
    the warehouse, with a training that lands an expert among them. With `reload`, the code location
    is loaded anew when a file changes, comes or goes that was given to a call here.
    """
    warehouse, place = _placed(home, key_prefix, group_name, translator, only_own=only_own)
    made = of_housekeeping(place)
    if reload:
        sensors = [build_reload_sensor(are_changed, place)]
        made = dg.Definitions.merge(made, dg.Definitions(sensors=sensors))
    return _with_resources(warehouse, place, made)


def _sensor_name(source: Source, names: Sequence[str], name: str) -> str:
    """How sensors are named: after the one that they watch, or as somebody says.

    What stands behind is somebody's `name`, so that no recipe has it.
    """
    if not is_several(source):
        return f"{identifier_of(names[0])}_{{}}"
    return "_".join(filter(None, ("{}", identifier_of(name))))


def _placed(
    home: str | Path,
    key_prefix: str | Sequence[str],
    group_name: str | None,
    translator: MergePipeTranslator | None,
    experts: Mapping[str, Made] | None = None,
    *,
    only_own: bool = False,
    running: Running = ALONE.running,
) -> tuple[Warehouse, Place]:
    warehouse = Warehouse.at(home).ensure()
    prefix = (key_prefix,) if isinstance(key_prefix, str) else tuple(key_prefix)
    makers = {name: _maker(name, asset) for name, asset in (experts or {}).items()}
    identity = identity_of(warehouse)
    return warehouse, Place(prefix, group_name, translator, identity, makers, only_own, running)


def _maker(name: str, made: Made) -> Maker:
    if not isinstance(made, dg.AssetDep):
        return Maker(_key(made))
    mapping, parts = made.partition_mapping, list[str]()
    if isinstance(mapping, dg.SpecificPartitionsPartitionMapping):
        parts = list(mapping.partition_keys)
    if len(parts) != 1 and mapping is not None:
        raise RecipeError(
            "No single partition makes an expert",
            where=f"experts, {name}",
            expected="SpecificPartitionsPartitionMapping of one partition, or no mapping",
            found=f"{type(mapping).__name__} of {', '.join(parts) or 'others'}",
            next_step="name one partition for each expert",
        )
    return Maker(made.asset_key, *parts)


def _key(asset: Asset) -> dg.AssetKey:
    if isinstance(asset, dg.AssetsDefinition):
        return asset.key
    if isinstance(asset, str):
        return dg.AssetKey.from_user_string(asset)
    return asset if isinstance(asset, dg.AssetKey) else dg.AssetKey(asset)


def _foreseen(warehouse: Warehouse, file: RecipeFile) -> RecipeFile:
    """A recipe, readable also while its selectors take nothing, as of a run that is to begin."""
    if file.parsed is None:
        with suppress(Exception):  # the file says what is wrong with it
            parsed = load_recipe(warehouse.recipe_path(file.name), warehouse, _two)
            return replace(file, parsed=parsed)
    return file


def _two(place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
    run = selector.run or "expert"
    return Selected(place, selector, (member_name(run, 1), member_name(run, 2)))


def _link_run(folder: Path, link: Path) -> None:
    """Have a run's folder in the inbox. Raises MergePipeError for another one of its name."""
    link_path(str(folder), link)
    if link.resolve() != folder:
        raise MergePipeError(
            "The inbox has another run of this name",
            where=str(link),
            expected=f"a link to {folder}",
            found=str(link.resolve()),
            next_step="rename one of the two folders, or remove what lies in the inbox",
        )


def _is_condition(automation: str, running: Running) -> bool:
    """Whether conditions start recipes.

    Raises MergePipeError for what is no `Automation`, and for an executor that none would use.
    """
    known = get_args(Automation)
    if automation not in known:
        raise MergePipeError(
            "Nothing of this name starts a recipe",
            where="build_recipe_defs, automation",
            expected=" or ".join(known),
            found=automation,
            next_step="write one of them, or leave it out",
        )
    is_condition = automation == "condition"
    if is_condition and running.executor is not None:
        raise MergePipeError(
            "Runs that conditions start have the executor of the project",
            where="build_recipe_defs, executor",
            expected="none, or no `automation`: an executor is that of a recipe's jobs",
            found=running.executor.name,
            next_step="leave one of them out",
        )
    return is_condition


def _refuse_unused(makers: Mapping[str, Maker], files: Sequence[RecipeFile]) -> None:
    """Raise RecipeError for an expert that no recipe uses, or may come to use by a selector."""
    unused = set(makers).difference(*(file.members for file in files))
    if unused and not any(file.parsed is None or file.selected for file in files):
        members = sorted({member for file in files for member in file.members})
        raise RecipeError(
            "No recipe uses an expert",
            where="build_recipe_defs, experts",
            expected="of " + ", ".join(members),
            found=", ".join(sorted(unused)),
            next_step="write the name that the recipe has for it",
        )


def _with_resources(home: Warehouse, place: Place, *made: dg.Definitions) -> dg.Definitions:
    own = resources(*_of_home(str(home.root)), place)
    return dg.Definitions.merge(dg.Definitions(resources=own), *made)


@cache
def _of_home(root: str) -> tuple[MergePipe, Engine]:
    # Dagster merges definitions with a resource of one name where it is one object.
    return MergePipe(home=root), Engine()
