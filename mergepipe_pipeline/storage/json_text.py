"""The one parser for JSON that somebody else wrote; every value that passes can be written again.

Stricter than Python's reader, which takes half surrogate pairs (no text for anyone), a key twice
(two readers see two values), NaN, and any depth that its own stack allows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from mergepipe_pipeline.errors import IncompleteCheckpointError

#: Far above any config or tokenizer, far below what a writer's stack can take.
_MAX_DEPTH = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes | str, whole: Callable[[str], int] = int) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError for anything doubtful.

    `whole` reads numbers without fraction and exponent.
    Infinity passes, although it is no JSON: transformers writes it into sound configs
    (`time_step_limit` of Mamba 2).
    """
    text = data.decode() if isinstance(data, bytes) else data
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=whole, parse_constant=_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if "sys.set_int_max_str_digits" in str(error):  # advice that users cannot follow
            raise ValueError(
                f"a number has more than {sys.get_int_max_str_digits()} digits"
            ) from None
        raise
    _refuse_depth(value)
    if _SURROGATE.search(text):
        _refuse_half_characters(value)
    return value


def load_object(data: bytes | str, where: str, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` names its kind ("An adapter's config").

    Raises IncompleteCheckpointError: what ends early or is empty often still arrives.
    """
    try:
        value = parse_json(data)
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} instead of an object")
    except ValueError as error:
        raise IncompleteCheckpointError(
            f"{what} cannot be read",
            where=where,
            expected="a JSON object",
            found=str(error)[:200],
            next_step="copy the file again, or get it from who made it",
        ) from error
    return value


def json_bytes(document: dict[str, Any]) -> bytes:
    """Readable bytes of a JSON object, in its own order of keys: it can carry meaning."""
    return (json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        raise ValueError("a key occurs twice")
    return seen


def _refuse_half_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds half of a character (a surrogate alone)") from None


def _constant(token: str) -> float:
    if token == "NaN":
        raise ValueError("NaN is not JSON")
    return float(token)


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
