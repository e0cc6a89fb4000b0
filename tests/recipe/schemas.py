"""Operator schemas by hand: what the recipe reader knows of methods, free of the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.operator import BaseUse, OperatorSchema, Parameter, Response, Space
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.recipe.model_tensors import ModelTable
from mergepipe_pipeline.recipe.parse import ParsedRecipe, parse_recipes, resolve_recipe

WEIGHT = Parameter("weight", "model", "float", None, "factor")
DENSITY = Parameter("density", "model", "float", 1.0, "share kept")
GAMMA = Parameter("gamma", "model", "float", 0.01, "share of outliers", least=0)
EPSILON = Parameter("epsilon", "model", "float", 0.15, "spread")
SCALE = Parameter("scale", "model", "float", 1.0, "factor")
LAMBDA = Parameter("lambda", "method", "float", 1.0, "factor of the update")
INT8 = Parameter("int8_mask", "method", "bool", False, "no effect")
RESCALE = Parameter("rescale", "method", "bool", True, "restore the norm")
VARIANT = Parameter("variant", "method", "choice", "mergekit", "whose", ("mergekit", "paper"))
T = Parameter("t", "method", "float", None, "way from base to expert")


def _normalize(default: bool) -> Parameter:
    return Parameter("normalize", "method", "bool", default, "divide by the weights")


def _schema(
    name: str,
    *parameters: Parameter,
    space: Space = "delta",
    base: BaseUse = "required",
    experts: tuple[int, int | None] = (1, None),
    response: Response = "vote",
) -> OperatorSchema:
    return OperatorSchema(
        name,
        parameters,
        "Σ",
        "https://x",
        space=space,
        base=base,
        experts=experts,
        response=response,
    )


def _flag(name: str, default: bool) -> Parameter:
    return Parameter(name, "method", "bool", default, "a flag")


def _number(name: str, default: float) -> Parameter:
    return Parameter(name, "method", "float", default, "a number")


_VOTE = (WEIGHT, DENSITY, _normalize(True), LAMBDA, INT8, VARIANT)
_PAIR: tuple[int, int] = (1, 1)
METHODS = {
    s.name: s
    for s in (
        _schema("linear", WEIGHT, _normalize(True), space="value", base="none"),
        _schema("ties", *_VOTE),
        _schema(
            "task_arithmetic",
            WEIGHT,
            _normalize(False),
            LAMBDA,
            INT8,
            response="additive",
        ),
        _schema("dare_ties", *_VOTE, RESCALE),
        _schema("dare_linear", *_VOTE, RESCALE, response="additive"),
        _schema("breadcrumbs", *_VOTE, GAMMA, response="additive"),
        _schema("breadcrumbs_ties", *_VOTE, GAMMA),
        _schema("della", *_VOTE, RESCALE, EPSILON),
        _schema("della_linear", *_VOTE, RESCALE, EPSILON, response="additive"),
        _schema("slerp", T, space="value", experts=_PAIR, response="unbounded"),
        _schema(
            "nuslerp",
            WEIGHT,
            _flag("nuslerp_flatten", True),
            _flag("nuslerp_row_wise", False),
            space="delta_if_base",
            base="optional",
            experts=(2, 2),
            response="unbounded",
        ),
        _schema(
            "multislerp",
            WEIGHT,
            _flag("normalize_weights", True),
            _number("eps", 1e-8),
            space="delta_if_base",
            base="optional",
            response="unbounded",
        ),
        _schema(
            "karcher",
            Parameter("max_iter", "method", "int", 10, "rounds"),
            _number("tol", 1e-5),
            space="value",
            base="none",
            response="unbounded",
        ),
        _schema(
            "model_stock", _flag("filter_wise", False), experts=(2, None), response="unbounded"
        ),
        _schema("sce", _number("select_topk", 1.0), INT8, response="unbounded"),
        _schema("arcee_fusion", experts=_PAIR, response="unbounded"),
        _schema("nearswap", T, space="value", experts=_PAIR, response="unbounded"),
        _schema("ram", _number("epsilon", 1e-5)),
        _schema(
            "ramplus_tl",
            Parameter("r", "method", "float", 0.1, "strength", least=0),
            _number("epsilon", 1e-5),
        ),
        _schema("passthrough", SCALE, space="value", base="none", experts=_PAIR),
    )
}

#: A model of three layers, as its names.
NAMES = (
    "model.embed_tokens.weight",
    *(f"model.layers.{k}.{part}.weight" for k in range(3) for part in ("self_attn.q", "mlp.up")),
    "model.norm.weight",
    "lm_head.weight",
)
Table = dict[str, TensorEntry]


def names_of(n_layers: int, *, head: bool = True) -> tuple[str, ...]:
    """The names of a model like that of NAMES with any number of layers."""
    parts = ("self_attn.q", "mlp.up")
    layers = (f"model.layers.{k}.{part}.weight" for k in range(n_layers) for part in parts)
    last = ("model.norm.weight", "lm_head.weight")
    return ("model.embed_tokens.weight", *layers, *last[: 1 + head])


def table(
    names: Sequence[str] = NAMES, dtype: str = "F32", shape: tuple[int, ...] = (2, 2)
) -> Table:
    """A model's tensors by name."""
    return {n: TensorEntry(n, dtype, shape, "model.safetensors", 0) for n in names}


def without(names: set[str]) -> Table:
    """The tensors of NAMES but some."""
    return table([n for n in NAMES if n not in names])


def parse(text: str) -> ParsedRecipe:
    """Parse with the methods of this file."""
    return parse_recipes(text, name="demo", where="demo.yml", methods=METHODS)[-1]


def resolve(
    text: str,
    tables: Mapping[str, Table] | None = None,
    *,
    every: Table | None = None,
    partial: Sequence[str] = (),
    depth: int | None = None,
) -> Recipe:
    """Parse and resolve; models have all of `every` (NAMES), but those that `tables` gives.

    The configs of all models tell `depth` layers.
    """
    raw = parse(text)
    given, usual = tables or {}, table() if every is None else every
    return resolve_recipe(
        raw,
        [
            ModelTable(ref, given.get(ref.text, usual), ref.text in partial, depth)
            for ref in raw.references
        ],
    )


def number(recipe: Recipe, model: str) -> int:
    """The number of the model of that text."""
    return [ref.text for ref in recipe.models].index(model)


def values(recipe: Recipe, parameter: str, model: str | None = None) -> dict[str, object]:
    """Tensor name to the value of a parameter, of the method or of one model."""
    out: dict[str, object] = {}
    for t in recipe.tensors:
        if model is None:
            out[t.name] = dict(t.params)[parameter]
        else:
            for row in (i.params for i in t.inputs if i.model == number(recipe, model)):
                out[t.name] = dict(row)[parameter]
    return out


def inputs(recipe: Recipe) -> dict[str, list[tuple[str, str]]]:
    """Tensor name to its inputs: model's text and the tensor's name there."""
    return {
        t.name: [(recipe.models[i.model].text, i.tensor) for i in t.inputs] for t in recipe.tensors
    }
