"""Under which names the definitions of a warehouse stand in a code location."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import dagster as dg

from mergepipe_pipeline.assets.running import Running
from mergepipe_pipeline.deploy.recipe_files import identifier_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resources import WAREHOUSE_TAG

_D = TypeVar("_D", dg.AssetsDefinition, dg.AssetsDefinition | dg.AssetChecksDefinition)
#: Whether the daemon knows, in a tick, the definitions that this process has.
IsKnown = Callable[[dg.SensorEvaluationContext], bool]


@dataclass(frozen=True)
class MergePipeProps:
    """An asset as a translator sees it: a `part`, as `plan`, of the recipe or search `name`.

    `name` is "" for what belongs to the warehouse. `spec` is the asset unless somebody translates.
    """

    name: str
    part: str
    spec: dg.AssetSpec


class Maker(NamedTuple):
    """The asset that makes an expert; of one with partitions, that `partition`."""

    key: dg.AssetKey
    partition: str | None = None


class MergePipeTranslator:
    """Says what the assets of recipes, searches and warehouses are in somebody's project."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        """The spec of an asset: its key, group, owners, tags, deps, automation condition.

        Its key follows from name, part and the key of `props.spec` alone: runs ask for it, too.
        """
        return props.spec


@dataclass(frozen=True)
class Place:
    """Where the definitions of one warehouse stand; by default in a location of their own.

    A guest among definitions of others has names that begin with its `prefix`, or with mergepipe.
    `identity` is its warehouse's, `makers` are what makes experts, by name. `only_own`:
    runs are ours in which nothing of others can be. `running`: where and how steps of recipes run.
    `of` has the names of sensors in it that are of some recipes or searches alone; `is_known` says
    whether the daemon knows their jobs.
    """

    prefix: tuple[str, ...] = ()
    group: str | None = None
    translator: MergePipeTranslator | None = None
    identity: str | None = None
    makers: Mapping[str, Maker] = field(default_factory=dict, compare=False)
    only_own: bool = False
    running: Running = field(default=Running(), compare=False)
    of: str = field(default="{}", compare=False)
    is_known: IsKnown = field(default=lambda context: True, compare=False)
    _made: dict[dg.AssetKey, tuple[str, str]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def is_guest(self) -> bool:
        """Whether others have definitions in the same code location."""
        return self.identity is not None

    @property
    def tags(self) -> dict[str, str]:
        """The tags of a guest's jobs: what a person starts is known as ours while it waits."""
        return {} if self.identity is None else {WAREHOUSE_TAG: self.identity}

    def name(self, text: str) -> str:
        """The name of a job, sensor or schedule, or of the resource of engines."""
        scope = self.prefix or (("mergepipe",) if self.is_guest else ())
        return "_".join(map(identifier_of, (*scope, text)))

    def sensor(self, text: str) -> str:
        """The name of a sensor, or of the job that it alone starts, in `of`."""
        return self.name(self.of.format(text))

    def group_of(self, text: str) -> str:
        """The group of the assets of a recipe, a search, or the catalog."""
        return self.group or "_".join(map(identifier_of, (*self.prefix, text)))

    @property
    def resource(self) -> str:
        """The key of the warehouse's resource."""
        return "_".join(map(identifier_of, (*self.prefix, "mergepipe")))

    def key(self, name: str, part: str) -> dg.AssetKey:
        """The key of a part of a recipe or search; `name` is "" for what the warehouse has."""
        key = self._usual(name, part)
        if self.translator is not None:
            key = self.translator.get_asset_spec(MergePipeProps(name, part, dg.AssetSpec(key))).key
        self._made[key] = name, part
        return key

    def recipe_of(self, key: dg.AssetKey) -> str:
        """The recipe or search to which the asset of a key belongs."""
        if key in self._made:
            return self._made[key][0]
        return "" if self.is_guest else key.path[0]

    def translated(self, assets: Iterable[_D]) -> list[_D]:
        """Assets, as the translator wants them; checks as they are."""
        if self.translator is None:
            return list(assets)
        return [
            d if isinstance(d, dg.AssetChecksDefinition) else d.map_asset_specs(self._spec)
            for d in assets
        ]

    def _usual(self, name: str, part: str) -> dg.AssetKey:
        return dg.AssetKey([*self.prefix, *([name] if name else []), part])

    def _spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        assert self.translator is not None
        name, part = self._made[spec.key]
        usual = spec.replace_attributes(key=self._usual(name, part))
        made = self.translator.get_asset_spec(MergePipeProps(name, part, usual))
        if made.key != spec.key:
            raise MergePipeError(
                "A translator gives one asset two keys",
                where=f"{type(self.translator).__name__}.get_asset_spec, {name} {part}".rstrip(),
                expected=spec.key.to_user_string(),
                found=made.key.to_user_string(),
                next_step="make the key from props.name, props.part and props.spec.key alone",
            )
        if spec.automation_condition and not _holds(made, spec.automation_condition):
            raise MergePipeError(
                "A translator takes away the condition that starts a recipe",
                where=f"{type(self.translator).__name__}.get_asset_spec, {name} {part}",
                expected=f"{spec.automation_condition.name}, alone or with others",
                found=made.automation_condition.name if made.automation_condition else "none",
                next_step="add to props.spec.automation_condition by & there, or leave it as it is",
            )
        return made

    def bound(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Work whose parameters `mergepipe` and `engine` get the resources of this place.

        Dagster takes the name of a parameter for the key of a resource.
        """
        keys = {"mergepipe": self.resource, "engine": self.name("engine")}
        signature = inspect.signature(work)
        own = {keys[name]: name for name in signature.parameters if keys.get(name, name) != name}
        if not own:
            return work

        def renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
            return {own.get(name, name): value for name, value in kwargs.items()}

        @wraps(work)
        def several(*args: Any, **kwargs: Any) -> Iterator[Any]:
            yield from work(*args, **renamed(kwargs))

        @wraps(work)
        def once(*args: Any, **kwargs: Any) -> Any:
            return work(*args, **renamed(kwargs))

        called = several if inspect.isgeneratorfunction(work) else once
        own_names = (
            p.replace(name=keys.get(p.name, p.name)) for p in signature.parameters.values()
        )
        called.__dict__["__signature__"] = signature.replace(parameters=list(own_names))
        return called


def _holds(spec: dg.AssetSpec, one: dg.AutomationCondition[Any]) -> bool:
    """Whether a condition is that of an asset, or a part of it."""
    found = [spec.automation_condition] if spec.automation_condition else []
    for condition in found:
        found.extend(condition.children)
    return any(condition is one for condition in found)


#: A code location that nobody else uses.
ALONE = Place()
