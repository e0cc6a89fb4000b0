"""Reads `evaluate:` (how a result's quality is measured) and `gate:` (what a release must reach).

Reads the text alone: whether files and programs exist shows where they are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from decimal import Decimal

from mergepipe_pipeline.domain.evaluation import (
    RELATIVE,
    Comparison,
    Evaluator,
    Gate,
    LmEval,
    Perplexity,
    Threshold,
)
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest

_KINDS = ("command", "python", "perplexity", "lm_eval")
_KEYS = (*_KINDS, "timeout", "retries", "env")
_PERPLEXITY_KEYS = ("text", "field", "max_tokens")
_LM_EVAL_KEYS = tuple(field.name for field in fields(LmEval))
_COMPARISONS: tuple[Comparison, ...] = ("min", "max", *RELATIVE)
#: What the built-in evaluator measures.
_BUILT_IN = ("perplexity", "loss", "tokens")
#: The key of a gate beside its metrics, and its values.
_ON_FAILURE, _AFTER = "on_failure", ("none", "bisect")

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,12})?)\s*%", re.ASCII)
_MOST_S, _MOST_RETRIES, _MOST_TOKENS, _MOST_EXAMPLES = 7 * 86400, 10, 1 << 40, 10_000


def read_evaluate(value: object, problems: Problems) -> Evaluator | None:
    """The `evaluate:` of a recipe; None without one, or with every problem added at its place."""
    path: KeyPath = ("evaluate",)
    n_before = len(problems)
    keys = _mapping(value, _KEYS, path, problems, "{command: [python, eval.py]}")
    if keys is None:
        return None
    kinds = [k for k in _KINDS if keys.get(k) is not None]
    if len(kinds) != 1:
        listed = " and ".join(kinds) or "none"
        problems.add(path, f"expected one of {', '.join(_KINDS)}, found {listed}")
        return None
    command = _command(keys.get("command"), (*path, "command"), problems)
    python = _entry(keys.get("python"), (*path, "python"), problems)
    perplexity = _perplexity(keys.get("perplexity"), (*path, "perplexity"), problems)
    lm_eval = _lm_eval(keys.get("lm_eval"), (*path, "lm_eval"), problems)
    timeout_s = _between(keys, "timeout", 600, (0, _MOST_S), path, problems)
    retries = _between(keys, "retries", 1, (0, _MOST_RETRIES), path, problems, whole=True)
    env = _env(keys.get("env"), (*path, "env"), problems)
    if timeout_s == 0:
        problems.add((*path, "timeout"), "expected seconds above 0, found 0")
    if len(problems) > n_before:
        return None
    return Evaluator(command, python, perplexity, timeout_s, int(retries), lm_eval, env)


def read_gate(value: object, evaluate: object, problems: Problems) -> Gate | None:
    """The `gate:` of a recipe, beside the value of its `evaluate:`; None as in `read_evaluate`."""
    path: KeyPath = ("gate",)
    n_before = len(problems)
    if value is None:
        return None
    if evaluate is None:
        problems.add(path, "there is no `evaluate:` that could measure what it asks for")
    if not isinstance(value, dict):
        problems.add(
            path, f"expected a mapping like {{accuracy: {{min: 0.6}}}}, {_found_clause(value)}"
        )
        return None
    after = value.get(_ON_FAILURE, _AFTER[0])
    if after not in _AFTER:
        near = suggest(str(after), _AFTER)
        text = f"expected one of {', '.join(_AFTER)}, {_found_clause(after)}{near}"
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


def _thresholds(metric: str, value: object, path: KeyPath, problems: Problems) -> list[Threshold]:
    keys = _mapping(value, _COMPARISONS, path, problems, "{min: 0.6}")
    if keys is None:
        return []
    if not keys:
        problems.add(path, f"expected at least one of {', '.join(_COMPARISONS)}, found none")
    thresholds = []
    for key, limit in keys.items():
        if key in _COMPARISONS:
            threshold = _threshold(metric, key, limit)
            if threshold is None:
                form = "0.01 or 2%, at least 0" if key in RELATIVE else "0.6"
                problems.add((*path, key), f"expected a number like {form}, {_found_clause(limit)}")
            else:
                thresholds.append(threshold)
    limits = {t.comparison: t.value for t in thresholds}
    if limits.get("min", -math.inf) > limits.get("max", math.inf):
        problems.add((*path, "min"), "it is above `max:`, so that nothing could pass")
    return thresholds


def _threshold(metric: str, key: Comparison, value: object) -> Threshold | None:
    is_relative = key in RELATIVE
    if isinstance(value, str):
        share = _SHARE.fullmatch(value.strip())
        if share is None or not is_relative:
            return None
        return Threshold(metric, key, float(Decimal(share[1]) / 100), is_share=True)
    number = _number(value)
    if number is None or (is_relative and number < 0):
        return None
    return Threshold(metric, key, number)


def _command(value: object, path: KeyPath, problems: Problems) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        text = f"expected a list like [python, eval.py], {_found_clause(value)}"
        hint = "; no shell reads it" if isinstance(value, str) else ""
        problems.add(path, text + hint)
        return ()
    for i, word in enumerate(value):
        if not isinstance(word, str) or "\0" in word or not (word or i):
            problems.add((*path, i), f"expected a text (numbers in quotes), {_found_clause(word)}")
    return tuple(map(str, value))


def _env(value: object, path: KeyPath, problems: Problems) -> tuple[str, ...]:
    if value is None:
        return ()
    names = [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
    if names and names == value and all(map(_VARIABLE.fullmatch, names)):
        return tuple(names)
    problems.add(path, f"expected names of variables like [HF_TOKEN], {_found_clause(value)}")
    return ()


def _entry(value: object, path: KeyPath, problems: Problems) -> str | None:
    if value is None or (isinstance(value, str) and _ENTRY.fullmatch(value)):
        return value
    problems.add(path, f"expected package.module:function, {_found_clause(value)}")
    return None


def _perplexity(value: object, path: KeyPath, problems: Problems) -> Perplexity | None:
    if value is None:
        return None
    keys = _mapping(value, _PERPLEXITY_KEYS, path, problems, "{text: notes.jsonl}")
    if keys is None:
        return None
    texts = {"field": "text", **{k: v for k, v in keys.items() if v is not None}}
    for key in ("text", "field"):
        text = texts.get(key)
        if not isinstance(text, str) or not text or "\0" in text:
            expected = "a file of text or JSON Lines" if key == "text" else "the name of a field"
            problems.add((*path, key), f"expected {expected}, {_found_clause(text)}")
    most = _between(keys, "max_tokens", 20_000, (2, _MOST_TOKENS), path, problems, whole=True)
    return Perplexity(str(texts.get("text")), str(texts["field"]), int(most))


def _lm_eval(value: object, path: KeyPath, problems: Problems) -> LmEval | None:
    if value is None:
        return None
    found = _mapping(value, _LM_EVAL_KEYS, path, problems, "{tasks: [arc_easy], limit: 100}")
    if found is None:
        return None
    keys = {key: item for key, item in found.items() if item is not None}
    tasks = keys.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(t, str) and t for t in tasks):
        problems.add((*path, "tasks"), f"expected a list like [arc_easy], {_found_clause(tasks)}")
        tasks = []
    limit = _number(keys.get("limit"))
    if "limit" in keys and (limit is None or limit <= 0 or (limit > 1 and limit % 1)):
        expected = "a number of examples, or a share of them below 1"
        problems.add((*path, "limit"), f"expected {expected}, {_found_clause(keys['limit'])}")
    templated = keys.get("apply_chat_template", False)
    if not isinstance(templated, bool):
        problems.add(
            (*path, "apply_chat_template"), f"expected true or false, {_found_clause(templated)}"
        )
    for key in ("device", "include_path"):
        text = keys.get(key, ".")
        if not isinstance(text, str) or not text or "\0" in text:
            expected = "a device like cpu or cuda:0" if key == "device" else "a folder of tasks"
            problems.add((*path, key), f"expected {expected}, {_found_clause(text)}")
    few = _between(keys, "num_fewshot", -1, (0, _MOST_EXAMPLES), path, problems, whole=True)
    batch = _between(keys, "batch_size", 1, (1, _MOST_EXAMPLES), path, problems, whole=True)
    return LmEval(
        tuple(tasks),
        limit=limit,
        num_fewshot=None if few < 0 else int(few),
        apply_chat_template=bool(templated),
        batch_size=int(batch),
        device=str(keys["device"]) if "device" in keys else None,
        include_path=str(keys["include_path"]) if "include_path" in keys else None,
    )


def _between(
    keys: Mapping[str, object],
    key: str,
    default: float,
    limits: tuple[float, float],
    path: KeyPath,
    problems: Problems,
    *,
    whole: bool = False,
) -> float:
    """The number under a key, within the limits; the default where there is none."""
    value = keys.get(key)
    if value is None:
        return default
    number = _number(value)
    if number is not None and limits[0] <= number <= limits[1] and not (whole and number % 1):
        return number
    kind = "a whole number" if whole else "seconds"
    text = f"expected {kind} from {limits[0]:g} to {limits[1]:.12g}, {_found_clause(value)}"
    problems.add((*path, key), text)
    return default


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _mapping(
    value: object, known: Sequence[str], path: KeyPath, problems: Problems, example: str
) -> Mapping[str, object] | None:
    """The value if it is a mapping, None if it is not; adds a problem for each unknown key."""
    if value is None and len(path) == 1:
        return None
    if not isinstance(value, dict):
        problems.add(path, f"expected a mapping like {example}, {_found_clause(value)}")
        return None
    problems.add_unknown(value, known, path)
    return value


def _found_clause(value: object) -> str:
    return f"found {shown(value)}"
