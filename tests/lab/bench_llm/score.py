"""What models answer, and how long that took: lines of one file, so that nothing is done twice."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.bench_llm.answers import Answers, Model, answered, divergence, texts
from tests.lab.bench_llm.tasks import Task

Scores = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """How often a part of the work was done, its seconds in all, and the most memory, in MiB."""

    times: int = 0
    seconds: float = 0.0
    peak_mib: int = 0


class Scored:
    """Scores by key and parts of the work, a line of JSON each, in one file that only grows."""

    def __init__(self, path: Path, until: float = math.inf) -> None:
        self._path, self.until = path, until
        lines = path.read_text().splitlines() if path.exists() else ()
        self._rows: dict[str, Scores] = {}
        self.parts: dict[str, Part] = {}
        for row in map(json.loads, lines):
            if "key" in row:
                self._rows[row["key"]] = row["scores"]
            else:
                self._add(**row)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Scores:
        return self._rows[key]

    def items(self) -> list[tuple[str, Scores]]:
        """All keys with their scores."""
        return list(self._rows.items())

    def put(self, key: str, find: Callable[[], Scores], **known: float) -> None:
        """Find scores that are missing, and keep them with what is known.

        Raises TimeoutError if it is late then.
        """
        if key in self._rows:
            return
        with self.part("score"):
            found = find()
        scores = {name: float(f"{value:.6g}") for name, value in (found | known).items()}
        self._rows[key] = scores
        self._write({"key": key, "scores": scores})
        print(f"{key}: " + ", ".join(f"{k} {v:.4g}" for k, v in scores.items()), flush=True)
        if time.monotonic() > self.until:
            raise TimeoutError("stopped after a score")

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Count the seconds of what is done inside to a part of the work."""
        began = time.monotonic()
        yield
        seconds = round(time.monotonic() - began, 2)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        self._add(part, seconds, peak_mib)
        self._write({"part": part, "seconds": seconds, "peak_mib": peak_mib})

    def _add(self, part: str, seconds: float, peak_mib: int) -> None:
        old = self.parts.get(part, Part())
        self.parts[part] = Part(old.times + 1, old.seconds + seconds, max(old.peak_mib, peak_mib))

    def _write(self, row: Mapping[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def whole(
    model: Model, tasks: Sequence[Task], full: Mapping[str, Answers] | None = None
) -> dict[str, float]:
    """Right answers, perplexities, and the divergence from a full merge, by name."""
    answers = answered(model, "test", tasks)
    found = {task: a.share for task, a in answers.items()}
    found |= {f"perplexity {name}": model.perplexity(text) for name, text in texts().items()}
    if full is not None:
        found |= {f"kl {task}": kl for task, kl in divergence(full, answers).items()}
    return found
