"""A recipe as written: all that its text says without a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mergepipe_pipeline.domain.evaluation import Evaluator, Gate
from mergepipe_pipeline.domain.recipe import Budget, ModelRef, TokenizerRecipe
from mergepipe_pipeline.domain.selector import Selected
from mergepipe_pipeline.recipe.problems import Lines
from mergepipe_pipeline.recipe.structure import Entry, Level, Module, Slice, levels


@dataclass(frozen=True)
class ParsedRecipe:
    """A recipe checked as far as its text allows.

    `references` are all models in order of appearance, one twice if a slice lists it twice, the
    base at `base` among them (None also where slices have different bases). `stage` is its `name:`;
    `stages_used` are the names of earlier stages whose results stand among the references, and
    `before` those stages. `dtype` and `out_dtype` are safetensors codes; `chat_template` is a
    template's text, `auto`, or the name of a known one. `schedule` is None where there is none. A
    `gate` has an `evaluator`. `selected` says which references each of its selectors stands for.
    Read `lenient`ly, it may hold what mergekit ignores. The result has a tokenizer if it
    `copies_tokenizer`; `truncates` crops vocabularies to the shortest, the base's included.
    """

    name: str
    where: str
    text: str
    method: str
    references: tuple[ModelRef, ...]
    base: int | None
    modules: tuple[Module, ...] = field(hash=False)
    level: Level = field(hash=False)
    dtype: str | None
    out_dtype: str | None
    budget: Budget
    strategy: str | None
    seed: int
    ref: str
    schedule: str | None
    trigger: str
    timezone: str
    block_elems: int | None
    tokenizer: TokenizerRecipe | None
    chat_template: str | None
    stage: str | None
    warnings: tuple[str, ...]
    lines: Lines = field(repr=False, compare=False)
    evaluator: Evaluator | None = None
    gate: Gate | None = None
    stages_used: tuple[str, ...] = ()
    before: tuple[ParsedRecipe, ...] = field(default=(), hash=False)
    selected: tuple[Selected, ...] = ()
    lenient: bool = False
    copies_tokenizer: bool = True
    truncates: bool = False

    @property
    def all_selected(self) -> tuple[Selected, ...]:
        """What the selectors of the stages before and its own stand for."""
        return tuple(s for stage in (*self.before, self) for s in stage.selected)

    def slices(self) -> Iterator[tuple[Module, Slice]]:
        """Every slice with its module, in recipe order."""
        for module in self.modules:
            for part in module.slices:
                yield module, part

    @property
    def not_aligned(self) -> frozenset[int]:
        """The references that some slice merges on another base than the recipe's, or on other
        layers of it.
        """
        parts = (part.not_aligned_with(self.base) for _, part in self.slices())
        return frozenset[int]().union(*parts)

    def entries(self) -> Iterator[Entry]:
        """Every listed model of every slice, in recipe order."""
        for _, part in self.slices():
            yield from part.entries

    def levels(self) -> Iterator[tuple[Level, bool]]:
        """Every place with parameters, and whether it belongs to one model."""
        return levels(self.modules, self.level)
