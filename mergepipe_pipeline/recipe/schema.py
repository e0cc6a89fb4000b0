"""The keys of a recipe, strictly: mergekit's and the project's own.

Pydantic checks shapes and texts here and nowhere else. What a parameter's value means is in
`parameters`, what a budget means in `budget`, what a tokenizer's wish means in `tokens`, and
whether keys fit a method in `checks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import ErrorDetails

from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.bounds import NAME
from mergepipe_pipeline.dtypes import FLOATING, FP8_BLOCKS, TORCH_NAME, code_from_name
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.budget import BudgetYaml
from mergepipe_pipeline.recipe.cron import cron_problem, is_time_zone
from mergepipe_pipeline.recipe.keys import Keys, Reference, expecting
from mergepipe_pipeline.recipe.problems import (
    KeyPath,
    Problems,
    recipe_error,
    sentence_of,
    shown,
    suggest,
    unknown_key,
)
from mergepipe_pipeline.recipe.selectors import NARROWING, SELECTING
from mergepipe_pipeline.recipe.structure import layer_range
from mergepipe_pipeline.recipe.windows import SCHEDULES

#: The schedule of a recipe that asks for nights and names no time.
DEFAULT_SCHEDULE = "0 3 * * *"
#: When a standing recipe is merged: as soon as what it wants changes, by its schedule alone, or
#: when a person says so.
TRIGGERS = ("change", "nightly", "manual")
#: Names of budget strategies, for a reader who has no planner at hand.
STRATEGIES = ("full", "magnitude", "packs")

#: Parameter names of mergekit, known to be misplaced when they stand beside `parameters:`.
PARAMETER_NAMES = frozenset(
    ("weight", "density", "normalize", "rescale", "lambda", "int8_mask", "t", "gamma", "epsilon")
) | {"scale", "filter_wise", "select_topk", "max_iter", "tol", "normalize_weights", "variant"}
_OF_STEPS = ("last", "every", "weights")
_ONE_OF = "`match:`, `tag:` or `run:`"
CONTENTS = ("models", "slices", "modules")


def _layer_range(value: object) -> object:
    layers = layer_range(value)
    # The last slice may have no layer: `checks` sees which one is the last.
    if layers is None or not (0 <= layers[0] < layers[1] or 0 < layers[0] == layers[1]):
        raise ValueError(
            "expected [start, end) in whole numbers, 0 <= start < end (the end is not included: "
            f"[0, 1] is layer 0 alone), found {shown(value)}"
        )
    return value


def _dtype_code(value: str) -> str:
    if value == FP8_BLOCKS:
        return value
    try:
        return code_from_name(value, "dtype")
    except RecipeError as error:
        names = [FP8_BLOCKS, *(TORCH_NAME[code] for code in sorted(FLOATING))]
        near = suggest(re.sub("^(b?)fp?(?=[0-9])", r"\1float", value), names)
        text = f"expected {error.expected} or {FP8_BLOCKS}, found {error.found}{near}"
        raise ValueError(text) from None


def _block_size(value: int) -> int:
    try:
        BlockGrid(value)
    except ValueError as error:
        raise ValueError(str(error).replace("block_elems", "block_size")) from None
    return value


def _schedule(value: str) -> str:
    problem = cron_problem(value)
    if problem is not None:
        raise ValueError(
            f"expected a cron schedule like {DEFAULT_SCHEDULE!r}, found {shown(value)}: {problem}"
        )
    return value


def _one_of(value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        listed, near = ", ".join(choices), suggest(value, choices)
        raise ValueError(f"expected one of {listed}, found {shown(value)}{near}")
    return value


#: A name that can be a ref, in words.
_REF = "up to 128 letters, digits, `.`, `_`, `-`, the first a letter or digit"

DtypeCode = Annotated[str, AfterValidator(_dtype_code)]
Ref = Annotated[str, expecting(_REF, lambda value: NAME.fullmatch(value) is not None)]
Text = Annotated[str, expecting("a text", lambda value: bool(value.strip()))]
TimeZone = Annotated[str, expecting("the name of a time zone like 'Europe/Berlin'", is_time_zone)]


class WeightsYaml(Keys):
    """The `weights:` of a selector: how they run over the steps of a run."""

    schedule: Annotated[str, AfterValidator(partial(_one_of, choices=SCHEDULES))]
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None


class ModelYaml(Keys):
    """One entry of `models:`: a model, or a selector of experts (`_check_entries`)."""

    model: Reference = None
    parameters: dict[str, Any] | None = None
    match: Text | None = None
    tag: Text | None = None
    base: Text | None = None
    min_version: Annotated[int, Field(ge=1)] | None = None
    exclude: list[Text] | None = None
    run: Text | None = None
    last: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] | None = None
    weights: WeightsYaml | None = None


class SourceYaml(Keys):
    """One entry of a slice's `sources:`."""

    model: Reference
    layer_range: Annotated[Any, AfterValidator(_layer_range)]
    parameters: dict[str, Any] | None = None


class SliceYaml(Keys):
    """One entry of `slices:`."""

    sources: list[SourceYaml]
    base_model: Reference = None
    residual_weight: Any = None
    parameters: dict[str, Any] | None = None


class ModuleYaml(Keys):
    """One of `modules:`."""

    models: list[ModelYaml] | None = None
    slices: list[SliceYaml] | None = None
    parameters: dict[str, Any] | None = None


class RecipeYaml(Keys):
    """A recipe's top level; `dtype` and `out_dtype` come out as safetensors codes or FP8_BLOCKS."""

    merge_method: str
    name: str | None = None
    out_path: str | None = None
    models: list[ModelYaml] | None = None
    slices: list[SliceYaml] | None = None
    modules: dict[str, ModuleYaml] | None = None
    base_model: Reference = None
    parameters: dict[str, Any] | None = None
    dtype: DtypeCode | None = None
    out_dtype: DtypeCode | None = None
    tokenizer_source: Any = None
    tokenizer: Any = None
    chat_template: Any = None
    budget: Any = None
    evaluate: Any = None
    gate: Any = None
    strategy: Annotated[str, AfterValidator(partial(_one_of, choices=STRATEGIES))] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    ref: Ref | None = None
    schedule: Annotated[str, AfterValidator(_schedule)] | None = None
    trigger: Annotated[str, AfterValidator(partial(_one_of, choices=TRIGGERS))] | None = None
    timezone: TimeZone = "UTC"
    block_size: Annotated[int, AfterValidator(_block_size)] | None = None


def validate(value: Mapping[str, object], problems: Problems) -> RecipeYaml | None:
    """The recipe's keys, or None with every misfit added to `problems`."""
    n_before = len(problems)
    _check_contents(value, (), CONTENTS, problems)
    _check_entries(value, (), problems)
    named = value.get("modules")
    for name, module in named.items() if isinstance(named, dict) else ():
        if isinstance(module, dict):
            _check_contents(module, ("modules", str(name)), CONTENTS[:2], problems)
            _check_entries(module, ("modules", str(name)), problems)
    recipe = _validated(value, problems)
    if recipe is None:
        return None
    _check_schedule(recipe, problems)
    return recipe if len(problems) == n_before else None


def _validated(value: Mapping[str, object], problems: Problems) -> RecipeYaml | None:
    try:
        return RecipeYaml.model_validate(value)
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    for error in errors:
        place = tuple(error["loc"])
        if error["type"] == "extra_forbidden":
            problems.ignore(place, _sentence(error))
        elif error["type"] != "missing" or not _is_misspelt(place, error["input"], problems):
            problems.add(place, _sentence(error))
    if not problems.lenient or any(e["type"] != "extra_forbidden" for e in errors):
        return None
    # pydantic's own `extra="ignore"` came after the releases that mergekit asks for.
    stripped = deepcopy(dict(value))
    for error in errors:
        *path, key = error["loc"]
        at: Any = stripped
        for part in path:
            at = at[part]
        del at[key]
    return _validated(stripped, problems)


def _check_schedule(recipe: RecipeYaml, problems: Problems) -> None:
    if recipe.trigger == "manual" and recipe.schedule is not None:
        problems.add(("schedule",), "a recipe with `trigger: manual` has no schedule; drop one")
    if recipe.timezone != "UTC" and recipe.schedule is None and recipe.trigger != "nightly":
        problems.add(("timezone",), "there is no `schedule:` that it could be the time zone of")


def _check_contents(
    value: Mapping[str, object], path: KeyPath, keys: Sequence[str], problems: Problems
) -> None:
    present = [k for k in keys if value.get(k) is not None]
    if not present and not _is_misspelt((*path, keys[0]), value, problems):
        alternatives = " or ".join(f"`{k}:`" for k in keys[1:])
        problems.add(
            (*path, keys[0]), f"this key is required and missing; {alternatives} may replace it"
        )
    for key in present:
        if value[key] in ([], {}):
            problems.add((*path, key), "expected at least one entry, found none")
        if key != present[0]:
            problems.add((*path, key), f"give either `{present[0]}:` or `{key}:`, not both")


def _check_entries(value: Mapping[str, object], path: KeyPath, problems: Problems) -> None:
    """Add a problem per entry of `models:` that is neither a model nor a selector, or both."""
    entries = value.get("models")
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        if not isinstance(entry, dict):
            continue
        selecting = [k for k in (*SELECTING, *NARROWING) if entry.get(k) is not None]
        entry_path = (*path, "models", i)
        if entry.get("model") is not None and selecting:
            problems.add(
                (*entry_path, selecting[0]), "give either `model:` or a selector, not both"
            )
        elif selecting and not set(selecting) & set(SELECTING):
            problems.add((*entry_path, selecting[0]), f"a selector needs {_ONE_OF}")
        elif entry.get("model") is None and not (
            selecting or _is_misspelt((*entry_path, "model"), entry, problems)
        ):
            problems.add(
                (*entry_path, "model"),
                f"this key is required and missing; {_ONE_OF} may replace it",
            )
        elif entry.get("run") is None:
            for key in (k for k in _OF_STEPS if entry.get(k) is not None):
                problems.add((*entry_path, key), "only the checkpoints of a `run:` have steps")
        else:
            _check_weights(entry, entry_path, problems)


def _check_weights(entry: Mapping[str, object], path: KeyPath, problems: Problems) -> None:
    """Add a problem where `weights:` and another key do not go together."""
    weights, parameters = entry.get("weights"), entry.get("parameters")
    if not isinstance(weights, dict):
        return
    if isinstance(parameters, dict) and parameters.get("weight") is not None:
        problems.add((*path, "weights"), "give either `weights:` or a `weight` of each, not both")
    is_exponential, decay = weights.get("schedule") == "exponential", weights.get("decay")
    if is_exponential and decay is None:
        problems.add(
            (*path, "weights", "decay"),
            "an exponential schedule needs it: the part of the mean that each step keeps, as 0.9",
        )
    elif decay is not None and not is_exponential:
        problems.add((*path, "weights", "decay"), "only an exponential schedule has a decay")


def known_strategy(name: str, where: str) -> str:
    """The name, if it is a strategy's; `where` names the option. Raises RecipeError."""
    try:
        return _one_of(name, STRATEGIES)
    except ValueError as error:
        problems = Problems({})
        problems.add(("strategy",), str(error))
        raise recipe_error([problems], where) from None


def ref_problem(name: str) -> str | None:
    """Why `name` cannot be a ref, or None if it can."""
    return None if NAME.fullmatch(name) else f"expected {_REF}, found {shown(name)}"


def _sentence(error: ErrorDetails) -> str:
    path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return _unknown_key(str(path[-1]), path)
    return sentence_of(error, RecipeYaml.keys_at)


def _unknown_key(key: str, path: KeyPath) -> str:
    if key in PARAMETER_NAMES:
        return f"`{key}` is a parameter of the method; move it under `parameters:`"
    if key in RecipeYaml.model_fields and len(path) > 1:
        return f"`{key}` belongs to the top level of the recipe"
    if key == "layer_range":
        return "whole models are merged under `models:`; use `slices:` to choose layers"
    if key in BudgetYaml.names() and len(path) == 1:
        return f"`{key}` is an option of the budget; move it under `budget:`"
    return unknown_key(key, RecipeYaml.keys_at(path))


def _is_misspelt(path: KeyPath, value: Mapping[str, object], problems: Problems) -> bool:
    """Whether another key of the mapping is a problem that suggests the missing one at `path`."""
    unknown = [str(key) for key in value if key not in RecipeYaml.keys_at(path)]
    messages = (_unknown_key(key, (*path[:-1], key)) for key in unknown)
    return not problems.lenient and any(text.endswith(f"`{path[-1]}`?") for text in messages)
