"""What a recipe wants, as a condition of Dagster's that the recipe's own sensor evaluates.

The sensor looks as always; Dagster's engine decides by the conditions of the plans, and keeps and
shows why. A run is one of the chain's assets, with the tags of all runs of a recipe.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorType

from mergepipe_pipeline.deploy.standing import Standing
from mergepipe_pipeline.sensors.ticks import RECIPE_TAG
from mergepipe_pipeline.text import visible

_RULE = "the release is not what the inputs ask for, no run works on it, and nothing is awaited"
_HELD = "the automation condition of its plan holds it back"


class RecipeWants(dg.AutomationCondition[dg.AssetKey]):
    """True of a recipe's plan while its sensor would start the chain; other sensors find it false.

    It asks for what is wanted, not for what happened: no event can be missed.
    """

    def __init__(self) -> None:
        self.said, self.is_true = _RULE, False

    @property
    def name(self) -> str:
        """What the UI calls it."""
        return "recipe_wants"

    @property
    def description(self) -> str:
        """What it asks, and in a tick of its sensor what that finds."""
        return self.said

    def get_label(self) -> str | None:
        """What the UI shows with an evaluation: why the condition is false."""
        return None if self.said == _RULE else self.said

    def evaluate(
        self, context: dg.AutomationContext[dg.AssetKey]
    ) -> dg.AutomationResult[dg.AssetKey]:
        """What the sensor finds in this tick."""
        return dg.AutomationResult(
            context, context.candidate_subset if self.is_true else context.get_empty_subset()
        )


@dataclass(frozen=True)
class Wanting:
    """A recipe whose condition, that of its plan, starts its chain."""

    plan: dg.AssetKey
    chain: Sequence[dg.AssetKey]
    condition: RecipeWants = field(default_factory=RecipeWants)

    def with_condition(
        self, assets: Iterable[dg.AssetsDefinition | dg.AssetChecksDefinition]
    ) -> list[dg.AssetsDefinition | dg.AssetChecksDefinition]:
        """The assets of the chain, the plan with its condition."""
        return [
            d.map_asset_specs(self._spec) if isinstance(d, dg.AssetsDefinition) else d
            for d in assets
        ]

    def _spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        if spec.key != self.plan:
            return spec
        return spec.replace_attributes(automation_condition=self.condition)


def decide(
    context: dg.SensorEvaluationContext,
    wanting: Mapping[str, Wanting],
    requests: Sequence[dg.RunRequest],
    states: dict[str, Standing],
) -> tuple[list[dg.RunRequest], dict[str, Any]]:
    """The runs that the conditions let pass, by recipe, and what more the tick's result holds.

    `states` tells of those that are held back.
    """
    asked = {request.tags[RECIPE_TAG]: request for request in requests}
    plans = {one.plan: name for name, one in wanting.items()}
    engine = dg.AutomationConditionSensorDefinition(
        "engine", target=dg.AssetSelection.assets(*plans), use_user_code_server=True
    )
    for name, one in wanting.items():
        where = states.get(name)
        one.condition.is_true = name in asked
        if where is not None:
            one.condition.said = visible(f"{where.state}: {where.why}")
        if name in asked:
            one.condition.said = _RULE
    level = context.log.level
    context.log.setLevel(logging.WARNING)  # else each tick keeps a log
    try:
        found = engine.evaluate_tick(context)
    finally:
        context.log.setLevel(level)
        for one in wanting.values():
            one.condition.said, one.condition.is_true = _RULE, False
    passed = {plans[key] for r in found.run_requests or () for key in r.asset_selection or ()}
    for name in asked.keys() - passed:
        states[name] = replace(states[name], state="waiting", told=_HELD, why=_HELD)
    more = {
        "cursor": found.cursor,
        "automation_condition_evaluations": found.automation_condition_evaluations,
    }
    chosen = [
        dg.RunRequest(r.run_key, tags=r.tags, asset_selection=list(wanting[name].chain))
        for name, r in asked.items()
        if name in passed
    ]
    return chosen, more


class ConditionSensor(dg.SensorDefinition):
    """A sensor of ours that Dagster takes for the one that evaluates the conditions."""

    @property
    def sensor_type(self) -> SensorType:
        """That of sensors which evaluate conditions in their code location."""
        return SensorType.AUTOMATION

    def with_attributes(self, **changes: Any) -> "ConditionSensor":
        """The same sensor with other attributes."""
        return as_condition_sensor(super().with_attributes(**changes))


def as_condition_sensor(sensor: dg.SensorDefinition) -> ConditionSensor:
    """The same sensor, of that kind."""
    sensor.__class__ = ConditionSensor
    assert isinstance(sensor, ConditionSensor)
    return sensor
