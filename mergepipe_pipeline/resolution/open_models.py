"""From model references to models: checkpoints opened, adapters laid on what they adapt.

The one place that decides what an adapter or a delta is relative to: the recipe's base, unless the
reference names another model (`model+adapter`). Headers only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.checkpoints.adapter import Tied, adapter_views, delta_views
from mergepipe_pipeline.checkpoints.header import tensor_order
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.decoding import values_of
from mergepipe_pipeline.domain.layers import embedding_like, is_post, tied_partner
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.model_config import ties_head
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.domain.view import LowRank, TensorView, moved, view_of
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import (
    CheckpointError,
    IncompatibleCheckpointsError,
    MergePipeError,
)
from mergepipe_pipeline.resolution.alignment import (
    FUSED,
    in_one_layout,
    laid_out,
    updates_fused,
    with_names_of,
)
from mergepipe_pipeline.resolution.fit import refuse_unplaced
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.plain_numbers import (
    coded_error,
    coded_part,
    coded_problem,
    raw_form,
    refuse_coded,
)
from mergepipe_pipeline.resolution.task_heads import as_classifier, refuse_language_base

#: What a checkpoint holds that is no whole model.
_KINDS = {"adapter": "an adapter", "delta": "deltas"}
#: Adds to an error which model it is about.
Placed = Callable[[MergePipeError, ModelRef], MergePipeError]


def open_models(
    places: Places,
    references: Sequence[ModelRef],
    base: int | None,
    problems: list[MergePipeError],
    placed: Placed = lambda error, ref: error,
    not_aligned: Collection[int] = (),
    *,
    decoded: bool = True,
) -> list[Model]:
    """A model per reference, the base's number being `base`; empty if there are problems.

    BASE+ADAPTER is opened as the adapter's change of the base, but as a whole model if its number
    is `not_aligned`: a slice then merges it on other tensors than the base's own. Not `decoded`,
    codes are tensors like others. Adds one problem per reference that cannot be opened, as `placed`
    gives it.
    """
    opened: list[tuple[Checkpoint, ...]] = []
    for ref in references:
        try:
            opened.append(places.of(ref))
        except MergePipeError as error:
            problems.append(placed(error, ref))
    if problems:
        return []
    texts = [r.text for r in references]
    return _models_of(opened, base, problems, texts, not_aligned, decoded=decoded)


def open_pair(expert: Checkpoint, base: Checkpoint) -> tuple[Model, Model]:
    """Two registered checkpoints as models, the first on the second. Raises as opening does."""
    problems: list[MergePipeError] = []
    models = _models_of([(expert,), (base,)], 1, problems, [expert.name, base.name])
    if problems:
        raise problems[0]
    if not models[0].is_partial:
        refuse_coded(models)
    refuse_unplaced(models[0], models[1])
    return models[0], models[1]


def _models_of(
    groups: Sequence[tuple[Checkpoint, ...]],
    base: int | None,
    problems: list[MergePipeError],
    texts: Sequence[str],
    not_aligned: Collection[int] = (),
    *,
    decoded: bool = True,
) -> list[Model]:
    """The models of checkpoints with their adapters, aligned; empty if there are problems."""
    models: list[Model] = []
    try:
        base_model = None if base is None else _base_model(texts[base], groups[base], decoded)
    except MergePipeError as error:
        problems.append(error)
        return []
    for number, checkpoints in enumerate(groups):
        is_whole = number in not_aligned and len(checkpoints) > 1
        try:
            models.append(
                base_model
                if base_model and number == base
                else _model(checkpoints, None if is_whole else base_model, decoded)
            )
        except MergePipeError as error:
            problems.append(error)
    return [] if problems else _aligned(models, base, problems)


def _aligned(
    models: Sequence[Model], base: int | None, problems: list[MergePipeError]
) -> list[Model]:
    """The models with their tensors named and laid out as the base has them, or the first one."""
    whole = (number for number, model in enumerate(models) if not model.is_partial)
    lead = next(whole, 0) if base is None else base
    try:
        return with_names_of(in_one_layout(models, lead), lead) if models else []
    except MergePipeError as error:
        # Codes do not stack as weights do, and it helps nobody to lay them out otherwise.
        problems.append(coded_problem(models) or error)
        return []


def _base_model(text: str, checkpoints: tuple[Checkpoint, ...], decoded: bool) -> Model:
    """The model that others are merged on; it must be whole."""
    first = checkpoints[0]
    if first.kind != "full":
        raise IncompatibleCheckpointsError(
            "The base model is not a whole model",
            where=f"base_model {text!r}, {first.root}",
            expected="full weights, or MODEL+ADAPTER",
            found=f"{_KINDS[first.kind]} alone",
            next_step="give the model that it was made from as base_model, and list this one "
            "under models",
        )
    return _model(checkpoints, None, decoded)


def _model(checkpoints: tuple[Checkpoint, ...], base: Model | None, decoded: bool) -> Model:
    """The model of a checkpoint, or of a checkpoint with an adapter; `base` is the recipe's."""
    first, *adapters = checkpoints
    if adapters:
        on_base = base is not None and base.checkpoints == (first,)
        if on_base:
            return _on_base(adapters[0], base)
        if first.kind != "full":
            raise IncompatibleCheckpointsError(
                "What stands before the `+` is no model that an adapter could be laid on",
                where=f"{first.root}+{adapters[0].root}",
                expected="a folder with full weights before the `+`",
                found=f"{_KINDS[first.kind]} alone",
                next_step="list both as models of their own, on a base_model",
            )
        return _adapted(_full(first, decoded=decoded), adapters[0])
    return _full(first, decoded=decoded) if first.kind == "full" else _on_base(first, base)


def _full(checkpoint: Checkpoint, *, decoded: bool) -> Model:
    """All of a checkpoint, in the order of one file of it, however it is cut into files.

    Plans list tensors in this order, and their ids must not depend on files. What is `decoded` are
    codes of a known form. Raises IncompatibleCheckpointsError for codes that do not fit together.
    """
    raw = {name: view_of(entry) for name, entry in checkpoint.by_name.items()}
    views = values_of(checkpoint) if decoded else raw
    order = tensor_order([(name, view.dtype, view.shape) for name, view in views.items()])
    return Model(checkpoint.name, (checkpoint,), {name: views[name] for name, _, _ in order})


def _on_base(checkpoint: Checkpoint, base: Model | None) -> Model:
    """An adapter or delta alone: only the tensors it changes."""
    if base is None:
        raise IncompatibleCheckpointsError(
            f"A checkpoint that holds only {_KINDS[checkpoint.kind]} needs a model to add it to",
            where=checkpoint.root,
            expected="base_model in the recipe, or MODEL+ADAPTER as the model's name",
            found="neither",
            next_step="add base_model, or write the model before a `+`",
        )
    if checkpoint.kind == "delta":
        views = delta_views(checkpoint)
        return Model(checkpoint.name, (checkpoint,), views, is_partial=True)
    refuse_language_base(base, checkpoint)
    views, unties = _laid_on(base, checkpoint)
    completed = {n: _with_weights(v, base.views.get(n, v), 1) for n, v in views.items()}
    checkpoints = (checkpoint, *(base.checkpoints if completed != views else ()))
    return Model(checkpoint.name, checkpoints, completed, is_partial=True, unties=unties)


def _laid_on(model: Model, adapter: Checkpoint) -> tuple[dict[str, TensorView], bool]:
    """Lay an adapter on a model's tensors: what changes, and whether it unties the head."""
    if updates_fused(adapter):
        model = laid_out(model, FUSED)
    tied = _tied(model)
    try:
        views = adapter_views(adapter, {n: v.shape for n, v in model.views.items()}, tied)
    except CheckpointError as error:
        form = raw_form(model)
        if form is None:
            raise
        # Codes have other names and shapes than the weights that an adapter fits.
        raise coded_error(model.checkpoint, form) from error
    unties = tied is not None and tied.head in views
    change = None if tied is None or unties else views.get(tied.embedding.name)
    if tied is not None and change is not None and tied.head in model.views:
        # The file has the matrix twice, and both must stay the same.
        views[tied.head] = replace(change, name=tied.head)
    return views, unties


def _tied(model: Model) -> Tied | None:
    """A model's embedding with the head that its config makes the same, stored or not."""
    names = [n for n in model.views if embedding_like(n) and n.endswith(".weight")]
    embeddings = [n for n in names if not is_post(n)]
    if model.unties or len(embeddings) != 1 or not ties_head(model.stated):
        return None
    stored = [n for n in names if is_post(n)]
    (name,) = embeddings
    inner = "language_model." if name.startswith("language_model.model.") else ""
    own = "embed_out.weight" if name.endswith("embed_in.weight") else f"{inner}lm_head.weight"
    return Tied(model.views[name], stored[0] if stored else own)


def tied_updates(models: Sequence[Model], base: int | None) -> tuple[str, ...]:
    """A warning per low-rank update of a matrix that is embedding and head in one."""
    warnings = []
    for model in models:
        whole = models[base] if model.is_partial and base is not None else model
        tied = _tied(whole)
        view = model.views.get(tied.embedding.name) if tied is not None else None
        if view is not None and view.low_rank and not model.unties:
            warnings.append(
                f"{model.name} updates {view.name}, which is the head too: both change, as PEFT "
                "merges it and mergekit does, but the adapter was trained with one of them changed"
            )
    return tuple(warnings)


def _adapted(model: Model, adapter: Checkpoint) -> Model:
    """A whole model with an adapter on it, as its own tensors plus low-rank updates."""
    if updates_fused(adapter):
        model = laid_out(model, FUSED)
    model = as_classifier(model, adapter)
    changes, unties = _laid_on(model, adapter)
    views: dict[str, TensorView] = dict(model.views)
    for name, change in changes.items():
        # A head that an adapter makes was the embedding before.
        own = views.get(name) or model.views[tied_partner(name, model.views) or name]
        coded = coded_part(own, model.checkpoints)
        if coded is not None:
            raise coded_error(*coded, tensor=name)
        if change.low_rank and not change.stored and own.dtype not in FLOATING:
            raise IncompatibleCheckpointsError(
                "An adapter changes a tensor that has no floating-point numbers",
                where=f"{adapter.root}, tensor {name}",
                expected="a tensor of a floating-point dtype",
                found=f"{own.dtype} in {model.name}",
                next_step="use the model in the precision that it was quantised from",
            )
        change = _with_weights(moved(change, len(model.checkpoints)), own, 0)
        if not change.stored:
            change = replace(own, name=name, low_rank=change.low_rank)
        views[name] = change
    if unties:
        _refuse_other_rows(model, adapter, views)
    name = f"{model.name}+{adapter.name}"
    checkpoints = (*model.checkpoints, adapter)
    return Model(name, checkpoints, views, unties=unties, becomes=model.becomes)


def _with_weights(change: TensorView, own: TensorView, offset: int) -> TensorView:
    """A change with the weights that its update follows from: those it brings, else its base's.

    `offset` is what the source numbers of `own` become.
    """
    update = change.low_rank
    if not isinstance(update, LowRank) or not (update.needs_values or update.is_residual):
        return change
    weights = replace(change, low_rank=None) if change.stored else moved(own, offset)
    if not weights.is_plain:
        raise IncompatibleCheckpointsError(
            "An adapter that follows from its base's weights (DoRA, PiSSA) lies on changed ones",
            where=f"tensor {change.name}",
            expected="a base whose file has the tensor as it is",
            found="one that another adapter changes",
            next_step="merge the adapter below first, and give its result as the base",
        )
    return replace(change, low_rank=replace(update, weights=weights.stored[0]))


def _refuse_other_rows(model: Model, adapter: Checkpoint, views: Mapping[str, TensorView]) -> None:
    rows = {n: v.shape[0] for n, v in views.items() if embedding_like(n) and n.endswith(".weight")}
    if len(set(rows.values())) > 1:
        raise IncompatibleCheckpointsError(
            "An adapter retrains the embedding or the head with other rows than the other one has",
            where=adapter.root,
            expected="as many rows in both",
            found=", ".join(f"{n} in {name}" for name, n in rows.items()),
            next_step=f"put the model with the enlarged vocabulary in place of {model.name}",
        )


def packable(expert: Model, base: Model) -> tuple[Model, Model]:
    """The pair that a pack is made of: expert and base as `open_pair` opens them.

    Without adapters on them, and with the names and the layout of this base, whatever a recipe
    with other models gives them. Of adapters and deltas there are no packs: they stay as they are.
    """
    if any(m.checkpoint.kind != "full" for m in (expert, base)):
        return expert, base
    pair = in_one_layout((_as_stored(expert), _as_stored(base)), 1)
    expert_model, base_model = with_names_of(pair, 1)
    return expert_model, base_model


def _as_stored(model: Model) -> Model:
    """A whole model as its file has it; the same object if nothing was done to it."""
    first, *adapters = model.checkpoints
    return _full(first, decoded=True) if adapters or model.variant else model
