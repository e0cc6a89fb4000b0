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
    wanted = models[lead].views
    return [m if m is models[lead] else _renamed(m, wanted) for m in models]


def _renamed(model: Model, wanted: Collection[str]) -> Model:
    """The model with every tensor that `wanted` knows by another name under that one."""
    unknown = [n for n in model.views if n not in wanted]
    if not unknown or not wanted:
        return model
    prefix = _prefix(unknown, wanted)
    names = {n: _alias(n, prefix, wanted) for n in model.views}
    if all(n == alias for n, alias in names.items()) or len(set(names.values())) < len(names):
        return model
    views = {names[n]: replace(v, name=names[n]) for n, v in model.views.items()}
    return replace(model, views=views, variant=f"{model.variant}; named {prefix}")


def _prefix(unknown: Sequence[str], wanted: Collection[str]) -> str:
    """What stands before most unknown names in one of the two; `-` marks what they have more.

    Empty if no prefix makes any name known.
    """
    found: dict[str, int] = {}
    tails = {n.partition(".")[2]: n.partition(".")[0] for n in wanted}
    for name in unknown:
        head, _, tail = name.partition(".")
        for new in _spellings(name):
            if new in tails:
                found[f"{tails[new]}."] = found.get(f"{tails[new]}.", 0) + 1
        for new in _spellings(tail):
            if new in wanted:
                found[f"-{head}."] = found.get(f"-{head}.", 0) + 1
    return max(found, key=lambda p: (found[p], p), default="")


def _alias(name: str, prefix: str, wanted: Collection[str]) -> str:
    """The name by which a tensor is known, else its own with the prefix that its model needs."""
    if name in wanted:
        return name
    moved = name.removeprefix(prefix[1:]) if prefix.startswith("-") else prefix + name
    known = (new for of in (name, moved) for new in _spellings(of) if new in wanted)
    return next(known, name)


def _spellings(name: str) -> list[str]:
    """The name, and the same in older or newer words."""
    ends = [(old, new) for old, new in _WORDS.items() if name.endswith(old)]
    return [name, *(name.removesuffix(old) + new for old, new in ends)]
