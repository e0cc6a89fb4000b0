"""Views of the base's tensors through a PEFT LoRA adapter, or through a delta checkpoint.

Names, shapes and dtypes only: says which stored factors change which tensor of the base and how;
`rows` computes values. Every tensor of an adapter is used, or the adapter is refused. Configs are
read by `adapter_config`, names matched by `adapter_names`, folders read by `open_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mergepipe_pipeline.checkpoints.adapter_config import (
    CONFIG,
    AdapterConfig,
    parse_adapter_config,
)
from mergepipe_pipeline.checkpoints.adapter_names import (
    MAGNITUDE,
    TOKENS,
    WHOLE,
    Change,
    find_changes,
    unusable,
)
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.view import LowRank, Part, RowValues, TensorView, Update
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import CheckpointError

Shape = tuple[int, ...]


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
    where = f"{checkpoint.root}, {CONFIG}"
    config = parse_adapter_config(checkpoint.adapter_config or "", where)
    shapes = base_names if isinstance(base_names, Mapping) else {}
    names = base_names
    if tied is not None:
        shapes = {**shapes, tied.head: tied.embedding.shape}
        names = {*base_names, tied.head}
    changes = find_changes(checkpoint, names, config)
    adapter = _Adapter(checkpoint, config, shapes)
    is_untied = tied is not None and adapter.is_untied(changes, tied)
    seconds = {}
    if tied is not None and not is_untied:
        seconds = adapter.join(changes, tied)
    views = adapter.views(changes, seconds)
    if tied is not None and is_untied and tied.head not in views:
        views[tied.head] = TensorView(tied.head, tied.embedding.dtype, tied.embedding.shape)
    return views


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


@dataclass(frozen=True, slots=True)
class _Factors:
    """A pair of factors of `n_matrices` of the config's rank: a [n·r, n_in], b [n_out, r·n]."""

    a: TensorEntry
    b: TensorEntry
    is_embedding: bool
    n_matrices: int
    magnitude: TensorEntry | None

    @property
    def shape(self) -> Shape:
        """Shape of b·a."""
        return (self.b.shape[0], self.a.shape[1])


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter's files and config, and the shapes of the base's tensors, where they are known."""

    checkpoint: Checkpoint
    config: AdapterConfig
    shapes: Mapping[str, Shape]

    def is_untied(self, changes: Mapping[str, Change], tied: Tied) -> bool:
        """Whether peft trains a copy of one of the two and leaves the other as it was."""
        ends = [changes[name] for name in (tied.embedding.name, tied.head) if name in changes]
        retrained = any(WHOLE in c.entries and self.config.retrains(c.module) for c in ends)
        return retrained and not self.config.ensure_weight_tying

    def join(self, changes: dict[str, Change], tied: Tied) -> dict[str, Change]:
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
                raise self._bad(entry, "beside a second update", "one update", found)
        return {name: head}

    def views(
        self, changes: Mapping[str, Change], seconds: Mapping[str, Change]
    ) -> dict[str, TensorView]:
        """The base's tensors that change; `seconds` are further updates of some of them."""
        updates: dict[str, Update] = dict(self._low_ranks(changes))
        for name, more in self._low_ranks(seconds).items():
            own = updates[name]
            assert isinstance(own, LowRank)
            updates[name] = replace(own, second=more)
        for name, change in changes.items():
            if TOKENS in change.entries:
                updates[name] = self._row_values(name, change)
        return {n: self._view(n, change, updates.get(n)) for n, change in changes.items()}

    def _bad(self, entry: TensorEntry, what: str, expected: str, found: str) -> CheckpointError:
        return unusable(entry, self.checkpoint, what, expected, found)

    def _row_values(self, name: str, change: Change) -> RowValues:
        entry, rows = change.entries[TOKENS], self.config.tokens_of(change.module)
        base = self.shapes.get(name)
        update_names = [e.name for role, e in change.entries.items() if role not in (TOKENS, WHOLE)]
        if update_names:
            raise self._bad(entry, "beside a second update", "one update", update_names[0])
        if not rows:
            found = "no trainable_token_indices for it in the config"
            raise self._bad(entry, "of unknown meaning", "which rows it replaces", found)
        if len(entry.shape) != 2 or entry.shape[0] != len(rows) or entry.dtype not in FLOATING:
            expected = f"{len(rows)} rows of floating-point numbers"
            found = f"{entry.dtype} {list(entry.shape)}"
            raise self._bad(entry, "that is not the tokens' of its config", expected, found)
        if base is not None and (entry.shape[1:] != base[1:] or max(rows) >= base[0]):
            found = f"tokens up to {max(rows)} of shape {list(entry.shape)}"
            raise self._bad(entry, "that does not fit the base", f"rows of {list(base)}", found)
        return RowValues(Part(0, entry), rows)

    def _view(self, name: str, change: Change, update: Update | None) -> TensorView:
        whole = change.entries.get(WHOLE)
        if update is None:
            assert whole is not None
            return TensorView(name, whole.dtype, whole.shape, (Part(0, whole),))
        shape = _shape_of(update, self.shapes.get(name))
        if whole is None:
            first = update.b if isinstance(update, LowRank) else update.values
            return TensorView(name, first.entry.dtype, shape, low_rank=update)
        if whole.shape != shape:
            expected, found = f"shape {list(shape)}", f"shape {list(whole.shape)}"
            raise self._bad(whole, "that does not fit its factors", expected, found)
        return TensorView(name, whole.dtype, shape, (Part(0, whole),), low_rank=update)

    def _low_ranks(self, changes: Mapping[str, Change]) -> dict[str, LowRank]:
        """The updates of the changes that have factors, each checked and turned its way.

        Raises CheckpointError for factors that do not fit each other, the config or the base.
        """
        pairs = ((name, self._factors(name, change)) for name, change in changes.items())
        factors = {name: pair for name, pair in pairs if pair}
        transposed = {name: self._is_transposed(name, f) for name, f in factors.items()}
        self._refuse_undecided_squares(factors, transposed)
        updates = {}
        for name, f in factors.items():
            if f.magnitude is not None:
                self._check_magnitude(f, f.magnitude)
            # A matrix beside its factors is what was left: peft saves it after the start.
            is_left = f.is_embedding or WHOLE in changes[name].entries
            starts = bool(self.config.start) and not is_left
            updates[name] = LowRank(
                Part(0, f.a),
                Part(0, f.b),
                self.config.scale_of(changes[name].module),
                transposed[name],
                f.n_matrices,
                Part(0, f.magnitude) if f.magnitude else None,
                is_residual=starts,
                is_orthogonal=starts and self.config.start == "olora",
            )
        return updates

    def _factors(self, name: str, change: Change) -> _Factors | None:
        pair = {role: e for role, e in change.entries.items() if role not in (WHOLE, TOKENS)}
        if not pair:
            return None
        any_entry, magnitude = next(iter(pair.values())), pair.pop(MAGNITUDE, None)
        base = self.shapes.get(name)
        n = base[0] if change.is_parameter and base is not None and len(base) == 3 else 1
        prefix = "embedding_" if any(role.startswith("embedding_") for role in pair) else ""
        if set(pair) != {f"{prefix}A", f"{prefix}B"}:
            found = " and ".join(f"lora_{role}" for role in sorted(pair)) or f"lora_{MAGNITUDE}"
            raise self._bad(any_entry, "without its partner", "lora_A and lora_B", found)
        factors = _Factors(pair[f"{prefix}A"], pair[f"{prefix}B"], bool(prefix), n, magnitude)
        for entry in pair.values():
            if entry.dtype not in FLOATING:
                what = "of a dtype without arithmetic"
                raise self._bad(entry, what, "floating point", entry.dtype)
            if len(entry.shape) != 2:
                found = f"shape {list(entry.shape)}"
                raise self._bad(entry, "of no linear layer", "two dimensions", found)
        rank, of = self.config.rank_of(change.module), f" of {n} matrices" if n > 1 else ""
        if (factors.a.shape[0], factors.b.shape[1]) != (rank * n, rank * n):
            found = f"A {list(factors.a.shape)} and B {list(factors.b.shape)}"
            what = "of another rank than its config says"
            raise self._bad(any_entry, what, f"rank {rank}{of}", found)
        if magnitude is not None and not self.config.use_dora:
            found = "no use_dora in its config"
            raise self._bad(magnitude, "of unknown meaning", "none of lengths", found)
        if self.config.use_dora and magnitude is None:
            expected = f"lora_{MAGNITUDE} (DoRA)"
            raise self._bad(any_entry, "without its partner", expected, "lora_A and lora_B")
        return factors

    def _check_magnitude(self, f: _Factors, magnitude: TensorEntry) -> None:
        if magnitude.numel != f.shape[0] or magnitude.dtype not in FLOATING:
            expected = f"{f.shape[0]} lengths of rows"
            found = f"{magnitude.dtype} {list(magnitude.shape)}"
            raise self._bad(magnitude, "that does not fit its factors", expected, found)

    def _is_transposed(self, name: str, factors: _Factors) -> bool:
        """Whether the update is the transpose of b·a: by the base's shape if that decides."""
        as_is, turned = factors.shape, factors.shape[::-1]
        base = self.shapes.get(name)
        is_stack = base is not None and len(base) == 3 and factors.n_matrices == base[0]
        if base is not None and is_stack:
            base = base[1:]
        flag = factors.is_embedding or self.config.fan_in_fan_out
        if is_stack and base == as_is == turned:
            return self._is_stack_transposed(name, factors)
        if base is None or base == as_is == turned:
            return flag
        if base != turned and (base != as_is or factors.is_embedding):
            expected = f"an update of shape {list(base)}"
            found = f"shape {list(turned if flag else as_is)}"
            raise self._bad(factors.b, "that does not fit the base", expected, found)
        return base == turned

    def _is_stack_transposed(self, name: str, factors: _Factors) -> bool:
        """Of square matrices of experts, by the other projection: [n_in, 2·n_inner] is turned."""
        module, _, own = name.rpartition(".")
        other = "gate_up_proj" if own == "down_proj" else "down_proj"
        sibling = self.shapes.get(f"{module}.{other}", ())
        if len(sibling) != 3 or sibling[1] == sibling[2]:
            expected = "experts whose projections have two different sizes"
            found = f"{name} is square"
            raise self._bad(factors.b, "that may be transposed or not", expected, found)
        return sibling[1] < sibling[2]

    def _refuse_undecided_squares(
        self, factors: Mapping[str, _Factors], transposed: Mapping[str, bool]
    ) -> None:
        """peft overwrites `fan_in_fan_out` at each layer: of a mixture it is true of the last only.

        Shapes decide all but the square ones.
        """
        flag = self.config.fan_in_fan_out
        linear = {n: f for n, f in factors.items() if not f.is_embedding and f.n_matrices == 1}
        if all(transposed[name] == flag for name in linear):
            return
        for name, f in linear.items():
            if f.shape[0] == f.shape[1]:
                expected = f"fan_in_fan_out {str(flag).lower()} for all tensors"
                found = f"others where it is not so, and {name} is square"
                raise self._bad(f.b, "that may be transposed or not", expected, found)


def _shape_of(update: Update, base: Shape | None) -> Shape:
    """The shape of the updated tensor: a matrix's by its factors, else the base's."""
    if isinstance(update, LowRank) and update.n_matrices == 1:
        shape = (update.b.entry.shape[0], update.a.entry.shape[1])
        return shape[::-1] if update.transposed else shape
    assert base is not None or isinstance(update, RowValues)
    return base or update.parts[0].entry.shape
