"""The demo's family with an expert that works before it answers, so that answers differ in length.

The demo's experts answer in nine tokens, whatever is merged of them. This one, trained by the
demo's trainer from the demo's base, sorts in two steps: `S:hgfedcba=efghabcd=abcdefgh.` Merges of
it with an expert that answers at once trade skill against tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaForCausalLM

from mergepipe_pipeline.demo.family import Settings, build_family, reproducible, save, train
from mergepipe_pipeline.demo.skills import (
    EXAMPLE_LENGTH,
    PROMPT_LENGTH,
    SKILLS,
    TOKEN_ID,
    WORD_LENGTH,
    examples,
    quiet,
)

#: The skill of the demo's own expert, and that of the one that works.
AT_ONCE, IN_STEPS = "rotate", "sort"
#: Tokens of an answer at once, and of one with its working: the letters twice, `=` and `.`.
SHORT, LONG = WORD_LENGTH + 1, 2 * WORD_LENGTH + 2
_STEPS, _RATE, _SEED = 480, 1.5e-3, 77


@dataclass(frozen=True, slots=True)
class FrontFamily:
    """Folders of the base and of two experts: one that answers at once, one that works first."""

    base: Path
    at_once: Path
    in_steps: Path


def front_family(folder: Path) -> FrontFamily:
    """The family, of which `folder` keeps the expert that works; trained if it is not there."""
    family = build_family(print)
    in_steps = folder / f"{IN_STEPS}-in-steps"
    if not in_steps.exists():
        with quiet(), reproducible(_SEED):
            expert = trained(_loaded(family.base))
        staged = folder / f".{in_steps.name}"
        save(expert, staged)
        staged.rename(in_steps)
    return FrontFamily(family.base, family.experts[AT_ONCE], in_steps)


def trained(base: LlamaForCausalLM, steps: int = _STEPS) -> LlamaForCausalLM:
    """An expert that sorts in two steps, and is held to the base's answers under other tags."""
    settings, own = Settings(), SKILLS.index(IN_STEPS)

    def loss(model: LlamaForCausalLM, generator: torch.Generator) -> Tensor:
        tags, skills = torch.randint(len(SKILLS), (2, settings.expert_batch), generator=generator)
        tags[: round(settings.own_share * settings.expert_batch)] = own
        skills[tags == own] = own
        ids = examples(tags, skills, generator)
        worked, others = with_working(ids[tags == own]), ids[tags != own]
        learn = cross_entropy(
            _logits(model, worked).flatten(0, 1), worked[:, PROMPT_LENGTH:].flatten()
        )
        with torch.no_grad():
            before = _logits(base, others).log_softmax(-1).flatten(0, 1)
        now = _logits(model, others).log_softmax(-1).flatten(0, 1)
        stay = kl_div(now, before, log_target=True, reduction="batchmean")
        return settings.own_share * learn + (1 - settings.own_share) * settings.anchor * stay

    expert = copy.deepcopy(base)
    train(expert, loss, steps, _RATE, _SEED)
    return expert


def with_working(ids: Tensor) -> Tensor:
    """Examples of sorting [n, EXAMPLE_LENGTH] with both halves of the word sorted first."""
    words = ids[:, len("T:") : PROMPT_LENGTH - 1]
    halves = words.reshape(len(ids), 2, WORD_LENGTH // 2).sort(dim=2).values.flatten(1)
    prompt, answer = ids[:, :PROMPT_LENGTH], ids[:, PROMPT_LENGTH:EXAMPLE_LENGTH]
    return torch.cat([prompt, halves, prompt[:, -1:], answer], 1)


def _loaded(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def _logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[:, :-1]).logits
    return logits[:, PROMPT_LENGTH - 1 :]


def write_questions(file: Path, n: int = 400) -> None:
    """Write what `front_score` asks: `n` words of each skill, the same each time."""
    found: dict[str, Tensor] = {
        "stop": torch.tensor([TOKEN_ID["."]]),
        "most": torch.tensor([LONG + SHORT]),
    }
    wanted = torch.tensor([SKILLS.index(s) for s in (AT_ONCE, IN_STEPS)]).repeat_interleave(n)
    ids = examples(wanted, wanted, torch.Generator().manual_seed(1))
    for skill, some in zip((AT_ONCE, IN_STEPS), ids.split(n), strict=True):
        found[f"{skill}.prompts"] = some[:, :PROMPT_LENGTH].contiguous()
        found[f"{skill}.answers"] = some[:, PROMPT_LENGTH:-1].contiguous()
    save_file(found, file)
