"""The recipes that mergekit and we both run, as a table.

`$base`, `$e0`, `$e1` and `$e2` stand for the models of a family. `dtype: float32` and
`out_dtype: bfloat16` are appended, so that both sides compute in float32 and round once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

#: Where a difference of more than rounding is no fault: "trim" and "band" where some |δ| equals a
#: threshold (whose elements win is arbitrary in mergekit), "choice" where a score that is computed
#: with rounding decides between keeping and dropping and is next to the threshold.
Doubt = Literal["none", "trim", "band", "choice"]

Stored = Literal["bfloat16", "float32"]

SUFFIX = "dtype: float32\nout_dtype: bfloat16\n"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe for the families `archs`, whose files are of dtype `stored`.

    `unchanged` False: families without unchanged tensors. `reference` is the dtype that mergekit
    computes in: float64 where its float32 result is mostly rounding.
    """

    archs: tuple[str, ...]
    yaml: str
    doubt: Doubt = "none"
    stored: Stored = "bfloat16"
    unchanged: bool = True
    reference: str = "float32"

    def text(self, family: Path) -> str:
        """The YAML over the models in `family`."""
        return fill(self.yaml, family) + SUFFIX


def fill(yaml: str, family: Path) -> str:
    """`yaml` with the family's folders in place of `$base` and `$e0` to `$e2`."""
    experts = {f"e{i}": str(family / f"expert_{i:02d}") for i in range(3)}
    return Template(yaml.lstrip()).substitute(experts, base=str(family / "base"))


TRIO = """
models:
  - {model: $e0, parameters: {weight: 1.0}}
  - {model: $e1, parameters: {weight: 0.731}}
  - {model: $e2, parameters: {weight: 0.417}}
"""
PAIR = """
models:
  - {model: $e0, parameters: {weight: 0.6}}
  - {model: $e1, parameters: {weight: 0.3}}
"""
BARE = """
models: [{model: $e0}, {model: $e1}, {model: $e2}]
"""
ONE = """
models: [{model: $e0}]
base_model: $base
"""
ON_BASE = "base_model: $base\n"


def _recipe(
    method: str,
    body: str,
    *archs: str,
    doubt: Doubt = "none",
    stored: Stored = "bfloat16",
    reference: str = "float32",
) -> Recipe:
    yaml = f"merge_method: {method}{body}"
    return Recipe(archs, yaml, doubt, stored, reference=reference)


RECIPES: dict[str, Recipe] = {
    "linear": _recipe("linear", TRIO, "llama_tied", "mistral", "mixtral"),
    "linear-sum": _recipe("linear", TRIO + "parameters: {normalize: false}\n", "gpt2", "phi3"),
    "linear-gradient": _recipe(
        "linear",
        """
models:
  - {model: $base, parameters: {weight: [1.0, 0.23]}}
  - {model: $e0, parameters: {weight: [{filter: mlp, value: [0.1, 0.9, 0.3]}, {value: 0.4}]}}
""",
        "qwen3",
        "bert",
        "gpt_neox",
    ),
    "passthrough": _recipe("passthrough", "\nmodels: [{model: $e2}]\n", "llama", "mixtral", "bert"),
    "passthrough-scale": _recipe(
        "passthrough",
        """
models:
  - model: $e2
    parameters:
      scale:
        - {filter: proj, value: [0.531, 1.4127]}
        - {filter: dense, value: 0.25}
        - {value: 1.0}
""",
        "qwen3",
        "gpt_neox",
        "phi3",
    ),
    "task_arithmetic": _recipe("task_arithmetic", TRIO + ON_BASE, "gemma2", "gpt2", "mixtral"),
    "task_arithmetic-gradient": _recipe(
        "task_arithmetic",
        """
models:
  - {model: $e0, parameters: {weight: [0.0, 0.5, 1.0]}}
  - {model: $e1, parameters: {weight: [{filter: attn, value: -0.3}, {value: [0.2, 0.8]}]}}
parameters: {lambda: 0.8, normalize: true}
base_model: $base
""",
        "llama",
        "phi3",
        "bert",
    ),
    "ties": _recipe(
        "ties",
        TRIO + ON_BASE + "parameters: {density: 0.3}\n",
        "llama",
        "gpt2",
        "bert",
        doubt="trim",
        stored="float32",
    ),
    "ties-gradient": _recipe(
        "ties",
        """
models:
  - {model: $e0, parameters: {weight: 1.0, density: [0.2, 0.7]}}
  - {model: $e1, parameters: {weight: [0.4, 0.9]}}
  - {model: $base}
parameters:
  density: [{filter: mlp, value: 0.5}, {value: 1.0}]
  normalize: false
  lambda: 1.2
  int8_mask: true
base_model: $base
""",
        "gemma2",
        "phi3",
        "gpt_neox",
        doubt="trim",
        stored="float32",
    ),
    "ties-coarse": _recipe(
        "ties", TRIO + ON_BASE + "parameters: {density: 0.3}\n", "llama", doubt="trim"
    ),
    "ties-rescale": _recipe(
        "ties",
        TRIO + ON_BASE + "parameters: {density: 0.3, rescale: true}\n",
        "qwen3",
        doubt="trim",
        stored="float32",
    ),
    "breadcrumbs": _recipe(
        "breadcrumbs",
        TRIO + ON_BASE + "parameters: {density: 0.6, gamma: 0.05}\n",
        "llama",
        "qwen3",
        "gpt_neox",
        doubt="band",
        stored="float32",
    ),
    "breadcrumbs-narrow": _recipe(
        "breadcrumbs",
        TRIO + ON_BASE + "parameters: {density: 0.95, gamma: 0.2}\n",
        "phi3",
        doubt="band",
        stored="float32",
    ),
    "breadcrumbs-coarse": _recipe(
        "breadcrumbs", TRIO + ON_BASE + "parameters: {density: 0.6}\n", "gpt2", doubt="band"
    ),
    "breadcrumbs_ties": _recipe(
        "breadcrumbs_ties",
        TRIO + ON_BASE + "parameters: {density: [0.3, 0.9]}\n",
        "gemma2",
        "gpt2",
        "bert",
        doubt="band",
        stored="float32",
    ),
    "slerp": _recipe("slerp", ONE + "parameters: {t: 0.35}\n", "llama", "gpt2", "bert"),
    "slerp-gradient": _recipe(
        "slerp",
        ONE
        + """
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - {value: 0.5}
""",
        "qwen3",
        "mistral",
        "phi3",
    ),
    "nuslerp": _recipe("nuslerp", PAIR, "llama", "gpt2", "gemma2"),
    "nuslerp-base": _recipe("nuslerp", PAIR + ON_BASE, "phi3", "bert", "gpt_neox"),
    "nuslerp-last": _recipe(
        "nuslerp", PAIR + "parameters: {nuslerp_flatten: false}\n", "mistral", "bert", "qwen3"
    ),
    "nuslerp-row": _recipe(
        "nuslerp",
        PAIR + ON_BASE + "parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n",
        "llama",
        "gpt2",
        "phi3",
    ),
    "multislerp": _recipe("multislerp", TRIO, "llama", "gpt_neox", "bert"),
    "multislerp-base": Recipe(
        ("qwen3", "phi3", "gpt2"),
        "merge_method: multislerp" + TRIO + ON_BASE,
        unchanged=False,
    ),
    "multislerp-sum": _recipe(
        "multislerp", PAIR + ON_BASE + "parameters: {normalize_weights: false}\n", "mistral"
    ),
    "karcher": _recipe("karcher", BARE, "llama", "gpt2", "bert"),
    "karcher-once": _recipe("karcher", BARE + "parameters: {max_iter: 1, tol: 1.0e-9}\n", "phi3"),
    "model_stock": _recipe("model_stock", BARE + ON_BASE, "llama", "gpt2", "gemma2"),
    "model_stock-filter": _recipe(
        "model_stock",
        BARE + ON_BASE + "parameters: {filter_wise: true}\n",
        "qwen3",
        "phi3",
        "bert",
    ),
    "sce": _recipe("sce", BARE + ON_BASE, "llama", "gpt2", "bert"),
    "sce-topk": _recipe(
        "sce",
        BARE + ON_BASE + "parameters: {select_topk: 0.4}\n",
        "mistral",
        "phi3",
        "gpt_neox",
        doubt="choice",
        stored="float32",
    ),
    "arcee_fusion": _recipe(
        "arcee_fusion",
        ONE,
        "llama",
        "gpt2",
        "bert",
        doubt="choice",
        reference="float64",
    ),
    "nearswap": _recipe("nearswap", ONE + "parameters: {t: 0.002}\n", "qwen3", "mixtral", "bert"),
    "nearswap-gradient": _recipe("nearswap", ONE + "parameters: {t: [0.0005, 0.01]}\n", "gpt2"),
    "ram": _recipe("ram", BARE + ON_BASE, "llama", "gemma2", "mixtral"),
    "ram-epsilon": _recipe("ram", BARE + ON_BASE + "parameters: {epsilon: 0.002}\n", "phi3"),
    "ramplus_tl": _recipe(
        "ramplus_tl",
        BARE + ON_BASE + "parameters: {epsilon: 0.001, r: 0.4, alpha: 0.7}\n",
        "llama",
        "gpt_neox",
        "bert",
    ),
    "slices-passthrough": _recipe(
        "passthrough",
        """
slices:
  - sources: [{model: $e0, layer_range: [0, 3]}]
  - sources: [{model: $e1, layer_range: [1, 4], parameters: {scale: 0.5}}]
""",
        "llama",
        "phi3",
        "gpt2",
        "gpt_neox",
    ),
    "slices-interleaved": _recipe(
        "passthrough",
        """
slices:
  - sources: [{model: $e0, layer_range: [0, 1]}]
  - sources: [{model: $e1, layer_range: [1, 2]}]
  - sources: [{model: $e0, layer_range: [1, 2]}]
  - sources: [{model: $base, layer_range: [3, 4]}]
""",
        "qwen3",
        "mixtral",
        "bert",
    ),
    "slices-slerp": _recipe(
        "slerp",
        """
slices:
  - sources:
      - {model: $base, layer_range: [0, 4]}
      - {model: $e0, layer_range: [0, 4]}
base_model: $base
parameters: {t: [{filter: mlp, value: [0, 1]}, {value: 0.5}]}
""",
        "mistral",
        "gpt2",
    ),
    "slices-shifted": _recipe(
        "linear",
        """
slices:
  - sources:
      - {model: $e0, layer_range: [0, 2], parameters: {weight: [1.0, 0.517]}}
      - {model: $e1, layer_range: [1, 3], parameters: {weight: 0.613}}
  - sources:
      - {model: $e1, layer_range: [1, 4], parameters: {weight: [0.311, 0.627]}}
      - {model: $e2, layer_range: [0, 3], parameters: {weight: 0.173}}
    parameters: {normalize: false}
""",
        "llama",
        "gpt2",
        "bert",
    ),
    "slices-ties": _recipe(
        "ties",
        """
slices:
  - sources:
      - {model: $base, layer_range: [0, 2]}
      - {model: $e0, layer_range: [0, 2], parameters: {weight: 0.9}}
      - {model: $e1, layer_range: [0, 2], parameters: {weight: 0.4, density: 0.2}}
  - sources:
      - {model: $base, layer_range: [1, 4]}
      - {model: $e2, layer_range: [1, 4], parameters: {weight: [0.2, 1.0]}}
parameters: {density: 0.5}
base_model: $base
""",
        "llama_tied",
        "phi3",
        doubt="trim",
        stored="float32",
    ),
}
