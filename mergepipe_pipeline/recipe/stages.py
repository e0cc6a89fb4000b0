"""Several recipes in one file: stages of one merge, where a later one takes an earlier's result.

A stage is named by its `name:`, or by the `out_path:` of older recipes, and a model of that name is
its result. Nothing here decides what runs when: a name must only refer to an earlier stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.recipe.budget import with_amount
from mergepipe_pipeline.recipe.parsed import ParsedRecipe
from mergepipe_pipeline.recipe.problems import KeyPath, shown
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference
from mergepipe_pipeline.recipe.schema import ref_problem
from mergepipe_pipeline.recipe.selectors import Choose
from mergepipe_pipeline.recipe.structure import Choice
from mergepipe_pipeline.recipe.yaml_text import Document

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
    """What later stages call a document's result, or None."""
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
