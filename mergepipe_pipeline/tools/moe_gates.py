"""The gates of a mixture's layers: from hidden states of prompts, from their embeddings, or random.

A gate is a unit vector: the mean of an expert's positive prompts less that of its negative ones.
As `mergekit-moe` does, hidden states are those of the base that enter the layer, at a prompt's last
token; `cheap_embed` sums the embeddings of a prompt's tokens. A prompt begins with the text of the
tokenizer's `bos_token`. Prompts run one by one, and means are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.layers import is_embedding
from mergepipe_pipeline.errors import CheckpointError, MergePipeError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.tools.models import Input
from mergepipe_pipeline.tools.moe_config import ExpertConfig, GateMode

#: [layers, hidden] of one prompt.
#: Nothing is downloaded, and no code of a model is run.
_LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}
_Of = Callable[[str], F32Array]


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


def noise(shape: tuple[int, ...], seed: int, what: object) -> F32Array:
    """Standard normal numbers that follow from seed and name alone."""
    key = int(sha256_hex(f"{seed} {what}".encode())[:32], 16)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)


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
        raise MergePipeError(
            "Prompts need the library that runs models",
            where=base.checkpoint.root,
            expected="transformers",
            found=str(error),
            next_step="`pip install mergepipe-pipeline[demo]`, or `gate_mode: random`",
        ) from error
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
