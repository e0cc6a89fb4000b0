"""Which refusals are right, or known to be left: by architecture and the first word of the case."""

from __future__ import annotations

_FIRST = "dense layers must be the first ones: a number says how many they are"
_PERIODS = "kinds of layers follow from a period and an offset, which not every order has"
_TABLE = "layers have parts of one table, and pairs of them share caches, by their numbers"
_SCALED = "attention is divided by the layer's number"

KNOWN: dict[tuple[str, str], str] = {
    ("deepseek_v2", "slices"): _FIRST,
    ("deepseek_v3", "slices"): _FIRST,
    ("glm4_moe", "slices"): _FIRST,
    ("ernie4_5_moe", "slices"): _PERIODS,
    ("jamba", "slices"): _PERIODS,
    ("gemma3n_text", "slices"): _TABLE,
    ("gpt2", "slices"): _SCALED,
}
