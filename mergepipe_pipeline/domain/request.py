"""How a merge was asked for: all that the recipe's text leaves open, so that it can be replayed."""

from __future__ import annotations

from dataclasses import dataclass

from mergepipe_pipeline.domain.selector import Selected


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """The checkpoint and content that a model text of a recipe, with its revision, stood for.

    `text` is the model's or the adapter's part of a reference (the whole reference where a folder
    has that name).
    """

    text: str
    name: str
    root: str
    checkpoint_id: str
    content_sha256: str


@dataclass(frozen=True, slots=True)
class Request:
    """The options that overruled the recipe (None: none did), and the models of all stages.

    `budget` is an amount as in recipes, `block_elems` elements of a block; with `no_packs` the
    originals were read although there were packs. `packs` are the ids of those that there were, of
    all stages. `selected` says which models the recipe's selectors stood for. What is `left_out`,
    by the names of checkpoints, took no part. With `lenient` the recipe may hold what mergekit
    ignores. The result has a tokenizer if the merge `copies_tokenizer`; `truncates` crops
    vocabularies to the shortest, the base's included. No id covers it.
    """

    budget: str | None = None
    strategy: str | None = None
    block_elems: int | None = None
    models: tuple[RequestedModel, ...] = ()
    no_packs: bool = False
    packs: tuple[str, ...] = ()
    selected: tuple[Selected, ...] = ()
    left_out: tuple[str, ...] = ()
    lenient: bool = False
    copies_tokenizer: bool = True
    truncates: bool = False


#: Nothing overrules the recipe, no model is known yet.
AS_WRITTEN = Request()
