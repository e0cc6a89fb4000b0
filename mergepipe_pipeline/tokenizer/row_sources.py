"""Which row of which model's embedding each row of the merged vocabulary is.

Pure arithmetic on vocabularies, no weights: the engine gathers the rows. The rules are those of
mergekit 0.1.5 (SEMANTICS.md 3.1, Tokenizer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe_pipeline.domain.recipe import TokenRule
from mergepipe_pipeline.errors import RecipeError

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What rows are found for: output `tokens` (token to row), of `n_rows`, and the models'.

    `models` holds per model token to own row, `n_model_rows` the rows of its embedding, `names` how
    messages call it. `base` gives rows before a mean is taken.
    """

    tokens: Mapping[str, int]
    n_rows: int
    models: tuple[Mapping[str, int], ...]
    n_model_rows: tuple[int, ...]
    names: tuple[str, ...]
    base: int | None
    rules: Mapping[str, TokenRule]


def model_rows(vocabulary: Vocabulary, among: Sequence[int]) -> tuple[ModelRows, ...]:
    """Rows for each model of `among` (in that order), with no other model as a source.

    Raises RecipeError for a rule that names a model not among these, a token that its model lacks,
    or a row outside its embedding.
    """
    own = {m: np.full(vocabulary.n_rows, -1, dtype=np.int64) for m in among}
    patches: dict[int, dict[int, Pairs]] = {m: {} for m in among}
    unnamed = np.ones(vocabulary.n_rows, dtype=np.bool_)
    for token, row in vocabulary.tokens.items():
        unnamed[row] = False
        rule = vocabulary.rules.get(token)
        explicit = None if rule is None else _explicit(vocabulary, rule, among)
        have = [(m, vocabulary.models[m][token]) for m in among if token in vocabulary.models[m]]
        forced = rule is not None and rule.force
        if not forced:
            for m, own_row in have:
                own[m][row] = own_row
            if len(have) == len(among):
                continue
        pairs = _default(have, vocabulary.base) if explicit is None else explicit
        for m in among:
            if forced or token not in vocabulary.models[m]:
                patches[m][row] = pairs
    mean_rows = np.flatnonzero(unnamed).astype(np.int64)
    return tuple(ModelRows(own[m], patches[m], mean_rows) for m in among)


def _default(have: Sequence[tuple[int, int]], base: int | None) -> Pairs:
    """The source without a rule: the base if it has the token, else the mean of all that have."""
    of_base = tuple(pair for pair in have if pair[0] == base)
    return of_base or tuple(have)


def _explicit(vocabulary: Vocabulary, rule: TokenRule, among: Sequence[int]) -> Pairs | None:
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
            expected="one of " + ", ".join(vocabulary.names[m] for m in among),
            found="no model" if rule.model is None else vocabulary.names[rule.model],
            next_step="name one of the merged models as the token's source",
        )
    name, n_rows = vocabulary.names[rule.model], vocabulary.n_model_rows[rule.model]
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
    row = vocabulary.models[rule.model].get(token)
    if row is None:
        owners = [n for n, v in zip(vocabulary.names, vocabulary.models, strict=True) if token in v]
        raise RecipeError(
            "A token's row is to come from a model that lacks the token",
            where=where,
            expected=f"{token!r} with a row in {name}",
            found="it in " + ", ".join(owners) if owners else "it in no model",
            next_step="name another model, a token that it has, or {kind: zero}",
        )
    return ((rule.model, row),)
