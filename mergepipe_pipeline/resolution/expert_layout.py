"""Experts of a mixture stored apart, as on the hub, or fused, as transformers 5 holds them.

Models of both layouts become models of one, as views into the same bytes: a fused tensor is runs of
the experts' tensors one after the other, an expert's tensor is a run of the fused one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.view import Part, Run, TensorView
from mergepipe_pipeline.errors import IncompatibleCheckpointsError

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
    parameters = json.loads(adapter.adapter_config or "{}").get("target_parameters") or []
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
