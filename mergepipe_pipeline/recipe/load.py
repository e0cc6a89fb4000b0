"""From YAML text to a resolved `Recipe`, collecting every problem on the way.

Two steps, since the second needs headers: `parse_recipe` knows the text alone, `resolve_recipe` also the
tensors. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import ValidationError

from mergepipe_pipeline.dtypes import FLOATING, code_from_name
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.recipe.budget import parse_budget
from mergepipe_pipeline.recipe.parameters import look_up, position
from mergepipe_pipeline.recipe.schema import NOT_YET, ModelEntry, RecipeFile
from mergepipe_pipeline.recipe.yaml_text import Document, Path, load_yaml
from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.spec.layers import layer_count
from mergepipe_pipeline.spec.operator import OperatorSchema, Parameter
from mergepipe_pipeline.spec.recipe import Budget, ModelRef, Params, Recipe, TensorRecipe

_GROUPS: dict[str, type] = {"models": ModelEntry}


@dataclass(frozen=True)
class RawRecipe:
    """A recipe whose text is in order. `models` are the merged models in recipe order.

    A base listed among the models of a delta method is not among them: it has no delta.
    """

    name: str
    where: str
    text: str
    file: RecipeFile
    entries: tuple[ModelEntry, ...]
    dtype: str | None
    out_dtype: str | None
    budget: Budget
    ref: str

    @property
    def method(self) -> str:
        """The merge method's name."""
        return self.file.merge_method

    @property
    def base_model(self) -> str | None:
        """The base as the text names it."""
        return self.file.base_model

    @property
    def models(self) -> tuple[str, ...]:
        """The merged models as the text names them."""
        return tuple(e.model for e in self.entries)

    @property
    def schedule(self) -> str:
        """Cron expression of the standing pipeline's nightly run."""
        return self.file.schedule

    @property
    def block_elems(self) -> int | None:
        """Elements per block, or None for the default grid."""
        return self.file.block_size


def parse_recipe(
    text: str,
    *,
    name: str,
    where: str,
    methods: Mapping[str, OperatorSchema],
    strategies: Sequence[str],
) -> RawRecipe:
    """Check all that text alone can tell. Raises RecipeError with every problem at once."""
    document = load_yaml(text, where)
    if not isinstance(document.value, dict):
        raise RecipeError(
            "A recipe is a mapping of keys",
            where=where,
            expected="merge_method, models, …",
            found=type(document.value).__name__,
            next_step="see the README's recipes",
        )
    problems = [f"{document.place(p)}: the key occurs twice; keep one" for p in document.repeated]
    file = None
    try:
        file = RecipeFile.model_validate(document.value)
    except ValidationError as error:
        problems += _explain(error, document, methods)
    given = document.value.get("merge_method")
    if isinstance(given, str) and given not in methods:
        problems.append(
            f"{document.place(('merge_method',))}: unknown method {given!r}"
            f"{_did_you_mean(given, methods)}; expected one of {', '.join(methods)}"
        )
    if file is not None:
        problems += _meaning(file, document, methods, strategies)
    parsed = _border_values(file, where, problems)
    if problems or file is None:
        raise RecipeError(
            "A recipe has problems",
            where=where,
            problems=tuple(problems),
            next_step="mend them all; nothing was read or written",
        )
    budget, dtype, out_dtype = parsed
    delta = methods[file.merge_method].space == "delta"
    entries = tuple(e for e in file.models if not (delta and e.model == file.base_model))
    return RawRecipe(name, where, text, file, entries, dtype, out_dtype, budget, file.ref or name)


def resolve_recipe(
    raw: RawRecipe,
    tensors: Sequence[TensorEntry],
    presence: Sequence[frozenset[str]],
    methods: Mapping[str, OperatorSchema],
) -> Recipe:
    """Plain numbers for every tensor of the output.

    `tensors` are those of the base (or the first model), `presence` the tensor names of each merged model.
    Raises RecipeError with every missing parameter at once.
    """
    schema = methods[raw.method]
    n_layers = layer_count(t.name for t in tensors)
    resolved, missing = [], dict[str, list[str]]()
    for entry in tensors:
        present = tuple(
            i for i, names in enumerate(presence) if entry.name in names and entry.dtype in FLOATING
        )
        t = position(entry.name, n_layers)
        method = _values(
            schema, "method", [raw.file.parameters], entry.name, t, "the recipe", missing
        )
        models = tuple(
            _values(
                schema,
                "model",
                [raw.entries[i].parameters, raw.file.parameters],
                entry.name,
                t,
                raw.entries[i].model,
                missing,
            )
            for i in present
        )
        resolved.append(TensorRecipe(entry.name, method, present, models))
    if missing:
        problems = tuple(
            f"{what} is required and missing, for {len(names)} tensors such as {names[0]}; "
            f"add it under `parameters`"
            for what, names in missing.items()
        )
        raise RecipeError(
            "A recipe lacks required parameters",
            where=raw.where,
            problems=problems,
            next_step="add them; nothing was read or written",
        )
    return Recipe(
        name=raw.name,
        text=raw.text,
        method=raw.method,
        base=ModelRef(raw.base_model) if raw.base_model else None,
        models=tuple(ModelRef(m) for m in raw.models),
        tensors=tuple(resolved),
        dtype=raw.dtype,
        out_dtype=raw.out_dtype,
        budget=raw.budget,
        strategy=raw.file.strategy,
        seed=raw.file.seed,
        ref=raw.ref,
        warnings=_warnings(raw, tensors),
    )


def _values(
    schema: OperatorSchema,
    scope: str,
    levels: Sequence[object],
    tensor: str,
    t: float,
    owner: str,
    missing: dict[str, list[str]],
) -> Params:
    out = []
    for p in schema.parameters:
        if p.scope == scope:
            value = look_up(p, levels, tensor, t)  # type: ignore[arg-type]
            if value is None:
                missing.setdefault(f"parameter {p.name!r} of {owner}", []).append(tensor)
            else:
                out.append((p.name, value))
    return tuple(out)


def _explain(
    error: ValidationError, document: Document, methods: Mapping[str, OperatorSchema]
) -> list[str]:
    """One line per pydantic problem, in the words of the recipe."""
    known = {p.name for s in methods.values() for p in s.parameters}
    lines: dict[str, None] = {}
    for item in error.errors(include_url=False):
        names_a_key = item["type"] in {"extra_forbidden", "missing"}
        path = _key_path(item["loc"], document, names_a_key=names_a_key)
        key = str(path[-1]) if path else ""
        place = document.place(path)
        if item["type"] == "extra_forbidden" and path[:1] == (key,) and key in NOT_YET:
            lines[f"{place}: {key!r} is not supported yet; {NOT_YET[key]}"] = None
        elif item["type"] == "extra_forbidden":
            fields = _fields_at(path)
            hint = _did_you_mean(key, fields)
            if not hint and key in known:
                hint = "; move it under `parameters`"
            lines[f"{place}: unknown key {key!r}{hint}"] = None
        elif item["type"] == "missing":
            lines[f"{place}: required key {key!r} is missing; add it"] = None
        else:
            found = f"found {str(item.get('input'))[:60]!r}"
            if not any(line.startswith(f"{place}:") for line in lines):
                lines[f"{place}: {item['msg'].lower()}, {found}"] = None
    return list(lines)


def _key_path(loc: tuple[str | int, ...], document: Document, *, names_a_key: bool) -> Path:
    """The part of pydantic's location that is a key path of the document: pydantic adds type names.

    `names_a_key`: the last part is a key that is unknown or missing, whatever the document says.
    """
    path: Path = ()
    for i, part in enumerate(loc):
        if (*path, part) in document.lines or (names_a_key and i == len(loc) - 1):
            path = (*path, part)
    return path


def _fields_at(path: Path) -> list[str]:
    if path and path[0] == "models" and len(path) == 3:
        return list(ModelEntry.model_fields)
    if len(path) == 1:
        return list(RecipeFile.model_fields)
    return ["filter", "value"]


def _did_you_mean(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _meaning(
    file: RecipeFile,
    document: Document,
    methods: Mapping[str, OperatorSchema],
    strategies: Sequence[str],
) -> list[str]:
    """Problems that need the method's schema."""
    problems = []
    if file.strategy not in strategies:
        problems.append(
            f"{document.place(('strategy',))}: unknown strategy {file.strategy!r}"
            f"{_did_you_mean(file.strategy, strategies)}; expected one of "
            f"{', '.join(strategies)}"
        )
    if file.tokenizer_source not in (None, "base"):
        problems.append(
            f"{document.place(('tokenizer_source',))}: {file.tokenizer_source!r} is not "
            "supported yet; use 'base'"
        )
    for place, text in _model_texts(file):
        if "+" in text.rsplit("/", 1)[-1]:
            problems.append(
                f"{document.place(place)}: adapters ({text!r}) are not supported yet; "
                "merge the adapter into its base first"
            )
        elif "@" in text.rsplit("/", 1)[-1]:
            problems.append(
                f"{document.place(place)}: revisions ({text!r}) are not supported yet; "
                "download that revision and give its folder"
            )
    schema = methods.get(file.merge_method)
    if schema is None:
        return problems
    if schema.needs_base and file.base_model is None:
        problems.append(f"base_model: required by {schema.name} and missing; add it")
    if schema.needs_base and all(e.model == file.base_model for e in file.models):
        problems.append(f"{document.place(('models',))}: no model besides the base; add one")
    return problems + _unknown_parameters(file, document, schema)


def _model_texts(file: RecipeFile) -> list[tuple[Path, str]]:
    texts: list[tuple[Path, str]] = [
        (("models", i, "model"), e.model) for i, e in enumerate(file.models)
    ]
    return texts + ([(("base_model",), file.base_model)] if file.base_model else [])


def _unknown_parameters(file: RecipeFile, document: Document, schema: OperatorSchema) -> list[str]:
    known: dict[str, Parameter] = {p.name: p for p in schema.parameters}
    problems = []
    for name in file.parameters:
        if name not in known:
            problems.append(_unknown_parameter(document, ("parameters", name), name, schema, known))
    for i, entry in enumerate(file.models):
        for name in entry.parameters:
            path: Path = ("models", i, "parameters", name)
            if name not in known:
                problems.append(_unknown_parameter(document, path, name, schema, known))
            elif known[name].scope == "method":
                problems.append(
                    f"{document.place(path)}: {name!r} is set once for all models; move it "
                    "to the recipe's `parameters`"
                )
    return problems


def _unknown_parameter(
    document: Document,
    path: Path,
    name: str,
    schema: OperatorSchema,
    known: Mapping[str, Parameter],
) -> str:
    return (
        f"{document.place(path)}: {schema.name} has no parameter {name!r}"
        f"{_did_you_mean(name, known)}; it has {', '.join(known) or 'none'}"
    )


def _border_values(
    file: RecipeFile | None, where: str, problems: list[str]
) -> tuple[Budget, str | None, str | None]:
    budget, dtypes = Budget(), dict[str, str | None](dtype=None, out_dtype=None)
    if file is None:
        return budget, None, None
    try:
        budget = parse_budget(file.budget, f"{where}, budget")
    except MergePipeError as error:
        problems.append(str(error))
    for key, name in (("dtype", file.dtype), ("out_dtype", file.out_dtype)):
        try:
            dtypes[key] = code_from_name(name, f"{where}, {key}") if name else None
        except MergePipeError as error:
            problems.append(str(error))
    if file.block_size is not None and (
        file.block_size & (file.block_size - 1) or not 4096 <= file.block_size <= 1 << 20
    ):
        problems.append(
            f"block_size: expected a power of two from 4096 to 1048576, found {file.block_size}"
        )
    return budget, dtypes["dtype"], dtypes["out_dtype"]


def _warnings(raw: RawRecipe, tensors: Sequence[TensorEntry]) -> tuple[str, ...]:
    stored = {t.dtype for t in tensors if t.dtype in FLOATING}
    if raw.dtype in {"BF16", "F16"} and stored - {raw.dtype}:
        return (
            f"dtype {raw.file.dtype}: mergekit would round inputs to it before the arithmetic; "
            "here arithmetic is in float32 and only the result is rounded",
        )
    return ()
