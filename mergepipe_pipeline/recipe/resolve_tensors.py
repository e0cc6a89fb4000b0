"""Step two from YAML to a `Recipe`: every output tensor with its inputs and plain numbers.

Needs the models' tensors as headers list them: names, dtypes, shapes. No file is opened, and every
problem is reported at once. A parameter is looked up as in mergekit: the source's own, the slice's,
the module's, the recipe's, the method's default. A source's filters see the name in the model,
others the name in the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mergepipe_pipeline.domain.layers import embedding_like, is_buffer, layer_stack, stack_counts
from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter
from mergepipe_pipeline.domain.output import is_computed, promoted_dtype
from mergepipe_pipeline.domain.recipe import BaseTensor, Params, Recipe, TensorInput, TensorRecipe
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.recipe.budget import check_budget_options
from mergepipe_pipeline.recipe.checks import (
    check_base,
    check_parameters,
    check_slices,
    copied,
    dtype_warnings,
    find_method,
    idle_filters,
    mixed_shapes,
    recipe_warnings,
    untied,
)
from mergepipe_pipeline.recipe.model_tensors import Belongs, Table, Tables
from mergepipe_pipeline.recipe.outputs import (
    Output,
    Outputs,
    SourceTensor,
    all_names,
    disjoint,
    first_parts,
    module_of,
)
from mergepipe_pipeline.recipe.parameters import as_bool, look_up
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, recipe_error
from mergepipe_pipeline.recipe.structure import Level, ParsedRecipe
from mergepipe_pipeline.text import listed


def resolve_recipe(
    parsed: ParsedRecipe,
    tables: Sequence[Table],
    methods: Mapping[str, OperatorSchema],
    partial: Sequence[bool] = (),
    depths: Sequence[int | None] = (),
    ties: Sequence[bool] = (),
) -> Recipe:
    """Give every output tensor its inputs and numbers.

    `tables[i]` are the tensors of `parsed.references[i]` by name, in file order. `partial[i]` says
    that model i is an adapter or a delta alone: its table has the base's names that it changes.
    Where other models take part and its share matters (values are merged, or deltas are counted or
    measured), it stays an input under the base's tensor name; else it is no input there. `depths`
    are the numbers of layers that the models' configs state: a layer beyond is a part of its own.
    `ties[i]` says that the head of model i is its embedding; without it all are.

    Raises RecipeError with every problem.
    """
    problems = Problems(parsed.lines, lenient=parsed.lenient)
    schema = find_method(parsed.method, methods, problems)
    if schema is None:
        raise recipe_error([problems], parsed.where)
    warnings = _check_text(parsed, schema, methods, problems)
    if len(tables) != len(parsed.references):
        problems.add(
            (), f"expected tensors of {len(parsed.references)} models, found {len(tables)}"
        )
    if problems:
        raise recipe_error([problems], parsed.where)
    flags = [*partial, *[False] * (len(tables) - len(partial))]
    tied = [*ties, *[True] * (len(tables) - len(ties))]
    model_tables = Tables(parsed.references, tables, flags, depths, tied)
    resolver = _Resolver(parsed, schema, model_tables, problems)
    tensors = resolver.tensors()
    if not problems:
        check_budget_options(parsed.budget, parsed.references, tensors, problems)
    if problems:
        raise recipe_error([problems], parsed.where)
    warnings += [*problems.ignored, *resolver.warnings]
    warnings += mixed_shapes(tensors, tables, parsed.references)
    warnings += _rounding_warnings(parsed, schema, tensors, tables)
    return _recipe_of(parsed, tensors, resolver.sliced, warnings)


def _check_text(
    parsed: ParsedRecipe,
    schema: OperatorSchema,
    methods: Mapping[str, OperatorSchema],
    problems: Problems,
) -> list[str]:
    """Check what needs no tensor, and return the warnings about it."""
    warnings = [*parsed.warnings, *check_parameters(schema, methods, parsed.levels(), problems)]
    warnings += recipe_warnings(parsed, schema)
    check_slices(schema, schema.base == "none", parsed.modules, parsed.references, problems)
    check_base(schema, parsed.modules, problems)
    return warnings


def _rounding_warnings(
    parsed: ParsedRecipe,
    schema: OperatorSchema,
    tensors: Sequence[TensorRecipe],
    tables: Sequence[Table],
) -> list[str]:
    """Warnings about dtypes that lose something of the models that arithmetic reads."""
    computed = [t for t in tensors if is_computed(schema.name, t)]
    if parsed.dtype is None:
        return dtype_warnings(None, [promoted_dtype(t, tables) for t in computed])
    used = {i.model for t in computed for i in t.inputs}
    used |= {t.base.model for t in computed if t.base}
    stored = [entry.dtype for model in sorted(used) for entry in tables[model].values()]
    return dtype_warnings(parsed.dtype, stored)


def _recipe_of(
    parsed: ParsedRecipe,
    tensors: tuple[TensorRecipe, ...],
    sliced: tuple[tuple[str, int], ...],
    warnings: list[str],
) -> Recipe:
    return Recipe(
        name=parsed.name,
        text=parsed.text,
        method=parsed.method,
        models=parsed.references,
        base=parsed.base,
        tensors=tensors,
        dtype=parsed.dtype,
        out_dtype=parsed.out_dtype,
        budget=parsed.budget,
        strategy=parsed.strategy,
        seed=parsed.seed,
        ref=parsed.ref,
        sliced=sliced,
        tokenizer=parsed.tokenizer,
        chat_template=parsed.chat_template,
        warnings=tuple(dict.fromkeys(warnings)),
    )


@dataclass
class _Resolver:
    parsed: ParsedRecipe
    schema: OperatorSchema
    tables: Tables
    problems: Problems
    warnings: list[str] = field(default_factory=list)
    sliced: tuple[tuple[str, int], ...] = ()
    copied: dict[int, dict[str, None]] = field(default_factory=dict)

    def tensors(self) -> tuple[TensorRecipe, ...]:
        """The output's tensors in order; not to be used if problems were added."""
        outputs = self._outputs()
        repeated = Repeated(self.problems)
        recipes = [r for output in outputs if (r := self._recipe(output, repeated)) is not None]
        recipes += self._leftovers({output.name for output in outputs})
        self.tables.add_misfits(self._places(), self.problems)
        repeated.flush()
        self.warnings += self.tables.own_parts()
        for model, names in self.copied.items():
            self.warnings.append(copied(list(names), self.tables.refs[model]))
        self.warnings += idle_filters([lv for lv, _ in self.parsed.levels()], all_names(outputs))
        return tuple(recipes)

    def _outputs(self) -> list[Output]:
        parts = self._parts()
        outputs: dict[str, Output] = {}
        for module in self.parsed.modules:
            name = module.name or "default"
            levels = (module.level, self.parsed.level)
            made: list[Output] = []
            if name in parts:
                maker = Outputs(self.schema, self.tables, self.problems, parts[name], levels)
                made = list(maker.of_module(module))
            twice = [output.name for output in made if output.name in outputs]
            if twice:
                owner = next(n for n, belongs in parts.items() if belongs(twice[0]))
                self.problems.add(
                    module.level.path,
                    f"{len(twice)} of its tensors belong to the module {owner}, too, "
                    f"first {twice[0]}",
                )
            outputs |= {output.name: output for output in made}
            if not all(part.whole for part in module.slices):
                self.sliced += tuple(stack_counts(output.name for output in made).items())
        return list(outputs.values())

    def _parts(self) -> dict[str, Belongs]:
        """Which tensors each module has; adds a problem for a module without any."""
        parts: dict[str, Belongs] = {}
        for module in self.parsed.modules:
            first = module.slices[0].entries[0].model
            names = self.tables[first if self.parsed.base is None else self.parsed.base]
            belongs = module_of(module.name or "default", names)
            if belongs is not None:
                parts[module.name or "default"] = belongs
                continue
            self.problems.add(
                module.level.path,
                f"no tensor belongs to this module; names begin with "
                f"{', '.join(first_parts(names))}",
            )
        return disjoint(parts)

    def _places(self) -> dict[int, KeyPath]:
        places: dict[int, KeyPath] = {}
        for entry in self.parsed.entries():
            places.setdefault(entry.model, (*entry.level.path, "model"))
        return places

    def _recipe(self, output: Output, repeated: Repeated) -> TensorRecipe | None:
        """The output with its numbers; None where too few models have an optional tensor."""
        first = self._first(output)
        if first is None:
            return None
        like = self.tables[first.model][first.tensor]
        if like.dtype not in FLOATING:
            return self._copy(output, first)
        stored = [taken for taken in output.taken if taken.stored]
        if self._lacks_base(output, stored, repeated):
            return None
        if not stored and self.schema.space != "value":
            return TensorRecipe(output.name, (), first, ())
        params = method_params(self.schema, output.levels, output.name, output.t, repeated)
        taken = [t for t in output.taken if t.stored or _matters(self.schema, params)]
        if len(taken) < self.schema.experts[0]:
            return self._too_few(output, taken, first)
        for t in taken:
            self.tables.check_entry(t.entry.model, t.tensor, like, first.model)
        self._warn_untied(output)
        return TensorRecipe(
            output.name, params, output.base, self._inputs(output, taken, params, repeated)
        )

    def _lacks_base(
        self, output: Output, stored: Sequence[SourceTensor], repeated: Repeated
    ) -> bool:
        """Whether the base lacks a tensor that a model has; adds that as a problem."""
        if self.schema.base == "none" or not stored or output.base is not None:
            return False
        if output.part.base is None:
            return False
        text = f"the base lacks an optional tensor that {self._text(stored[0])!r} has"
        repeated.add(stored[0].entry.level.path, text, output.name)
        return True

    def _inputs(
        self, output: Output, taken: Sequence[SourceTensor], params: Params, repeated: Repeated
    ) -> tuple[TensorInput, ...]:
        """The models' tensors of an output, each with its own parameters."""
        rows = [
            model_params(
                self.schema,
                (t.entry.level, *output.levels),
                t.name,
                output.t,
                self._text(t),
                repeated,
            )
            for t in taken
        ]
        check_sum(self.schema, params, rows, output.levels[0].path, output.name, repeated)
        return tuple(
            TensorInput(t.entry.model, t.tensor, t.position, row)
            for t, row in zip(taken, rows, strict=True)
        )

    def _copy(self, output: Output, first: BaseTensor) -> TensorRecipe:
        """A copy of a tensor that no arithmetic is for; all models must have it so."""
        like = self.tables[first.model][first.tensor]
        for taken in output.taken:
            if taken.stored and taken.entry.model != first.model:
                self.tables.check_kind(taken.entry.model, taken.tensor, like, first.model)
                if not is_buffer(output.name):
                    self.copied.setdefault(first.model, {})[f"{output.name} in {like.dtype}"] = None
        return TensorRecipe(output.name, (), first, ())

    def _first(self, output: Output) -> BaseTensor | None:
        """The tensor that gives the output its shape, and that a copy is of."""
        if output.base is not None:
            return output.base
        stored = [t for t in output.taken if t.stored]
        return BaseTensor(stored[0].entry.model, stored[0].tensor) if stored else None

    def _too_few(
        self, output: Output, taken: Sequence[SourceTensor], first: BaseTensor
    ) -> TensorRecipe | None:
        with_base = output.base is not None and self.schema.base != "none"
        if len(taken) + with_base <= 1 or not taken:
            return TensorRecipe(output.name, (), first, ())
        self.warnings.append(
            f"{output.name} is left out: {self.schema.name} takes {self.schema.experts[0]} models, "
            f"and {len(taken)} besides the base has it"
        )
        return None

    def _warn_untied(self, output: Output) -> None:
        pairs = [(t.entry.model, t.name, t.tensor) for t in output.taken if t.stored]
        if output.base is not None:
            pairs.append((output.base.model, output.name, output.base.tensor))
        tied = [m for m, name, tensor in pairs if name != tensor and embedding_like(name)]
        if tied:
            lacking = [self.tables.refs[m] for m in dict.fromkeys(tied)]
            self.warnings.append(untied(output.name, lacking))

    def _leftovers(self, output_names: set[str]) -> list[TensorRecipe]:
        """Copies of the tensors that are in no named module; no layers that slices leave out."""
        if all(module.name is None for module in self.parsed.modules):
            return []
        first = self.parsed.modules[0].slices[0].entries[0].model
        owner = first if self.parsed.base is None else self.parsed.base
        sliced = dict(self.sliced)
        names = [
            name
            for name in self.tables[owner]
            if name not in output_names and layer_stack(name) not in sliced
        ]
        if names:
            self.warnings.append(
                f"modules: {len(names)} tensors are in none of them, first {names[0]}: they are "
                f"copied from {self.tables.refs[owner].text!r}, where mergekit leaves them out"
            )
        return [TensorRecipe(name, (), BaseTensor(owner, name), ()) for name in names]

    def _text(self, taken: SourceTensor) -> str:
        return self.tables.refs[taken.entry.model].text


def _matters(schema: OperatorSchema, params: Params) -> bool:
    """Whether an input equal to the base changes the result."""
    if schema.space != "delta" or schema.response in ("unbounded", "mean"):
        return True
    # Without a `normalize` parameter, the factors of a sum may depend on all deltas.
    return schema.response == "additive" and bool(dict(params).get("normalize", True))


class Repeated:
    """Problems that many tensors share, said once with the first tensor and how many more."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._tensors: dict[tuple[KeyPath, str], dict[str, None]] = {}

    def add(self, path: KeyPath, text: str, tensor: str) -> None:
        """Note that `text` is wrong at `path` for one tensor more."""
        self._tensors.setdefault((path, text), {})[tensor] = None

    def flush(self) -> None:
        """Add what was noted to the problems."""
        for (path, text), tensors in self._tensors.items():
            self._problems.add(path, f"{text}, tensor {listed(tensors, 1)}")


def method_params(
    schema: OperatorSchema, levels: Sequence[Level], tensor: str, t: float, repeated: Repeated
) -> Params:
    """The method's parameters for an output tensor; `levels` from the nearest to the recipe's."""
    return _params(schema, "method", levels, tensor, t, "", repeated)


def model_params(
    schema: OperatorSchema,
    levels: Sequence[Level],
    tensor: str,
    t: float,
    model: str,
    repeated: Repeated,
) -> Params:
    """The parameters of one model, called `model`, for the tensor of that name in it."""
    return _params(schema, "model", levels, tensor, t, f" of model {model!r}", repeated)


def check_sum(
    schema: OperatorSchema,
    params: Params,
    rows: Sequence[Params],
    path: KeyPath,
    tensor: str,
    repeated: Repeated,
) -> None:
    """Add a problem where weights are divided by their sum and it is zero."""
    weights = [row["weight"] for row in map(dict, rows) if "weight" in row]
    if schema.space != "value" or not dict(params).get("normalize") or not weights:
        return
    if sum(map(float, weights)) == 0:
        text = "the weights sum to zero and `normalize` divides by the sum"
        repeated.add(path, f"{text}; change a weight or set `normalize: false`", tensor)


def _params(
    schema: OperatorSchema,
    scope: str,
    levels: Sequence[Level],
    tensor: str,
    t: float,
    owner: str,
    repeated: Repeated,
) -> Params:
    settings = [level.settings for level in levels]
    params: list[tuple[str, float | int | bool | str]] = []
    for p in (p for p in schema.parameters if p.scope == scope):
        value = look_up(p.name, settings, tensor, t, stepwise=p.kind == "bool")
        if value is None:
            if p.default is not None:
                params.append((p.name, _cast(p, p.default)))
            else:
                text = f"the required parameter `{p.name}`{owner} has no value"
                text += _without_effect(schema, levels)
                repeated.add(levels[0].path, text, tensor)
        elif p.kind == "int" and not isinstance(value, str) and not float(value).is_integer():
            text = f"`{p.name}`{owner} must be a whole number, found {value:g}"
            repeated.add((*_place(p.name, levels), p.name), text, tensor)
        else:
            params.append((p.name, _cast(p, value)))
    return tuple(params)


def _without_effect(schema: OperatorSchema, levels: Sequence[Level]) -> str:
    """Which given parameters the method does not have, perhaps in place of one that it needs."""
    parameters = {p.name for p in schema.parameters}
    unknown = dict.fromkeys(n for level in levels for n in level.settings if n not in parameters)
    return f"; `{schema.name}` has no parameter `{'`, `'.join(unknown)}`" if unknown else ""


def _place(name: str, levels: Sequence[Level]) -> KeyPath:
    for level in levels:
        if name in level.settings:
            return (*level.path, "parameters")
    return ()


def _cast(parameter: Parameter, value: float | int | bool | str) -> float | int | bool | str:
    if parameter.kind == "bool" and isinstance(value, str):
        return bool(as_bool(value))
    kinds: Mapping[str, type[float] | type[int] | type[bool] | type[str]]
    kinds = {"float": float, "int": int, "bool": bool, "choice": str}
    return kinds[parameter.kind](value)
