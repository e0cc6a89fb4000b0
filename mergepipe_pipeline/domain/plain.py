"""Frozen dataclasses as plain JSON material, all the way down."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any


def plain(value: Any) -> Any:
    """A dataclass as a mapping, all the way down; `asdict` would copy every range and number.

    Fields that are NaN or infinite are text, as JSON has no such numbers: "nan", "inf", "-inf".
    """
    names = _field_names(type(value))
    if names:
        return {
            name: field if type(field := getattr(value, name)) in _PLAIN else plain(field)
            for name in names
        }
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    if isinstance(value, tuple) and value and _field_names(type(value[0])):
        return [plain(v) for v in value]
    return value


_PLAIN = frozenset({str, int, bool, type(None)})
_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    if kind not in _NAMES:
        _NAMES[kind] = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()
    return _NAMES[kind]
