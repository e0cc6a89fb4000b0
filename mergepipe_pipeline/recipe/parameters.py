"""The values that a parameter may have, and what each is worth for one tensor, as in mergekit.

A value is a number or a text, a gradient (list of numbers over the layers), or a list of `{filter,
value}` whose first match wins. Numeric texts count as numbers. A bare `{filter, value}` is read as
a list of one, with a warning, where older mergekits fail. `checks` knows which parameters exist,
and which of them take a text or a boolean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, shown_path, suggest

#: Parameters that mean a share, whatever the method: 1 or more keeps all, as in mergekit.
SHARES = frozenset({"density"})

_YES, _NO = {"true", "yes", "on", "t", "y", "1"}, {"false", "no", "off", "f", "n", "0"}
_RULE_KEYS = ("filter", "value")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.ASCII | re.IGNORECASE)
#: Larger numbers are slips of the keys: no weight, factor or number of rounds comes near.
_LARGEST = 1e6


@dataclass(frozen=True, slots=True)
class Rule:
    """Anchors (one: a constant) for tensors whose name contains `filter`; None takes all.

    A text is the only anchor.
    """

    filter: str | None
    anchors: tuple[float, ...] | tuple[str]


#: A parameter's value in its general form: the first rule that takes the tensor counts.
Setting = tuple[Rule, ...]
Settings = Mapping[str, Setting]


def as_bool(text: str) -> bool | None:
    """Yes or no, as pydantic reads a text in mergekit; None for other texts."""
    word = text.strip().lower()
    return True if word in _YES else False if word in _NO else None


def position(layer: int | None, n_layers: int) -> float:
    """Where a tensor stands on the way through `n_layers` layers, in [0, 1].

    Layer k of n has k/(n−1), the only layer of one has 1; embeddings, final norm and head (layer
    None) have 0.
    """
    if layer is None:
        return 0.0
    return layer / (n_layers - 1) if n_layers > 1 else 1.0


def interpolate(anchors: Sequence[float], t: float) -> float:
    """The value at `t` in [0, 1] of a gradient over evenly spaced anchors; within their range."""
    if len(anchors) == 1:
        return float(anchors[0])
    place = t * (len(anchors) - 1)
    left = min(int(place), max(0, len(anchors) - 2))
    a, b = anchors[left], anchors[min(left + 1, len(anchors) - 1)]
    part = place - left
    # Equal neighbours are given back exactly, and rounding cannot leave their range.
    return min(max((1 - part) * a + part * b, min(a, b)), max(a, b))


def evaluate(
    setting: Setting, tensor: str, t: float, *, stepwise: bool = False
) -> float | str | None:
    """The value for a tensor at position `t`, or None if no rule takes it.

    `stepwise` takes the last anchor passed, for yes and no, which have nothing between them.
    """
    for rule in setting:
        if rule.filter is None or rule.filter in tensor:
            numbers = [a for a in rule.anchors if not isinstance(a, str)]
            if stepwise or not numbers:
                return rule.anchors[int(t * (len(rule.anchors) - 1))]
            return interpolate(numbers, t)
    return None


def look_up(
    name: str, levels: Sequence[Settings], tensor: str, t: float, *, stepwise: bool = False
) -> float | str | None:
    """The value from the first level that has one for this tensor; None if none has."""
    for level in levels:
        if name in level:
            value = evaluate(level[name], tensor, t, stepwise=stepwise)
            if value is not None:
                return value
    return None


def parse_settings(
    raw: object, path: KeyPath, problems: Problems, warnings: list[str]
) -> dict[str, Setting]:
    """The `parameters:` mapping at `path`; values that cannot be read are left out and reported."""
    if not isinstance(raw, dict):
        return {}
    settings: dict[str, Setting] = {}
    for name, value in raw.items():
        key_path = (*path, str(name))
        if value == []:
            warnings.append(f"{shown_path(key_path)} is an empty list, which gives no value")
            continue
        n_before = len(problems)
        setting = _parse_setting(value, key_path, problems, warnings)
        _check_share(str(name), setting, key_path, problems)
        if len(problems) == n_before:
            settings[str(name)] = setting
    return settings


def _parse_setting(raw: object, path: KeyPath, problems: Problems, warnings: list[str]) -> Setting:
    if isinstance(raw, dict):
        warnings.append(
            f"{shown_path(path)}: a {{filter, value}} outside a list is read as a list of one, "
            "which mergekit before 0.1.5 refuses"
        )
        return (_parse_rule(raw, path, problems),)
    if isinstance(raw, list) and any(isinstance(item, dict) for item in raw):
        if not all(isinstance(item, dict) for item in raw):
            problems.add(path, "a list holds either numbers or {filter, value} entries, not both")
            return ()
        return tuple(_parse_rule(item, (*path, i), problems) for i, item in enumerate(raw))
    return (Rule(None, _parse_anchors(raw, path, problems)),)


def _parse_rule(raw: dict[str, object], path: KeyPath, problems: Problems) -> Rule:
    for key in raw:
        if key not in _RULE_KEYS:
            problems.ignore((*path, key), f"unknown key `{key}`{suggest(key, _RULE_KEYS)}")
    if "value" not in raw:
        problems.add(path, "a {filter, value} entry needs `value:`")
        return Rule(None, (0.0,))
    pattern = raw.get("filter")
    if pattern is not None and not isinstance(pattern, str):
        problems.add((*path, "filter"), f"expected a part of tensor names, found {shown(pattern)}")
        pattern = None
    anchors = _parse_anchors(raw["value"], (*path, "value"), problems)
    return Rule(None if pattern == "*" else pattern, anchors)


def _parse_anchors(
    raw: object, path: KeyPath, problems: Problems
) -> tuple[float, ...] | tuple[str]:
    if not isinstance(raw, list):
        value = _parse_scalar(raw, path, problems)
        if isinstance(value, str):
            return (value,)
        return (value,)
    if not raw:
        problems.add(path, "expected a value or a list of numbers, found an empty list")
    numbers = []
    for i, item in enumerate(raw):
        value = _parse_scalar(item, (*path, i), problems)
        if isinstance(value, str):
            problems.add((*path, i), f"a gradient is of numbers, found {shown(item)}")
            break
        numbers.append(value)
    return tuple(numbers)


def _parse_scalar(raw: object, path: KeyPath, problems: Problems) -> float | str:
    if isinstance(raw, bool):
        return raw
    number = None
    if isinstance(raw, int | float | str):
        try:
            number = float(raw)
        except ValueError:
            return str(raw)
        # Python reads 1_000 and the digits of any script as well.
        if isinstance(raw, str) and math.isfinite(number) and not _DECIMAL.fullmatch(raw.strip()):
            return raw
    if number is None:
        problems.add(path, f"expected a number or a text, found {shown(raw)}")
        return 0.0
    if not math.isfinite(number):
        problems.add(path, f"expected a finite number, found {shown(raw)}")
        return 0.0
    if abs(number) > _LARGEST:
        problems.add(path, f"expected a number from -1e6 to 1e6, found {shown(raw)}")
        return 0.0
    return number


def _check_share(name: str, setting: Setting, path: KeyPath, problems: Problems) -> None:
    if name not in SHARES:
        return
    for value in (a for rule in setting for a in rule.anchors if not isinstance(a, str)):
        if value < 0:
            problems.add(path, f"`{name}` is a share from 0 up, found {value:g}")
