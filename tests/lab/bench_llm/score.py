"""One model's answers to all tasks, kept in a file beside others: nothing is scored twice."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.bench_llm.answers import Model, divergence, texts
from tests.lab.bench_llm.tasks import TASKS, Split, Task

Scores = Mapping[str, float]


class Scored:
    """Scores by key, a line of JSON each, in one file that only grows."""

    def __init__(self, path: Path, until: float = math.inf) -> None:
        self._path, self._until = path, until
        lines = path.read_text().splitlines() if path.exists() else ()
        self._rows: dict[str, Scores] = {r["key"]: r["scores"] for r in map(json.loads, lines)}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Scores:
        return self._rows[key]

    def items(self) -> list[tuple[str, Scores]]:
        """All keys with their scores."""
        return list(self._rows.items())

    def put(self, key: str, scores: Scores) -> Scores:
        """Keep what was found, at once. Raises TimeoutError if it is late."""
        self._rows[key] = scores
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "scores": dict(scores)}) + "\n")
        print(f"{key}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items()), flush=True)
        if time.monotonic() > self._until:
            raise TimeoutError("stopped after a score")
        return scores


def answered(
    model: Model, split: Split, tasks: Sequence[Task] = TASKS, most: int | None = None
) -> dict[str, float]:
    """Task to the share of right answers; `most` items of each (None: all)."""
    return {t.name: model.right(t, t.items(split)[:most]) for t in tasks}


def whole(model: Model, full: Model | None = None) -> dict[str, float]:
    """Right answers, perplexities, and the divergence from a full merge, by name."""
    found = answered(model, "test")
    found |= {f"perplexity {name}": model.perplexity(text) for name, text in texts().items()}
    if full is not None:
        found |= {f"kl {task}": kl for task, kl in divergence(full, model).items()}
    return found
