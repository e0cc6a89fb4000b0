"""Whether a recipe's keys fit its merge method, and warnings where it may surprise.

A warning is one sentence that says what is done here: where a recipe means something else than in
mergekit, or surprises in both. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.dtypes import FLOATING, TORCH_NAME, itemsize
from mergepipe_pipeline.recipe.parameters import SHARES, Setting, as_bool
from mergepipe_pipeline.recipe.problems import KeyPath, Lines, Problems, shown, shown_path, suggest
from mergepipe_pipeline.recipe.schema import PARAMETER_NAMES
from mergepipe_pipeline.recipe.structure import Level, Module, ParsedRecipe, Slice


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


def check_windows(schema: OperatorSchema, lines: Lines, problems: Problems) -> None:
    """Add a problem for each `weights:` of a selector whose method weighs no models."""
    if all(parameter.name != "weight" for parameter in schema.parameters):
        for path in (path for path in lines if path[-3:-2] == ("models",)):
            if path[-1] == "weights":
                problems.add(path, f"`{schema.name}` weighs no models; `linear` does")


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
    n = len(part.contributing(schema))
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


#: Warnings of these parameters whenever they are given, by name.
_BY_NAME = {
    "int8_mask": "has no effect on results, here as in mergekit",
}
_OUTSIDE_T = "is outside [0, 1], so the merge leaves the way between the two models"


def recipe_warnings(parsed: ParsedRecipe) -> list[str]:
    """The warnings that a recipe's text and its method give reason for."""
    schema, warnings = parsed.schema, _base_warnings(parsed)
    warnings += _method_warnings(schema, [level for level, _ in parsed.levels()])
    warnings += [
        f"{shown_path(part.level.path)} takes no layer, as the end of a layer_range is not "
        "included: it gives the last norm and the head, as in mergekit"
        for _, part in parsed.slices()
        if part.is_empty
    ]
    for level, _ in parsed.levels():
        for name in level.settings:
            place = shown_path((*level.path, "parameters", name))
            if name in _BY_NAME and name in {p.name for p in schema.parameters}:
                warnings.append(f"{place} {_BY_NAME[name]}")
            if name in SHARES and name in {p.name for p in schema.parameters}:
                warnings += _odd_shares(place, level, name)
            if name == "t" and schema.name in {"slerp", "nuslerp"} and not _within(level, name):
                warnings.append(f"{place} {_OUTSIDE_T}")
    return warnings


def joined_base(parsed: ParsedRecipe, *, joined: bool) -> list[str]:
    """Warn that a base which is not listed is merged like the models that are."""
    if not joined or parsed.base is None:
        return []
    return [
        f"base_model {parsed.references[parsed.base].text!r} is not listed, and "
        f"`{parsed.method}` merges it like the models that are, as in mergekit; "
        "give weights per model to leave it out"
    ]


def _odd_shares(place: str, level: Level, name: str) -> list[str]:
    """Warn that a share above 1 keeps everything, and a share of 0 nothing."""
    shares = [[a for a in r.anchors if not isinstance(a, str)] for r in level.settings[name]]
    largest = max((a for anchors in shares for a in anchors), default=1)
    if largest > 1:
        return [f"{place} is {largest:g}: what is above 1 keeps everything, as 1 does"]
    return [f"{place} is 0: nothing of the deltas is kept"] if [0] in shares else []


def _within(level: Level, name: str) -> bool:
    numbers = [a for r in level.settings[name] for a in r.anchors if not isinstance(a, str)]
    return all(0 <= number <= 1 for number in numbers)


def _base_warnings(parsed: ParsedRecipe) -> list[str]:
    warnings = []
    listed = {entry.model for entry in parsed.entries()}
    if parsed.schema.base == "none":
        if parsed.base is not None and parsed.base not in listed:
            warnings.append(
                f"base_model {parsed.references[parsed.base].text!r} is not listed under models: "
                "it only stands in for blocks that are not read, where mergekit merges it or fails"
            )
        return warnings
    for _, part in parsed.slices():
        warnings += [
            f"{shown_path((*e.level.path, 'parameters'))}: {parsed.references[e.model].text!r} is "
            "the base, so they have no effect"
            for e in part.entries
            if e.model == part.base and e.level.settings
        ]
    return warnings


def _method_warnings(schema: OperatorSchema, levels: Sequence[Level]) -> list[str]:
    name, parameters = schema.name, {n for level in levels for n in level.settings}
    variant = "variant" in parameters
    if name.startswith("dare_") and not variant:
        return [
            f"{name}: what is kept is rescaled to the L1 norm of the whole delta, as in mergekit, "
            "and not by 1/density as in the paper"
        ]
    if name.startswith("breadcrumbs"):
        return [
            f"{name}: a gamma whose share of a tensor is less than one element removes no outlier, "
            "where mergekit before 0.1.5 zeroes the whole delta"
        ]
    if name == "model_stock":
        return [
            "model_stock: where the experts' deltas point away from each other (negative cosine) "
            "the result lies beyond the base, and may lie far out"
        ]
    return []


def dtype_warnings(dtype: str | None, stored: Iterable[str]) -> list[str]:
    """Warn of what `dtype` (a safetensors code) means for inputs of the `stored` dtypes."""
    floating = sorted({code for code in stored if code in FLOATING})
    if dtype is None:
        short = [TORCH_NAME[code] for code in floating if itemsize(code) < 4]
        if not short:
            return []
        return [
            f"no dtype: arithmetic is in float32 and the result is rounded to {', '.join(short)} "
            "once, where mergekit computes in the stored dtype"
        ]
    wider = [TORCH_NAME[code] for code in floating if itemsize(code) > itemsize(dtype)]
    if not wider:
        return []
    return [
        f"dtype {TORCH_NAME[dtype]}: the {', '.join(wider)} inputs are not rounded to it before "
        "the arithmetic, as mergekit does, but only when the result is written"
    ]


def idle_filters(levels: Iterable[Level], names: Mapping[str, None]) -> list[str]:
    """One warning per filter that is part of no tensor's name, so that its value is never used."""
    return [
        f"{shown_path((*level.path, 'parameters', name))}: the filter {rule.filter!r} matches no "
        "tensor"
        for level in levels
        for name, setting in level.settings.items()
        for rule in setting
        if rule.filter is not None and not any(rule.filter in tensor for tensor in names)
    ]


def copied(names: Sequence[str], source: ModelRef) -> str:
    """Warn that tensors without floating-point numbers, with their dtypes, are not merged."""
    return (
        f"{len(names)} tensors have no floating-point numbers, first {names[0]}: they are copied "
        f"from {source.text!r}, whatever the other models have there"
    )


def untied(head: str, lacking: Sequence[ModelRef]) -> str:
    """Warn that `head` is written although some models tie it to their embeddings."""
    names = ", ".join(repr(ref.text) for ref in lacking)
    return (
        f"{head} is written because an input has it; {names} ties it, so the embeddings of that "
        "model stand in for it, and the result's tie_word_embeddings must be false"
    )
