"""The door as components of Dagster: definitions from YAML, for `dg` and its UI.

Each component hands its attributes to one `build_*_defs`. Paths start from the YAML's folder.
"""

import inspect
import json
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
import yaml
from dagster.components import (
    ComponentTypeSpec,
    DefsStateConfig,
    ResolvedDefsStateConfig,
    scaffold_component,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver

from mergepipe_pipeline.assets.place import MergePipeProps, MergePipeTranslator
from mergepipe_pipeline.assets.running import WRITE_POOL, RunOptions
from mergepipe_pipeline.dagster.door import (
    Automation,
    Made,
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
    build_window_defs,
)
from mergepipe_pipeline.deploy.copies import Source, texts_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.recipe.windows import SCHEDULES


def _where(context: dg.ComponentLoadContext) -> dict[str, Any]:
    """What tells a component from others, and where paths in its texts start."""
    key = context.component_loc.get_display_key(context.defs_module_path)
    return {"name": key.removesuffix("[0]").removesuffix("]"), "relative_to": context.path}


def _path(context: dg.ResolutionContext, value: str) -> str:
    return str(context.resolve_source_relative_path(str(Path(value).expanduser())))


def _source(context: dg.ResolutionContext, value: str | Mapping[str, Any]) -> Source:
    if isinstance(value, str):
        return _path(context, str(context.resolve_value(value)))
    found = {name: _rendered(context.at_path(name), one) for name, one in value.items()}
    return {
        name: one if isinstance(one, str) else yaml.safe_dump(one, sort_keys=False)
        for name, one in found.items()
    }


def _rendered(context: dg.ResolutionContext, value: Any) -> Any:
    """A recipe with its `{{ … }}` filled in, and all else as it stands.

    Dagster reads each text anew, so that a revision of digits becomes a number; and templates of
    chats, which have statements, are the recipe's own.
    """
    if isinstance(value, Mapping):
        return {key: _rendered(context.at_path(key), one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rendered(context.at_path(place), one) for place, one in enumerate(value)]
    is_template = isinstance(value, str) and "{{" in value and "{%" not in value
    return context.resolve_value(value) if is_template else value


def _written_as(attributes: Callable[[str], Mapping[str, Any]]) -> type[dg.Scaffolder]:
    """What `dg scaffold defs` writes: an example with the name of the component's folder."""

    class Example(dg.Scaffolder):
        def scaffold(self, request: dg.ScaffoldRequest) -> None:
            path = request.target_path
            name = path.parent.name if request.append else path.name
            home = "{{ context.project_root }}/warehouse"
            scaffold_component(request, {"home": home, **attributes(name)})

    return Example


class _Translator(MergePipeTranslator):
    def __init__(self, component: "_OfWarehouse") -> None:
        self._component = component

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        return self._component.get_asset_spec(props)


_Path = dg.Resolver(_path, model_field_type=str)
_Files = str | Mapping[str, Any]


class Part(dg.Model):
    """One partition of an asset."""

    asset: str
    partition: str


def _experts(context: dg.ResolutionContext, value: Mapping[str, str | Part]) -> dict[str, Made]:
    return {name: _made(context.at_path(name), one) for name, one in value.items()}


def _made(context: dg.ResolutionContext, one: str | Part) -> Made:
    if isinstance(one, str):
        found: Made = context.resolve_value(one)
        return found
    asset, part = (str(context.resolve_value(text)) for text in (one.asset, one.partition))
    mapping = dg.SpecificPartitionsPartitionMapping([part])
    return dg.AssetDep(dg.AssetKey.from_user_string(asset), partition_mapping=mapping)


_Experts = Annotated[
    Mapping[str, Made],
    dg.Resolver(
        _experts,
        model_field_type=Mapping[str, str | Part],
        description="What makes experts, by their names: plans follow it, and what it says by "
        "`mergepipe/checkpoint` lands.",
        examples=[{"math": "training/math", "code": {"asset": "training", "partition": "code"}}],
    ),
]


def _files(description: str, example: Mapping[str, Any]) -> dg.Resolver:
    return dg.Resolver(
        _source,
        model_field_type=_Files,
        inject_before_resolve=False,
        description=f"{description}: a folder, a file, or texts or mappings by name.",
        examples=["recipes", example],
    )


@dataclass(kw_only=True)
class _OfWarehouse(dg.Component, dg.Resolvable, ABC):
    home: Annotated[
        str,
        dg.Resolver(
            _path,
            model_field_type=str,
            description="The folder of the warehouse.",
            examples=["{{ context.project_root }}/warehouse", "{{ env.MERGEPIPE_HOME }}"],
        ),
    ]
    key_prefix: Annotated[
        str | Sequence[str],
        dg.Resolver.default(
            description="What asset keys, and names of jobs, sensors and resources, begin with."
        ),
    ] = ()
    group_name: Annotated[
        str | None, dg.Resolver.default(description="The group of all assets; the recipe's name.")
    ] = None
    translation: Annotated[
        TranslationFn[MergePipeProps] | None,
        TranslationFnResolver[MergePipeProps](
            lambda props: {"props": props, "name": props.name, "part": props.part}
        ),
    ] = None

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """What lists of components say of this one."""
        return ComponentTypeSpec(tags=["llm", "model-merging"])

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        """The spec of an asset, as `translation` says; for subclasses to say otherwise."""
        return props.spec if self.translation is None else self.translation(props.spec, props)

    def _defs(self, build: Callable[..., dg.Definitions], **more: Any) -> dg.Definitions:
        """What a function of the door makes of the attributes that it takes, and of `more`."""
        takes = set(inspect.signature(build).parameters)
        if "running" in takes:
            takes = takes - {"running"} | set(RunOptions.__annotations__)
        own = {name: getattr(self, name) for f in fields(self) if (name := f.name) in takes}
        return build(**{**own, "translator": _Translator(self), **more})


@dg.scaffold_with(_written_as(lambda name: {}))
@dataclass(kw_only=True)
class InboxComponent(_OfWarehouse):
    """Makes checkpoints known that land in a warehouse: `expert_index`, its check and sensor.

    A warehouse has one. It brings the resource `mergepipe`, by which assets land what they train.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.InboxComponent
    attributes:
      home: "{{ context.project_root }}/warehouse"
    ```
    """

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of `build_inbox_defs`."""
        return self._defs(build_inbox_defs)


@dg.scaffold_with(_written_as(lambda name: {}))
@dataclass(kw_only=True)
class HousekeepingComponent(_OfWarehouse):
    """Keeps disk and instance in order, and tells of failures: one of a warehouse in a location.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.HousekeepingComponent
    attributes:
      home: "{{ context.project_root }}/warehouse"
      reload: true
    ```
    """

    only_own: Annotated[
        bool, dg.Resolver.default(description="Leave runs in which assets of others can be alone.")
    ] = True
    reload: Annotated[
        bool,
        dg.Resolver.default(description="Load this code location anew when files here change."),
    ] = False

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of `build_housekeeping`."""
        return self._defs(build_housekeeping)


@dataclass(kw_only=True)
class _OfRecipes(_OfWarehouse, ABC):
    shards: Annotated[
        int | None,
        dg.Resolver.default(description="How many steps share a merge; MERGEPIPE_SHARDS."),
    ] = None
    automation: Annotated[
        Automation,
        dg.Resolver.default(description="What starts a recipe: a sensor, or a condition of it."),
    ] = "sensor"
    executor: dg.Injected[dg.ExecutorDefinition] | None = None
    pool: Annotated[
        str, dg.Resolver.default(description="The pool of steps that merge or write a model.")
    ] = WRITE_POOL
    op_tags: Annotated[
        Mapping[str, Any],
        dg.Resolver.default(
            description="Their tags.",
            examples=[
                {"dagster-k8s/config": {"container_config": {"resources": {"limits": {"cpu": 4}}}}}
            ],
        ),
    ] = field(default_factory=dict)
    pipes: dg.Injected[dg.PipesClient] | None = None
    pipes_args: Annotated[
        Mapping[str, Any],
        dg.Resolver.default(
            description="What its `run` is given for each shard.",
            examples=[{"image": "ours/merge:1", "namespace": "merging"}],
        ),
    ] = field(default_factory=dict)


_RECIPE = {
    "merge_method": "linear",
    "models": [
        {"model": "math", "parameters": {"weight": 0.5}},
        {"model": "code", "parameters": {"weight": 0.5}},
    ],
    "dtype": "bfloat16",
}


@dg.scaffold_with(_written_as(lambda name: {"recipes": {name: _RECIPE}}))
@dataclass(kw_only=True)
class MergeRecipeComponent(_OfRecipes):
    """Merges experts by recipes, again when one of them changes, and releases what passes.

    Each recipe gets a chain of assets from `plan` to `release`, a job, its schedule and a sensor.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.MergeRecipeComponent
    attributes:
      home: "{{ context.project_root }}/warehouse"
      experts: {math: training/math, code: training/code}
      recipes:
        both:
          merge_method: linear
          models:
            - {model: math, parameters: {weight: 0.5}}
            - {model: code, parameters: {weight: 0.5}}
      translation:
        owners: ["team:models"]
        tags: {step: "{{ part }}"}
    ```
    """

    recipes: Annotated[Source, _files("Recipes", {"both": _RECIPE})]
    experts: _Experts = field(default_factory=dict)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of `build_recipe_defs`."""
        return self._defs(build_recipe_defs, **_where(context))


class _Kept(dg.Scaffolder):
    """Writes an example with a folder of recipes beside the YAML."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        path = request.target_path.parent if request.append else request.target_path
        state = {"management_type": "LOCAL_FILESYSTEM", "key": path.name}
        kept = _written_as(lambda name: {"recipes": "recipes", "defs_state": state})
        kept().scaffold(request)
        folder = path / "recipes"
        folder.mkdir(exist_ok=True)
        (folder / f"{path.name}.yml").write_text(yaml.safe_dump(_RECIPE, sort_keys=False))


@dg.scaffold_with(_Kept)
@dataclass(kw_only=True)
class KeptRecipesComponent(dg.StateBackedComponent, MergeRecipeComponent):
    """Merges experts by the recipes of a folder as `dg utils refresh-defs-state` found them last.

    Where definitions load, the folder need not be there: recipes change without a new image, and
    each run has those of its code location.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.KeptRecipesComponent
    attributes:
      home: /shared/warehouse
      recipes: /repositories/recipes
      defs_state: {management_type: VERSIONED_STATE_STORAGE, key: recipes}
    ```
    """

    defs_state: ResolvedDefsStateConfig

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """Where the recipes are kept, under the key that the YAML says."""
        if self.defs_state.key is None or isinstance(self.recipes, Mapping):
            raise MergePipeError(
                "Recipes cannot be kept as a state",
                where=type(self).__name__,
                expected="`recipes`, a folder or a file, and `key` in `defs_state`",
                found="recipes in the YAML" if self.defs_state.key else "no key",
                next_step="give both: a key is the same on each machine, as a path need not be",
            )
        return DefsStateConfig.from_args(self.defs_state, default_key=self.defs_state.key)

    def write_state_to_path(self, state_path: Path) -> None:
        """Keep the recipes as they are now."""
        state_path.write_text(json.dumps(texts_of(self.recipes)))

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """The definitions of `build_recipe_defs`; none before the first refresh."""
        if state_path is None:
            return dg.Definitions()
        folder = Path(str(self.recipes))
        start = folder if folder.suffix not in {".yml", ".yaml"} else folder.parent
        texts = json.loads(state_path.read_text())
        more = {**_where(context), "recipes": texts, "relative_to": start}
        return self._defs(build_recipe_defs, **more)


@dg.scaffold_with(
    _written_as(lambda name: {"run": "{{ context.project_root }}/runs/" + name, "name": name})
)
@dataclass(kw_only=True)
class WindowComponent(_OfRecipes):
    """Merges the last checkpoints of a training run, anew as they are saved.

    The run may begin later.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.WindowComponent
    attributes:
      home: "{{ context.project_root }}/warehouse"
      run: "{{ context.project_root }}/runs/sft"
      name: sft
      last: 8
      training: training/sft
    ```
    """

    run: Annotated[
        str,
        dg.Resolver(_path, model_field_type=str, description="The folder of the training run."),
    ]
    name: Annotated[str, dg.Resolver.default(description="The name of the recipe.")] = "window"
    last: Annotated[int, dg.Resolver.default(description="How many checkpoints are merged.")] = 8
    every: Annotated[
        int | None, dg.Resolver.default(description="Take steps that are multiples of it.")
    ] = None
    schedule: Annotated[
        str,
        dg.Resolver.default(description="The schedule of weights.", examples=list(SCHEDULES)),
    ] = "minus_sqrt"
    decay: Annotated[
        float | None, dg.Resolver.default(description="The decay of `exponential`.")
    ] = None
    recipe: Annotated[
        Mapping[str, Any] | None,
        dg.Resolver(
            _rendered,
            model_field_type=Mapping[str, Any] | None,
            inject_before_resolve=False,
            description="Other keys of the recipe.",
            examples=[{"dtype": "bfloat16"}],
        ),
    ] = None
    training: Annotated[
        dg.ResolvedAssetKey | None, dg.Resolver.default(description="The asset that trains.")
    ] = None

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of `build_window_defs`."""
        return self._defs(build_window_defs, relative_to=context.path)


_SEARCH = {
    "sources": ["math", "code"],
    "base_model": "base",
    "merge_method": "task_arithmetic",
    "objectives": {
        "accuracy": {"direction": "max", "anchors": [0.2, 0.9]},
        "tokens": {"direction": "min", "anchors": [4000, 500]},
    },
    "evaluate": {"command": ["python", "{{ context.project_root }}/eval.py"]},
    "evaluations": 48,
}


@dg.scaffold_with(_written_as(lambda name: {"searches": {name: _SEARCH}}))
@dataclass(kw_only=True)
class SearchComponent(_OfWarehouse):
    """Searches merges along a front of objectives, and publishes those that none beats.

    Example:

    ```yaml
    type: mergepipe_pipeline.dagster.SearchComponent
    attributes:
      home: "{{ context.project_root }}/warehouse"
      searches: searches
      experts: {math: training/math}
    ```
    """

    searches: Annotated[Source, _files("Searches", {"front": _SEARCH})]
    experts: _Experts = field(default_factory=dict)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions of `build_search_defs`."""
        return self._defs(build_search_defs, **_where(context))
