"""One tensor under two names: models whose names differ by version, prefix or word are aligned.

`model.language_model.layers.0.…` of one version is `language_model.model.layers.0.…` of another,
`h.0.ln_1.weight` of the hub's GPT-2 is `transformer.h.0.ln_1.weight` in what transformers saves,
and `LayerNorm.gamma` of old BERTs is `LayerNorm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.tensor_names import any_version
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.errors import IncompatibleCheckpointsError

#: Name to what headers state of a tensor.
Table = Mapping[str, TensorEntry | TensorView]
#: Own names to the lead's names that they may mean.
_Candidates = Mapping[str, Sequence[str]]


def with_names_of(models: Sequence[Model], lead: int) -> list[Model]:
    """The models with their tensors under the names that the model `lead` has for them.

    Raises IncompatibleCheckpointsError for names that may mean several tensors.
    """
    lead_views = models[lead].views
    return [m if m is models[lead] else _renamed(m, lead_views) for m in models]


def _renamed(model: Model, lead: Table) -> Model:
    names = aliases(model.views, lead, model.name)
    if not names:
        return model
    views = {names.get(n, n): v for n, v in model.views.items()}
    views = {n: v if v.name == n else replace(v, name=n) for n, v in views.items()}
    said = digest_json(sorted(names.items()))[:24]
    return replace(model, views=views, variant=f"{model.variant}; named {said}")


def aliases(own: Table, lead: Table, where: str) -> dict[str, str]:
    """The lead's name of each tensor of `own` that the lead has under another name only.

    First what versions of transformers call one tensor, then what has one more first part on one
    side, if one such part fits the most tensors by name and shape. Raises
    IncompatibleCheckpointsError, about the model `where`, for names that may mean several tensors.
    """
    unknown = [n for n in own if n not in lead]
    free = [n for n in lead if n not in own] if unknown else []
    by_form = _by_form((any_version(n), n) for n in free)
    found = _only({n: by_form.get(any_version(n), ()) for n in unknown}, where)
    taken = set(found.values())
    rest = [n for n in unknown if n not in found]
    moves = _moves(rest, [n for n in free if n not in taken])
    fits = {part: _n_fitting(move, own, lead) for part, move in moves.items()}
    best = [part for part, n in fits.items() if n == max(fits.values())]
    return found | (_only(moves[best[0]], where) if len(best) == 1 else {})


def _moves(own: Sequence[str], lead: Collection[str]) -> dict[str, dict[str, list[str]]]:
    """By the first part that one side has more (marked with `-` if it is the own), the candidates.

    Own names to the lead's that are the same without that part.
    """
    moves: dict[str, dict[str, list[str]]] = {}
    tails: dict[str, list[tuple[str, str]]] = {}
    by_form: dict[str, list[str]] = _by_form((any_version(n), n) for n in lead)
    for form, names in by_form.items():
        head, _, tail = form.partition(".")
        tails.setdefault(any_version(tail), []).extend((head, n) for n in names)
    for name in own:
        form = any_version(name)
        head, _, tail = form.partition(".")
        for part, alias in tails.get(form, ()):
            moves.setdefault(part, {}).setdefault(name, []).append(alias)
        for alias in by_form.get(any_version(tail), ()):
            moves.setdefault(f"-{head}", {}).setdefault(name, []).append(alias)
    return moves


def _by_form(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    names_by_form: dict[str, list[str]] = {}
    for form, name in pairs:
        names_by_form.setdefault(form, []).append(name)
    return names_by_form


def _n_fitting(move: _Candidates, own: Table, lead: Table) -> int:
    return sum(any(own[n].shape == lead[a].shape for a in names) for n, names in move.items())


def _only(candidates: _Candidates, where: str) -> dict[str, str]:
    """Each name's one candidate; raises for a name with several, or two names with one."""
    found: dict[str, str] = {}
    own_name: dict[str, str] = {}
    for name, aliases_ in candidates.items():
        for alias in aliases_:
            other = own_name.setdefault(alias, name)
            if len(aliases_) > 1 or other != name:
                several = (name, *aliases_[:2]) if len(aliases_) > 1 else (other, name, alias)
                raise IncompatibleCheckpointsError(
                    "A tensor's name may mean several tensors",
                    where=where,
                    expected="one tensor for each name, in one version of its names",
                    found=", ".join(several),
                    next_step="remove the copy that is not meant, and save the model again",
                )
            found[name] = alias
    return found
