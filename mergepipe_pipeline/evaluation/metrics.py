"""Metrics as an evaluator prints them: one JSON object of finite numbers, its last line."""

from __future__ import annotations

import json
import math
from typing import Any

from mergepipe_pipeline.domain.evaluation import Metrics
from mergepipe_pipeline.text import in_one_line

_MOST = 256
_LONGEST_NAME = 100
_SHOWN_CHARS = 120


class NoMetricsError(Exception):
    """An output that ends in no metrics; the message says why."""


def metrics_of(stdout: bytes) -> Metrics:
    """The metrics in the last line that is not blank. Raises NoMetricsError."""
    lines = stdout.split(b"\n")
    last = next((line for line in reversed(lines) if line.strip()), b"")
    if not last:
        raise NoMetricsError("it prints nothing on standard output")
    try:
        value = json.loads(last, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise NoMetricsError(f"its last line is no JSON: {_shown(last)}") from None
    if not isinstance(value, dict) or not value:
        raise NoMetricsError(f"its last line is no JSON object of numbers: {_shown(last)}")
    if len(value) > _MOST:
        raise NoMetricsError(f"it gives {len(value)} metrics, {_MOST} are the most")
    return {_name(name): _number(name, number) for name, number in value.items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise NoMetricsError("its last line gives a metric twice")
    return dict(pairs)


def _name(name: str) -> str:
    if not name.strip() or len(name) > _LONGEST_NAME or in_one_line(name) != name:
        raise NoMetricsError(
            f"the name of a metric is no text of 1 to {_LONGEST_NAME} printable letters: "
            f"{_shown(name.encode(errors='backslashreplace'))}"
        )
    return name


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:
        pass
    raise NoMetricsError(f"its metric {name!r} is no finite number: {_shown(repr(value).encode())}")


def _shown(line: bytes) -> str:
    text = in_one_line(line[: 4 * _SHOWN_CHARS].decode(errors="replace"))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
