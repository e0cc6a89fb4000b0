"""Crops the vocabulary matrices of all inputs until they fit, and finds tables of a vocabulary.

Without `tokenizer:` rows are token ids and the base's count: what an expert has beyond them is left
out, and what it lacks counts as the base's. Without a base all are cropped to the shortest.
A table follows by its name. A tensor of another name with as many rows may be one too: the change
is refused rather than left out there. Sizes in a config follow the tables that have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mergepipe_pipeline.domain.layers import (
    beside_rows,
    embedding_like,
    is_embedding,
    layer_index,
    vocabulary_axis,
)
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import ConfigValue
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


#: Keys of configs that state a number of rows: that of the embedding, or of a table of layers.
_SIZE_KEYS = frozenset(
    {"vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size", "padded_vocab_size"}
    | {"n_vocab", "n_words", "input_vocab_size", "output_vocab_size"}
)
_PER_LAYER_KEY, _PER_LAYER = "vocab_size_per_layer_input", "embed_tokens_per_layer"
#: Where ids of images and sound begin, and rows of tokens that lie in a table of their own.
_FIXED_KEYS = ("vocab_offset", "additional_vocab_size")
#: Words in names outside the layers of what has rows for something else than tokens.
_NO_TABLE = re.compile(r"pos|wpe|rotary|norm|ln_")


def embedding_rows(model: Model) -> int | None:
    """Rows of a model's input embedding; None if it has none that is known."""
    embeddings = [v for n, v in model.views.items() if is_embedding(n) and layer_index(n) is None]
    return embeddings[0].shape[0] if embeddings else None


def refuse_left_tables(
    names: Mapping[str, tuple[int, ...]], n_rows: int | None, config: Mapping[str, Any], where: str
) -> None:
    """Raise IncompatibleCheckpointsError if a change of a model's rows would leave a table behind.

    `names` are its tensors with their shapes, `n_rows` the rows of its embedding (None: the config
    states them).
    """
    if n_rows is None:
        n_rows = next((n for place, n in _sizes(config) if _key(place) == "vocab_size"), None)
    # What the vocabulary feeds into would have its size as well: then a size tells nothing.
    inner = {shape[-1] for shape in names.values() if len(shape) > 1 and shape[0] != 1}
    left = [
        f"{name} {list(shape)}"
        for name, shape in names.items()
        if vocabulary_axis(name) is None
        and n_rows not in inner
        and n_rows in (shape[:1] if shape[:1] != (1,) else shape[1:2])
        and _may_be_table(name)
    ]
    fixed = [f"{place}: {n}" for place, n in _numbers(config) if n and _key(place) in _FIXED_KEYS]
    if left or fixed:
        raise IncompatibleCheckpointsError(
            "A tensor with as many rows as the vocabulary is not known to follow a tokenizer"
            if left
            else "The ids of a model's tokens are fixed by its config, and would move",
            where=f"{where}, tensor {left[0]}" if left else f"{where}/config.json, {fixed[0]}",
            expected="a table whose name is known, such as embed_tokens or lm_head"
            if left
            else "a vocabulary without parts in places of their own",
            found=", ".join(left or fixed),
            next_step="leave out `tokenizer_source` and `tokenizer`, or take this model's own "
            "tokenizer and rows",
        )


def _may_be_table(name: str) -> bool:
    if layer_index(name) is not None:
        return "embed" in name or "head" in name.split(".")
    return not _NO_TABLE.search(name)


def size_changes(
    recipe: Recipe, models: Sequence[Model], template: int, config: Mapping[str, Any]
) -> list[tuple[str, ConfigValue]]:
    """Changes of the template's config where it states other rows than the result's tables have.

    Raises IncompatibleCheckpointsError for tables that get other numbers of rows than a config
    can state.
    """
    rows: dict[str, tuple[int, int]] = {}
    for t in recipe.tensors:
        axis = vocabulary_axis(t.name)
        if axis is not None:
            rows[t.name] = _rows_of(t, models, template, axis)
    return changed_sizes(rows, config, models[template].checkpoint.root)


def changed_sizes(
    rows: Mapping[str, tuple[int, int]], config: Mapping[str, Any], where: str
) -> list[tuple[str, ConfigValue]]:
    """List the changes of sizes; `rows` are those of each table before and after."""
    tables = {n: pair for n, pair in rows.items() if _PER_LAYER not in n}
    grown = {new - old for old, new in tables.values()}
    if len(grown) > 1 and len({new for _, new in tables.values()}) > 1:
        raise IncompatibleCheckpointsError(
            "Tables of one vocabulary would have other numbers of rows than a config can state",
            where=where,
            expected="as many rows more or fewer in each",
            found=", ".join(f"{n}: {old} to {new}" for n, (old, new) in tables.items()),
            next_step="leave out `tokenizer_source` and `tokenizer`, or give the tables of all "
            "models as many rows",
        )
    changes: list[tuple[str, ConfigValue]] = []
    after = {old: new for n, (old, new) in tables.items() if embedding_like(n)}
    stated = list(_sizes(config))
    prefix = "text_config." if isinstance(config.get("text_config"), dict) else ""
    for key, pair in (
        ("vocab_size", next((p for n, p in tables.items() if is_embedding(n)), None)),
        (_PER_LAYER_KEY, next((p for n, p in rows.items() if _PER_LAYER in n), None)),
    ):
        own = [(place, n) for place, n in stated if place in (key, f"text_config.{key}")]
        if pair is not None and not own and pair[0] != pair[1]:
            changes.append((f"{prefix}{key}", pair[1]))
        if pair is not None:
            olds = {pair[0]: pair[1]} | (after if key != _PER_LAYER_KEY else {})
            changes += [(place, new) for place, n in own if (new := olds.get(n, pair[1])) != n]
    done = {place for place, _ in changes}
    return changes + [
        (place, after[n])
        for place, n in stated
        if place not in done and _key(place) != _PER_LAYER_KEY and after.get(n, n) != n
    ]


def _rows_of(t: TensorRecipe, models: Sequence[Model], template: int, axis: int) -> tuple[int, int]:
    """Rows of a table as the template's file has it, and in the result."""
    sources = [(i.model, i.tensor) for i in t.inputs]
    sources = ([(t.base.model, t.base.tensor)] if t.base else []) + sources
    views = {m: models[m].views[name] for m, name in reversed(sources)}
    new = views[sources[0][0]].shape[axis]
    own = views.get(template)
    return (own.stored[0].shape[axis] if own and own.stored else new), new


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    return (
        (place, n)
        for place, n in _numbers(config)
        if _key(place) in _SIZE_KEYS or _key(place) == _PER_LAYER_KEY
    )


def _key(place: str) -> str:
    return place.rpartition(".")[2]


def _numbers(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, int]]:
    """Dotted places of whole numbers in a config and its parts."""
    for key, value in config.items():
        if type(value) is int:
            yield f"{above}{key}", value
        elif isinstance(value, dict) and "." not in key:
            yield from _numbers(value, f"{above}{key}.")
