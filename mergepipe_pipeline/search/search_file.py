"""The search file: its keys, every one checked.

The text alone is read: whether sources and evaluator are there is seen where the search starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat

from mergepipe_pipeline.domain.evaluation import Evaluator, Metrics
from mergepipe_pipeline.recipe.evaluate import EvaluateYaml
from mergepipe_pipeline.recipe.keys import Keys, readable
from mergepipe_pipeline.recipe.problems import Problems, recipe_error, shown
from mergepipe_pipeline.recipe.references import identity, parse_reference
from mergepipe_pipeline.recipe.yaml_text import read_yaml
from mergepipe_pipeline.search.pareto import REFERENCE


def _pair(pair: list[float]) -> list[float]:
    if pair[0] >= pair[1]:
        raise ValueError(f"expected two numbers, the smaller first, found {shown(pair)}")
    return pair


def _coordinate(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "search" and not (is_number and 0 <= float(str(value)) <= 1):
        raise ValueError(f"expected `search` or a number from 0 to 1, found {shown(value)}")
    return value


Pair = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
Ascending = Annotated[Pair, AfterValidator(_pair)]
Model = Annotated[str, AfterValidator(readable)]
Coordinate = Annotated[Any, AfterValidator(_coordinate)]
Count = Annotated[int, Field(ge=1, le=100_000)]


class ObjectiveYaml(Keys):
    """One of `objectives:`, under the name of its metric."""

    direction: Literal["max", "min"]
    anchors: Pair


class SpaceYaml(Keys):
    """The key `space:`."""

    weights: Literal["mix", "each"] = "mix"
    range: Ascending | None = None
    blocks: Count | None = None
    head: Coordinate = "search"
    embeddings: Coordinate = 0.5
    density: Ascending | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric that is to be large or small (`is_max`): 0 at the anchor `worst`, 1 at `best`."""

    metric: str
    is_max: bool
    worst: float
    best: float

    def value(self, metrics: Metrics) -> float:
        """How good the metric is, no worse than a failure. Raises KeyError where it is missing."""
        return max(REFERENCE, self.share(metrics))

    def share(self, metrics: Metrics) -> float:
        """How good the metric is, however bad. Raises KeyError where it is missing."""
        return (metrics[self.metric] - self.worst) / (self.best - self.worst)


class SearchFile(Keys):
    """A search file."""

    sources: Annotated[list[Model], Field(min_length=2)]
    base_model: Model
    merge_method: Literal["linear", "task_arithmetic", "ties"]
    parameters: dict[str, Any] = Field(default={})
    space: SpaceYaml = SpaceYaml()
    measured: Annotated[dict[str, ObjectiveYaml], Field(min_length=2, alias="objectives")]
    evaluate: EvaluateYaml
    evaluations: Count
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    initial: Count = 8
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    budget: Any = None
    failures: Count = 5

    @cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator of candidates."""
        return self.evaluate.evaluator

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives; the last one is what the others cost."""
        return tuple(
            Objective(name, o.direction == "max", *o.anchors) for name, o in self.measured.items()
        )

    @property
    def is_mix(self) -> bool:
        """Whether a coordinate mixes two sources."""
        return self.space.weights == "mix"

    @property
    def fixed(self) -> dict[str, float]:
        """The coordinates of layers outside the numbered ones that are not searched."""
        outer = {"head": self.space.head, "embed": self.space.embeddings}
        return {name: x for name, x in outer.items() if x != "search"}

    def values(self, metrics: Metrics) -> tuple[float, ...]:
        """One value per objective. Raises KeyError with the name of a metric that is missing."""
        return tuple(o.value(metrics) for o in self.objectives)

    def shares(self, metrics: Metrics) -> tuple[float, ...]:
        """The same, however bad. Raises KeyError as `values`."""
        return tuple(o.share(metrics) for o in self.objectives)


def parse_search(text: str, where: str) -> SearchFile:
    """Read the text of a search file. Raises RecipeError with every problem at its key path."""
    document = read_yaml(text)
    problems, value = document.problems, document.value
    file = None
    if isinstance(value, dict):
        file = SearchFile.read(value, (), problems)
    elif not problems:
        problems.add((), "a search is a mapping with `sources:` and `objectives:`", document.line)
    if file is not None:
        _check(file, problems)
    if problems or file is None:
        raise recipe_error([problems], where, "search file")
    return file


def _check(file: SearchFile, problems: Problems) -> None:
    """Add a problem for each key that does not go with another."""
    space = file.space
    if space.weights == "mix" and len(file.sources) != 2:
        text = f"`mix` is x of one source and 1 - x of the other, found {len(file.sources)} sources"
        problems.add(("space", "weights"), f"{text}; write `each`")
    if space.weights == "mix" and space.range is not None:
        problems.add(("space", "range"), "`mix` goes from 0 to 1; a range is for `each`")
    is_above_0 = space.range is not None and space.range[0] > 0
    if space.weights == "each" and file.merge_method == "linear" and not is_above_0:
        text = "`linear` divides by the sum of weights: give a range above 0, as [0.1, 1]"
        problems.add(("space", "range"), text)
    if space.density is not None:
        if file.merge_method != "ties":
            problems.add(("space", "density"), f"`{file.merge_method}` has no density")
        if not 0 < space.density[0] < space.density[1] <= 1:
            problems.add(("space", "density"), "expected shares above 0 and up to 1")
        if "density" in file.parameters:
            problems.add(("parameters", "density"), "it is searched: `space:` has it, too")
    if "weight" in file.parameters:
        problems.add(("parameters", "weight"), "weights are what is searched")
    if len({identity(parse_reference(s)) for s in file.sources}) < len(file.sources):
        problems.add(("sources",), "a source stands twice")
    for name, objective in file.measured.items():
        worst, best = objective.anchors
        if worst == best or (objective.direction == "max") != (worst < best):
            text = f"expected [worst, best], which go the way of `{objective.direction}`"
            problems.add(("objectives", name, "anchors"), f"{text}, found {shown([worst, best])}")
