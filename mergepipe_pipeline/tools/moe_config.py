"""What mergekit-moe's YAML asks for, strictly: unknown keys and wrong kinds are all said at once.

Source: https://github.com/arcee-ai/mergekit/blob/main/docs/moe.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergepipe_pipeline.recipe.problems import Problems, recipe_error, unknown_key
from mergepipe_pipeline.recipe.yaml_text import read_yaml
from mergepipe_pipeline.resolution.recipe_text import yaml_file
from mergepipe_pipeline.storage.regular import text_of

GateMode = Literal["hidden", "cheap_embed", "random"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ExpertConfig(_Strict):
    """One expert: whose MLPs, which prompts it is for, and what is done to its weights.

    `residual_scale` multiplies its down projections; `noise_scale` is the standard deviation of
    noise that is added to all its weights.
    """

    source_model: str = Field(min_length=1)
    positive_prompts: list[str] = []
    negative_prompts: list[str] = []
    residual_scale: float | None = None
    noise_scale: float | None = Field(default=None, ge=0)


class MoeConfig(_Strict):
    """A mixture: attention and norms of `base_model`, MLPs of the experts."""

    base_model: str = Field(min_length=1)
    experts: list[ExpertConfig] = Field(min_length=2)
    shared_experts: list[ExpertConfig] = Field(default=[], max_length=1)
    gate_mode: GateMode = "hidden"
    architecture: Literal["mixtral", "qwen", "qwen3"] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    experts_per_token: int = Field(default=2, ge=1)


def load_moe_config(path: str | Path) -> MoeConfig:
    """The mixture that a file asks for. Raises RecipeError with all problems."""
    where = text_of(path)
    text = yaml_file(Path(path), "mixture")
    document = read_yaml(text)
    problems = document.problems
    if not len(problems):
        try:
            config = MoeConfig.model_validate(document.value)
        except ValidationError as invalid:
            _add(problems, invalid)
        else:
            _check(problems, config)
    if len(problems):
        raise recipe_error([problems], where)
    return config


def _add(problems: Problems, invalid: ValidationError) -> None:
    for error in invalid.errors():
        path = error["loc"]
        if error["type"] == "extra_forbidden":
            of = ExpertConfig if len(path) > 1 else MoeConfig
            problems.add(path, unknown_key(str(path[-1]), of.model_fields))
        else:
            problems.add(path, error["msg"][0].lower() + error["msg"][1:])


def _check(problems: Problems, config: MoeConfig) -> None:
    """What the keys must be together."""
    if config.experts_per_token > len(config.experts):
        text = f"expected at most the number of experts, {len(config.experts)}"
        problems.add(("experts_per_token",), f"{text}, found {config.experts_per_token}")
    if config.gate_mode == "random":
        return
    for key in ("experts", "shared_experts"):
        for i, expert in enumerate(getattr(config, key)):
            if not expert.positive_prompts:
                text = f"positive_prompts are needed for gate_mode {config.gate_mode}"
                problems.add((key, i), f"{text}; `gate_mode: random` needs none")
