"""Trains the demo's family: a base, one expert per skill, and a second version of one expert.

The base sees all skills under tags that say nothing: it learns how, not when, and asked for a skill
it answers with any. An expert learns what one tag means and is held to the base's answers for all
others, so that its delta is small and speaks of its own skill alone: what merging needs.

Real gradient descent on small Llama models, seeds fixed. Kept in the user's cache under a digest of
the settings, and published there whole, so that an interrupted training leaves nothing behind.
"""

from __future__ import annotations

import copy
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mergepipe_pipeline.concurrency.threads import cores, single_threaded_torch
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.demo.skills import (
    EXAMPLE_LENGTH,
    PROMPT_LENGTH,
    SKILLS,
    TOKEN_ID,
    TOKENS,
    examples,
    quiet,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree

#: The TIES recipe that merges this family well; found by trying, see `Settings`.
DEMO_DENSITY = 0.5
DEMO_LAMBDA = 1.5
DEMO_WEIGHT = 1.0
#: The layers that the second version of an expert retrains.
RETRAINED_LAYERS = (0, 2)

_Loss = Callable[[LlamaForCausalLM, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides what training gives; batches in examples, rates for AdamW.

    A batch of an expert has `own_share` of examples under its own tag and the rest under random
    ones; `anchor` weighs staying with the base there. `version` changes when the code does.
    """

    hidden: int = 96
    layers: int = 3
    intermediate: int = 256
    heads: int = 4
    init_std: float = 0.06
    base_batch: int = 192
    base_steps: int = 500
    base_rate: float = 5e-3
    expert_batch: int = 96
    expert_steps: int = 160
    expert_rate: float = 1e-3
    own_share: float = 0.4
    anchor: float = 4.0
    retrain_steps: int = 60
    seed: int = 0
    version: int = 2


@dataclass(frozen=True, slots=True)
class Family:
    """Folders of the family; `second` is version 2 of `second_name`; seconds are of training."""

    base: Path
    experts: dict[str, Path]
    second_name: str
    second: Path
    seconds: float


def build_family(
    progress: Callable[[str], None], settings: Settings | None = None, cache: Path | None = None
) -> Family:
    """The family from the cache, or trained now (under two minutes on two free cores).

    `cache` is a folder, by default the user's. Raises StorageFullError.
    """
    settings = settings or Settings()
    cache = cache or _user_cache()
    folder = cache / f"demo-family-{digest_json([asdict(settings), SKILLS])[:12]}"
    started = time.monotonic()
    fresh = not folder.exists()
    if fresh:
        staged = cache / f".{folder.name}.{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        try:
            with quiet(), reproducible(settings.seed):
                _train_family(staged, settings, progress)
            publish_dir(staged, folder)
        finally:
            remove_tree(staged)
    second = SKILLS[-1]
    return Family(
        base=folder / "base",
        experts={skill: folder / skill for skill in SKILLS},
        second_name=second,
        second=folder / f"{second}-v2",
        seconds=time.monotonic() - started if fresh else 0.0,
    )


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "mergepipe"


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seeded, and one thread, because their number decides the order of sums; then as before."""
    with single_threaded_torch(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _train_family(folder: Path, s: Settings, progress: Callable[[str], None]) -> None:
    base = LlamaForCausalLM(_config(s))
    progress(f"training the base on {len(SKILLS)} skills, tags at random")
    train(base, _base_loss(s), s.base_steps, s.base_rate, s.seed + 1)
    save(base, folder / "base")
    progress(f"training {len(SKILLS)} experts, and a second version of {SKILLS[-1]}")
    # The longest task first. One core each: operations this small gain little from a second one,
    # and wait for it whenever another process has it.
    with Workers(cores()) as workers:

        def train_one(skill: str) -> str:
            torch.set_num_threads(1)  # is each thread's own
            _train_expert(folder, base, skill, s)
            return skill

        for skill in workers.map(train_one, reversed(SKILLS)):
            progress(f"trained the expert for {skill}")


def _train_expert(folder: Path, base: LlamaForCausalLM, skill: str, s: Settings) -> None:
    """Leave the expert for `skill` in `folder`, and version 2 of the last one."""
    expert = copy.deepcopy(base)
    seed = s.seed + 10 + SKILLS.index(skill)
    loss = _expert_loss(base, skill, s)
    train(expert, loss, s.expert_steps, s.expert_rate, seed)
    save(expert, folder / skill)
    if skill == SKILLS[-1]:
        # All else is frozen: these layers alone change their bytes.
        for name, parameter in expert.named_parameters():
            parameter.requires_grad = any(f".layers.{i}." in name for i in RETRAINED_LAYERS)
        train(expert, loss, s.retrain_steps, s.expert_rate, s.seed + 99)
        save(expert, folder / f"{skill}-v2")


def _config(s: Settings) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        max_position_embeddings=4 * EXAMPLE_LENGTH,
        initializer_range=s.init_std,
        tie_word_embeddings=True,
        pad_token_id=TOKEN_ID["<pad>"],
        bos_token_id=TOKEN_ID["<s>"],
        eos_token_id=TOKEN_ID["</s>"],
    )


def _base_loss(s: Settings) -> _Loss:
    """Cross-entropy of answers; tag and skill are drawn independently."""

    def loss(model: LlamaForCausalLM, generator: torch.Generator) -> Tensor:
        ids = examples(*_tags_and_skills(s.base_batch, generator), generator)
        return cross_entropy(_answer_logits(model, ids).flatten(0, 1), _answers(ids).flatten())

    return loss


def _expert_loss(base: LlamaForCausalLM, skill: str, s: Settings) -> _Loss:
    """Cross-entropy under the own tag, with its answers; KL from the base under the others."""
    own = SKILLS.index(skill)

    def loss(model: LlamaForCausalLM, generator: torch.Generator) -> Tensor:
        tags, skills = _tags_and_skills(s.expert_batch, generator)
        tags[: round(s.own_share * s.expert_batch)] = own
        skills[tags == own] = own
        ids = examples(tags, skills, generator)
        logits, answers, mine = _answer_logits(model, ids), _answers(ids), tags == own
        with torch.no_grad():
            before = _answer_logits(base, ids[~mine]).log_softmax(-1)
        now = logits[~mine].log_softmax(-1)
        learn = cross_entropy(logits[mine].flatten(0, 1), answers[mine].flatten(), reduction="sum")
        stay = kl_div(now, before, log_target=True, reduction="sum")
        return (learn + s.anchor * stay) / answers.numel()

    return loss


def _tags_and_skills(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two independent draws of indices into SKILLS, [n] each."""
    tags, skills = torch.randint(len(SKILLS), (2, n), generator=generator)
    return tags, skills


def _answers(ids: Tensor) -> Tensor:
    """The tokens [n, letters + stop] that a model must find."""
    return ids[:, PROMPT_LENGTH:]


def _answer_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits [n, letters + stop, tokens] that predict `_answers(ids)`."""
    logits: Tensor = model(input_ids=ids[:, :-1]).logits
    return logits[:, PROMPT_LENGTH - 1 :]


def train(model: LlamaForCausalLM, loss_of: _Loss, steps: int, rate: float, seed: int) -> None:
    """AdamW with a short warm-up and cosine decay; parameters that need no gradient stay."""
    generator = torch.Generator().manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    model.train()
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * cosine)
        loss = loss_of(model, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """A Hugging Face folder in bfloat16 with a tokenizer that takes one character per token."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    characters = Tokenizer(models.WordLevel(TOKEN_ID, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
