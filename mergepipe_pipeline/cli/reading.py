"""The options that say how a recipe is read, as mergekit's command has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import click


class Reading(TypedDict):
    """How a recipe is read, as `load_recipe` takes it."""

    lenient: bool
    copy_tokenizer: bool
    truncate_embeddings: bool


#: How it is read if nobody asks for more.
AS_WRITTEN = Reading(lenient=False, copy_tokenizer=True, truncate_embeddings=False)


def reading(planning: dict[str, Any]) -> Reading:
    """The options that say how a recipe is read, taken out of the others.

    Raises UsageError for others that contradict each other.
    """
    if planning.get("strategy") == "packs" and planning.get("no_packs"):
        raise click.UsageError(
            "--strategy packs and --no-packs exclude each other: give one of them"
        )
    return Reading(
        lenient=planning.pop("lenient"),
        copy_tokenizer=planning.pop("copy_tokenizer"),
        truncate_embeddings=planning.pop("truncate_embeddings"),
    )


def reading_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of `Reading`."""
    for option in (
        click.option(
            "--copy-tokenizer/--no-copy-tokenizer",
            default=True,
            help="Give the result a tokenizer (default).",
        ),
        click.option(
            "--unsafe-truncate-embeddings",
            "truncate_embeddings",
            is_flag=True,
            help="Crop all vocabularies to the shortest, as if token numbers meant the same.",
        ),
        click.option(
            "--lenient",
            is_flag=True,
            help="Warn about keys and parameters that mergekit ignores, and ignore them, too.",
        ),
    ):
        function = option(function)
    return function
