"""Where mergekit 0.1.5 stops, or makes NaN, and what we do there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.parity.recipes import BARE, ON_BASE, ONE, TRIO

#: What we do with such a recipe: merge it, or refuse it before any work.
Ours = Literal["merges", "refuses"]

UP_SCALE = """
slices:
  - sources: [{model: $e0, layer_range: [0, 3]}]
  - sources: [{model: $e1, layer_range: [1, 4]}]
"""
_OPPOSITE = """
models:
  - {model: $e0, parameters: {weight: 1}}
  - {model: $e1, parameters: {weight: -1}}
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A recipe that mergekit stops at, with (a pattern of) what it says, and what we do."""

    arch: str
    yaml: str
    says: str
    ours: Ours


REFUSALS: dict[str, Refusal] = {
    "any merge of a BertModel": Refusal(
        "bert_model", "merge_method: linear" + TRIO, "can only concatenate list", "merges"
    ),
    "another number of layers of kinds (gemma2)": Refusal(
        "gemma2", "merge_method: passthrough" + UP_SCALE, "number of `layer_types`", "merges"
    ),
    "another number of layers of kinds (qwen3)": Refusal(
        "qwen3", "merge_method: passthrough" + UP_SCALE, "number of `layer_types`", "merges"
    ),
    "multislerp on a base of tensors that no expert changes": Refusal(
        "llama", "merge_method: multislerp" + TRIO + ON_BASE, "weighted sum .* is zero", "merges"
    ),
    "linear with a base that is not listed": Refusal(
        "llama", "merge_method: linear" + TRIO + ON_BASE, "Missing required parameter", "merges"
    ),
    "one model twice": Refusal(
        "llama",
        """
merge_method: linear
models:
  - {model: $e0, parameters: {weight: 0.4}}
  - {model: $e0, parameters: {weight: 0.6}}
""",
        "Duplicate merge inputs",
        "merges",
    ),
    "two layers of one model in a slice": Refusal(
        "llama",
        """
merge_method: linear
slices:
  - sources:
      - {model: $e0, layer_range: [0, 2], parameters: {weight: 0.4}}
      - {model: $e0, layer_range: [2, 4], parameters: {weight: 0.6}}
""",
        "Duplicate merge inputs",
        "merges",
    ),
    "passthrough of one model and a base": Refusal(
        "llama", "merge_method: passthrough" + ONE, "requires exactly 1 inputs", "merges"
    ),
    "model_stock of one expert": Refusal(
        "llama", "merge_method: model_stock" + ONE, "at least 3 inputs", "refuses"
    ),
    "slerp without a base": Refusal(
        "llama",
        "merge_method: slerp\nmodels: [{model: $e0}, {model: $e1}]\nparameters: {t: 0.5}\n",
        "requires a base input",
        "refuses",
    ),
    "slerp of three": Refusal(
        "llama",
        "merge_method: slerp" + BARE + ON_BASE + "parameters: {t: 0.5}\n",
        "requires exactly 2 inputs",
        "refuses",
    ),
    "della of a tensor of one element": Refusal(
        "gpt_neox",
        "merge_method: della" + TRIO + ON_BASE + "parameters: {density: 0.5}\n",
        "Expected p_in >= 0",
        "merges",
    ),
    "della with probabilities above one": Refusal(
        "llama",
        "merge_method: della" + TRIO + ON_BASE + "parameters: {density: 0.9}\n",
        r"density \+/- epsilon",
        "refuses",
    ),
    "slices of unequal length": Refusal(
        "llama",
        """
merge_method: linear
slices:
  - sources:
      - {model: $e0, layer_range: [0, 2], parameters: {weight: 0.4}}
      - {model: $e1, layer_range: [2, 3], parameters: {weight: 0.6}}
""",
        "same number of layers",
        "refuses",
    ),
    "layers that a model lacks": Refusal(
        "llama",
        "merge_method: passthrough\nslices:\n  - sources: [{model: $e0, layer_range: [2, 6]}]\n",
        "required but not present",
        "refuses",
    ),
    "a base that is no source of a slice": Refusal(
        "llama",
        """
merge_method: task_arithmetic
slices:
  - sources: [{model: $e0, layer_range: [0, 4], parameters: {weight: 1}}]
base_model: $base
""",
        "Base input is not present",
        "refuses",
    ),
}

#: Recipes that mergekit carries out to models of NaN and infinity.
NOT_FINITE = {
    "linear of weights that cancel": "merge_method: linear" + _OPPOSITE,
    "multislerp of weights that cancel": "merge_method: multislerp" + _OPPOSITE,
    "multislerp on a base of weights that cancel": "merge_method: multislerp" + _OPPOSITE + ON_BASE,
}
