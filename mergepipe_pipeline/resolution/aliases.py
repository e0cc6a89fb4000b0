"""One tensor under two names: models whose names differ by a prefix or by older words are aligned.

`h.0.ln_1.weight` of the hub's GPT-2 is `transformer.h.0.ln_1.weight` in what transformers saves,
and `LayerNorm.gamma` of old BERTs is `LayerNorm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mergepipe_pipeline.spec.model import Model

_WORDS = {".gamma": ".weight", ".weight": ".gamma", ".beta": ".bias", ".bias": ".beta"}


def with_names_of(models: Sequence[Model], lead: int) -> list[Model]:
    """The models with their tensors under the names that the model `lead` has for them."""
    lead_names = models[lead].views
    return [m if m is models[lead] else _renamed(m, lead_names) for m in models]


def _renamed(model: Model, lead_names: Collection[str]) -> Model:
    """The model with its tensors under the names that `lead_names` has for them."""
    unknown = [n for n in model.views if n not in lead_names]
    if not unknown or not lead_names:
        return model
    prefix = _prefix(unknown, lead_names)
    names = {n: _alias(n, prefix, lead_names) for n in model.views}
    if all(n == alias for n, alias in names.items()) or len(set(names.values())) < len(names):
        return model
    views = {names[n]: replace(v, name=names[n]) for n, v in model.views.items()}
    return replace(model, views=views, variant=f"{model.variant}; named {prefix}")


def _prefix(unknown: Sequence[str], lead_names: Collection[str]) -> str:
    """The prefix that most unknown names lack, or, marked with `-`, have too much.

    Empty if no prefix makes any name known.
    """
    votes: dict[str, int] = {}
    tails = {n.partition(".")[2]: n.partition(".")[0] for n in lead_names}
    for name in unknown:
        head, _, tail = name.partition(".")
        for new in _spellings(name):
            if new in tails:
                votes[f"{tails[new]}."] = votes.get(f"{tails[new]}.", 0) + 1
        for new in _spellings(tail):
            if new in lead_names:
                votes[f"-{head}."] = votes.get(f"-{head}.", 0) + 1
    return max(votes, key=lambda p: (votes[p], p), default="")


def _alias(name: str, prefix: str, lead_names: Collection[str]) -> str:
    """The name by which a tensor is known, else its own with the prefix that its model needs."""
    if name in lead_names:
        return name
    moved = name.removeprefix(prefix[1:]) if prefix.startswith("-") else prefix + name
    aliases = (new for of in (name, moved) for new in _spellings(of) if new in lead_names)
    return next(aliases, name)


def _spellings(name: str) -> list[str]:
    """The name, and the same in older or newer words."""
    ends = [(old, new) for old, new in _WORDS.items() if name.endswith(old)]
    return [name, *(name.removesuffix(old) + new for old, new in ends)]
