"""Whether a recipe's keys fit its merge method: known method, known parameters, models enough.

Judges by operator schemas alone; shapes of keys were checked by `schema`, forms of values by
`parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.recipe.parameters import Settings
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest
from mergepipe_pipeline.spec.operator import OperatorSchema

#: Methods that merge values, for a reader who has no schemas: a listed base is a model like others.
_VALUE_METHODS = frozenset({"linear"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of `models:` with its own parameters; `path` is its place in the YAML."""

    text: str
    settings: Settings
    path: KeyPath


def base_is_a_model(method: str, methods: Mapping[str, OperatorSchema] | None) -> bool:
    """Whether a base listed among the models takes part, as it does where values are merged."""
    if methods is not None and method in methods:
        return methods[method].space == "value"
    return method in _VALUE_METHODS


def check_models(models: Sequence[Entry], problems: Problems) -> None:
    """Add a problem for a model listed twice and for a recipe without models to merge.

    `models` are those that contribute, without a base that does not.
    """
    seen: dict[str, KeyPath] = {}
    for entry in models:
        if entry.text in seen:
            problems.add(
                entry.path, f"{entry.text!r} is listed twice; list it once with the weights added"
            )
        seen.setdefault(entry.text, entry.path)
    if not models:
        problems.add(("models",), "expected at least one model besides the base, found none")


def check_method(
    method: str,
    methods: Mapping[str, OperatorSchema],
    base_model: str | None,
    settings: Settings,
    entries: Sequence[Entry],
    problems: Problems,
) -> OperatorSchema | None:
    """The method's schema; None with a problem if there is no such method.

    Adds problems for a missing base, for parameters the method lacks and for those at a level where
    they have no effect. `settings` are the recipe's, `entries` all that are listed.
    """
    schema = methods.get(method)
    if schema is None:
        problems.add(
            ("merge_method",),
            f"unknown method {shown(method)}{suggest(method, methods)}"
            f"; known are {', '.join(sorted(methods))}",
        )
        return None
    if schema.needs_base and base_model is None:
        problems.add(("merge_method",), f"`{method}` needs `base_model:`, and there is none")
    for name in settings:
        _check_name(schema, name, ("parameters", name), per_model=False, problems=problems)
    for entry in entries:
        for name in entry.settings:
            path = (*entry.path, "parameters", name)
            _check_name(schema, name, path, per_model=True, problems=problems)
    return schema


def _check_name(
    schema: OperatorSchema, name: str, path: KeyPath, *, per_model: bool, problems: Problems
) -> None:
    scopes = {p.name: p.scope for p in schema.parameters}
    if name not in scopes:
        problems.add(
            path,
            f"`{schema.name}` has no parameter `{name}`{suggest(name, scopes)}"
            f"; it has {', '.join(scopes) or 'none'}",
        )
    elif per_model and scopes[name] == "method":
        problems.add(
            path, f"`{name}` is set once for all models; move it to the top-level `parameters:`"
        )
