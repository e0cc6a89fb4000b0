"""The two steps from YAML to a `Recipe`: parse the text alone, then resolve it against tensors.

Step one needs no checkpoint, so that definitions can be made from a recipe whose models do not
exist yet; step two needs headers. Neither opens a file, and both report every problem at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from mergepipe_pipeline.dtypes import FLOATING, TORCH_NAME, itemsize
from mergepipe_pipeline.errors import BudgetError, RecipeError
from mergepipe_pipeline.recipe.budget import parse_budget
from mergepipe_pipeline.recipe.checks import Entry, base_is_a_model, check_method, check_models
from mergepipe_pipeline.recipe.parameters import Settings, parse_settings
from mergepipe_pipeline.recipe.problems import Lines, Problems
from mergepipe_pipeline.recipe.resolve import idle_filters, resolve_tensors
from mergepipe_pipeline.recipe.schema import (
    STRATEGIES,
    RecipeYaml,
    check_strategy,
    ref_problem,
    validate,
)
from mergepipe_pipeline.recipe.yaml_text import read_yaml
from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.spec.operator import OperatorSchema
from mergepipe_pipeline.spec.recipe import Budget, ModelRef, Recipe


@dataclass(frozen=True)
class RawRecipe:
    """A recipe as written, checked as far as its text allows.

    `entries` are all listed models; `dtype` and `out_dtype` are safetensors codes. `merges_base`
    says that a base among the entries is a model like the others.
    """

    name: str
    where: str
    text: str
    method: str
    base_model: str | None
    entries: tuple[Entry, ...] = field(hash=False)
    settings: Settings = field(hash=False)
    merges_base: bool
    dtype: str | None
    out_dtype: str | None
    budget: Budget
    strategy: str
    seed: int
    ref: str
    schedule: str
    block_elems: int | None
    warnings: tuple[str, ...]
    lines: Lines = field(repr=False, compare=False)

    @property
    def model_entries(self) -> tuple[Entry, ...]:
        """The entries that contribute to the merge, in recipe order."""
        return _contributing(self.entries, self.base_model, self.merges_base)

    @property
    def models(self) -> tuple[str, ...]:
        """The texts of the models that contribute to the merge, in recipe order."""
        return tuple(entry.text for entry in self.model_entries)


def parse_recipe(
    text: str,
    *,
    name: str,
    where: str,
    methods: Mapping[str, OperatorSchema] | None = None,
    strategies: Collection[str] = STRATEGIES,
) -> RawRecipe:
    """Read a recipe's text. `name` is the default ref, `where` (a path) goes into messages.

    With `methods`, the method and its parameters' names are checked here already, else by
    `resolve_recipe`. `strategies` are the names that `strategy:` may have.

    Raises RecipeError with every problem; BudgetError if the budget is the only one.
    """
    document = read_yaml(text)
    problems, value = document.problems, document.value
    if not isinstance(value, dict):
        if not problems:
            problems.add((), "a recipe is a mapping with `merge_method:` and `models:`")
        raise _error(problems, where)
    warnings: list[str] = []
    yaml = validate(value, problems)
    settings = parse_settings(value.get("parameters"), ("parameters",), problems, warnings)
    entries = _entries(value, problems, warnings)
    check_strategy(value.get("strategy"), strategies, problems)
    budget, budget_error = _budget(value.get("budget"), where, problems)
    if yaml is None or budget is None:
        _check_loosely(value, methods, settings, entries, problems)
        raise budget_error if budget_error and len(problems) == 1 else _error(problems, where)
    raw = RawRecipe(
        name=name,
        where=where,
        text=text,
        method=yaml.merge_method,
        base_model=yaml.base_model,
        entries=entries,
        settings=settings,
        merges_base=base_is_a_model(yaml.merge_method, methods),
        dtype=yaml.dtype,
        out_dtype=yaml.out_dtype or yaml.dtype,
        budget=budget,
        strategy=yaml.strategy,
        seed=yaml.seed,
        ref=_ref(yaml, name, problems),
        schedule=yaml.schedule,
        block_elems=yaml.block_size,
        warnings=(*warnings, *_base_warnings(yaml, entries, methods)),
        lines=document.lines,
    )
    check_models(raw.model_entries, problems)
    if methods is not None:
        check_method(raw.method, methods, raw.base_model, settings, entries, problems)
    if problems:
        raise _error(problems, where)
    return raw


def resolve_recipe(
    raw: RawRecipe,
    tensors: Sequence[TensorEntry],
    presence: Sequence[AbstractSet[str]],
    methods: Mapping[str, OperatorSchema],
) -> Recipe:
    """Give every output tensor its numbers.

    `tensors` are the output's in order (the base's, or the first model's without a base);
    `presence[i]` are the tensor names that `raw.models[i]` has.

    Raises RecipeError with every problem.
    """
    problems = Problems(raw.lines)
    models = raw.model_entries
    names = [t.name for t in tensors]
    floating = frozenset(t.name for t in tensors if t.dtype in FLOATING)
    schema = check_method(raw.method, methods, raw.base_model, raw.settings, raw.entries, problems)
    if len(presence) != len(models):
        problems.add(
            ("models",), f"expected tensor names of {len(models)} models, found {len(presence)}"
        )
    if schema is None or problems:
        raise _error(problems, raw.where)
    # Arithmetic needs floating-point elements: other tensors are copied, no model takes part.
    mergeable = [floating & have for have in presence]
    recipes = resolve_tensors(schema, raw.settings, models, names, mergeable, problems)
    if problems:
        raise _error(problems, raw.where)
    return Recipe(
        name=raw.name,
        text=raw.text,
        method=raw.method,
        base=ModelRef(raw.base_model) if raw.base_model is not None else None,
        models=tuple(ModelRef(entry.text) for entry in models),
        tensors=recipes,
        dtype=raw.dtype,
        out_dtype=raw.out_dtype,
        budget=raw.budget,
        strategy=raw.strategy,
        seed=raw.seed,
        ref=raw.ref,
        warnings=(
            *raw.warnings,
            *_dtype_warnings(raw.dtype, tensors),
            *idle_filters(raw.settings, models, names),
        ),
    )


def _contributing(
    entries: Sequence[Entry], base_model: str | None, merges_base: bool
) -> tuple[Entry, ...]:
    return tuple(e for e in entries if merges_base or e.text != base_model)


def _entries(
    value: Mapping[str, object], problems: Problems, warnings: list[str]
) -> tuple[Entry, ...]:
    models = value.get("models")
    if not isinstance(models, list):
        return ()
    entries = []
    for i, item in enumerate(models):
        if isinstance(item, dict):
            path = ("models", i)
            settings = parse_settings(
                item.get("parameters"), (*path, "parameters"), problems, warnings
            )
            entries.append(Entry(str(item.get("model")), settings, path))
    return tuple(entries)


def _budget(
    value: object, where: str, problems: Problems
) -> tuple[Budget | None, BudgetError | None]:
    try:
        return parse_budget(value, f"{where}, key budget"), None
    except BudgetError as error:
        problems.add(("budget",), f"expected {error.expected}, found {error.found}")
        return None, error


def _ref(yaml: RecipeYaml, name: str, problems: Problems) -> str:
    if yaml.ref is None and (why := ref_problem(name)):
        problems.add((), f"the recipe's name cannot be its ref: {why}; give it one with `ref:`")
    return yaml.ref or name


def _check_loosely(
    value: Mapping[str, object],
    methods: Mapping[str, OperatorSchema] | None,
    settings: Settings,
    entries: Sequence[Entry],
    problems: Problems,
) -> None:
    """What can be said about the method although other keys are wrong."""
    method = value.get("merge_method")
    if methods is None or not isinstance(method, str):
        return
    base = value.get("base_model")
    # A base that is wrong in itself is there: it was reported, and is no missing base.
    check_method(method, methods, None if base is None else str(base), settings, entries, problems)


def _base_warnings(
    yaml: RecipeYaml, entries: Sequence[Entry], methods: Mapping[str, OperatorSchema] | None
) -> tuple[str, ...]:
    listed = [e for e in entries if e.text == yaml.base_model]
    if base_is_a_model(yaml.merge_method, methods):
        if yaml.base_model is None or listed:
            return ()
        return (
            f"base_model {yaml.base_model!r} is not listed under models: it only stands in for "
            "blocks that are not read (mergekit fails here)",
        )
    return tuple(
        f"models[{e.path[-1]}].parameters: {e.text!r} is the base, so they have no effect"
        for e in listed
        if e.settings
    )


def _dtype_warnings(dtype: str | None, tensors: Sequence[TensorEntry]) -> tuple[str, ...]:
    stored = sorted({t.dtype for t in tensors if t.dtype in FLOATING})
    if dtype is None:
        short = [TORCH_NAME[s] for s in stored if itemsize(s) < 4]
        if not short:
            return ()
        return (
            f"no dtype: arithmetic is in float32 and the result is rounded to {', '.join(short)} "
            "once, where mergekit computes in the stored dtype",
        )
    wider = [TORCH_NAME[s] for s in stored if itemsize(s) > itemsize(dtype)]
    if not wider:
        return ()
    return (
        f"dtype {TORCH_NAME[dtype]}: the {', '.join(wider)} inputs are not rounded to it before "
        "the arithmetic, as mergekit does, but only when the result is written",
    )


def _error(problems: Problems, where: str) -> RecipeError:
    sentences = problems.sentences()
    return RecipeError(
        "A recipe cannot be used",
        problems=sentences,
        where=where,
        expected="a recipe without problems",
        found=f"{len(sentences)} problem{'s' if len(sentences) > 1 else ''}",
        next_step="mend all of these; nothing was read or written",
    )
