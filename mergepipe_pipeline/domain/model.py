"""A model as a merge sees it: named tensors over one or more checkpoints, whatever holds them.

A full checkpoint, an adapter or a delta (with the base's tensors that it does not change left out),
a checkpoint with an adapter on it, or any of these with its embeddings in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.domain.view import Part, RowValues, TensorView, Update
from mergepipe_pipeline.errors import RecipeError


@dataclass(frozen=True)
class Model:
    """A model by name; sources in `views` index `checkpoints`.

    `is_partial`: it lacks the tensors in which it equals its base. `variant` names what was done to
    the views beyond what the checkpoints say (empty: nothing). `unties`: its adapter gives it a
    head of its own where the config says that the embedding is the head. `becomes` is what its
    adapter changes in the config: key and value.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    views: Mapping[str, TensorView] = field(repr=False)
    is_partial: bool = False
    variant: str = ""
    unties: bool = False
    becomes: tuple[tuple[str, ConfigValue], ...] = ()

    @cached_property
    def model_id(self) -> str:
        """The id of its one checkpoint, or 24 hex characters over the ids of several."""
        if len(self.checkpoints) == 1 and not self.variant:
            return self.checkpoints[0].checkpoint_id
        ids = [c.checkpoint_id for c in self.checkpoints]
        return digest_json([ids, self.variant])[:24]

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the model's files beside weights come from."""
        return self.checkpoints[0]

    @cached_property
    def stated(self) -> Mapping[str, Any]:
        """The content of its config.json, with the class that its adapter makes of it."""
        classes = dict(self.becomes).get("architectures")
        return {**self.checkpoint.stated, **({} if classes is None else {"architectures": classes})}

    @property
    def nbytes(self) -> int:
        """Bytes of one full read."""
        return sum(v.nbytes for v in self.views.values())


#: Dtypes of an adapter by the bytes of an element, unless it is said: most have one of these.
_TOLD_BY_SIZE = frozenset({"BF16", "F32", "F64"})


def view_digest(view: TensorView, digests: Sequence[Mapping[str, str]]) -> str:
    """64 hex over a view's content; for a whole stored tensor the digest of its bytes.

    `digests[i]` gives tensor name to digest for source number i.
    """

    def of(part: Part) -> Any:
        own = [digests[part.source][entry.name] for entry in part.entries]
        return [own, part.codes.rule] if part.codes else own[0]

    if view.whole:
        return digests[view.stored[0].source][view.whole.name]
    return digest_json(
        [
            [of(p) for p in view.stored],
            [asdict(r) for r in view.runs],
            view.is_delta,
            view.low_rank and _update(view.low_rank, of),
            view.shape,
        ]
    )


def _update(update: Update, of: Callable[[Part], Any]) -> list[object]:
    """The material of an update's identity; of a plain one the factors and the scale alone."""

    def typed(part: Part) -> object:
        """A part's content, with its dtype where the number of its bytes does not tell it."""
        dtype = part.entry.dtype
        return of(part) if dtype in _TOLD_BY_SIZE else [of(part), dtype]

    if isinstance(update, RowValues):
        return [typed(update.values), update.rows]
    plain: list[object] = [typed(update.a), typed(update.b), update.scale, update.transposed]
    rest = [
        update.n_matrices,
        update.magnitude and typed(update.magnitude),
        update.weights and typed(update.weights),
        update.is_residual,
        update.second and _update(update.second, of),
        *([True] if update.is_orthogonal else []),
    ]
    return plain if rest == [1, None, None, False, None] else [*plain, rest]


def grid_for(base: Model, block_elems: int | None) -> BlockGrid:
    """The block grid of a base: as asked for, or from the model's size. Raises RecipeError."""
    if block_elems is not None:
        try:
            return BlockGrid(block_elems)
        except ValueError as error:
            raise RecipeError(
                "A block size cannot be used",
                where="block size",
                expected=str(error).removeprefix("block_elems must be "),
                found=str(block_elems),
                next_step="leave it out for a size that fits the model",
            ) from None
    return BlockGrid.for_numel(sum(v.numel for v in base.views.values()))
