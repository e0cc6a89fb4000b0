"""Whether a recipe's keys fit its merge method: known method, known parameters, models enough.

Judges by operator schemas alone; shapes of keys were checked by `schema`, forms of values by
`parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.recipe.parameters import Setting, as_bool
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, shown_path, suggest
from mergepipe_pipeline.recipe.schema import PARAMETER_NAMES
from mergepipe_pipeline.recipe.structure import Level, Module, Slice

#: Methods without a base, for a reader who has no schemas: a listed base is a model like others.
_NO_BASE = frozenset({"linear", "karcher", "passthrough"})


def base_takes_part(method: str, methods: Mapping[str, OperatorSchema] | None) -> bool:
    """Whether a base listed among the models is merged like them."""
    if methods is not None and method in methods:
        return methods[method].base == "none"
    return method in _NO_BASE


def find_method(
    method: str, methods: Mapping[str, OperatorSchema], problems: Problems
) -> OperatorSchema | None:
    """The method's schema; None with a problem if there is no such method."""
    schema = methods.get(method)
    if schema is None:
        problems.add(
            ("merge_method",),
            f"unknown method {shown(method)}{suggest(method, methods)}"
            f"; known are {', '.join(sorted(methods))}",
        )
    return schema


def check_parameters(
    schema: OperatorSchema,
    methods: Mapping[str, OperatorSchema],
    levels: Iterable[tuple[Level, bool]],
    problems: Problems,
) -> list[str]:
    """Add a problem for parameters the method lacks, at the wrong level, or of the wrong kind.

    Returns warnings: one per parameter that only other methods have, which mergekit ignores.
    """
    elsewhere = PARAMETER_NAMES | {p.name for s in methods.values() for p in s.parameters}
    parameters = {p.name: p for p in schema.parameters}
    warnings = []
    for level, per_model in levels:
        for name, setting in level.settings.items():
            path = (*level.path, "parameters", name)
            if name in parameters:
                _check_place(parameters[name], path, per_model, problems)
                _check_kind(parameters[name], setting, path, problems)
            elif name in elsewhere:
                warnings.append(
                    f"{shown_path(path)} has no effect: `{schema.name}` has no such parameter"
                )
            else:
                problems.ignore(
                    path,
                    f"`{schema.name}` has no parameter `{name}`{suggest(name, parameters)}"
                    f"; it has {', '.join(parameters) or 'none'}",
                )
    return warnings


def _check_place(parameter: Parameter, path: KeyPath, per_model: bool, problems: Problems) -> None:
    if per_model and parameter.scope == "method":
        problems.ignore(
            path,
            f"`{parameter.name}` is set once for all models; move it to the `parameters:` of the "
            "recipe or the slice",
        )


def _check_kind(parameter: Parameter, setting: Setting, path: KeyPath, problems: Problems) -> None:
    for value in (a for rule in setting for a in rule.anchors):
        if parameter.kind == "choice":
            if value not in parameter.choices:
                near = suggest(value, parameter.choices) if isinstance(value, str) else ""
                choices = ", ".join(parameter.choices)
                problems.add(path, f"expected one of {choices}, found {shown(value)}{near}")
        elif parameter.kind == "bool" and isinstance(value, str) and as_bool(value) is not None:
            continue
        elif isinstance(value, str):
            want = "true or false" if parameter.kind == "bool" else "a number"
            problems.add(path, f"expected {want}, found {shown(value)}")
        elif isinstance(value, bool) and parameter.kind != "bool":
            problems.ignore(
                path, f"expected a number, found {shown(value)}; write 1 or 0 if you mean it"
            )
        elif parameter.least is not None and value < parameter.least:
            problems.add(path, f"expected a number from {parameter.least:g} up, found {value:g}")


def check_slices(
    schema: OperatorSchema | None,
    merges_base: bool,
    modules: Sequence[Module],
    references: Sequence[ModelRef],
    problems: Problems,
) -> None:
    """Add a problem per slice with a model twice, too few or many, or without its base's layers."""
    for module in modules:
        _check_empty(module, problems)
    for part in (part for module in modules for part in module.slices):
        _check_twice(part, references, problems)
        _check_lengths(part, problems)
        path = part.level.path
        if part.is_short:
            continue
        if schema is None:
            if not part.entries:
                problems.add(path, "expected at least one model, found none")
            continue
        _check_count(schema, part, problems)
        if schema.base != "none" and not part.whole:
            listed = {entry.model for entry in part.entries}
            if part.base is not None and part.base not in listed:
                problems.add(
                    path,
                    f"the base {references[part.base].text!r} is not among this slice's sources; "
                    "its layers must be given there",
                )


def check_base(schema: OperatorSchema, modules: Sequence[Module], problems: Problems) -> None:
    """Add a problem if the method needs a base and some slice has none."""
    if schema.needs_base and any(p.base is None for m in modules for p in m.slices):
        problems.add(("merge_method",), f"`{schema.name}` needs `base_model:`, and there is none")


def _check_count(schema: OperatorSchema, part: Slice, problems: Problems) -> None:
    n = len(part.contributing(schema.base == "none"))
    fewest, most = schema.experts
    if n == 0 and part.entries and part.base is not None and schema.may_lack_experts:
        return
    if fewest <= n and (most is None or n <= most):
        return
    besides = " besides the base" if schema.base != "none" and part.base is not None else ""
    want = f"at least {max(1, fewest)}" if n < fewest else f"at most {most}"
    want = f"exactly {fewest}" if fewest == most else want
    noun = "model" if want.endswith(" 1") else "models"
    problems.add(
        part.level.path, f"`{schema.name}` takes {want} {noun}{besides}, found {n or 'none'}"
    )


def _check_twice(part: Slice, references: Sequence[ModelRef], problems: Problems) -> None:
    seen: set[int] = set()
    for entry in part.entries:
        if entry.model in seen:
            text = references[entry.model].text
            problems.add(entry.level.path, f"the base {text!r} is listed twice; list it once")
        seen.add(entry.model)


def _check_empty(module: Module, problems: Problems) -> None:
    """Add a problem per slice without a layer, but for a last one: it gives norm and head."""
    full = any(not part.is_empty for part in module.slices)
    for part in module.slices[: -1 if full else None]:
        for entry in part.entries if part.is_empty else ():
            start, end = entry.layers or (0, 0)
            problems.add(
                (*entry.level.path, "layer_range"),
                f"[{start}, {end}] takes no layer, as the end is not included: "
                f"[{start}, {start + 1}] is layer {start} alone",
            )


def _check_lengths(part: Slice, problems: Problems) -> None:
    ranges = [e.layers for e in part.entries if e.layers is not None]
    lengths = {end - start for start, end in ranges}
    if len(lengths) > 1:
        listed = ", ".join(f"[{start}, {end}]" for start, end in ranges)
        problems.add(
            part.level.path,
            f"all sources of a slice need the same number of layers, found {listed}",
        )
