"""The factors of a LoRA adapter, checked: their ranks, shapes, and which way round they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.view import LowRank, Part
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.storage.adapter_config import AdapterConfig
from mergepipe_pipeline.storage.adapter_names import MAGNITUDE, TOKENS, WHOLE, Change, unusable

Shape = tuple[int, ...]


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


def low_ranks(
    changes: Mapping[str, Change],
    shapes: Mapping[str, Shape],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> dict[str, LowRank]:
    """The updates of the changes that have factors, each checked and turned its way.

    Raises CheckpointError for factors that do not fit each other, the config or the base.
    """
    factors = {
        name: pair
        for name, change in changes.items()
        if (pair := _factors(change, shapes.get(name), config, checkpoint))
    }
    transposed = {
        name: _is_transposed(name, f, shapes, config, checkpoint) for name, f in factors.items()
    }
    _refuse_undecided_squares(factors, transposed, config, checkpoint)
    updates = {}
    for name, f in factors.items():
        if f.magnitude is not None:
            _check_magnitude(f, f.magnitude, checkpoint)
        # A matrix that stands beside its factors is what was left: peft saves it after the start.
        starts = bool(config.start) and not f.is_embedding and WHOLE not in changes[name].entries
        updates[name] = LowRank(
            Part(0, f.a),
            Part(0, f.b),
            config.scale_of(changes[name].module),
            transposed[name],
            f.n_matrices,
            Part(0, f.magnitude) if f.magnitude else None,
            is_residual=starts,
            is_orthogonal=starts and config.start == "olora",
        )
    return updates


def _factors(
    change: Change, base: Shape | None, config: AdapterConfig, checkpoint: Checkpoint
) -> _Factors | None:
    pair = {role: e for role, e in change.entries.items() if role not in (WHOLE, TOKENS)}
    if not pair:
        return None
    any_entry, magnitude = next(iter(pair.values())), pair.pop(MAGNITUDE, None)
    n = base[0] if change.is_parameter and base is not None and len(base) == 3 else 1
    if set(pair) == {"A", "B"}:
        factors = _Factors(pair["A"], pair["B"], False, n, magnitude)
    elif set(pair) == {"embedding_A", "embedding_B"}:
        factors = _Factors(pair["embedding_A"], pair["embedding_B"], True, n, magnitude)
    else:
        found = " and ".join(f"lora_{role}" for role in sorted(pair)) or f"lora_{MAGNITUDE}"
        raise unusable(any_entry, checkpoint, "without its partner", "lora_A and lora_B", found)
    for entry in pair.values():
        if entry.dtype not in FLOATING:
            raise unusable(
                entry, checkpoint, "of a dtype without arithmetic", "floating point", entry.dtype
            )
        if len(entry.shape) != 2:
            found = f"shape {list(entry.shape)}"
            raise unusable(entry, checkpoint, "of no linear layer", "two dimensions", found)
    rank = config.rank_of(change.module)
    if (factors.a.shape[0], factors.b.shape[1]) != (rank * n, rank * n):
        found = f"A {list(factors.a.shape)} and B {list(factors.b.shape)}"
        of = f" of {n} matrices" if n > 1 else ""
        raise unusable(
            any_entry, checkpoint, "of another rank than its config says", f"rank {rank}{of}", found
        )
    if magnitude is not None and not config.keeps_lengths:
        found = "no use_dora in its config"
        raise unusable(magnitude, checkpoint, "of unknown meaning", "none of lengths", found)
    if config.keeps_lengths and magnitude is None:
        raise unusable(
            any_entry,
            checkpoint,
            "without its partner",
            f"lora_{MAGNITUDE} (DoRA)",
            "lora_A and lora_B",
        )
    return factors


def _check_magnitude(f: _Factors, magnitude: TensorEntry, checkpoint: Checkpoint) -> None:
    if magnitude.numel != f.shape[0] or magnitude.dtype not in FLOATING:
        found = f"{magnitude.dtype} {list(magnitude.shape)}"
        expected = f"{f.shape[0]} lengths of rows"
        raise unusable(magnitude, checkpoint, "that does not fit its factors", expected, found)


def _is_transposed(
    name: str,
    factors: _Factors,
    shapes: Mapping[str, Shape],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> bool:
    """Whether the update is the transpose of b·a: by the base's shape if that decides."""
    as_is, turned = factors.shape, factors.shape[::-1]
    base = shapes.get(name)
    is_stack = base is not None and len(base) == 3 and factors.n_matrices == base[0]
    if base is not None and is_stack:
        base = base[1:]
    flag = factors.is_embedding or config.fan_in_fan_out
    if is_stack and base == as_is == turned:
        return _is_stack_transposed(name, factors, shapes, checkpoint)
    if base is None or base == as_is == turned:
        return flag
    if base != turned and (base != as_is or factors.is_embedding):
        update = turned if flag else as_is
        raise unusable(
            factors.b,
            checkpoint,
            "that does not fit the base",
            f"an update of shape {list(base)}",
            f"shape {list(update)}",
        )
    return base == turned


def _is_stack_transposed(
    name: str, factors: _Factors, shapes: Mapping[str, Shape], checkpoint: Checkpoint
) -> bool:
    """Of square matrices of experts, by the other projection: [n_in, 2·n_inner] is turned."""
    module, _, own = name.rpartition(".")
    sibling = shapes.get(f"{module}.{'gate_up_proj' if own == 'down_proj' else 'down_proj'}", ())
    if len(sibling) != 3 or sibling[1] == sibling[2]:
        raise unusable(
            factors.b,
            checkpoint,
            "that may be transposed or not",
            "experts whose projections have two different sizes",
            f"{name} is square",
        )
    return sibling[1] < sibling[2]


def _refuse_undecided_squares(
    factors: Mapping[str, _Factors],
    transposed: Mapping[str, bool],
    config: AdapterConfig,
    checkpoint: Checkpoint,
) -> None:
    """peft overwrites `fan_in_fan_out` at each layer: of a mixture it is true of the last only.

    Shapes decide all but the square ones.
    """
    linear = {n: f for n, f in factors.items() if not f.is_embedding and f.n_matrices == 1}
    if all(transposed[name] == config.fan_in_fan_out for name in linear):
        return
    for name, f in linear.items():
        if f.shape[0] == f.shape[1]:
            raise unusable(
                f.b,
                checkpoint,
                "that may be transposed or not",
                f"fan_in_fan_out {str(config.fan_in_fan_out).lower()} for all tensors",
                f"others where it is not so, and {name} is square",
            )
