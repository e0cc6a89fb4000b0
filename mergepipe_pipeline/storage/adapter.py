"""Views of the base's tensors through a PEFT LoRA adapter, or through a delta checkpoint.

Names, shapes and dtypes only: says which stored factors change which tensor of the base and how;
`tensors` computes values. Every tensor of an adapter is used, or the adapter is refused. Configs
are read by `adapter_config`, folders by `open_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.spec.view import LowRank, Part, TensorView
from mergepipe_pipeline.storage.adapter_config import CONFIG, AdapterConfig, parse_adapter_config

_PREFIX = "base_model.model."
#: The adapter's own name ("default") is in the keys only if something else than peft saved them.
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_"
    r"(?:(?P<linear>[AB])(?:\.[^.]+)?\.weight|(?P<embedding>embedding_[AB])(?:\.[^.]+)?)"
)
_WRAPPER = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
_WHOLE = "whole"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Change:
    """The adapter's tensors for one base tensor, by role: whole, A, B, embedding_A, embedding_B.

    `module` is the changed module's name in the model that was adapted.
    """

    module: str
    entries: dict[str, TensorEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Factors:
    """A pair of factors of the config's rank: a [r, n_in], b [n_out, r]."""

    a: TensorEntry
    b: TensorEntry
    is_embedding: bool

    @property
    def shape(self) -> Shape:
        """Shape of b·a."""
        return (self.b.shape[0], self.a.shape[1])


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
    own shape: an embedding may have been resized. Parts are of source 0.

    On a base that has its embedding and head `tied`, a change of either is one of the embedding, as
    `merge_and_unload` makes it; only where the adapter retrains one of them as a whole module, peft
    unties them. Then the head is among the views, whatever it is.

    Raises CheckpointError for an adapter that is empty or no plain LoRA, for tensors of unknown
    meaning, for ones that fit none or several of the base's, and for shapes that do not fit.

    Source: W + scale · B·A, arXiv:2106.09685; names as peft saves them,
    https://huggingface.co/docs/peft/developer_guides/checkpoint.
    """
    config = parse_adapter_config(checkpoint.adapter_config or "", f"{checkpoint.root}, {CONFIG}")
    _refuse_empty(checkpoint)
    shapes = base_names if isinstance(base_names, Mapping) else {}
    names = base_names
    if tied is not None:
        shapes = {**shapes, tied.head: tied.embedding.shape}
        names = {*base_names, tied.head}
    changes = _changes(checkpoint, _suffixes(names))
    is_untied = tied is not None and _is_untied(changes, tied, config)
    if tied is not None and not is_untied:
        _join(changes, tied, checkpoint)
    views = _changed_views(changes, shapes, config, checkpoint)
    if tied is not None and is_untied and tied.head not in views:
        views[tied.head] = TensorView(tied.head, tied.embedding.dtype, tied.embedding.shape)
    return views


def _changed_views(
    changes: Mapping[str, _Change],
    shapes: Mapping[str, Shape],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> dict[str, TensorView]:
    """The base's tensors that change, each with its factors checked and turned its way."""
    factors = {
        name: found
        for name, change in changes.items()
        if (found := _factors(change, config, checkpoint))
    }
    transposed = {
        name: _is_transposed(f, shapes.get(name), config, checkpoint) for name, f in factors.items()
    }
    _refuse_undecided_squares(factors, transposed, config, checkpoint)
    views = {}
    for name, change in changes.items():
        low_rank = None
        if f := factors.get(name):
            scale = config.scale_of(change.module)
            low_rank = LowRank(Part(0, f.a), Part(0, f.b), scale, transposed[name])
        views[name] = _view(name, change.entries.get(_WHOLE), low_rank, checkpoint)
    return views


def delta_views(checkpoint: Checkpoint) -> dict[str, TensorView]:
    """Every tensor of a delta checkpoint as a difference from the base's tensor of that name.

    Raises CheckpointError for a tensor of another than a floating-point dtype, and for none.
    """
    _refuse_empty(checkpoint)
    views = {}
    for entry in checkpoint.tensors:
        _refuse_integers(entry, checkpoint)
        part = (Part(0, entry),)
        views[entry.name] = TensorView(entry.name, entry.dtype, entry.shape, part, is_delta=True)
    return views


def _refuse_empty(checkpoint: Checkpoint) -> None:
    if not checkpoint.tensors:
        raise CheckpointError(
            f"There is nothing in this {checkpoint.kind}",
            where=checkpoint.root,
            expected="at least one tensor",
            found="none",
            next_step="save it again: training or copying it went wrong",
        )


def _changes(checkpoint: Checkpoint, suffixes: Mapping[str, list[str]]) -> dict[str, _Change]:
    changes: dict[str, _Change] = {}
    for entry in checkpoint.tensors:
        key = entry.name.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(key)
        if factor is None and ("lora_" in key or "token_adapter" in key):
            raise _unusable(entry, checkpoint, "of unknown meaning", "lora_A or lora_B", key)
        role = (factor["linear"] or factor["embedding"]) if factor else _WHOLE
        own = f"{factor['module']}.weight" if factor else key
        if own not in suffixes:
            own = _WRAPPER.sub("", own)
        name, module = _base_name(own, suffixes, entry, checkpoint), own.rpartition(".")[0]
        change = changes.setdefault(name, _Change(module))
        if role in change.entries or change.module != module:
            others = ", ".join(e.name for e in change.entries.values())
            raise _unusable(
                entry, checkpoint, f"for {name}, which it changes elsewhere too", "one", others
            )
        change.entries[role] = entry
    return changes


def _is_untied(changes: Mapping[str, _Change], tied: Tied, config: AdapterConfig) -> bool:
    """Whether peft trains a copy of one of the two and leaves the other as it was."""
    ends = [changes[name] for name in (tied.embedding.name, tied.head) if name in changes]
    retrained = any(_WHOLE in c.entries and config.retrains(c.module) for c in ends)
    return retrained and not config.ensure_weight_tying


def _join(changes: dict[str, _Change], tied: Tied, checkpoint: Checkpoint) -> None:
    """Make what changes a tied head a change of the embedding.

    Where peft saves both matrices whole, they are one parameter, and equal.
    """
    head = changes.pop(tied.head, None)
    if head is None:
        return
    own = changes.get(tied.embedding.name, _Change(head.module))
    updated = [c for c in (own, head) if c.entries.keys() - {_WHOLE}]
    if len(updated) > 1:
        entry = next(e for role, e in head.entries.items() if role != _WHOLE)
        found = f"others for {tied.embedding.name}, to which the base ties it"
        raise _unusable(entry, checkpoint, "beside a second update", "one update", found)
    module = updated[0].module if updated else own.module
    changes[tied.embedding.name] = _Change(module, {**head.entries, **own.entries})


def _suffixes(base_names: Collection[str]) -> dict[str, list[str]]:
    """Every dotted end of every base name, to the names that have it."""
    found: dict[str, list[str]] = {}
    for name in base_names:
        parts = name.split(".")
        for i in range(len(parts)):
            found.setdefault(".".join(parts[i:]), []).append(name)
    return found


def _base_name(
    own: str, suffixes: Mapping[str, list[str]], entry: TensorEntry, checkpoint: Checkpoint
) -> str:
    """The base tensor of that name, else the one name that ends with it, or that it ends with."""
    ends = suffixes.get(own, [])
    if own in ends:
        return own
    if not ends:
        parts = own.split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        # A last part alone ("weight") says nothing of where a tensor belongs.
        ends = next(([t] for t in tails if "." in t and t in suffixes.get(t, [])), [])
    if not ends:
        none = "none of that name (the base may tie it to another)"
        raise _unusable(entry, checkpoint, "that the base does not have", own, none)
    if len(ends) > 1:
        several = ", ".join(sorted(ends)[:3])
        raise _unusable(entry, checkpoint, "that may be several of the base", own, several)
    return ends[0]


def _factors(change: _Change, config: AdapterConfig, checkpoint: Checkpoint) -> _Factors | None:
    pair = {role: e for role, e in change.entries.items() if role != _WHOLE}
    if not pair:
        return None
    one = next(iter(pair.values()))
    if set(pair) == {"A", "B"}:
        factors = _Factors(pair["A"], pair["B"], is_embedding=False)
    elif set(pair) == {"embedding_A", "embedding_B"}:
        factors = _Factors(pair["embedding_A"], pair["embedding_B"], is_embedding=True)
    else:
        found = " and ".join(f"lora_{role}" for role in sorted(pair))
        raise _unusable(one, checkpoint, "without its partner", "lora_A and lora_B", found)
    for entry in pair.values():
        _refuse_integers(entry, checkpoint)
        if len(entry.shape) != 2:
            found = f"shape {list(entry.shape)}"
            raise _unusable(entry, checkpoint, "of no linear layer", "two dimensions", found)
    rank = config.rank_of(change.module)
    if (factors.a.shape[0], factors.b.shape[1]) != (rank, rank):
        found = f"A {list(factors.a.shape)} and B {list(factors.b.shape)}"
        raise _unusable(
            one, checkpoint, "of another rank than its config says", f"rank {rank}", found
        )
    return factors


def _is_transposed(
    factors: _Factors, base: Shape | None, config: AdapterConfig, checkpoint: Checkpoint
) -> bool:
    """Whether the update is the transpose of b·a: by the base's shape if that decides."""
    as_is, turned = factors.shape, factors.shape[::-1]
    flag = factors.is_embedding or config.fan_in_fan_out
    if base is None or base == as_is == turned:
        return flag
    if base != turned and (base != as_is or factors.is_embedding):
        update = turned if flag else as_is
        raise _unusable(
            factors.b,
            checkpoint,
            "that does not fit the base",
            f"an update of shape {list(base)}",
            f"shape {list(update)}",
        )
    return base == turned


def _refuse_undecided_squares(
    factors: Mapping[str, _Factors],
    transposed: Mapping[str, bool],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> None:
    """peft overwrites `fan_in_fan_out` at each layer: of a mixture it is true of the last only.

    Shapes decide all but the square ones.
    """
    linear = {name: f for name, f in factors.items() if not f.is_embedding}
    if all(transposed[name] == config.fan_in_fan_out for name in linear):
        return
    for name, f in linear.items():
        if f.shape[0] == f.shape[1]:
            raise _unusable(
                f.b,
                checkpoint,
                "that may be transposed or not",
                f"fan_in_fan_out {str(config.fan_in_fan_out).lower()} for all tensors",
                f"others where it is not so, and {name} is square",
            )


def _view(
    name: str, whole: TensorEntry | None, low_rank: LowRank | None, checkpoint: Checkpoint
) -> TensorView:
    if low_rank is None:
        assert whole is not None
        return TensorView(name, whole.dtype, whole.shape, (Part(0, whole),))
    a, b = low_rank.a.entry, low_rank.b.entry
    shape = (b.shape[0], a.shape[1])
    if low_rank.transposed:
        shape = shape[::-1]
    if whole is None:
        return TensorView(name, b.dtype, shape, low_rank=low_rank)
    if whole.shape != shape:
        expected, found = f"shape {list(shape)}", f"shape {list(whole.shape)}"
        raise _unusable(whole, checkpoint, "that does not fit its factors", expected, found)
    return TensorView(name, whole.dtype, shape, (Part(0, whole),), low_rank=low_rank)


def _refuse_integers(entry: TensorEntry, checkpoint: Checkpoint) -> None:
    if entry.dtype not in FLOATING:
        raise _unusable(
            entry, checkpoint, "of a dtype without arithmetic", "floating point", entry.dtype
        )


def _unusable(
    entry: TensorEntry, checkpoint: Checkpoint, what: str, expected: str, found: str
) -> CheckpointError:
    kind = "A delta" if checkpoint.kind == "delta" else "An adapter"
    return CheckpointError(
        f"{kind} holds a tensor {what}",
        where=f"{checkpoint.root}, {entry.file}, {entry.name}",
        expected=expected,
        found=found,
        next_step="give the base it was trained on, or merge it into that base and give the result",
    )
