"""Which tensors of an expert a pack holds, and the contents that its id follows from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.pack import PACKED_DTYPES, TensorContent


def packed_names(expert: Model, base: Model) -> list[str]:
    """The tensors that have levels, in the expert's order.

    Those that both store whole, with equal shape and dtype. All others are read from the expert.
    """
    return [
        name
        for name, view in expert.views.items()
        if (base_view := base.views.get(name)) is not None
        and view.is_plain
        and base_view.is_plain
        and (view.shape, view.dtype) == (base_view.shape, base_view.dtype)
        and view.dtype in PACKED_DTYPES
        and view.numel
    ]


def packed_as(contents: Iterable[TensorContent], digests: Mapping[str, str]) -> dict[str, str]:
    """The pack's names of a checkpoint's tensors with these `digests`, where it has them."""
    named = {c.name: c.digest for c in contents}
    names = {digest: name for name, digest in named.items()}
    return {
        tensor: tensor if named.get(tensor) == digest else names[digest]
        for tensor, digest in digests.items()
        if digest in names
    }


def packed_contents(
    expert: Model,
    base: Model,
    digests: Sequence[Mapping[str, str]],
    base_digests: Sequence[Mapping[str, str]],
) -> tuple[TensorContent, ...]:
    """The contents that a pack of an expert against a base holds, in the expert's order.

    Digests are by tensor, per checkpoint of each model.
    """
    return tuple(
        TensorContent(
            name,
            name,
            expert.views[name].dtype,
            expert.views[name].shape,
            view_digest(expert.views[name], digests),
            view_digest(base.views[name], base_digests),
        )
        for name in packed_names(expert, base)
    )
