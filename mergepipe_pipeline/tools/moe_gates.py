"""The file of a mixture, and the gates of its layers: from hidden states of prompts, from
their embeddings, or random.

The file is mergekit-moe's YAML (https://github.com/arcee-ai/mergekit/blob/main/docs/moe.md), read
strictly: unknown keys and wrong kinds are all said at once.
A gate is a unit vector: the mean of an expert's positive prompts less that of its negative ones.
As `mergekit-moe` does, hidden states are those of the base that enter the layer, at a prompt's last
token; `cheap_embed` sums the embeddings of a prompt's tokens. A prompt begins with the text of the
tokenizer's `bos_token`. Prompts run one by one, and means are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.layers import is_embedding
from mergepipe_pipeline.errors import CheckpointError, MergePipeError, not_installed
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.recipe.keys import Keys
from mergepipe_pipeline.recipe.problems import Problems, recipe_error
from mergepipe_pipeline.recipe.yaml_text import read_yaml
from mergepipe_pipeline.resolution.recipe_text import yaml_file
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.tools.models import Input, noise

#: Nothing is downloaded, and no code of a model is run.
_LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}
#: [layers, hidden] of one prompt.
_Of = Callable[[str], F32Array]
GateMode = Literal["hidden", "cheap_embed", "random"]


class ExpertConfig(Keys):
    """One expert: whose MLPs, which prompts it is for, and what is done to its weights.

    `residual_scale` multiplies its down projections; `noise_scale` is the standard deviation of
    noise that is added to all its weights.
    """

    source_model: str = Field(min_length=1)
    positive_prompts: list[str] = Field(default=[])
    negative_prompts: list[str] = Field(default=[])
    residual_scale: float | None = None
    noise_scale: float | None = Field(default=None, ge=0)


class MoeConfig(Keys):
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
    document = read_yaml(yaml_file(Path(path), "mixture"))
    problems = document.problems
    config = None if problems else MoeConfig.read(document.value, (), problems)
    if config is not None:
        _check(problems, config)
    if config is None or problems:
        raise recipe_error([problems], text_of(path), "mixture")
    return config


def _check(problems: Problems, config: MoeConfig) -> None:
    """Add a problem for keys that do not go together."""
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


def gates(
    mode: GateMode,
    base: Input,
    experts: Sequence[ExpertConfig],
    shape: tuple[int, int],
    seed: int,
    progress: Progress,
) -> F32Array:
    """The gates [layers, experts, hidden]; `shape` is (layers, hidden).

    Raises CheckpointError if the base cannot be run, MergePipeError for prompts that cancel.
    """
    if mode == "random":
        return np.stack([noise((len(experts), shape[1]), seed, i) for i in range(shape[0])])
    of = _hidden(base, shape) if mode == "hidden" else _embedded(base, shape)
    prompts = sum(len(e.positive_prompts) + len(e.negative_prompts) for e in experts)
    with progress.task("gates", prompts) as advance:

        def counted(prompt: str) -> F32Array:
            advance(1)
            return of(prompt)

        made = [_gate(expert, counted, mode == "cheap_embed") for expert in experts]
    return np.stack(made, axis=1)


def _gate(expert: ExpertConfig, of: _Of, is_unit: bool) -> F32Array:
    """[layers, hidden] of one expert; with `is_unit`, both means count the same."""
    gate = _mean(expert.positive_prompts, of)
    if expert.negative_prompts:
        negative = _mean(expert.negative_prompts, of)
        gate = _unit(gate, expert) - _unit(negative, expert) if is_unit else gate - negative
    return _unit(gate, expert)


def _mean(prompts: Sequence[str], of: _Of) -> F32Array:
    mean: F32Array = np.mean([of(prompt) for prompt in prompts], axis=0, dtype=np.float32)
    return mean


def _unit(values: F32Array, expert: ExpertConfig) -> F32Array:
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    if not (np.isfinite(norms).all() and norms.all()):
        raise MergePipeError(
            "An expert's prompts give no gate",
            where=f"experts, {expert.source_model}",
            expected="prompts whose states are finite and do not cancel",
            found="NaN or infinity" if not np.isfinite(norms).all() else "a difference of zero",
            next_step="give other prompts, or `gate_mode: random`",
        )
    unit: F32Array = values / norms
    return unit


def _hidden(base: Input, shape: tuple[int, int]) -> _Of:
    torch, transformers = _transformers(base)
    tokens = _tokens(base, transformers)
    model = _run(
        base,
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            base.checkpoint.root, dtype="auto", **_LOCAL
        ).eval(),
    )

    def of(prompt: str) -> F32Array:
        ids = torch.tensor([tokens(prompt)])
        with torch.no_grad():
            states = _run(
                base, lambda: model.base_model(ids, output_hidden_states=True, use_cache=False)
            ).hidden_states
        hidden: F32Array = torch.stack([s[0, -1].float() for s in states[: shape[0]]]).numpy()
        return hidden

    return of


def _embedded(base: Input, shape: tuple[int, int]) -> _Of:
    _, transformers = _transformers(base)
    tokens = _tokens(base, transformers)
    name = next(filter(is_embedding, base.tensors))
    table = base.floats(name)

    def of(prompt: str) -> F32Array:
        ids = [i for i in tokens(prompt) if i < len(table)]
        return np.broadcast_to(table[ids].sum(axis=0), shape)

    return of


def _tokens(base: Input, transformers: Any) -> Callable[[str], list[int]]:
    tokenizer = _run(
        base,
        lambda: transformers.AutoTokenizer.from_pretrained(base.checkpoint.root, **_LOCAL),
    )

    def of(prompt: str) -> list[int]:
        # As in mergekit-moe: nothing that the tokenizer adds by itself, but its `bos_token`.
        text = (tokenizer.bos_token or "") + prompt
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise MergePipeError(
                "A prompt has no tokens",
                where="positive_prompts or negative_prompts",
                expected="a text with at least one token",
                found=repr(prompt)[:80],
                next_step="give another prompt",
            )
        return ids

    return of


def _transformers(base: Input) -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        what, or_else = "Prompts need the library that runs models", ", or `gate_mode: random`"
        where = base.checkpoint.root
        raise not_installed(what, "demo", error, or_else, where=where) from error
    log: Any = transformers.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    return torch, transformers


def _run(base: Input, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise CheckpointError(
            "transformers cannot run the base",
            where=base.checkpoint.root,
            expected="a model and a tokenizer that it loads from a local folder",
            found=f"{type(error).__name__}: {error}"[:300],
            next_step="correct its config or tokenizer, or use `gate_mode: random`",
        ) from error
