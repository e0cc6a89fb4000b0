"""How good a snapshot is: what measures it, what was measured, and what a release asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: What an evaluator prints: finite numbers by name.
Metrics = Mapping[str, float]

Comparison = Literal["min", "max", "max_drop", "max_rise"]
#: Comparisons with what the ref names at present.
RELATIVE: tuple[Comparison, ...] = ("max_drop", "max_rise")


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The evaluator that is built in: the perplexity of a text under the merged model.

    `text` is a file, `field` the key of each document where its lines are JSON; at most
    `max_tokens` tokens are read.
    """

    text: str
    field: str = "text"
    max_tokens: int = 20_000


@dataclass(frozen=True, slots=True)
class LmEval:
    """Tasks of EleutherAI's lm-evaluation-harness, with the options that it gives these names.

    `include_path` is a folder of tasks beside the harness's own; without a `device` it is a GPU
    where there is one.
    """

    tasks: tuple[str, ...]
    limit: float | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 1
    device: str | None = None
    include_path: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The measure of a snapshot: a command, a Python function (`module:name`), perplexity, lm_eval.

    Paths are relative to the recipe's file. What fails, or takes longer than `timeout_s` seconds,
    is tried `retries` times more; not what ends well without metrics. `env` are variables of the
    environment that it gets though they may be secrets.
    """

    command: tuple[str, ...] = ()
    python: str | None = None
    perplexity: Perplexity | None = None
    timeout_s: float = 600.0
    retries: int = 1
    lm_eval: LmEval | None = None
    env: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The evaluator in a few words."""
        if self.perplexity is not None:
            return f"perplexity of {self.perplexity.text}"
        if self.lm_eval is not None:
            return f"lm_eval of {', '.join(self.lm_eval.tasks)}"
        return self.python or " ".join(self.command)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics that an evaluator measured of a snapshot.

    `evaluator_id` is a digest of the evaluator and of the files it names, `evaluator` says it in
    words. `seconds` is wall time, `created` a time in UTC.
    """

    snapshot_id: str
    evaluator_id: str
    evaluator: str
    metrics: Metrics
    seconds: float
    created: str
    log_sha256: str


@dataclass(frozen=True, slots=True)
class Threshold:
    """The limit of a metric: `value`, or that share of the live value if `is_share`."""

    metric: str
    comparison: Comparison
    value: float
    is_share: bool = False

    @property
    def summary(self) -> str:
        """The threshold in words: `at least 0.6`, `a rise of at most 2 %`."""
        number = figure(100 * self.value) + " %" if self.is_share else figure(self.value)
        lead = {"min": "at least", "max": "at most"}
        lead |= {"max_drop": "a drop of at most", "max_rise": "a rise of at most"}
        return f"{lead[self.comparison]} {number}"


@dataclass(frozen=True, slots=True)
class Gate:
    """The thresholds for a snapshot before it is released, and what follows a refusal."""

    thresholds: tuple[Threshold, ...]
    on_failure: Literal["none", "bisect"] = "none"

    @property
    def is_relative(self) -> bool:
        """Whether any threshold compares with what is live."""
        return any(t.comparison in RELATIVE for t in self.thresholds)


@dataclass(frozen=True, slots=True)
class Finding:
    """How one threshold was met; `live` is None where it is not known."""

    threshold: Threshold
    value: float
    live: float | None
    passed: bool

    @property
    def limit(self) -> float | None:
        """The least or most that passes; None where it follows from a live value and none is."""
        t = self.threshold
        if t.comparison not in RELATIVE:
            return t.value
        if self.live is None:
            return None
        allowed = t.value * abs(self.live) if t.is_share else t.value
        return self.live - allowed if t.comparison == "max_drop" else self.live + allowed

    @property
    def summary(self) -> str:
        """The metric, its value, the threshold and the live value, in one sentence."""
        head = f"{self.threshold.metric} is {figure(self.value)}"
        if self.live is not None:
            head += f", {figure(self.live)} live"
        if not self.passed:
            return f"{head}; the gate asks for {self.threshold.summary}"
        if self.threshold.comparison in RELATIVE and self.live is None:
            return f"{head} ({self.threshold.summary} passes: nothing is live yet)"
        return f"{head} ({self.threshold.summary})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a gate on a snapshot, beside what its ref names (None: nothing yet).

    `since` says of a refused one what differs from the live one, "" where there is none.
    """

    snapshot_id: str
    live_snapshot_id: str | None
    findings: tuple[Finding, ...]
    since: str = ""

    @property
    def passed(self) -> bool:
        """Whether every threshold is met."""
        return all(f.passed for f in self.findings)

    @property
    def summary(self) -> str:
        """The faults, or that there are none, in one sentence."""
        return "; ".join(f.summary for f in self.findings if f.passed == self.passed)


def figure(number: float) -> str:
    """A number for people, to ten digits."""
    return f"{number:.10g}"
