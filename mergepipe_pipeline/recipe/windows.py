"""The weights of a window: checkpoints of one run that are merged as if its rate had decayed.

A schedule says how much an update counts that lies so far through the window, from 1 at its start
to 0 at its end. The checkpoint before an update has all updates before, so a checkpoint weighs what
its updates count more than those after it, and the weights add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

#: The schedules; a linear decay of updates is the uniform mean of checkpoints.
SCHEDULES = ("uniform", "linear", "minus_sqrt", "exponential")
_MEANS = ("uniform", "linear")


def window_weights(n: int, schedule: str, decay: float = 0.0) -> tuple[float, ...]:
    """The weights of `n` checkpoints in the order of their steps.

    `decay` is what an exponential moving average keeps of itself at each step.
    """
    if schedule == "minus_sqrt":
        return tuple(sqrt((i + 1) / n) - sqrt(i / n) for i in range(n))
    if schedule == "exponential":
        return (decay ** (n - 1), *((1 - decay) * decay ** (n - 1 - i) for i in range(1, n)))
    return (1 / n,) * n


def as_mean(recipe: dict[str, object]) -> dict[str, object]:
    """The recipe, or with method `mean` where it is a linear merge of one uniform window alone.

    Both are the mean of the checkpoints; from exact sums it slides without reading all of them.
    """
    models, method = recipe.get("models"), recipe.get("merge_method")
    entry = models[0] if isinstance(models, list) and len(models) == 1 else None
    if method not in ("linear", "mean") or not isinstance(entry, dict):
        return recipe
    weights = entry.get("weights")
    is_plain = all(recipe.get(key) is None for key in ("base_model", "parameters"))
    is_mean = isinstance(weights, dict) and weights.get("schedule") in _MEANS
    if not is_mean or entry.get("parameters") or not is_plain:
        return recipe
    window = {key: value for key, value in entry.items() if key != "weights"}
    return {**recipe, "merge_method": "mean", "models": [window]}


def weights_of(entry: Mapping[str, object], n: int) -> tuple[float, ...] | None:
    """The weights that the `weights:` of a selector gives to what it takes; None without them.

    Values of a wrong kind count as absent: `schema` refuses those.
    """
    weights = entry.get("weights")
    schedule = weights.get("schedule") if isinstance(weights, Mapping) else None
    decay = weights.get("decay") if isinstance(weights, Mapping) else None
    if schedule not in SCHEDULES:
        return None
    return window_weights(n, str(schedule), decay if isinstance(decay, float) else 0.0)
