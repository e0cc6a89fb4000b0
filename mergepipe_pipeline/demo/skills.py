"""Five small skills over words: their examples as tokens, and how well a model does them.

Not training. An example is `T:word=answer.`, where the tag T (the skill's initial) asks for the
skill; all examples are equally long, so a batch of them is one tensor and greedy decoding of a
whole batch is a few forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

LETTERS = "abcdefghijkl"
WORD_LENGTH = 8

_ANSWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda words: words,
    "next": lambda words: (words + 1) % len(LETTERS),
    "previous": lambda words: (words - 1) % len(LETTERS),
    "rotate": lambda words: words.roll(-3, dims=1),
    "sort": lambda words: words.sort(dim=1).values,
}
SKILLS: tuple[str, ...] = tuple(_ANSWERS)
TAGS = "".join(skill[0].upper() for skill in SKILLS)

TOKENS = ["<pad>", "<s>", "</s>", *LETTERS, *":=.", *TAGS]
TOKEN_ID = {token: i for i, token in enumerate(TOKENS)}
PROMPT_LENGTH = len("T:") + WORD_LENGTH + len("=")
EXAMPLE_LENGTH = PROMPT_LENGTH + WORD_LENGTH + len(".")


def examples(tags: Tensor, skills: Tensor, generator: torch.Generator) -> Tensor:
    """Token ids [n, EXAMPLE_LENGTH] of random words, asked by tag and answered by skill.

    `tags` and `skills` are indices into SKILLS, [n] int64; they differ where a model is to see a
    skill under another skill's tag.
    """
    n = len(tags)
    words = torch.randint(len(LETTERS), (n, WORD_LENGTH), generator=generator)
    every = torch.stack([answer(words) for answer in _ANSWERS.values()])  # [skills, n, letters]
    answers = every[skills, torch.arange(n)]
    colon, equals, stop = (torch.full((n, 1), TOKEN_ID[c]) for c in ":=.")
    a, first_tag = TOKEN_ID[LETTERS[0]], TOKEN_ID[TAGS[0]]
    return torch.cat([first_tag + tags[:, None], colon, a + words, equals, a + answers, stop], 1)


def text(ids: Tensor) -> str:
    """The characters of one example [EXAMPLE_LENGTH]."""
    return "".join(TOKENS[i] for i in ids.tolist())


@torch.no_grad()
def score(
    folder: Path, skills: Sequence[str] = SKILLS, n: int = 200, seed: int = 1
) -> dict[str, float]:
    """Share of `n` examples per skill that the model in `folder` answers exactly, greedily.

    Every model is asked the same words; with 12^8 of them, training will have met none. One pass
    over the right answers tells it: up to its first wrong letter a model has said no other.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = torch.tensor([SKILLS.index(skill) for skill in skills]).repeat_interleave(n)
    ids = examples(wanted, wanted, torch.Generator().manual_seed(seed))
    said = model(input_ids=ids[:, :-2]).logits[:, PROMPT_LENGTH - 1 :].argmax(dim=-1)
    right = (said == ids[:, PROMPT_LENGTH:-1]).all(dim=1)
    shares = right.view(len(skills), n).double().mean(dim=1).tolist()
    return dict(zip(skills, shares, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without progress bars and advice, as it was afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
