"""Items as tokens: batches for training, and for judging what a model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergepipe_pipeline.arrays import I64Array
from tests.lab.bench_llm.tasks import Item

#: Where models learn and answer.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens `ids` and `mask` [items, tokens]; where each answer's token `targets` is predicted."""

    ids: Tensor
    mask: Tensor
    rows: Tensor
    places: Tensor
    targets: Tensor


class Encoder:
    """The base's tokenizer, and the words that end an answer."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self.end: int = self._tokenizer.eos_token_id
        #: What the tokenizer puts before a text: of Gemma one token, of SmolLM2 none.
        self.start: list[int] = self._tokenizer("")["input_ids"]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text alone."""
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def answers(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each answer and of its end."""
        return [[*ids, self.end] for ids in self.tokens(texts)]

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text behind the start."""
        return [[*self.start, *ids] for ids in self.tokens(texts)]

    def batch(self, items: Sequence[Item]) -> Batch:
        """Items with their answers, padded on the right."""
        prompts = self.prompts([i.prompt for i in items])
        answers = self.answers([i.answer for i in items])
        whole = [p + a for p, a in zip(prompts, answers, strict=True)]
        ids, mask = self._padded(whole)
        rows = [n for n, a in enumerate(answers) for _ in a]
        places = [
            len(p) - 1 + i for p, a in zip(prompts, answers, strict=True) for i in range(len(a))
        ]
        targets = [token for a in answers for token in a]
        return Batch(ids, mask, placed(rows), placed(places), placed(targets))

    def questions(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the questions alone, padded on the left."""
        return self._padded(self.prompts([i.prompt for i in items]), left=True)

    def _padded(
        self, rows: Sequence[Sequence[int]], *, left: bool = False
    ) -> tuple[Tensor, Tensor]:
        shape = len(rows), max(map(len, rows))
        ids, mask = np.full(shape, self.end), np.zeros(shape, np.int64)
        for n, row in enumerate(rows):
            place = slice(shape[1] - len(row), None) if left else slice(len(row))
            ids[n, place] = row
            mask[n, place] = 1
        return placed(ids), placed(mask)


@cache
def encoder(base: Path) -> Encoder:
    """The tokenizer of a base, read once."""
    return Encoder(base)


@cache
def batch(base: Path, items: tuple[Item, ...]) -> Batch:
    """Items with their answers as a base's tokens, made once."""
    return encoder(base).batch(items)


def placed(values: Sequence[int] | I64Array) -> Tensor:
    """Whole numbers as a tensor where models are."""
    return torch.as_tensor(values, device=DEVICE)
