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
from mergepipe_pipeline.dtypes import FLOATING, FP8_BLOCKS
from mergepipe_pipeline.recipe.budget import check_budget_options
from mergepipe_pipeline.recipe.checks import (
    copied,
    dtype_warnings,
    idle_filters,
    untied,
)
from mergepipe_pipeline.recipe.model_tensors import Belongs, ModelTable, Table
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


def resolve_recipe(parsed: ParsedRecipe, models: Sequence[ModelTable]) -> Recipe:
    """Give every output tensor its inputs and numbers; `models[i]` is `parsed.references[i]`.

    Where other models take part than a partial one, and its share matters (values are merged, or
    deltas are counted or measured), it stays an input under the base's tensor name; else it is no
    input there.

    Raises RecipeError with every problem.
    """
    problems = Problems(parsed.lines)
    resolver = _Resolver(parsed, models, problems)
    tensors = resolver.tensors()
    if not problems:
        check_budget_options(parsed.budget, parsed.references, tensors, problems)
    if problems:
        raise recipe_error([problems], parsed.where)
    tables = [model.tensors for model in models]
    warnings = [*parsed.warnings, *resolver.warnings]
    warnings += _rounding_warnings(parsed, tensors, tables)
    return _recipe_of(parsed, tensors, resolver.sliced, warnings)


def _rounding_warnings(
    parsed: ParsedRecipe, tensors: Sequence[TensorRecipe], tables: Sequence[Table]
) -> list[str]:
    """Warnings about dtypes that lose something of the models that arithmetic reads."""
    computed = [t for t in tensors if is_computed(parsed.method, t)]
    if parsed.dtype == FP8_BLOCKS:
        return []
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
    models: Sequence[ModelTable]
    problems: Problems
    warnings: list[str] = field(default_factory=list)
    sliced: tuple[tuple[str, int], ...] = ()
    copied: dict[int, dict[str, None]] = field(default_factory=dict)

    @property
    def schema(self) -> OperatorSchema:
        return self.parsed.schema

    def tensors(self) -> tuple[TensorRecipe, ...]:
        """The output's tensors in order; not to be used if problems were added."""
        outputs = self._outputs()
        recipes = [r for output in outputs if (r := self._recipe(output)) is not None]
        recipes += self._leftovers({output.name for output in outputs})
        places = self._places()
        for number, model in enumerate(self.models):
            model.add_misfits(places.get(number, ()), self.problems)
        for model in self.models:
            self.warnings += model.own_parts()
        for number, names in self.copied.items():
            self.warnings.append(copied(list(names), self.parsed.references[number]))
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
                maker = Outputs(self.schema, self.models, self.problems, parts[name], levels)
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
            owner = first if self.parsed.base is None else self.parsed.base
            names = self.models[owner].tensors
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

    def _recipe(self, output: Output) -> TensorRecipe | None:
        """The output with its numbers; None where too few models have an optional tensor."""
        first = self._first(output)
        if first is None:
            return None
        like = self.models[first.model].tensors[first.tensor]
        if like.dtype not in FLOATING:
            return self._copy(output, first)
        stored = [taken for taken in output.taken if taken.stored]
        if self._lacks_base(output, stored):
            return None
        if not stored and self.schema.space != "value":
            return TensorRecipe(output.name, (), first, ())
        params = self._params("method", output.levels, output.name, output.t)
        taken = [t for t in output.taken if t.stored or _matters(self.schema, params)]
        if len(taken) < self.schema.experts[0]:
            return self._too_few(output, taken, first)
        for t in taken:
            self.models[t.entry.model].check_entry(t.tensor, like, self.models[first.model])
        self._warn_untied(output)
        return TensorRecipe(output.name, params, output.base, self._inputs(output, taken, params))

    def _lacks_base(self, output: Output, stored: Sequence[SourceTensor]) -> bool:
        """Whether the base lacks a tensor that a model has; adds that as a problem."""
        if self.schema.base == "none" or not stored or output.base is not None:
            return False
        if output.part.base is None:
            return False
        text = f"the base lacks an optional tensor that {self._text(stored[0])!r} has"
        self.problems.add_of(output.name, stored[0].entry.level.path, text)
        return True

    def _inputs(
        self, output: Output, taken: Sequence[SourceTensor], params: Params
    ) -> tuple[TensorInput, ...]:
        """The models' tensors of an output, each with its own parameters."""
        inputs = []
        for t in taken:
            levels, owner = (t.entry.level, *output.levels), f" of model {self._text(t)!r}"
            own = self._params("model", levels, t.name, output.t, owner)
            inputs.append(TensorInput(t.entry.model, t.tensor, t.position, own))
        weights = [row["weight"] for i in inputs if "weight" in (row := dict(i.params))]
        is_divided = self.schema.space == "value" and dict(params).get("normalize") and weights
        if is_divided and sum(map(float, weights)) == 0:
            text = "the weights sum to zero and `normalize` divides by the sum"
            text += "; change a weight or set `normalize: false`"
            self.problems.add_of(output.name, output.levels[0].path, text)
        return tuple(inputs)

    def _params(
        self, scope: str, levels: Sequence[Level], tensor: str, t: float, owner: str = ""
    ) -> Params:
        """The parameters of the method, or of the model `owner`; `levels` from the nearest up."""
        settings = [level.settings for level in levels]
        params: list[tuple[str, float | int | bool | str]] = []
        for p in (p for p in self.schema.parameters if p.scope == scope):
            given = look_up(p.name, settings, tensor, t, stepwise=p.kind == "bool")
            value = p.default if given is None else given
            if value is None:
                text = f"the required parameter `{p.name}`{owner} has no value"
                text += _without_effect(self.schema, levels)
                self.problems.add_of(tensor, levels[0].path, text)
            elif p.kind == "int" and isinstance(value, float) and not value.is_integer():
                text = f"`{p.name}`{owner} must be a whole number, found {value:g}"
                self.problems.add_of(tensor, (*_place(p.name, levels), p.name), text)
            else:
                params.append((p.name, _cast(p, value)))
        return tuple(params)

    def _copy(self, output: Output, first: BaseTensor) -> TensorRecipe:
        """A copy of a tensor that no arithmetic is for; all models must have it so."""
        like = self.models[first.model].tensors[first.tensor]
        for taken in output.taken:
            if taken.stored and taken.entry.model != first.model:
                owner = self.models[first.model]
                self.models[taken.entry.model].check_kind(taken.tensor, like, owner)
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
            lacking = [self.parsed.references[m] for m in dict.fromkeys(tied)]
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
            for name in self.models[owner].tensors
            if name not in output_names and layer_stack(name) not in sliced
        ]
        if names:
            self.warnings.append(
                f"modules: {len(names)} tensors are in none of them, first {names[0]}: they are "
                f"copied from {self.models[owner].text}, where mergekit leaves them out"
            )
        return [TensorRecipe(name, (), BaseTensor(owner, name), ()) for name in names]

    def _text(self, taken: SourceTensor) -> str:
        return self.parsed.references[taken.entry.model].text


def _matters(schema: OperatorSchema, params: Params) -> bool:
    """Whether an input equal to the base changes the result."""
    if schema.space != "delta" or schema.response in ("unbounded", "mean"):
        return True
    # Without a `normalize` parameter, the factors of a sum may depend on all deltas.
    return schema.response == "additive" and bool(dict(params).get("normalize", True))


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
