"""Views of the base's tensors through a PEFT LoRA adapter, or through a delta checkpoint.

Names, shapes and dtypes only: says which stored factors change which tensor of the base and how;
`tensors` computes values. Every tensor of an adapter is used, or the adapter is refused. Configs
are read by `adapter_config`, names matched by `adapter_names`, factors checked by
`adapter_factors`, folders read by `open_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.view import LowRank, Part, RowValues, TensorView, Update
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.storage.adapter_config import CONFIG, AdapterConfig, parse_adapter_config
from mergepipe_pipeline.storage.adapter_factors import Shape, low_ranks
from mergepipe_pipeline.storage.adapter_names import (
    MAGNITUDE,
    TOKENS,
    WHOLE,
    Change,
    find_changes,
    unusable,
)


@dataclass(frozen=True, slots=True)
class Tied:
    """A base's input embedding, and the name of the head that its config makes the same matrix."""

    embedding: TensorView
    head: str


def adapter_views(
    checkpoint: Checkpoint,
    base_names: Collection[str] | Mapping[str, Shape],
    tied: Tied | None = None,
) -> dict[str, TensorView]:
    """The base's tensors that a LoRA adapter changes or replaces, by their names in the base.

    With the base's shapes (elements per dimension) factors are checked against them, and they
    decide the orientation; without, `fan_in_fan_out` of the config does. Whole tensors keep their
    own shape: an embedding may have been resized. Parts are of source 0; updates that follow from
    the base's weights (`LowRank.weights`) have none yet.

    On a base whose embedding and head are `tied`, a change of either changes the embedding, as in
    `merge_and_unload`. Only where the adapter retrains one of them as a whole module does peft
    untie them; then the head is always among the views.

    Raises CheckpointError for an adapter that is empty or of a kind that is not read, for tensors
    of unknown meaning, for ones that fit none or several of the base's, and for shapes that do not
    fit.

    Source: W + scale · B·A, arXiv:2106.09685; names as peft saves them,
    https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    config = parse_adapter_config(checkpoint.adapter_config or "", f"{checkpoint.root}, {CONFIG}")
    shapes = base_names if isinstance(base_names, Mapping) else {}
    names = base_names
    if tied is not None:
        shapes = {**shapes, tied.head: tied.embedding.shape}
        names = {*base_names, tied.head}
    changes = find_changes(checkpoint, names, config)
    is_untied = tied is not None and _is_untied(changes, tied, config)
    seconds = {}
    if tied is not None and not is_untied:
        seconds = _join(changes, tied, checkpoint)
    views = _changed_views(changes, seconds, shapes, config, checkpoint)
    if tied is not None and is_untied and tied.head not in views:
        views[tied.head] = TensorView(tied.head, tied.embedding.dtype, tied.embedding.shape)
    return views


def _changed_views(
    changes: Mapping[str, Change],
    seconds: Mapping[str, Change],
    shapes: Mapping[str, Shape],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> dict[str, TensorView]:
    """The base's tensors that change; `seconds` are further updates of some of them."""
    updates: dict[str, Update] = dict(low_ranks(changes, shapes, config, checkpoint))
    for name, more in low_ranks(seconds, shapes, config, checkpoint).items():
        own = updates[name]
        assert isinstance(own, LowRank)
        updates[name] = replace(own, second=more)
    for name, change in changes.items():
        if TOKENS in change.entries:
            updates[name] = _row_values(change, shapes.get(name), config, checkpoint)
    return {
        name: _view(name, change, updates.get(name), shapes.get(name), checkpoint)
        for name, change in changes.items()
    }


def delta_views(checkpoint: Checkpoint) -> dict[str, TensorView]:
    """Every tensor of a delta checkpoint as a difference from the base's tensor of that name.

    Raises CheckpointError for a tensor of another than a floating-point dtype.
    """
    views = {}
    for entry in checkpoint.tensors:
        if entry.dtype not in FLOATING:
            raise unusable(
                entry, checkpoint, "of a dtype without arithmetic", "floating point", entry.dtype
            )
        part = (Part(0, entry),)
        views[entry.name] = TensorView(entry.name, entry.dtype, entry.shape, part, is_delta=True)
    return views


def _is_untied(changes: Mapping[str, Change], tied: Tied, config: AdapterConfig) -> bool:
    """Whether peft trains a copy of one of the two and leaves the other as it was."""
    ends = [changes[name] for name in (tied.embedding.name, tied.head) if name in changes]
    retrained = any(WHOLE in c.entries and config.retrains(c.module) for c in ends)
    return retrained and not config.ensure_weight_tying


def _join(changes: dict[str, Change], tied: Tied, checkpoint: Checkpoint) -> dict[str, Change]:
    """Turn a change of a tied head into one of the embedding; returns second updates by name.

    Where peft saves both matrices whole, they are one parameter, and equal.
    """
    head, name = changes.pop(tied.head, None), tied.embedding.name
    if head is None:
        return {}
    own = changes.get(name, Change(head.module))
    updated = [c for c in (own, head) if c.entries.keys() - {WHOLE}]
    if len(updated) < 2:
        module = updated[0].module if updated else own.module
        changes[name] = Change(module, {**head.entries, **own.entries})
        return {}
    for role in (MAGNITUDE, TOKENS):
        entry = own.entries.get(role) or head.entries.get(role)
        if entry is not None:
            found = f"others for {name}, to which the base ties it"
            raise unusable(entry, checkpoint, "beside a second update", "one update", found)
    return {name: head}


def _row_values(
    change: Change, base: Shape | None, config: AdapterConfig, checkpoint: Checkpoint
) -> RowValues:
    entry, rows = change.entries[TOKENS], config.tokens_of(change.module)
    update_names = [e.name for role, e in change.entries.items() if role not in (TOKENS, WHOLE)]
    if update_names:
        raise unusable(entry, checkpoint, "beside a second update", "one update", update_names[0])
    if not rows:
        found = "no trainable_token_indices for it in the config"
        raise unusable(entry, checkpoint, "of unknown meaning", "which rows it replaces", found)
    if len(entry.shape) != 2 or entry.shape[0] != len(rows) or entry.dtype not in FLOATING:
        expected = f"{len(rows)} rows of floating-point numbers"
        found = f"{entry.dtype} {list(entry.shape)}"
        raise unusable(entry, checkpoint, "that is not the tokens' of its config", expected, found)
    if base is not None and (entry.shape[1:] != base[1:] or max(rows) >= base[0]):
        found = f"tokens up to {max(rows)} of shape {list(entry.shape)}"
        raise unusable(
            entry, checkpoint, "that does not fit the base", f"rows of {list(base)}", found
        )
    return RowValues(Part(0, entry), rows)


def _view(
    name: str, change: Change, update: Update | None, base: Shape | None, checkpoint: Checkpoint
) -> TensorView:
    whole = change.entries.get(WHOLE)
    if update is None:
        assert whole is not None
        return TensorView(name, whole.dtype, whole.shape, (Part(0, whole),))
    shape, dtype = _shape_of(update, base), update.parts[0].entry.dtype
    if isinstance(update, LowRank):
        dtype = update.b.entry.dtype
    if whole is None:
        return TensorView(name, dtype, shape, low_rank=update)
    if whole.shape != shape:
        expected, found = f"shape {list(shape)}", f"shape {list(whole.shape)}"
        raise unusable(whole, checkpoint, "that does not fit its factors", expected, found)
    return TensorView(name, whole.dtype, shape, (Part(0, whole),), low_rank=update)


def _shape_of(update: Update, base: Shape | None) -> Shape:
    """The shape of the updated tensor: a matrix's by its factors, else the base's."""
    if isinstance(update, LowRank) and update.n_matrices == 1:
        shape = (update.b.entry.shape[0], update.a.entry.shape[1])
        return shape[::-1] if update.transposed else shape
    assert base is not None or isinstance(update, RowValues)
    return base or update.parts[0].entry.shape
