"""Reads `evaluate:` (how a result's quality is measured) and `gate:` (what a release must reach).

Reads the text alone: whether files and programs exist shows where they are used.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from mergepipe_pipeline.domain.evaluation import (
    Evaluator,
    Gate,
    LmEval,
    Perplexity,
    Threshold,
)
from mergepipe_pipeline.recipe.keys import Keys, expecting, is_bool, is_number, is_text, whole
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest

_KINDS = ("command", "python", "perplexity", "lm_eval")
#: What the built-in evaluator measures.
_BUILT_IN = ("perplexity", "loss", "tokens")
#: The key of a gate beside its metrics, and its values.
_ON_FAILURE, _AFTER = "on_failure", ("none", "bisect")

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,12})?)\s*%", re.ASCII)
_MOST_S, _MOST_RETRIES, _MOST_TOKENS, _MOST_EXAMPLES = 7 * 86400, 10, 1 << 40, 10_000


#: For a key without a default: that it is missing is said as that it is wrong.
_REQUIRED = Field(validate_default=True)
_RELATIVE = "a number like 0.01 or 2%, at least 0"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _command(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        hint = "; no shell reads it" if isinstance(value, str) else ""
        raise ValueError(f"expected a list like [python, eval.py], found {shown(value)}{hint}")
    for i, word in enumerate(value):
        if not (is_text(word) or (i and word == "")):
            raise ValueError(f"expected texts (numbers in quotes), found {shown(word)}")
    return tuple(value)


def _is_limit(value: Any) -> bool:
    return is_number(value) and value > 0 and (value <= 1 or value % 1 == 0)


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 < value <= _MOST_S


def _is_entry(value: Any) -> bool:
    return isinstance(value, str) and _ENTRY.fullmatch(value) is not None


def _are_names(value: Any) -> bool:
    return _texts(value) and all(map(_VARIABLE.fullmatch, value))


def _is_relative(value: Any) -> bool:
    if isinstance(value, str):
        return _SHARE.fullmatch(value.strip()) is not None
    return is_number(value) and value >= 0


def _number(value: Any) -> tuple[float, bool]:
    """A threshold, and whether it is a share of the live value."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value.strip())):
        return float(Decimal(share[1]) / 100), True
    return float(value), False


class _Perplexity(Keys):
    example = "{text: notes.jsonl}"
    text: Annotated[Any, expecting("a file of text or JSON Lines", is_text), _REQUIRED] = None
    field: Annotated[Any, expecting("the name of a field", is_text)] = "text"
    max_tokens: Annotated[Any, whole(2, _MOST_TOKENS)] = 20_000


class _LmEval(Keys):
    example = "{tasks: [arc_easy], limit: 100}"
    tasks: Annotated[Any, expecting("a list like [arc_easy]", _texts, tuple), _REQUIRED] = None
    limit: Annotated[
        Any, expecting("a number of examples, or a share of them below 1", _is_limit, float)
    ] = None
    num_fewshot: Annotated[Any, whole(0, _MOST_EXAMPLES)] = None
    apply_chat_template: Annotated[Any, expecting("true or false", is_bool)] = False
    batch_size: Annotated[Any, whole(1, _MOST_EXAMPLES)] = 1
    device: Annotated[Any, expecting("a device like cpu or cuda:0", is_text)] = None
    include_path: Annotated[Any, expecting("a folder of tasks", is_text)] = None


class EvaluateYaml(Keys):
    """The key `evaluate:`."""

    example = "{command: [python, eval.py]}"
    command: Annotated[Any, AfterValidator(_command)] = ()
    python: Annotated[Any, expecting("package.module:function", _is_entry)] = None
    perplexity: _Perplexity | None = None
    lm_eval: _LmEval | None = None
    timeout: Annotated[Any, expecting(f"seconds above 0, to {_MOST_S}", _is_time, float)] = 600.0
    retries: Annotated[Any, whole(0, _MOST_RETRIES)] = 1
    env: Annotated[Any, expecting("names of variables like [HF_TOKEN]", _are_names, tuple)] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in _KINDS if getattr(self, kind)]
        if len(kinds) != 1:
            listed = " and ".join(kinds) or "none"
            raise ValueError(f"expected one of {', '.join(_KINDS)}, found {listed}")
        return self

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator that these keys ask for."""
        return Evaluator(
            self.command,
            self.python,
            None if self.perplexity is None else Perplexity(**self.perplexity.model_dump()),
            self.timeout,
            self.retries,
            None if self.lm_eval is None else LmEval(**self.lm_eval.model_dump()),
            self.env,
        )


def read_evaluate(value: object, problems: Problems) -> Evaluator | None:
    """The `evaluate:` of a recipe; None without one, or with every problem added at its place."""
    keys = None if value is None else EvaluateYaml.read(value, ("evaluate",), problems)
    return None if keys is None else keys.evaluator


def read_gate(value: object, evaluate: object, problems: Problems) -> Gate | None:
    """The `gate:` of a recipe, beside the value of its `evaluate:`; None as in `read_evaluate`."""
    path: KeyPath = ("gate",)
    n_before = len(problems)
    if value is None:
        return None
    if evaluate is None:
        problems.add(path, "there is no `evaluate:` that could measure what it asks for")
    if not isinstance(value, dict):
        text = f"expected a mapping like {{accuracy: {{min: 0.6}}}}, found {shown(value)}"
        problems.add(path, text)
        return None
    after = value.get(_ON_FAILURE, _AFTER[0])
    if after not in _AFTER:
        near = suggest(str(after), _AFTER)
        text = f"expected one of {', '.join(_AFTER)}, found {shown(after)}{near}"
        problems.add((*path, _ON_FAILURE), text)
    metrics = {name: limits for name, limits in value.items() if name != _ON_FAILURE}
    if not metrics:
        problems.add(path, "expected at least one metric with a threshold, found none")
    is_built_in = isinstance(evaluate, dict) and evaluate.get("perplexity") is not None
    thresholds: list[Threshold] = []
    for name, limits in metrics.items():
        if is_built_in and name not in _BUILT_IN:
            near = suggest(name, _BUILT_IN) or f"; it gives {', '.join(_BUILT_IN)}"
            problems.add((*path, name), f"the built-in evaluator has no such metric{near}")
        thresholds += _thresholds(name, limits, (*path, name), problems)
    return Gate(tuple(thresholds), after) if len(problems) == n_before else None


class _Limits(Keys):
    """The thresholds of a metric: each a number, and whether it is a share."""

    example = "{min: 0.6}"
    min: Annotated[Any, expecting("a number like 0.6", is_number, _number)] = None
    max: Annotated[Any, expecting("a number like 0.6", is_number, _number)] = None
    max_drop: Annotated[Any, expecting(_RELATIVE, _is_relative, _number)] = None
    max_rise: Annotated[Any, expecting(_RELATIVE, _is_relative, _number)] = None


def _thresholds(metric: str, value: object, path: KeyPath, problems: Problems) -> list[Threshold]:
    limits = _Limits.read(value, path, problems)
    if limits is None or not isinstance(value, dict):
        return []
    given = {key: limit for key in value if (limit := getattr(limits, key)) is not None}
    if not given:
        listed = ", ".join(_Limits.model_fields)
        problems.add(path, f"expected at least one of {listed}, found none")
    if limits.min and limits.max and limits.min > limits.max:
        problems.add((*path, "min"), "it is above `max:`, so that nothing could pass")
    return [Threshold(metric, key, *limit) for key, limit in given.items()]
