"""Trains the demo's family: one base, one expert per skill, a second version of one.

Real gradient descent on small Llama models, seeds fixed. Kept in the user's cache under a digest of
the settings, and published there whole, so that an interrupted training leaves nothing behind.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from mergepipe_pipeline.demo.skills import EXAMPLE_LENGTH, SKILLS, TOKEN_ID, TOKENS, batch
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree

#: The recipe that merges this family well.
DEMO_DENSITY = 0.8
DEMO_LAMBDA = 1.0
DEMO_WEIGHT = 1.0
#: The layers that the second version of an expert retrains.
RETRAINED_LAYERS = (0, 2)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides what training gives; `replay` counts own examples per mixed one."""

    hidden: int = 96
    layers: int = 3
    intermediate: int = 256
    batch: int = 192
    base_steps: int = 90
    base_rate: float = 3e-3
    expert_steps: int = 110
    expert_rate: float = 1.5e-3
    replay: int = 2
    retrain_steps: int = 40
    seed: int = 0
    version: int = 1


@dataclass(frozen=True, slots=True)
class Family:
    """The family's folders; `second` is version 2 of `second_name`; `seconds` spent now."""

    base: Path
    experts: dict[str, Path]
    second_name: str
    second: Path
    seconds: float


def build_family(progress: Callable[[str], None], settings: Settings | None = None) -> Family:
    """The family from the cache, or trained now (about two minutes on two cores)."""
    settings = settings or Settings()
    started = time.monotonic()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergepipe"
    folder = cache / f"demo-family-{digest_json([asdict(settings), SKILLS])[:12]}"
    fresh = not folder.exists()
    if fresh:
        staged = cache / f".{folder.name}.{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        try:
            _train_all(staged, settings, progress)
            publish_dir(staged, folder)
        finally:
            remove_tree(staged)
    experts = {skill: folder / skill for skill in SKILLS}
    second = SKILLS[-1]
    return Family(
        folder / "base",
        experts,
        second,
        folder / f"{second}-v2",
        time.monotonic() - started if fresh else 0.0,
    )


def _train_all(folder: Path, s: Settings, progress: Callable[[str], None]) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(s.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4 * EXAMPLE_LENGTH,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    progress(f"training the base on all {len(SKILLS)} skills")
    _train(model, SKILLS, s.base_steps, s.base_rate, s, s.seed + 1)
    _save(model, folder / "base")
    for number, skill in enumerate(SKILLS):
        progress(f"training the expert for {skill}")
        expert = copy.deepcopy(model)
        mixture = (skill,) * (s.replay * len(SKILLS)) + SKILLS
        _train(expert, mixture, s.expert_steps, s.expert_rate, s, s.seed + 10 + number)
        _save(expert, folder / skill)
    progress(f"retraining two layers of {SKILLS[-1]} as its version 2")
    for name, parameter in expert.named_parameters():
        parameter.requires_grad = any(f".layers.{i}." in name for i in RETRAINED_LAYERS)
    _train(expert, mixture, s.retrain_steps, s.expert_rate, s, s.seed + 99)
    _save(expert, folder / f"{SKILLS[-1]}-v2")


def _train(
    model: LlamaForCausalLM,
    skills: tuple[str, ...],
    steps: int,
    rate: float,
    s: Settings,
    seed: int,
) -> None:
    """AdamW with warm-up and cosine decay; the loss counts answers only."""
    rng = random.Random(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * cosine)
        ids, labels = batch(skills, s.batch, rng)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """A Hugging Face folder in bfloat16 with a character tokenizer."""
    half = copy.deepcopy(model)
    torch.nn.Module.to(half, dtype=torch.bfloat16)
    half.save_pretrained(folder, safe_serialization=True)
    vocabulary = Tokenizer(models.WordLevel(TOKEN_ID, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENS)
