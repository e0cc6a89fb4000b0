"""Refuses arithmetic on what is stored as codes or factors; copies of it pass.

`domain.stored_form` says what is stored so. Here is decided what a recipe, a pair or a tool would
compute with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.model_config import QUANTISATION_KEYS, config_places
from mergepipe_pipeline.domain.output import is_computed, out_dtype
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.domain.stored_form import StoredForm
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import FP8_BLOCKS
from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import placed_in


def refuse_coded_models(parsed: ParsedRecipe, models: Sequence[Model]) -> None:
    """Raise for a whole model of codes that some slice merges with another whole model.

    Its names and shapes need not be the others', so this comes before tensors are compared.
    """
    for _, part in parsed.slices():
        numbers = {entry.model for entry in part.contributing(parsed.schema)}
        numbers |= set() if parsed.schema.base == "none" or part.base is None else {part.base}
        whole = [n for n in sorted(numbers) if not models[n].is_partial]
        for n in whole if len(whole) > 1 else ():
            form = raw_form(models[n])
            if form is not None:
                error = coded_error(models[n].checkpoint, form)
                raise placed_in(parsed, error, parsed.references[n])


def refuse_coded(models: Sequence[Model]) -> None:
    """Raise IncompatibleCheckpointsError for the first whole model that is stored as codes."""
    problem = coded_problem(models)
    if problem is not None:
        raise problem


def coded_problem(models: Sequence[Model]) -> IncompatibleCheckpointsError | None:
    """The refusal of the first whole model that is stored as codes; None where there is none."""
    for model in models:
        form = None if model.is_partial else raw_form(model)
        if form is not None:
            return coded_error(model.checkpoint, form)
    return None


def refuse_coded_arithmetic(recipe: Recipe, models: Sequence[Model]) -> None:
    """Raise IncompatibleCheckpointsError if some output is computed from codes, or casts them.

    So also where its layers are stored in several forms, of which its config can state one.
    """
    if all(c.form is None for m in models for c in m.checkpoints):
        return
    copied: list[tuple[TensorRecipe, Model, TensorView, StoredForm]] = []
    for t in recipe.tensors:
        for model, view in _sources(t, models):
            found = coded_part(view, model.checkpoints)
            if found is not None and _is_computed(recipe, t, models):
                raise coded_error(*found, tensor=view.name)
            if found is not None:
                copied.append((t, model, view, found[1]))
    for t, model, view, form in copied:
        if out_dtype(recipe, t, models) != view.dtype or recipe.out_dtype == FP8_BLOCKS:
            raise _cast(model, view, form)
    _refuse_mixed_forms(recipe, models)


def is_coded(recipe: Recipe, models: Sequence[Model]) -> bool:
    """Whether some output tensor is a copy of codes."""
    return any(
        coded_part(view, model.checkpoints) is not None
        for t in recipe.tensors
        for model, view in _sources(t, models)
    )


def stale_settings(recipe: Recipe, models: Sequence[Model], template: Checkpoint) -> list[str]:
    """The places of the template's config that say how weights were quantised, where none is."""
    if is_coded(recipe, models):
        return []
    return config_places(template.stated, QUANTISATION_KEYS)


def raw_form(model: Model) -> StoredForm | None:
    """The form of a whole model's codes; None if it has none, or if they are decoded."""
    form = model.checkpoint.form
    if form is None or any(p.codes for view in model.views.values() for p in view.stored):
        return None
    return form


def coded_part(
    view: TensorView, checkpoints: Sequence[Checkpoint]
) -> tuple[Checkpoint, StoredForm] | None:
    """The checkpoint, with its form, of a stored tensor of a view that holds codes; None if none.

    `checkpoints` are those that the view's parts are of.
    """
    for part in view.stored:
        form = checkpoints[part.source].form
        if form is not None and part.codes is None and part.entry.name in form.coded:
            return checkpoints[part.source], form
    return None


def coded_error(
    checkpoint: Checkpoint, form: StoredForm, tensor: str | None = None
) -> IncompatibleCheckpointsError:
    """The refusal of arithmetic on a checkpoint's codes, first of all on `tensor`."""
    name = tensor or form.example
    dtype = checkpoint.by_name[name].dtype if name in checkpoint.by_name else "codes"
    does = "only a recipe decodes" if form.schemes else "a merge only copies"
    return IncompatibleCheckpointsError(
        f"A model's weights are stored as {form.name}, which {does}",
        where=f"{checkpoint.name}, tensor {name}",
        expected="weights as plain numbers (bfloat16, float16, float32)",
        found=f"{dtype} whose numbers mean something only together with other tensors",
        next_step=_AS_PLAIN if form.schemes else form.step,
    )


#: For verbs that take plain numbers alone, and recipes whose results cannot keep the codes.
_AS_PLAIN = (
    "write it as plain numbers by a recipe with `merge_method: passthrough`, this model and "
    "`dtype: bfloat16`, and give the result"
)


def _sources(t: TensorRecipe, models: Sequence[Model]) -> Iterator[tuple[Model, TensorView]]:
    """The models that an output is made from, with their views of its tensor."""
    for number, tensor in dict.fromkeys(t.sources):
        yield models[number], models[number].views[tensor]


def _is_computed(recipe: Recipe, t: TensorRecipe, models: Sequence[Model]) -> bool:
    """Whether there is arithmetic in an output: any method's but an unscaled passthrough of one."""
    views = [models[i.model].views[i.tensor] for i in t.inputs[:1]]
    return is_computed(recipe.method, t) or any(v.low_rank or v.is_delta for v in views)


def _cast(model: Model, view: TensorView, form: StoredForm) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        f"`dtype` would round what is stored as {form.name}",
        where=f"{model.name}, tensor {view.name}",
        expected=f"{view.dtype}, as it is stored",
        found="another type in the recipe",
        next_step="leave `dtype` and `out_dtype` out of the recipe",
    )


def _refuse_mixed_forms(recipe: Recipe, models: Sequence[Model]) -> None:
    """Raise where outputs come from whole models of which some are stored otherwise."""
    settings: dict[str, Mapping[str, object]] = {}
    for model in (models[n] for n in sorted(recipe.used) if not models[n].is_partial):
        form = raw_form(model)
        settings[model.name] = {} if form is None else {"form": form.name, **form.settings}
    if len({str(s) for s in settings.values()}) > 1 and is_coded(recipe, models):
        named = ", ".join(f"{n}: {s.get('form', 'plain numbers')}" for n, s in settings.items())
        raise IncompatibleCheckpointsError(
            "The result's tensors are stored in several forms, and its config can state one",
            where=recipe.name,
            expected="models that are all stored alike",
            found=named,
            next_step="use these models as plain numbers, or all in the same form",
        )
