"""Which models' ids of tokens a result states: those of the tokenizer and the template that it has.

Only a recipe that asks for another tokenizer or chat template changes any: else the files are the
template's as they are.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.planner.plan_builder import Side
from mergepipe_pipeline.resolution.model_files import (
    files_of,
    tokenizer_files_of,
    tokenizer_of,
    tokenizer_owner,
)
from mergepipe_pipeline.storage.json_text import json_bytes, load_object
from mergepipe_pipeline.tokenizer.build import TokenizerBuild
from mergepipe_pipeline.tokenizer.builtin import BUILT_IN, ENDS
from mergepipe_pipeline.tokenizer.chat import template_of
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    ModelTokenizer,
    of_tokenizer,
    read_tokenizer,
)
from mergepipe_pipeline.tokenizer.special_ids import GENERATION, Statement, followed, statement_of

_UNBOUNDED = 1 << 62


def with_ids(
    side: Side, recipe: Recipe, models: Sequence[Model], build: TokenizerBuild | None
) -> tuple[Side, tuple[str, ...]]:
    """The side with the ids of the output's tokens in both configs, and warnings.

    `models` are as their files have them. Raises IncompatibleCheckpointsError for an id that the
    output needs and has no token for, CheckpointError for files that cannot be read.
    """
    if side.files is None:
        return side, ()
    lead = recipe.base or 0
    asked = recipe.tokenizer.source if recipe.tokenizer else side.template
    source = lead if asked == "union" else asked
    ending, is_built_in = _ending(side, recipe, models, source)
    if build is None and ending == side.template and not is_built_in:
        return side, ()
    numbers = (source, ending)
    try:
        lead_tokenizer = tokenizer_of(models[lead if build else side.template], _UNBOUNDED)
        template = models[side.template].checkpoint
        owners = [tokenizer_owner(models[m]) if build else models[m].checkpoint for m in numbers]
        said = {id(c): _statement(c, lead_tokenizer) for c in (template, *owners)}
        own, by_source, by_ending = (said[id(c)] for c in (template, *owners))
    except CheckpointError as error:
        if build is not None:
            raise
        return side, (f"chat_template: which tokens end a text is left as it is: {error}",)
    vocab, n_rows = lead_tokenizer.vocab, _UNBOUNDED
    if build is not None:
        vocab, n_rows = build.vocab, build.n_rows
    told = _built_in_ends(recipe, by_ending, vocab) if is_built_in else ()
    if build is None and is_built_in:
        return side, told
    new = followed(own, by_source, by_ending, vocab, n_rows)
    files = dict(side.files)
    if new.generation is not None:
        files[GENERATION] = b64encode(json_bytes(new.generation)).decode()
    config = (*side.config, *new.config)
    return replace(side, config=config, files=tuple(sorted(files.items()))), (*new.warnings, *told)


def _ending(side: Side, recipe: Recipe, models: Sequence[Model], source: int) -> tuple[int, bool]:
    """The model whose template the output has, and whether that is a built-in one instead."""
    if recipe.chat_template is None:
        return source, False
    files = {name: b64decode(text) for name, text in side.files or ()}
    text = template_of(ModelTokenizer("output", files, 0, {}, ()))
    for m in dict.fromkeys((source, side.template, *range(len(models)))):
        own = ModelTokenizer(models[m].name, tokenizer_files_of(models[m]), 0, {}, ())
        if (template_of(own) or "").strip() == (text or "").strip():
            return m, False
    return source, recipe.chat_template in BUILT_IN


def _statement(checkpoint: Checkpoint, lead: ModelTokenizer) -> Statement:
    files = files_of(checkpoint, lambda name: of_tokenizer(name) or name == GENERATION)
    tokenizer = read_tokenizer(checkpoint.name, files, _UNBOUNDED)
    config = load_object(checkpoint.config or "{}", checkpoint.root, "A model's config")
    return statement_of(tokenizer if tokenizer.plain else lead, checkpoint.name, config, files)


def _built_in_ends(recipe: Recipe, said: Statement, vocab: Mapping[str, int]) -> tuple[str, ...]:
    """A warning where a built-in template ends turns with a token that ends no text."""
    token = ENDS.get(recipe.chat_template or "")
    ends = said.ends()
    if token is None or vocab.get(token, -1) in (ends if isinstance(ends, list) else [ends]):
        return ()
    place = f"with id {vocab[token]} is not among these" if token in vocab else "is no token of it"
    return (
        f"chat_template: {recipe.chat_template} ends turns with {token}; the result stops at "
        f"{ends}, and {token} {place}: generation goes on after a turn",
    )
