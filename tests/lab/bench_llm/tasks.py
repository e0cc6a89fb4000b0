"""Seven skills of `reasoning-gym` (Apache-2.0): items with one right answer, drawn by seeds.

Five are answered by greedy decoding and judged to the letter, two by the likelihood of each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Split = Literal["train", "valid", "test"]
#: The first seed of each split, and how far apart those of two training seeds are: `reasoning-gym`
#: draws item n of a seed by the seed + n.
_APART = 1_000_000
_SEEDS: Mapping[Split, int] = {"test": 1, "valid": 1_000_000, "train": 2_000_000}
SIZES: Mapping[Split, int] = {"train": 20_000, "valid": 128, "test": 512}
#: What each split leaves out: the items of these.
_HELD_OUT: Mapping[Split, tuple[Split, ...]] = {
    "test": (),
    "valid": ("test",),
    "train": ("test", "valid"),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A question as the model reads it, and its answer with the blank before it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A data set of `reasoning-gym` with its settings; `choices` are all answers there are."""

    name: str
    source: str
    settings: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[str, ...] = ()

    def items(self, split: Split, seed: int = 0) -> tuple[Item, ...]:
        """The items of a split, which no other split has; a seed has its own of `train`."""
        return _drawn(self.name, split, seed if split == "train" else 0)


_RELATIONS = (
    *("aunt", "brother", "brother-in-law", "daughter", "daughter-in-law", "father"),
    *("father-in-law", "granddaughter", "grandfather", "grandmother", "grandson", "husband"),
    *("mother", "mother-in-law", "nephew", "niece", "sister", "sister-in-law", "son"),
    *("son-in-law", "uncle", "wife"),
)
TASKS = (
    Task("sums", "chain_sum", {"max_terms": 3, "min_digits": 1, "max_digits": 2}),
    Task("spelling", "spell_backward", {"max_word_len": 4}),
    Task("lists", "number_filtering", {"max_numbers": 4, "max_decimals": 0}),
    Task("reading", "needle_haystack", {"min_num_statements": 3, "max_num_statements": 5}),
    Task("counting", "letter_counting", {"min_words": 3, "max_words": 6}),
    Task("kinship", "family_relationships", choices=_RELATIONS),
    Task("logic", "syllogism", choices=("No", "Yes")),
)
_BY_NAME = {task.name: task for task in TASKS}


@cache
def _drawn(name: str, split: Split, seed: int) -> tuple[Item, ...]:
    return tuple(_draw(_BY_NAME[name], split, seed))


def _draw(task: Task, split: Split, seed: int) -> Iterator[Item]:
    """As many different items as the split has; of few that there are, all that are found."""
    import reasoning_gym

    wanted = SIZES[split]
    seen = {i.prompt for other in _HELD_OUT[split] for i in task.items(other)}
    most = len(seen) + wanted
    first = _SEEDS[split] + seed * _APART
    settings: dict[str, Any] = {"size": 2 * wanted, "seed": first, **task.settings}
    for entry in reasoning_gym.create_dataset(task.source, **settings):
        item = Item(f"{entry['question'].strip()}\nAnswer:", f" {entry['answer']}")
        if item.prompt not in seen and len(seen) < most:
            seen.add(item.prompt)
            yield item
