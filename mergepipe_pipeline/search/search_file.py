"""What a search file asks for, every key checked.

The text alone is read: whether sources and evaluator are there is seen where the search starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from mergepipe_pipeline.domain.evaluation import Evaluator, Metrics
from mergepipe_pipeline.optimise.proposers import Method
from mergepipe_pipeline.optimise.surrogate import Prior
from mergepipe_pipeline.optimise.trials import REFERENCE
from mergepipe_pipeline.recipe.evaluate import read_evaluate
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, recipe_error, sentence_of, shown
from mergepipe_pipeline.recipe.references import UnreadableReference, identity, parse_reference
from mergepipe_pipeline.recipe.yaml_text import read_yaml


def _pair(pair: list[float]) -> list[float]:
    if pair[0] >= pair[1]:
        raise ValueError(f"expected two numbers, the smaller first, found {shown(pair)}")
    return pair


def _coordinate(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "search" and not (is_number and 0 <= float(str(value)) <= 1):
        raise ValueError(f"expected `search` or a number from 0 to 1, found {shown(value)}")
    return value


def _model(text: str) -> str:
    try:
        parse_reference(text)
    except UnreadableReference as error:
        raise ValueError(str(error)) from None
    return text


Pair = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
Ascending = Annotated[Pair, AfterValidator(_pair)]
Model = Annotated[str, AfterValidator(_model)]
Coordinate = Annotated[Any, AfterValidator(_coordinate)]
Count = Annotated[int, Field(ge=1, le=100_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ObjectiveYaml(_Strict):
    """One of `objectives:`, under the name of its metric."""

    direction: Literal["max", "min"]
    anchors: Pair


class SpaceYaml(_Strict):
    """The key `space:`."""

    weights: Literal["mix", "each"] = "mix"
    range: Ascending | None = None
    blocks: Count | None = None
    head: Coordinate = "search"
    embeddings: Coordinate = 0.5
    density: Ascending | None = None


class SearchYaml(_Strict):
    """A search file's top level."""

    sources: Annotated[list[Model], Field(min_length=2)]
    base_model: Model
    merge_method: Literal["linear", "task_arithmetic", "ties"]
    parameters: dict[str, Any] = {}
    space: SpaceYaml = SpaceYaml()
    objectives: Annotated[dict[str, ObjectiveYaml], Field(min_length=2)]
    evaluate: Any
    evaluations: Count
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    initial: Count = 8
    method: Method = "async"
    prior: Prior = "map"
    prompts: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    budget: Any = None
    failures: Count = 5


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


@dataclass(frozen=True, slots=True)
class SearchFile:
    """What a search file asks for.

    `range` is what 0 and 1 of a weight's coordinate mean, `density` of the density's (None: it is
    not searched). `head` and `embeddings` are fixed coordinates, None where they are searched.
    `blocks` None is one for each layer; `prompts` names a file beside this one.
    """

    sources: tuple[str, ...]
    base: str
    method: str
    parameters: Mapping[str, Any]
    is_mix: bool
    range: tuple[float, float]
    blocks: int | None
    head: float | None
    embeddings: float | None
    density: tuple[float, float] | None
    objectives: tuple[Objective, ...]
    evaluator: Evaluator
    evaluations: int
    workers: int
    initial: int
    proposer: Method
    prior: Prior
    prompts: str | None
    seed: int
    budget: Any
    failures: int

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
    yaml = evaluator = None
    if isinstance(value, dict):
        yaml = _validated(value, problems)
        evaluator = read_evaluate(value.get("evaluate"), problems)
        if value.get("evaluate") is None:
            problems.add(("evaluate",), "this key is required and missing")
    elif not problems:
        problems.add((), "a search is a mapping with `sources:` and `objectives:`", document.line)
    if yaml is not None:
        _check(yaml, problems)
    if problems or yaml is None or evaluator is None:
        raise recipe_error([problems], where, "search file")
    return _file(yaml, evaluator)


def _file(yaml: SearchYaml, evaluator: Evaluator) -> SearchFile:
    space = yaml.space
    low, high = space.range or (0.0, 1.0)
    return SearchFile(
        sources=tuple(yaml.sources),
        base=yaml.base_model,
        method=yaml.merge_method,
        parameters=yaml.parameters,
        is_mix=space.weights == "mix",
        range=(low, high),
        blocks=space.blocks,
        head=None if space.head == "search" else space.head,
        embeddings=None if space.embeddings == "search" else space.embeddings,
        density=None if space.density is None else (space.density[0], space.density[1]),
        objectives=tuple(
            Objective(name, o.direction == "max", *o.anchors) for name, o in yaml.objectives.items()
        ),
        evaluator=evaluator,
        evaluations=yaml.evaluations,
        workers=yaml.workers,
        initial=yaml.initial,
        proposer=yaml.method,
        prior=yaml.prior,
        prompts=yaml.prompts,
        seed=yaml.seed,
        budget=yaml.budget,
        failures=yaml.failures,
    )


def _check(yaml: SearchYaml, problems: Problems) -> None:
    """Add a problem for each key that does not go with another."""
    space = yaml.space
    if space.weights == "mix" and len(yaml.sources) != 2:
        text = f"`mix` is x of one source and 1 - x of the other, found {len(yaml.sources)} sources"
        problems.add(("space", "weights"), f"{text}; write `each`")
    if space.weights == "mix" and space.range is not None:
        problems.add(("space", "range"), "`mix` goes from 0 to 1; a range is for `each`")
    is_above_0 = space.range is not None and space.range[0] > 0
    if space.weights == "each" and yaml.merge_method == "linear" and not is_above_0:
        text = "`linear` divides by the sum of weights: give a range above 0, as [0.1, 1]"
        problems.add(("space", "range"), text)
    if space.density is not None:
        if yaml.merge_method != "ties":
            problems.add(("space", "density"), f"`{yaml.merge_method}` has no density")
        if not 0 < space.density[0] < space.density[1] <= 1:
            problems.add(("space", "density"), "expected shares above 0 and up to 1")
        if "density" in yaml.parameters:
            problems.add(("parameters", "density"), "it is searched: `space:` has it, too")
    if "weight" in yaml.parameters:
        problems.add(("parameters", "weight"), "weights are what is searched")
    if len({identity(parse_reference(s)) for s in yaml.sources}) < len(yaml.sources):
        problems.add(("sources",), "a source stands twice")
    if yaml.prompts is not None and yaml.prior == "none":
        problems.add(("prompts",), "`prior: none` does not use them")
    for name, objective in yaml.objectives.items():
        worst, best = objective.anchors
        if worst == best or (objective.direction == "max") != (worst < best):
            text = f"expected [worst, best], which go the way of `{objective.direction}`"
            problems.add(("objectives", name, "anchors"), f"{text}, found {shown([worst, best])}")


def _validated(value: Mapping[str, object], problems: Problems) -> SearchYaml | None:
    try:
        return SearchYaml.model_validate(value)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            path = tuple(error["loc"])
            if path != ("evaluate",):  # it is told without pydantic
                problems.add(path, sentence_of(error, _known_keys))
    return None


def _known_keys(path: KeyPath) -> Collection[str]:
    """The keys that may stand where the last part of `path` stands."""
    if len(path) == 1:
        return SearchYaml.model_fields
    models: dict[str, type[BaseModel]] = {"space": SpaceYaml, "objectives": ObjectiveYaml}
    return models[str(path[0])].model_fields
