"""Which architectures are drawn, and how: `architectures.yml`, read and filled with random choices.

A config is drawn as users find it: windows, layers of two kinds in any order, dense layers among
mixtures, and the numbers that older configs have instead of lists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Config = dict[str, Any]
#: CLIP and SigLIP towers were wrapped once more in files before transformers 5.
_NESTED_TOWER = (r"^vision_tower\.", "vision_tower.vision_model.")
#: Renames what `save_pretrained` writes to an older spelling of the hub: (pattern, replacement).
OLDER_NAMES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("gpt2", "bloom"), (r"^transformer\.", "")),
    "opt": (r"^model\.", ""),
    **dict.fromkeys(("llava", "paligemma", "gemma3"), _NESTED_TOWER),
}


@dataclass(slots=True)
class Draw:
    """A seeded source of choices for a model of some layers."""

    rng: random.Random
    layers: int

    def pick(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def kinds(self, *kinds: str) -> list[str]:
        """A kind per layer, in any order, each at least once."""
        drawn = [*kinds, *(self.pick(*kinds) for _ in range(self.layers - len(kinds)))]
        self.rng.shuffle(drawn)
        return drawn

    def some(self) -> list[int]:
        """Numbers of some layers, neither none nor all."""
        return sorted(self.rng.sample(range(self.layers), self.rng.randint(1, self.layers - 1)))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A tag of the file and its arguments."""

    of: Callable[..., Any]
    given: tuple[Any, ...]


_CHOICES: dict[str, Callable[..., Any]] = {
    "pick": Draw.pick,
    "kinds": Draw.kinds,
    "some": Draw.some,
    "pairs": lambda d, *kinds: [[[kind], 1] for kind in d.kinds(*kinds)],
    "bits": lambda d: [d.pick(0, 1) for _ in range(d.layers)],
    "rates": lambda d: [d.pick(0.0, 0.9) for _ in range(d.layers)],
    "depth": lambda d: d.rng.randint(1, d.layers - 1),
    "window": lambda d: d.rng.randint(4, 9),
    "layers": lambda d: d.layers,
}


class _Loader(yaml.SafeLoader):
    pass


def _choice(loader: _Loader, suffix: str, node: yaml.Node) -> _Choice:
    is_list = isinstance(node, yaml.SequenceNode)
    given = loader.construct_sequence(node, deep=True) if is_list else []  # type: ignore[arg-type]
    return _Choice(_CHOICES[suffix], tuple(given))


_Loader.add_multi_constructor("!", _choice)
_FILE = yaml.load((Path(__file__).parent / "architectures.yml").read_text(), _Loader)
NAMES: tuple[str, ...] = tuple(_FILE["models"])


def auto_class(name: str) -> str:
    """The class of transformers that loads models of a type."""
    if "vision_config" in _FILE["models"][name]:
        return "AutoModelForImageTextToText"
    kinds = {"bert": "MaskedLM", "t5": "Seq2SeqLM", "bart": "Seq2SeqLM"}
    return f"AutoModelFor{kinds.get(name, 'CausalLM')}"


def is_sliced(name: str) -> bool:
    """Whether a model's layers are one list that slices may reorder here."""
    return auto_class(name) in ("AutoModelForCausalLM", "AutoModelForMaskedLM")


def draw_config(name: str, d: Draw) -> Config:
    """Draw the settings of a tiny model of a type."""
    what = _FILE["models"][name]
    drawn: Config = _drawn(what if "text_config" in what else _FILE["common"] | what, d)
    if "text_config" in drawn:
        drawn["tie_word_embeddings"] = drawn["text_config"]["tie_word_embeddings"]
    if name == "cohere2":  # its class has no such key
        del drawn["head_dim"]
    return drawn


def _drawn(value: Any, d: Draw) -> Any:
    if isinstance(value, _Choice):
        return _drawn(value.of(d, *value.given), d)
    if isinstance(value, list):
        return [_drawn(v, d) for v in value]
    return dict(_entries(value, d)) if isinstance(value, dict) else value


def _entries(config: Config, d: Draw) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key == "either":
            yield from _drawn(d.pick(*value), d).items()
        else:
            yield key, _drawn(value, d)
