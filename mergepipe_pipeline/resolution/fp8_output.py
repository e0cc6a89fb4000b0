"""Which tensors of a result are written as fp8 with a scale per block, and what its config says.

Linear layers are, as transformers and vLLM run them: of whole blocks, since neither quantises a
part of a block of columns, transformers decodes no part of a block of rows, and vLLM stacks the
rows of several layers. Stacks of experts are kept: transformers 5 decodes them without their
scales. A template that is stored so says itself what is coded: its readers know it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mergepipe_pipeline.domain.codes import FP8_BLOCK
from mergepipe_pipeline.domain.layers import embedding_like, layer_index
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.output import stored_like
from mergepipe_pipeline.domain.recipe import Recipe, TensorRecipe
from mergepipe_pipeline.dtypes import FLOATING, FP8_BLOCKS
from mergepipe_pipeline.errors import RecipeError

Shapes = Mapping[str, tuple[int, ...]]

_BLOCKS = [FP8_BLOCK, FP8_BLOCK]
#: The module of a layer's experts, in a name of one of them or of all in a stack.
_EXPERTS = re.compile(r"(.*\.experts)\.(?:\d+\.|(?:gate_up|down)_proj$)")
#: Matrices of layers that are kept: routers, GPT-2's (they lie turned), towers that see or hear.
_KEPT = re.compile(
    r"\.(?:gate|router|shared_expert_gate)\.weight$|(?:^|\.)h\.\d+\.\w+\.c_\w+\.weight$"
    r"|(?:^|\.)(?:visual|vision\w*|audio\w*|multi_modal_projector|mm_projector|connector)\."
)
#: What vLLM makes one module of: all are coded, or none.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


def coded_names(recipe: Recipe, models: Sequence[Model], template: int) -> frozenset[str]:
    """The output tensors that are coded; `template` is the model that gives the config.

    None where the recipe does not ask for it. Raises RecipeError where it does, and none can be.
    """
    if recipe.out_dtype != FP8_BLOCKS:
        return frozenset()
    if models[template].checkpoint.config is None:
        raise RecipeError(
            "A result in fp8 needs a config.json that says so",
            where=f"{recipe.name}, dtype {FP8_BLOCKS}",
            expected=f"a config.json beside the weights of {models[template].name}",
            found="none",
            next_step="put it there, or write `dtype: bfloat16`",
        )
    stated = _of_template(recipe, models[template], template)
    default = _default(_shapes(recipe, models))
    names = [t.name for t in recipe.tensors]
    coded = frozenset(n for n in names if stated.get(n, n in default))
    if not coded:
        raise RecipeError(
            "No weight of the result can be written as fp8 by blocks",
            where=f"{recipe.name}, dtype {FP8_BLOCKS}",
            expected=f"linear layers with rows and columns in multiples of {FP8_BLOCK}",
            found="none among its tensors",
            next_step="write `dtype: bfloat16`",
        )
    return coded


def quantization_config(recipe: Recipe, models: Sequence[Model]) -> dict[str, Any]:
    """What config.json says of the codes; names the modules that transformers must not convert."""
    kept = dict.fromkeys(["lm_head", *_modules(_shapes(recipe, models), recipe.coded)])
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": _BLOCKS,
        "modules_to_not_convert": list(kept),
    }


def _shapes(recipe: Recipe, models: Sequence[Model]) -> Shapes:
    """The shapes of the output tensors of floating-point numbers, by name."""
    like = {t.name: stored_like(t, models) for t in recipe.tensors}
    return {name: view.shape for name, view in like.items() if view.dtype in FLOATING}


def _of_template(recipe: Recipe, model: Model, number: int) -> dict[str, bool]:
    """Whether a template that is fp8 by such blocks codes the tensors that are made of its own."""
    settings = model.checkpoint.form.settings if model.checkpoint.form else {}
    if settings.get("quant_method") != "fp8":
        return {}
    if settings.get("weight_block_size", _BLOCKS) != _BLOCKS:
        return {}
    return {
        t.name: _is_coded(t, model, number)
        for t in recipe.tensors
        if any(source == number for source, _ in t.sources)
    }


def _is_coded(t: TensorRecipe, model: Model, number: int) -> bool:
    names = [tensor for source, tensor in t.sources if source == number]
    codes = [part.codes for part in model.views[names[-1]].stored]
    return bool(codes) and all(
        c is not None
        and c.element == "F8_E4M3"
        and c.block == (min(FP8_BLOCK, c.shape[-2]), min(FP8_BLOCK, c.shape[-1]))
        and c.shape[-2] * c.shape[-1] % 4 == 0  # scales that follow codes lie at whole words
        for c in codes
    )


def _default(shapes: Shapes) -> frozenset[str]:
    """The tensors that are coded where no template says so."""
    whole = {name for name, shape in shapes.items() if _is_linear(name, shape)}
    for name in sorted(whole):
        above, _, module = name.removesuffix(".weight").rpartition(".")
        for group in (g for g in _TOGETHER if module in g):
            members = {f"{above}.{m}.weight" for m in group} & shapes.keys()
            whole -= set() if members <= whole else members
    return frozenset(whole)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a layer's linear module in whole blocks."""
    if layer_index(name) is None or embedding_like(name) or _KEPT.search(name):
        return False
    is_matrix = len(shape) == 2 and name.endswith(".weight")
    return is_matrix and all(n and n % FP8_BLOCK == 0 for n in shape)


def _modules(shapes: Shapes, coded: Collection[str]) -> Iterator[str]:
    """The modules whose matrices are not coded."""
    for name, shape in shapes.items():
        if name in coded or len(shape) < 2:
            continue
        if match := _EXPERTS.match(name):
            yield match[1]  # transformers has all experts in one module
        if name.endswith(".weight"):
            yield name.removesuffix(".weight")
