"""A recipe as written: modules of slices of entries with their settings, and all else of its text.

`models:` is one module of one slice of whole models; `slices:` is one module. Nothing here knows a
tensor, and nothing here checks keys: `schema` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mergepipe_pipeline.domain.evaluation import Evaluator, Gate
from mergepipe_pipeline.domain.operator import OperatorSchema
from mergepipe_pipeline.domain.recipe import Budget, ModelRef, TokenizerRecipe
from mergepipe_pipeline.domain.selector import Selected
from mergepipe_pipeline.recipe.parameters import Settings, parse_settings
from mergepipe_pipeline.recipe.problems import KeyPath, Lines, Problems, shown_path
from mergepipe_pipeline.recipe.references import (
    UnreadableReference,
    identity,
    overrides_architecture,
    parse_reference,
)
from mergepipe_pipeline.recipe.selectors import (
    Choose,
    NothingSelectedError,
    nobody,
    read_selector,
)
from mergepipe_pipeline.recipe.windows import weights_of


@dataclass(frozen=True, slots=True)
class Level:
    """The `parameters:` of one place; `path` is that place in the YAML."""

    path: KeyPath
    settings: Settings


@dataclass(frozen=True, slots=True)
class Entry:
    """One of a slice's models, with layers [start, end) of it, or all where `layers` is None."""

    model: int
    layers: tuple[int, int] | None
    level: Level


@dataclass(frozen=True, slots=True)
class Slice:
    """Models merged layer by layer; `base` is the slice's own or the recipe's.

    `is_short`: a selector of it takes nothing, which is a problem by itself.
    """

    entries: tuple[Entry, ...]
    base: int | None
    level: Level
    is_short: bool = False

    @property
    def whole(self) -> bool:
        """Whether the models stand here as they are, all layers of them."""
        return all(entry.layers is None for entry in self.entries)

    @property
    def is_empty(self) -> bool:
        """Whether no layer is taken here."""
        return bool(self.entries) and all(
            entry.layers is not None and entry.layers[0] == entry.layers[1]
            for entry in self.entries
        )

    def contributing(self, schema: OperatorSchema) -> tuple[Entry, ...]:
        """The entries that are merged, the base among them if the method merges it like others."""
        return tuple(e for e in self.entries if schema.base == "none" or e.model != self.base)

    def not_aligned_with(self, base: int | None) -> frozenset[int]:
        """The models that are merged here on another base, or on other layers than their own."""
        starts = {e.model: e.layers[0] for e in self.entries if e.layers is not None}
        first = next(iter(starts.values()), 0)
        base_start = 0 if base is None else starts.get(base, first)
        return frozenset(
            e.model
            for e in self.entries
            if self.base != base or starts.get(e.model, base_start) != base_start
        )


@dataclass(frozen=True, slots=True)
class Module:
    """A part of the output with layers of its own; `name` None is the whole model."""

    name: str | None
    slices: tuple[Slice, ...]
    level: Level


def with_joined_base(
    modules: tuple[Module, ...], level: Level, base: int | None, schema: OperatorSchema
) -> tuple[Module, ...]:
    """The modules with an unlisted base as the last model, where the method merges it like others.

    mergekit reads `models:` so for methods without a base, if the recipe's own parameters give the
    base all that the method requires.
    """
    required = {p.name for p in schema.parameters if p.scope == "model" and p.default is None}
    if base is None or schema.base != "none" or not required <= set(level.settings):
        return modules

    def joined(part: Slice) -> Slice:
        listed = [entry.model for entry in part.entries]
        most = schema.experts[1]
        if not part.whole or base in listed or (most is not None and len(listed) >= most):
            return part
        return replace(part, entries=(*part.entries, Entry(base, None, Level(part.level.path, {}))))

    return tuple(replace(m, slices=tuple(joined(part) for part in m.slices)) for m in modules)


@dataclass
class Models:
    """The models of a recipe in order of appearance, each as often as one slice lists it."""

    refs: list[ModelRef] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def number(self, value: object) -> int | None:
        """The number of the model that `value` names; None if it cannot be read."""
        try:
            ref = parse_reference(value)
        except UnreadableReference:
            return None
        if overrides_architecture(value):
            self.warnings.append(
                f"override_architecture of {ref.text!r} has no effect: structure is read from "
                "tensor names"
            )
        for i, listed in enumerate(self.refs):
            if identity(listed) == identity(ref):
                return i
        self.refs.append(ref)
        return len(self.refs) - 1


@dataclass(frozen=True)
class Choice:
    """How selectors are answered: by `choose`, which takes none of `reserved` (see `Choose`).

    `prefix` begins the place of each; `selected` gets the answers.
    """

    choose: Choose = nobody
    reserved: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    selected: list[Selected] = field(default_factory=list)


@dataclass
class _Outliner:
    models: Models
    base_model: object
    problems: Problems
    warnings: list[str]
    choice: Choice

    def modules(self, value: Mapping[str, object]) -> Iterator[Module]:
        nothing = Level((), {})
        named = value.get("modules")
        if isinstance(named, dict):
            for name, module in named.items():
                if isinstance(module, dict):
                    path = ("modules", str(name))
                    level = self._level(module, path)
                    yield Module(str(name), tuple(self._slices(module, path)), level)
        else:
            yield Module(None, tuple(self._slices(value, ())), nothing)

    def _slices(self, value: Mapping[str, object], path: KeyPath) -> Iterator[Slice]:
        listed = value.get("models")
        if isinstance(listed, list):
            path = (*path, "models")
            n_before = len(self.problems)
            models = self._written_out(listed, path)
            is_short = len(self.problems) > n_before
            entries = tuple(self._entries(models, path, whole=True))
            yield Slice(entries, self._base(None), Level(path, {}), is_short)
            return
        slices = value.get("slices")
        for i, item in enumerate(slices if isinstance(slices, list) else []):
            if not isinstance(item, dict):
                continue
            slice_path = (*path, "slices", i)
            sources = item.get("sources")
            listed = enumerate(sources if isinstance(sources, list) else [])
            entries = tuple(self._entries(listed, (*slice_path, "sources")))
            if item.get("residual_weight") is not None:
                self.warnings.append(
                    f"slices[{i}].residual_weight has no effect, as in mergekit, which declares it "
                    "and never reads it"
                )
            yield Slice(entries, self._base(item.get("base_model")), self._level(item, slice_path))

    def _base(self, own: object) -> int | None:
        value = self.base_model if own is None else own
        return None if value is None else self.models.number(value)

    def _written_out(self, value: Sequence[object], path: KeyPath) -> list[tuple[int, object]]:
        """The entries with their numbers, each selector replaced by the models that it takes."""
        reserved = {**self.choice.reserved, **_names(self.base_model, "it is the recipe's base")}
        for item in value:
            if isinstance(item, dict):
                reserved |= _names(item.get("model"), "the recipe names it")
        entries: list[tuple[int, object]] = []
        for i, item in enumerate(value):
            selector = read_selector(item) if isinstance(item, dict) else None
            if selector is None or not isinstance(item, dict):
                entries.append((i, item))
                continue
            place = self.choice.prefix + shown_path((*path, i))
            try:
                chosen = self.choice.choose(place, selector, reserved)
            except NothingSelectedError as error:
                self.problems.add((*path, i), f"the selector ({selector}) takes nothing: {error}")
                continue
            self.choice.selected.append(chosen)
            reserved |= dict.fromkeys(chosen.taken, f"{place} takes it")
            entries += [(i, of_one) for of_one in _of_each(item, chosen.taken)]
        return entries

    def _entries(
        self, value: Iterable[tuple[int, object]], path: KeyPath, *, whole: bool = False
    ) -> Iterator[Entry]:
        seen: set[int] = set()
        for i, item in value:
            if not isinstance(item, dict):
                continue
            here = (*path, i)
            level = self._level(item, here)
            number = self.models.number(item.get("model"))
            if number in seen and not self._is_base(number):
                number = self._again(number, here)
            if number is not None:
                seen.add(number)
                yield Entry(number, None if whole else layer_range(item.get("layer_range")), level)

    def _is_base(self, number: int) -> bool:
        return self.base_model is not None and self.models.number(self.base_model) == number

    def _again(self, number: int, path: KeyPath) -> int:
        """A model listed once more takes part once more, as if another folder held the same."""
        ref = self.models.refs[number]
        self.warnings.append(f"{shown_path(path)}: {ref.text!r} is listed twice: both count")
        self.models.refs.append(ref)
        return len(self.models.refs) - 1

    def _level(self, value: Mapping[str, object], path: KeyPath) -> Level:
        raw, here = value.get("parameters"), (*path, "parameters")
        return Level(path, parse_settings(raw, here, self.problems, self.warnings))


def _of_each(item: Mapping[str, object], taken: Sequence[str]) -> Iterator[dict[str, object]]:
    """The entry of each model that a selector takes, as if the recipe had one for each."""
    weights, parameters = weights_of(item, len(taken)), item.get("parameters")
    for k, name in enumerate(taken):
        entry = {**item, "model": name}
        if weights is not None:
            given = parameters if isinstance(parameters, dict) else {}
            entry["parameters"] = {**given, "weight": weights[k]}
        yield entry


def _names(reference: object, why: str) -> dict[str, str]:
    """The names or paths in a model reference, each with why no selector takes it."""
    try:
        ref = parse_reference(reference)
    except UnreadableReference:
        return {}
    return {text: why for text in (ref.text, ref.model, ref.lora) if text is not None}


def read_structure(
    value: Mapping[str, object],
    models: Models,
    problems: Problems,
    warnings: list[str],
    choice: Choice,
) -> tuple[tuple[Module, ...], Level]:
    """The modules of a recipe's value and its own settings; what cannot be read is left out.

    Adds the models it meets to `models`, and settings that cannot be read to `problems`. Selectors
    become the models that `choice` gives, as if the recipe named each.
    """
    outliner = _Outliner(models, value.get("base_model"), problems, warnings, choice)
    modules = tuple(outliner.modules(value))
    if value.get("base_model") is not None:
        models.number(value["base_model"])
    settings = parse_settings(value.get("parameters"), ("parameters",), problems, warnings)
    warnings += dict.fromkeys(models.warnings)
    return modules, Level((), settings)


def levels(modules: Sequence[Module], top: Level) -> Iterator[tuple[Level, bool]]:
    """Every place with parameters, `top` first, and whether it belongs to one model."""
    yield top, False
    for module in modules:
        yield module.level, False
        for part in module.slices:
            yield part.level, False
            for entry in part.entries:
                yield entry.level, True


def layer_range(value: object) -> tuple[int, int] | None:
    """`[start, end)` as a pair, None for anything else."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    start, end = value
    if any(isinstance(v, bool) or not isinstance(v, int) for v in (start, end)):
        return None
    return start, end


@dataclass(frozen=True)
class ParsedRecipe:
    """A recipe checked as far as its text allows; `schema` is its method's.

    `references` are all models in order of appearance, one twice if a slice lists it twice, the
    base at `base` among them (None also where slices have different bases). `stage` is its `name:`;
    `stages_used` are the names of earlier stages whose results stand among the references, and
    `before` those stages. `dtype` and `out_dtype` are safetensors codes; `chat_template` is a
    template's text, `auto`, or the name of a known one. `schedule` is None where there is none. A
    `gate` has an `evaluator`. `selected` says which references each of its selectors stands for.
    Read `lenient`ly, it may hold what mergekit ignores.
    """

    name: str
    where: str
    text: str
    schema: OperatorSchema
    references: tuple[ModelRef, ...]
    base: int | None
    modules: tuple[Module, ...] = field(hash=False)
    level: Level = field(hash=False)
    dtype: str | None
    out_dtype: str | None
    budget: Budget
    strategy: str | None
    seed: int
    ref: str
    schedule: str | None
    trigger: str
    timezone: str
    block_elems: int | None
    tokenizer: TokenizerRecipe | None
    chat_template: str | None
    stage: str | None
    lines: Lines = field(repr=False, compare=False)
    evaluator: Evaluator | None = None
    gate: Gate | None = None
    stages_used: tuple[str, ...] = ()
    before: tuple[ParsedRecipe, ...] = field(default=(), hash=False)
    selected: tuple[Selected, ...] = ()
    warnings: tuple[str, ...] = ()
    lenient: bool = False

    @property
    def method(self) -> str:
        """The merge method's name."""
        return self.schema.name

    @property
    def all_selected(self) -> tuple[Selected, ...]:
        """The choices of its own selectors and of those of the stages before."""
        return tuple(s for stage in (*self.before, self) for s in stage.selected)

    def slices(self) -> Iterator[tuple[Module, Slice]]:
        """Every slice with its module, in recipe order."""
        for module in self.modules:
            for part in module.slices:
                yield module, part

    @property
    def not_aligned(self) -> frozenset[int]:
        """The references that some slice merges on another base than the recipe's, or on other
        layers of it.
        """
        parts = (part.not_aligned_with(self.base) for _, part in self.slices())
        return frozenset[int]().union(*parts)

    def entries(self) -> Iterator[Entry]:
        """Every listed model of every slice, in recipe order."""
        for _, part in self.slices():
            yield from part.entries

    def levels(self) -> Iterator[tuple[Level, bool]]:
        """Every place with parameters, and whether it belongs to one model."""
        return levels(self.modules, self.level)
