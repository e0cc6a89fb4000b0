"""Makes the vocabulary matrices of all inputs fit: by the recipe's tokenizer, or by cropping.

Without `tokenizer:` rows are token ids and the base's count: what an expert has beyond them is left
out, and what it lacks counts as the base's. Without a base all are cropped to the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergepipe_pipeline.domain.layers import beside_rows, vocabulary_axis
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.domain.view import TensorView, cropped
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError


def fit_rows(
    recipe: Recipe,
    models: Sequence[Model],
    problems: list[MergePipeError],
    *,
    truncate: bool = False,
) -> tuple[list[Model], tuple[str, ...]]:
    """The models with vocabulary matrices of equal use, and a warning per cropped tensor.

    `truncate` crops all to the shortest, the base included. Adds a problem for every tensor whose
    shapes cannot be reconciled.
    """
    views = [dict(m.views) for m in models]
    changed: list[list[str]] = [[] for _ in models]
    warnings: list[str] = []
    for t in recipe.tensors:
        sites = [(i.model, i.tensor) for i in t.inputs]
        base = (t.base.model, t.base.tensor) if t.base else None
        matrices = [views[m][n] for m, n in ([base] if base else []) + sites]
        if len({v.shape for v in matrices}) < 2:
            continue
        if not _only_rows_differ(t, matrices):
            owners = [m for m, _ in ([base] if base else []) + sites]
            problems.append(_misfit(t, models, matrices, owners))
            continue
        axis = vocabulary_axis(t.name) or 0
        shortest = min(v.shape[axis] for v in matrices)
        rows = matrices[0].shape[axis] if base and not truncate else shortest
        for m, name in dict.fromkeys((([base] if base else []) + sites) if truncate else sites):
            view = views[m][name]
            n_rows = view.shape[axis]
            if n_rows > rows:
                views[m][name] = cropped(view, rows, axis)
                changed[m].append(f"{name}:{rows}")
                warnings.append(
                    f"{models[m].name}, {name}: only the first {rows} of {n_rows} rows are "
                    "used; set tokenizer_source to match tokens instead of row numbers"
                )
            elif n_rows < rows:
                warnings.append(
                    f"{models[m].name}, {name}: has {n_rows} of {rows} rows and counts as "
                    "the base in the others (mergekit refuses or skips it)"
                )
    fitted = [
        replace(m, views=v, variant="; ".join((m.variant, *c)) if c else m.variant)
        for m, v, c in zip(models, views, changed, strict=True)
    ]
    return fitted, tuple(warnings)


def _only_rows_differ(t: TensorRecipe, views: Sequence[TensorView]) -> bool:
    widths = {beside_rows(t.name, v.shape) for v in views}
    return len(widths) == 1 and None not in widths and not any(v.low_rank for v in views)


def _misfit(
    t: TensorRecipe, models: Sequence[Model], views: Sequence[TensorView], owners: Sequence[int]
) -> IncompatibleCheckpointsError:
    first = views[0]
    at = next(i for i, v in enumerate(views) if v.shape != first.shape)
    return IncompatibleCheckpointsError(
        "A tensor of an expert has another shape",
        where=f"{models[owners[at]].name}, tensor {views[at].name}",
        expected=f"{list(first.shape)} as in {models[owners[0]].name}",
        found=str(list(views[at].shape)),
        next_step="use experts of this base, or another base_model",
    )
