"""What a model answers: how much is right, what it has forgotten, how far it is from another."""

from __future__ import annotations

import heapq
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from mergepipe_pipeline.demo.skills import quiet
from tests.lab.bench_llm.encoded import DEVICE, batch, encoder, placed
from tests.lab.bench_llm.tasks import Item, Split, Task

#: Items at a time of either sort of task, and tokens of a text.
_ANSWERED, _CHOSEN = (64, 32) if DEVICE.type == "cpu" else (256, 64)
_TOKENS = 512
#: One item of so many is compared with another model's.
_COMPARED = 8
#: Characters of each text whose perplexity is taken.
_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Answers:
    """Which items are answered rightly, and the logarithms of some answers' probabilities.

    Of an answer that is said: [tokens of right answers, words]; of one that is chosen: [items,
    choices].
    """

    right: Tensor
    logs: Tensor

    @property
    def share(self) -> float:
        """The share of items that are answered rightly."""
        return float(self.right.float().mean())


class Model:
    """A model folder in bfloat16, with the tokenizer of `base`."""

    def __init__(self, folder: Path, base: Path) -> None:
        from transformers import AutoModelForCausalLM

        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.lm = loaded.to(DEVICE).eval()
        self._base, self._encoder = base, encoder(base)

    def answers(self, task: Task, items: Sequence[Item]) -> Answers:
        """The answers to a task's items, which are asked in the order of their length."""
        order = sorted(items, key=lambda i: len(i.prompt))
        size = _CHOSEN if task.choices else _ANSWERED
        parts = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
        with torch.inference_mode():
            found = [self._chosen(task, p) if task.choices else self._said(p) for p in parts]
        return Answers(torch.cat([a.right for a in found]), torch.cat([a.logs for a in found]))

    def perplexity(self, text: str) -> float:
        """exp of the mean loss of a text's tokens, in windows that begin anew."""
        ids = placed(self._encoder.tokens([text])[0])
        windows = ids[: len(ids) // _TOKENS * _TOKENS].reshape(-1, _TOKENS)
        # An empty list alone would become floats.
        start = placed(np.array(self._encoder.start, np.int64))
        losses = []
        with torch.inference_mode():
            for window in windows.split(4):
                # [windows, start + tokens]
                read = torch.cat([start.expand(len(window), -1), window], 1)
                logits = self.lm(input_ids=read).logits[:, len(start) : -1].float()
                losses.append(cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()))
        return float(torch.stack(losses).mean().exp())

    def _said(self, items: tuple[Item, ...]) -> Answers:
        """Right is what greedy decoding says: every token, and the end, is the likeliest."""
        asked = batch(self._base, items)
        hidden = self.lm.model(input_ids=asked.ids, attention_mask=asked.mask)
        # [answer tokens, words]
        logits = self.lm.lm_head(hidden.last_hidden_state[asked.rows, asked.places]).float()
        missed = asked.rows[logits.argmax(1) != asked.targets]
        right = torch.bincount(missed, minlength=len(items)) == 0
        return Answers(right, log_softmax(logits[asked.rows % _COMPARED == 0], dim=-1))

    def _chosen(self, task: Task, items: Sequence[Item]) -> Answers:
        """Right is the choice that is likeliest, its end included."""
        likely = self.likelihoods(task, items)
        wanted = placed([task.choices.index(i.answer[1:]) for i in items])
        compared = likely[::_COMPARED]
        return Answers(likely.argmax(1) == wanted, log_softmax(compared, dim=-1))

    def likelihoods(self, task: Task, items: Sequence[Item]) -> Tensor:
        """The logarithm of each choice's probability after each question: [items, choices].

        All choices follow the question in one row, where none sees another.
        """
        said, wanted = self._spread(task.choices)
        ids, mask = self._encoder.questions(items)  # [items, prompt]
        owner, depth, tokens = (placed(column) for column in zip(*said, strict=True))
        whole = torch.cat([ids, tokens.expand(len(ids), -1)], 1)
        length, prompt = whole.shape[1], ids.shape[1]
        sees = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        sees[prompt:, prompt:] &= owner[:, None] == owner
        filled = torch.cat([mask, torch.ones_like(whole[:, prompt:])], 1).bool()
        # Padding sees itself alone, since a softmax over nothing is NaN.
        seen = sees & filled[:, None] | torch.eye(length, dtype=torch.bool, device=DEVICE)
        places = torch.cat([mask.cumsum(1) - 1, mask.sum(1, keepdim=True) + depth], 1)
        hidden = self.lm.model(
            input_ids=whole, attention_mask=seen[:, None], position_ids=places.clamp(0)
        ).last_hidden_state[:, prompt - 1 :]
        logs = log_softmax(self.lm.lm_head(hidden).float(), dim=-1)  # [items, 1 + said, words]
        choice, token, after = (placed(column) for column in zip(*wanted, strict=True))
        likely = torch.zeros(len(ids), len(task.choices), device=DEVICE)
        return likely.index_add(1, choice, logs[:, after, token])

    def _spread(
        self, choices: Sequence[str]
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The choices' tokens but their ends, each (choice, depth, token); and all tokens, each
        (choice, token, place), which follows the question at place 0, or the n-th token before.
        """
        said, wanted = [], []
        answers = self._encoder.answers([f" {choice}" for choice in choices])
        for n, answer in enumerate(answers):
            after = 0
            for depth, token in enumerate(answer):
                wanted.append((n, token, after))
                if token != self._encoder.end:
                    said.append((n, depth, token))
                    after = len(said)
        return said, wanted


def answered(
    model: Model, split: Split, tasks: Sequence[Task], most: int | None = None
) -> dict[str, Answers]:
    """The answers to `most` items of each task (None: to all), by the task's name."""
    return {t.name: model.answers(t, t.items(split)[:most]) for t in tasks}


def divergence(full: Mapping[str, Answers], other: Mapping[str, Answers]) -> dict[str, float]:
    """Task to the mean KL(full ‖ other) of its answers, in nats."""
    return {
        name: float(kl_div(o.logs, full[name].logs, reduction="batchmean", log_target=True))
        for name, o in other.items()
    }


@cache
def texts() -> dict[str, str]:
    """English and code of Python's own library."""
    english = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    code = inspect.getsource(textwrap) + inspect.getsource(heapq)
    return {"english": english[:_CHARACTERS], "code": code[:_CHARACTERS]}
