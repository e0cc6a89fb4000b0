"""The tokenizer of a merge's output: its vocabulary, its files, and the rows of its embedding.

From a recipe's tokenizer part and the models' tokenizers; no weight is touched: the engine gathers
the rows. The vocabulary is that of one model, with the tokens of all others behind it for a union;
ids of that one model never change. Unlike mergekit 0.1.5, new ids depend on nothing but the recipe:
models in its order, tokens by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergepipe_pipeline.domain.recipe import TokenizerRecipe, TokenRule
from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.tokenizer.model_tokenizer import AddedToken, ModelTokenizer
from mergepipe_pipeline.tokenizer.output_files import output_files

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelRows:
    """How to fill one model's embedding of the output's vocabulary.

    `own`: int64 [n_rows], the row in the model's own embedding, or -1. `patches`: for each row that
    is a token's and -1 in `own`, the (model number, row) pairs whose mean it is; none: zeros.
    `mean_rows`: int64, rows that no token names (padding, gaps between ids); each is the mean of
    all other rows of this same model, after those are filled.
    """

    own: NDArray[np.int64]
    patches: Mapping[int, Pairs]
    mean_rows: NDArray[np.int64]


class TokenSource(NamedTuple):
    """A model as a source of rows: token to row, of `n_rows`; `name` is how messages call it."""

    name: str
    n_rows: int
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class TokenizerBuild:
    """The output's tokenizer files, vocabulary (token to row), and embedding rows per model.

    `n_rows` is the number of rows of the output's embedding, padding included. `models` are those
    of the recipe; `base` gives rows before a mean is taken, and `rules`, by token, say otherwise.
    `warnings` are sentences.
    """

    files: dict[str, bytes]
    vocab: dict[str, int]
    n_rows: int
    models: tuple[TokenSource, ...]
    base: int | None
    rules: Mapping[str, TokenRule]
    warnings: tuple[str, ...]

    @cached_property
    def rows(self) -> tuple[ModelRows, ...]:
        """Rows for each model of the recipe. Raises RecipeError as `rows_among`."""
        return self.rows_among(range(len(self.models)))

    def rows_among(self, among: Sequence[int]) -> tuple[ModelRows, ...]:
        """Rows for an embedding to which only these models (numbers) contribute, in that order.

        A token that none of them has is zeros even if another model of the recipe has it. Raises
        RecipeError for a rule that names a model not among these, a token that its model lacks, or
        a row outside its embedding.
        """
        own = {m: np.full(self.n_rows, -1, dtype=np.int64) for m in among}
        patches: dict[int, dict[int, Pairs]] = {m: {} for m in among}
        unnamed = np.ones(self.n_rows, dtype=np.bool_)
        tokens = {m: self.models[m].tokens for m in among}
        for token, row in self.vocab.items():
            unnamed[row] = False
            rule = self.rules.get(token)
            explicit = None if rule is None else self._explicit(rule, among)
            have = [(m, tokens[m][token]) for m in among if token in tokens[m]]
            forced = rule is not None and rule.force
            if not forced:
                for m, own_row in have:
                    own[m][row] = own_row
                if len(have) == len(among):
                    continue
            pairs = _default(have, self.base) if explicit is None else explicit
            for m in among:
                if forced or token not in tokens[m]:
                    patches[m][row] = pairs
        mean_rows = np.flatnonzero(unnamed).astype(np.int64)
        return tuple(ModelRows(own[m], patches[m], mean_rows) for m in among)

    def _explicit(self, rule: TokenRule, among: Sequence[int]) -> Pairs | None:
        """The source that a rule names; None for the default."""
        if rule.kind == "default":
            return None
        if rule.kind == "zero":
            return ()
        where = f"tokenizer, tokens, {rule.token!r}"
        if rule.model is None or rule.model not in among:
            raise RecipeError(
                "A token's row is to come from a model that has no part in the embedding",
                where=where,
                expected="one of " + ", ".join(self.models[m].name for m in among),
                found="no model" if rule.model is None else self.models[rule.model].name,
                next_step="name one of the merged models as the token's source",
            )
        name, n_rows, tokens = self.models[rule.model]
        if rule.kind == "model_token" and rule.of_id is not None:
            if not 0 <= rule.of_id < n_rows:
                raise RecipeError(
                    "A token's row is outside the embedding that it is to come from",
                    where=f"{where}, token_id",
                    expected=f"0 to {n_rows - 1} in {name}",
                    found=str(rule.of_id),
                    next_step="correct token_id",
                )
            return ((rule.model, rule.of_id),)
        token = rule.token if rule.kind == "model" or rule.of_token is None else rule.of_token
        row = tokens.get(token)
        if row is None:
            owners = [model.name for model in self.models if token in model.tokens]
            raise RecipeError(
                "A token's row is to come from a model that lacks the token",
                where=where,
                expected=f"{token!r} with a row in {name}",
                found="it in " + ", ".join(owners) if owners else "it in no model",
                next_step="name another model, a token that it has, or {kind: zero}",
            )
        return ((rule.model, row),)


def _default(have: Sequence[tuple[int, int]], base: int | None) -> Pairs:
    """The source without a rule: the base if it has the token, else the mean of all that have."""
    of_base = tuple(pair for pair in have if pair[0] == base)
    return of_base or tuple(have)


def build_tokenizer(
    recipe: TokenizerRecipe, models: Sequence[ModelTokenizer], base: int | None
) -> TokenizerBuild:
    """The output's tokenizer. `base` is the recipe's base model, if it has one.

    A model without tokenizer files is taken to have the base's (the first model's without a base).
    Tokens whose id is beyond their model's embedding are left out. Raises RecipeError for a rule
    that cannot be followed and CheckpointError for a tokenizer that cannot be read or written.
    Source: mergekit 0.1.5 (SEMANTICS.md 3.1, Tokenizer).
    """
    lead = base or 0
    if not models[lead].plain:
        raise CheckpointError(
            "The model whose tokenizer the output builds on has none",
            where=models[lead].name,
            expected="tokenizer.json in its folder",
            next_step="put the tokenizer's files into its folder, or name another base_model",
        )
    tokenizers = tuple(m if m.plain else _borrowed(m, models[lead]) for m in models)
    source = tokenizers[lead if recipe.source == "union" else recipe.source]
    plain = {t: i for t, i in source.plain.items() if i < source.n_rows}
    added = {t.content: t for t in source.added if t.id < source.n_rows}
    if recipe.source == "union":
        _add_union(plain, added, [source, *(m for i, m in enumerate(tokenizers) if i != lead)])
    _append(plain, added, [AddedToken(r.token, -1) for r in recipe.tokens])
    vocab = {**plain, **{t.content: t.id for t in added.values()}}
    multiple = recipe.pad_to_multiple_of or 1
    n_rows = -(-(max(vocab.values(), default=-1) + 1) // multiple) * multiple
    build = TokenizerBuild(
        output_files(source, plain, tuple(added.values())),
        vocab,
        n_rows,
        tuple(TokenSource(m.name, m.n_rows, m.vocab_in_rows) for m in tokenizers),
        base,
        _by_token(recipe.tokens),
        tuple(_warnings(models, models[lead].name)),
    )
    _ = build.rows  # a rule that cannot be followed is refused here
    return build


def _borrowed(model: ModelTokenizer, lead: ModelTokenizer) -> ModelTokenizer:
    """A model without a tokenizer, with another model's."""
    return replace(lead, name=model.name, n_rows=model.n_rows)


def _add_union(
    plain: Mapping[str, int], added: dict[str, AddedToken], models: Sequence[ModelTokenizer]
) -> None:
    """Add the tokens of all models to `added`: first plain ones, then added ones.

    A token that any model adds is an added token of the output, with the settings of the first.
    """
    in_rows = [(m, [t for t in m.added if t.id < m.n_rows]) for m in models]
    special = {t.content for _, tokens in in_rows for t in tokens}
    for model, _ in in_rows:
        by_id = sorted(model.plain, key=model.plain.__getitem__)
        new = [t for t in by_id if model.plain[t] < model.n_rows and t not in special]
        _append(plain, added, [AddedToken(t, -1) for t in new])
    for _, tokens in in_rows:
        restated = [t for t in tokens if t.content in plain and t.content not in added]
        added.update({t.content: replace(t, id=plain[t.content]) for t in restated})
        _append(plain, added, tokens)


def _append(
    plain: Mapping[str, int], added: dict[str, AddedToken], tokens: Sequence[AddedToken]
) -> None:
    """Add tokens that the vocabulary lacks, behind all others."""
    ids = [*plain.values(), *(t.id for t in added.values())]
    next_id = max(ids, default=-1) + 1
    for token in tokens:
        if token.content and token.content not in plain and token.content not in added:
            added[token.content] = replace(token, id=next_id)
            next_id += 1


def _by_token(rules: Sequence[TokenRule]) -> dict[str, TokenRule]:
    for rule in rules:
        if not rule.token:
            raise RecipeError(
                "A token rule is for the empty token",
                where="tokenizer, tokens",
                expected="a token's text",
                found="''",
                next_step="name a token",
            )
    return {rule.token: rule for rule in rules}


def _warnings(models: Sequence[ModelTokenizer], lead: str) -> list[str]:
    out = [f"{m.name} has no tokenizer; taken to be that of {lead}" for m in models if not m.plain]
    for model in models:
        beyond = len(model.vocab) - len(model.vocab_in_rows)
        if beyond:
            out.append(f"{model.name}: {beyond} tokens beyond its {model.n_rows} rows left out")
    return out
