"""Five small skills over characters: their examples, their tokens, and how well a model does them.

An example is `T:word=answer.`, T naming the skill. Answers are as long as words, so greedy decoding
of a whole batch is a few forward passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

LETTERS = "abcdefghijkl"
WORD_LENGTH = 8
TOKENS = ["<pad>", "<s>", "</s>", *LETTERS, *":=.", *"CNPRS"]
TOKEN_ID = {token: i for i, token in enumerate(TOKENS)}
EXAMPLE_LENGTH = 2 + WORD_LENGTH + 1 + WORD_LENGTH + 1


def _shift(word: str, by: int) -> str:
    return "".join(LETTERS[(LETTERS.index(c) + by) % len(LETTERS)] for c in word)


_ANSWERS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "next": lambda word: _shift(word, 1),
    "previous": lambda word: _shift(word, -1),
    "rotate": lambda word: word[3:] + word[:3],
    "sort": lambda word: "".join(sorted(word)),
}
SKILLS: tuple[str, ...] = tuple(_ANSWERS)


def example(skill: str, rng: random.Random) -> tuple[str, str]:
    """A prompt and its answer."""
    word = "".join(rng.choice(LETTERS) for _ in range(WORD_LENGTH))
    return f"{skill[0].upper()}:{word}=", _ANSWERS[skill](word)


def batch(
    skills: tuple[str, ...], size: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [size, EXAMPLE_LENGTH] and labels of the same shape, -100 outside the answers."""
    ids = torch.zeros(size, EXAMPLE_LENGTH, dtype=torch.long)
    labels = torch.full((size, EXAMPLE_LENGTH), -100)
    for row in range(size):
        prompt, answer = example(rng.choice(skills), rng)
        ids[row] = torch.tensor([TOKEN_ID[c] for c in f"{prompt}{answer}."])
        labels[row, len(prompt) :] = ids[row, len(prompt) :]
    return ids, labels


@torch.no_grad()
def score(folder: Path, n: int = 200, seed: int = 1) -> dict[str, float]:
    """Share of `n` examples per skill that the model in `folder` answers exactly."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {skill: _accuracy(model, skill, n, seed) for skill in SKILLS}


def _accuracy(model: torch.nn.Module, skill: str, n: int, seed: int) -> float:
    rng = random.Random(f"{seed}-{skill}")
    examples = [example(skill, rng) for _ in range(n)]
    ids = torch.tensor([[TOKEN_ID[c] for c in prompt] for prompt, _ in examples])
    for _ in range(WORD_LENGTH):
        following = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    answers = ids[:, -WORD_LENGTH:].tolist()
    right = sum(
        "".join(TOKENS[t] for t in given) == answer
        for given, (_, answer) in zip(answers, examples, strict=True)
    )
    return right / n
