"""Aligns models: tensors under the names, and experts in the layout, that the leading model has.

`model.language_model.layers.0.…` of one version is `language_model.model.layers.0.…` of another,
`h.0.ln_1.weight` of the hub's GPT-2 is `transformer.h.0.ln_1.weight` in what transformers saves,
and `LayerNorm.gamma` of old BERTs is `LayerNorm.weight`. Experts of a mixture are stored per
expert, as on the hub, or fused, as transformers 5 holds them: models of both layouts become models
of one, as views into the same bytes. A fused tensor is runs of the experts' tensors one after the
other, an expert's tensor is a run of the fused one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.tensor_names import any_version
from mergepipe_pipeline.domain.view import Part, Run, TensorView
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


_APART = re.compile(
    r"(?P<stem>.+\.)(?P<block>block_sparse_moe|mlp|feed_forward)\.experts\.(?P<number>\d+)\."
    r"(?P<kind>w[123]|(?:gate|up|down)_proj)\.weight"
)
_FUSED = re.compile(
    r"(?P<stem>.+\.)(?P<block>mlp|feed_forward)\.experts\.(?P<kind>gate_up_proj|down_proj)"
)
_ROUTER = re.compile(r"(?P<stem>.+\.)(?:block_sparse_moe|mlp)\.gate\.(?P<rest>weight)")
#: Kinds of an expert's matrices by the fused tensor, in the order of their rows there.
_KINDS = {
    "block_sparse_moe": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "feed_forward": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}
#: What a block is called where its experts are fused.
_FUSED_BLOCK = {"block_sparse_moe": "mlp", "mlp": "mlp", "feed_forward": "feed_forward"}
_FUSES = {kind: fused for kinds in _KINDS.values() for fused, ks in kinds.items() for kind in ks}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model holds its experts: fused, or apart in blocks called `block`."""

    block: str
    fused: bool


FUSED = Layout("mlp", True)


def layout_of(names: Mapping[str, TensorView]) -> Layout | None:
    """The layout of a model with these tensors; None for one without experts."""
    for name, view in names.items():
        if match := _APART.fullmatch(name):
            return Layout(match["block"], False)
        if (match := _FUSED.fullmatch(name)) and len(view.shape) == 3:
            return Layout(match["block"], True)
    return None


def updates_fused(adapter: Checkpoint) -> bool:
    """Whether an adapter updates fused experts, which PEFT calls parameters."""
    parameters = adapter.adapter_stated.get("target_parameters") or []
    return any("experts." in str(p) for p in parameters if isinstance(p, str))


def in_one_layout(models: Sequence[Model], lead: int) -> list[Model]:
    """The models with their experts as the model `lead` has them; fused where an update needs it.

    Raises IncompatibleCheckpointsError for a model whose experts cannot be laid out so.
    """
    layouts = [layout_of(m.views) for m in models]
    layout = layouts[lead]
    if any(_has_fused_update(m) for m in models):
        layout = FUSED
    if layout is None:
        return list(models)
    return [laid_out(m, layout) for m in models]


def laid_out(model: Model, layout: Layout) -> Model:
    """The model with its experts in another layout; as it is where it has that already."""
    own = layout_of(model.views)
    if own in (None, layout) or (own is not None and own.fused and layout.fused):
        return model
    views = dict(_fused(model)) if layout.fused else dict(_apart(model, layout.block))
    return replace(model, views=views, variant=f"{model.variant}; experts {layout}")


def _has_fused_update(model: Model) -> bool:
    return any(v.low_rank and _FUSED.fullmatch(name) for name, v in model.views.items())


def _fused_name(match: re.Match[str]) -> str:
    return f"{match['stem']}{_FUSED_BLOCK[match['block']]}.experts.{_FUSES[match['kind']]}"


def _fused(model: Model) -> Iterator[tuple[str, TensorView]]:
    """Every tensor under its fused name, where the first of its experts stood."""
    groups: dict[str, dict[tuple[int, str], TensorView]] = {}
    for name, view in model.views.items():
        if match := _APART.fullmatch(name):
            fused = _fused_name(match)
            groups.setdefault(fused, {})[int(match["number"]), match["kind"]] = view
    yielded = set()
    for name, view in model.views.items():
        if match := _APART.fullmatch(name):
            fused = _fused_name(match)
            if fused not in yielded:
                yielded.add(fused)
                kinds = _KINDS[match["block"]][fused.rpartition(".")[2]]
                yield fused, _stacked(fused, groups[fused], kinds, model)
        else:
            own = _ROUTER.sub(r"\g<stem>mlp.gate.\g<rest>", name)
            yield own, replace(view, name=own)


def _stacked(
    name: str,
    experts: Mapping[tuple[int, str], TensorView],
    kinds: Sequence[str],
    model: Model,
) -> TensorView:
    n = len(experts) // len(kinds)
    order = [(e, kind) for e in range(n) for kind in kinds]
    views = [experts[key] for key in order if key in experts]
    first = views[0] if views else next(iter(experts.values()))
    plain = (first.dtype, first.shape, first.is_delta)
    if len(views) < len(experts) or any(
        (v.dtype, v.shape, v.is_delta) != plain or v.low_rank or v.runs or not v.stored
        for v in views
    ):
        raise IncompatibleCheckpointsError(
            "A model's experts cannot be fused, as another model here has them",
            where=f"{model.name}, {name}",
            expected="all experts as stored tensors of one type and shape",
            found="an update of single experts" if first.low_rank else "some of them, or others",
            next_step="give all models in one layout, or merge an adapter into its base first",
        )
    parts, size = tuple(v.stored[0] for v in views), first.numel
    runs = tuple(Run(i * size, i, 0, size) for i in range(len(views)))
    shape = (n, len(kinds) * first.shape[0], *first.shape[1:])
    return TensorView(name, first.dtype, shape, parts, runs, first.is_delta)


def _apart(model: Model, block: str) -> Iterator[tuple[str, TensorView]]:
    """Every tensor under its names on the hub."""
    for name, view in model.views.items():
        if match := _FUSED.fullmatch(name):
            yield from _split(view, match["stem"], _KINDS[block][match["kind"]], block, model)
        else:
            own = _ROUTER.sub(rf"\g<stem>{block}.gate.\g<rest>", name)
            yield own, replace(view, name=own)


def _split(
    view: TensorView, stem: str, kinds: Sequence[str], block: str, model: Model
) -> Iterator[tuple[str, TensorView]]:
    if view.runs or not view.stored:
        raise IncompatibleCheckpointsError(
            "A model's fused experts cannot be taken apart, as another model here has them",
            where=f"{model.name}, tensor {view.name}",
            expected="a stored tensor",
            found="rows in another order" if view.runs else "an update alone",
            next_step="give all models in one layout",
        )
    n, rows, *rest = view.shape
    shape = (rows // len(kinds), *rest)
    part: Part = view.stored[0]
    for i in range(n * len(kinds)):
        e, kind = i // len(kinds), kinds[i % len(kinds)]
        name = f"{stem}{block}.experts.{e}.{kind}.weight"
        runs = (Run(0, 0, i * prod(shape), prod(shape)),)
        yield name, TensorView(name, view.dtype, shape, (part,), runs, view.is_delta)
