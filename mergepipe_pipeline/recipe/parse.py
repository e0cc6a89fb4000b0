"""Step one from YAML to a `Recipe`: parse the text alone, of one recipe or of several stages.

Needs no checkpoint, so that definitions can be made from a recipe whose models do not exist yet.
`resolve_tensors` is step two. Neither opens a file, and both report every problem at once. A stage
is named by its `name:`, or by the `out_path:` of older recipes, and a later stage's model of that
name is its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mergepipe_pipeline.domain.operator import OperatorSchema
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.errors import BudgetError, MergePipeError
from mergepipe_pipeline.recipe.budget import parse_budget, read_budget, with_amount
from mergepipe_pipeline.recipe.checks import (
    check_base,
    check_parameters,
    check_slices,
    check_windows,
    find_method,
    joined_base,
    recipe_warnings,
)
from mergepipe_pipeline.recipe.evaluate import read_evaluate, read_gate
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, recipe_error, shown
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference
from mergepipe_pipeline.recipe.resolve_tensors import resolve_recipe
from mergepipe_pipeline.recipe.schema import DEFAULT_SCHEDULE, RecipeYaml, ref_problem, validate
from mergepipe_pipeline.recipe.selectors import Choose, nobody
from mergepipe_pipeline.recipe.structure import (
    Choice,
    Level,
    Models,
    Module,
    ParsedRecipe,
    levels,
    read_structure,
    with_joined_base,
)
from mergepipe_pipeline.recipe.tokens import check_chat_template, read_tokenizer
from mergepipe_pipeline.recipe.windows import as_mean
from mergepipe_pipeline.recipe.yaml_text import Document, read_documents

__all__ = ["ParsedRecipe", "parse_recipes", "resolve_recipe"]

Methods = Mapping[str, OperatorSchema]
#: Why a model cannot be used; None if it can, or if nobody looks.
Lost = Callable[[ModelRef], str | None]


def parse_recipes(
    text: str,
    *,
    name: str,
    where: str,
    methods: Methods,
    choose: Choose = nobody,
    lenient: bool = False,
    lost: Lost = lambda _: None,
) -> tuple[ParsedRecipe, ...]:
    """Read a file of one or more recipes, the stages of one merge: the last gives the result.

    A model named like an earlier stage is that stage's result. The budget's amount, the ref and the
    schedule of all are those of the last; `name` is the default ref, `where` (a path) goes into
    messages. Selectors are replaced by the experts that `choose` gives, as if the recipe named
    them. Of a recipe with problems, what is `lost` of its models is a problem, too.

    Raises RecipeError with every problem; BudgetError if the budget's amount is the only one.
    """
    documents = read_documents(text)
    for document in documents:
        document.problems.lenient = lenient
    stages = [
        _parse(d, name, where, methods, choice)
        for d, choice in zip(documents, stage_choices(documents, choose), strict=True)
    ]
    link = link_stages(documents, stages)
    if any(d.problems for d in documents):
        _add_lost(documents, lost)
        raise _error(documents, where)
    return link


def _add_lost(documents: Collection[Document], lost: Lost) -> None:
    """Add to each document's problems its models that are not there."""
    stages = {stage_name(d.value) for d in documents if isinstance(d.value, dict)}
    for document in documents:
        for path, ref in named_models(document.value):
            if ref.model not in stages and (why := lost(ref)):
                document.problems.add(path, why)


def _error(documents: Collection[Document], where: str) -> MergePipeError:
    (document, *more) = documents
    if not more and len(document.problems) == 1 and isinstance(document.value, dict):
        budget = document.value.get("budget")
        try:
            if not isinstance(budget, dict):
                parse_budget(budget, f"{where}, key budget")
        except BudgetError as error:
            return error
    return recipe_error([d.problems for d in documents], where)


def _parse(
    document: Document, name: str, where: str, methods: Methods, choice: Choice
) -> ParsedRecipe | None:
    """The recipe in a document; its problems are in `document.problems`."""
    problems, value = document.problems, document.value
    if not isinstance(value, dict):
        if not problems:
            text = "a recipe is a mapping with `merge_method:` and `models:`"
            problems.add((), text, document.line)
        return None
    yaml, value = validate(value, problems), as_mean(value)
    # The other keys are read whatever is wrong with some, so that all problems are said at once.
    warnings: list[str] = []
    models = Models()
    listed, level = read_structure(value, models, problems, warnings, choice)
    base, evaluate = _base(value, models, listed), value.get("evaluate")
    schema = _method(value, listed, level, methods, problems, warnings)
    if schema and value is document.value:
        check_windows(schema, document.lines, problems)
    modules = with_joined_base(listed, level, base, schema) if schema else listed
    of_keys = partial(
        ParsedRecipe,
        name=name,
        where=where,
        text=document.text,
        base=base,
        modules=modules,
        level=level,
        budget=read_budget(value.get("budget"), problems),
        tokenizer=read_tokenizer(value, base, models, problems),
        chat_template=check_chat_template(value.get("chat_template"), problems),
        evaluator=read_evaluate(evaluate, problems),
        gate=read_gate(value.get("gate"), evaluate, problems),
        lines=document.lines,
        lenient=problems.lenient,
    )
    if yaml is None:
        return None
    check_slices(schema, modules, models.refs, problems)
    if schema is None:
        return None
    recipe = partial(of_keys, schema=schema, references=tuple(models.refs))
    parsed = _parsed(recipe, yaml, _ref(yaml, name, problems))
    warnings += [*recipe_warnings(parsed), *joined_base(parsed, joined=modules != listed)]
    warnings += problems.ignored
    selected = tuple(choice.selected)
    return replace(parsed, selected=selected, warnings=tuple(dict.fromkeys(warnings)))


def _parsed(recipe: Callable[..., ParsedRecipe], yaml: RecipeYaml, ref: str) -> ParsedRecipe:
    return recipe(
        dtype=yaml.dtype,
        out_dtype=yaml.out_dtype or yaml.dtype,
        strategy=yaml.strategy,
        seed=yaml.seed,
        ref=ref,
        schedule=yaml.schedule or (DEFAULT_SCHEDULE if yaml.trigger == "nightly" else None),
        trigger=yaml.trigger or ("nightly" if yaml.schedule else "change"),
        timezone=yaml.timezone,
        block_elems=yaml.block_size,
        stage=yaml.name or yaml.out_path,
    )


def _method(
    value: Mapping[str, object],
    modules: tuple[Module, ...],
    level: Level,
    methods: Methods,
    problems: Problems,
    warnings: list[str],
) -> OperatorSchema | None:
    """The method's schema, to which the parameters are held; None with a problem for none such."""
    method = value.get("merge_method")
    schema = find_method(method, methods, problems) if isinstance(method, str) else None
    if schema is not None:
        warnings += check_parameters(schema, methods, levels(modules, level), problems)
        # A wrong base is not a missing one, and was reported already.
        if value.get("base_model") is None:
            check_base(schema, modules, problems)
    return schema


def _base(value: Mapping[str, object], models: Models, modules: tuple[Module, ...]) -> int | None:
    if value.get("base_model") is not None:
        return models.number(value["base_model"])
    bases = {part.base for module in modules for part in module.slices}
    return bases.pop() if len(bases) == 1 else None


def _ref(yaml: RecipeYaml, name: str, problems: Problems) -> str:
    if yaml.ref is None and (why := ref_problem(name)):
        problems.add((), f"the recipe's name cannot be its ref: {why}; give it one with `ref:`")
    return yaml.ref or name


#: Keys about the whole of a file, which its last document gives.
_OF_THE_WHOLE = ("budget", "ref", "schedule", "trigger", "timezone", "evaluate", "gate")
_REFERENCE_KEYS = frozenset({"model", "base_model", "tokenizer_source", "source"})


def link_stages(
    documents: Sequence[Document], stages: Sequence[ParsedRecipe | None]
) -> tuple[ParsedRecipe, ...]:
    """The stages with the names they use, and with amount, ref and schedule of the last.

    `stages[i]` is what `documents[i]` says, None if it cannot be read. Adds problems to the
    documents: a stage without a name, a name twice, a stage used before it is made.
    """
    names = _names(documents)
    linked: list[ParsedRecipe] = []
    made_of: dict[str, ParsedRecipe] = {}
    for i, (document, stage) in enumerate(zip(documents, stages, strict=True)):
        used: dict[str, None] = {}
        for path, ref in named_models(document.value):
            stage_number = names.get(ref.model)
            if stage_number is None:
                continue
            if stage_number < i:
                used[ref.model] = None
            else:
                target = "itself" if stage_number == i else f"the later stage {shown(ref.model)}"
                document.problems.add(path, f"a stage can use earlier stages only, found {target}")
        if stage is not None:
            before = tuple(made_of[name] for name in used if name in made_of)
            stage = replace(stage, stages_used=tuple(used), before=before)
            linked.append(_linked(stage, documents[i], stages[-1], is_last=i == len(stages) - 1))
            made_of.setdefault(stage.stage or "", linked[-1])
    return tuple(linked)


def _names(documents: Sequence[Document]) -> dict[str, int]:
    """Stage name to its number; adds problems for missing and repeated names."""
    names: dict[str, int] = {}
    for i, document in enumerate(documents):
        if not isinstance(document.value, dict):
            continue
        name = stage_name(document.value)
        if name is None and i < len(documents) - 1:
            document.problems.add(
                (), "every recipe of a file but the last needs a `name:`", document.line
            )
        if not isinstance(name, str) or len(documents) == 1:
            continue
        if "name" in document.value and (why := ref_problem(name)):
            document.problems.add(("name",), why)
        if name in names:
            document.problems.add(("name",), f"another stage is named {shown(name)} already")
        names.setdefault(name, i)
    return names


def stage_name(value: Mapping[str, object]) -> str | None:
    """The name by which later stages call a document's result, or None."""
    name = value.get("name") or value.get("out_path")
    return name if isinstance(name, str) else None


def stage_choices(documents: Sequence[Document], choose: Choose) -> Iterator[Choice]:
    """How the selectors of each document are answered: no expert named like a stage is taken."""
    names = [stage_name(d.value) if isinstance(d.value, dict) else None for d in documents]
    stage_names = names if len(names) > 1 else ()
    reserved = {n: "a stage of this file has its name" for n in stage_names if n is not None}
    for name in names:
        yield Choice(choose, reserved, "" if name is None else f"{name}: ")


def named_models(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, ModelRef]]:
    """Every model that a document names, with its key path; a name that cannot be read is left out.

    Needs no recipe that can be used.
    """
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        key_path = (*path, key)
        if key == "parameters" or item in ("base", "union"):
            continue
        if key in _REFERENCE_KEYS and not (isinstance(item, Mapping) and "kind" in item):
            with suppress(UnreadableReference):
                yield key_path, parse_reference(item)
        else:
            yield from named_models(item, key_path)


def _linked(
    stage: ParsedRecipe, document: Document, last: ParsedRecipe | None, *, is_last: bool
) -> ParsedRecipe:
    """A stage that is not the last, with what the last gives for all."""
    if is_last or last is None or not isinstance(document.value, dict):
        return stage
    warnings = tuple(
        f"stage {stage.stage}: {key} has no effect; the last recipe of the file gives it"
        for key in _overruled(document.value)
    )
    return replace(
        stage,
        name=stage.stage or stage.name,
        # Pins and other budget options name a stage's own models and tensors.
        budget=with_amount(stage.budget, last.budget),
        ref=last.ref,
        schedule=last.schedule,
        trigger=last.trigger,
        timezone=last.timezone,
        warnings=(*stage.warnings, *warnings),
    )


def _overruled(value: Mapping[str, object]) -> Iterator[str]:
    """The keys of a stage that the last recipe decides on; its other budget options are its own."""
    for key in _OF_THE_WHOLE:
        item = value.get(key)
        if key == "budget" and isinstance(item, dict):
            yield from (f"budget.{part}" for part in ("limit", "error") if part in item)
        elif key in value:
            yield key
