"""Items as tokens: batches for training, and for judging what a model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.lab.bench_llm.tasks import Item


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

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(self, item: Item) -> list[int]:
        """The tokens of an answer and of its end."""
        return [*self.prompt(item.answer), self.end]

    def batch(self, items: Sequence[Item]) -> Batch:
        """Items with their answers, padded on the right."""
        prompts = [self.prompt(i.prompt) for i in items]
        answers = [self.answer(i) for i in items]
        whole = [p + a for p, a in zip(prompts, answers, strict=True)]
        ids, mask = self._padded(whole)
        rows = [n for n, a in enumerate(answers) for _ in a]
        places = [
            len(p) - 1 + i for p, a in zip(prompts, answers, strict=True) for i in range(len(a))
        ]
        targets = [token for a in answers for token in a]
        return Batch(ids, mask, torch.tensor(rows), torch.tensor(places), torch.tensor(targets))

    def prompts(self, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the questions alone, padded on the left."""
        return self._padded([self.prompt(i.prompt) for i in items], left=True)

    def _padded(
        self, rows: Sequence[Sequence[int]], *, left: bool = False
    ) -> tuple[Tensor, Tensor]:
        most = max(map(len, rows))
        ids = torch.full((len(rows), most), self.end)
        mask = torch.zeros((len(rows), most), dtype=torch.long)
        for n, row in enumerate(rows):
            place = slice(most - len(row), most) if left else slice(0, len(row))
            ids[n, place] = torch.tensor(row)
            mask[n, place] = 1
        return ids, mask
