"""What a model answers: how much is right, what it has forgotten, how far it is from another."""

from __future__ import annotations

import heapq
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from pydoc_data import topics
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from mergepipe_pipeline.demo.skills import quiet
from tests.lab.bench_llm.encoded import Encoder
from tests.lab.bench_llm.tasks import TASKS, Item, Task

_BATCH, _CHOOSING, _TOKENS = 128, 16, 512
#: Items per task whose answers' distributions are compared.
_COMPARED = 64
#: Characters of each text whose perplexity is taken.
_CHARACTERS = 40_000


class Model:
    """A model folder in bfloat16; items are judged in batches of about the same length."""

    def __init__(self, folder: Path, base: Path) -> None:
        from transformers import LlamaForCausalLM

        with quiet():
            loaded: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model = loaded.eval()
        self._encoder = Encoder(base)

    def right(self, task: Task, items: Sequence[Item]) -> float:
        """The share of items that are answered rightly."""
        judge = self._chosen if task.choices else self._decoded
        size = _CHOOSING if task.choices else _BATCH
        with torch.inference_mode():
            said = self._by_length(items, size, lambda part: judge(task, part))
            return mean(map(float, said))

    def perplexity(self, text: str) -> float:
        """exp of the mean loss of a text's tokens, in windows that begin anew."""
        ids = torch.tensor(self._encoder.prompt(text))
        windows = ids[: len(ids) // _TOKENS * _TOKENS].reshape(-1, _TOKENS)
        losses = []
        with torch.inference_mode():
            for window in windows.split(4):
                logits = self._model(input_ids=window).logits[:, :-1].float()
                losses.append(cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()))
        return float(torch.stack(losses).mean().exp())

    def log_probabilities(self, items: Sequence[Item]) -> Iterator[Tensor]:
        """Of every token of the answers, over all words: [answer tokens, words] per batch."""
        with torch.inference_mode():
            for start in range(0, len(items), _CHOOSING):
                batch = self._encoder.batch(items[start : start + _CHOOSING])
                hidden = self._model.model(input_ids=batch.ids, attention_mask=batch.mask)
                picked = hidden.last_hidden_state[batch.rows, batch.places]
                yield log_softmax(self._model.lm_head(picked).float(), dim=-1)

    def _by_length(
        self, items: Sequence[Item], size: int, judge: Callable[[Sequence[Item]], list[bool]]
    ) -> list[bool]:
        order = sorted(items, key=lambda i: len(i.prompt))
        return [r for at in range(0, len(order), size) for r in judge(order[at : at + size])]

    def _decoded(self, task: Task, items: Sequence[Item]) -> list[bool]:
        """Greedy decoding, to the letter; as many tokens as the longest right answer has."""
        ids, mask = self._encoder.prompts(items)
        most = max(len(self._encoder.answer(i)) for i in items)
        made = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False
        )[:, ids.shape[1] :].tolist()
        said = [self._encoder.text(row).strip() for row in made]
        return [text == item.answer.strip() for text, item in zip(said, items, strict=True)]

    def _chosen(self, task: Task, items: Sequence[Item]) -> list[bool]:
        """The choice that is most likely, its end included."""
        ids, mask = self._encoder.prompts(items)
        choices = [self._encoder.answer(Item("", f" {c}")) for c in task.choices]
        most = max(map(len, choices))
        tokens = torch.tensor([c + [self._encoder.end] * (most - len(c)) for c in choices])
        counted = torch.tensor([[n < len(c) for n in range(most)] for c in choices])
        first = self._model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        past, n = first.past_key_values, len(choices)
        past.batch_repeat_interleave(n)
        given = tokens.repeat(len(items), 1)  # [items * choices, tokens]
        whole = torch.cat([mask.repeat_interleave(n, 0), torch.ones_like(given)], 1)
        rest = self._model(
            input_ids=given[:, :-1], attention_mask=whole[:, :-1], past_key_values=past
        )
        starts = first.logits.repeat_interleave(n, 0)  # [items * choices, 1, words]
        logits = log_softmax(torch.cat([starts, rest.logits], 1).float(), dim=-1)
        taken = logits.gather(2, given[..., None])[..., 0].reshape(len(items), n, most)
        best = (taken * counted).sum(2).argmax(1).tolist()
        return [f" {task.choices[b]}" == i.answer for b, i in zip(best, items, strict=True)]


def divergence(full: Model, other: Model, most: int = _COMPARED) -> dict[str, float]:
    """Task to the mean KL(full ‖ other), in nats, over right answers' tokens; of `most` items."""
    found = {}
    for task in TASKS:
        items = task.items("test")[:most]
        pairs = zip(full.log_probabilities(items), other.log_probabilities(items), strict=True)
        sums = [(float(kl_div(b, a, reduction="sum", log_target=True)), len(a)) for a, b in pairs]
        found[task.name] = sum(s for s, _ in sums) / sum(n for _, n in sums)
    return found


@cache
def texts() -> dict[str, str]:
    """English and code of Python's own library."""
    english = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    code = inspect.getsource(textwrap) + inspect.getsource(heapq)
    return {"english": english[:_CHARACTERS], "code": code[:_CHARACTERS]}
