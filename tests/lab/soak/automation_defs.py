"""A project whose recipes are started by what MERGEPIPE_FORM names: see `automation`."""

import os

import dagster as dg

from mergepipe_pipeline.dagster import (
    MergePipeProps,
    MergePipeTranslator,
    build_inbox_defs,
    build_recipe_defs,
)

_FORM, _HOME = os.environ["MERGEPIPE_FORM"], os.environ["MERGEPIPE_HOME"]
_AC = dg.AutomationCondition
#: The best that was found of Dagster's own: the chain, in one run, when an input's content changed.
_CHANGED = (
    (_AC.any_deps_match(_AC.data_version_changed() & ~_AC.in_progress()) | _AC.newly_missing())
    .since_last_handled()
    .__and__(~_AC.any_deps_missing())
    .__and__(~_AC.in_progress())
)
_WITH_IT = _AC.any_deps_match(_AC.will_be_requested())


class _Conditions(MergePipeTranslator):
    """Gives the assets of a chain conditions of Dagster's own."""

    def get_asset_spec(self, props: MergePipeProps) -> dg.AssetSpec:
        if not props.name:
            return props.spec
        of_form = _CHANGED if props.part in ("conflicts", "plan") else _WITH_IT
        condition = _AC.eager() if _FORM == "eager" else of_form
        return props.spec.replace_attributes(automation_condition=condition)


def _engines() -> dg.Definitions:
    made = build_recipe_defs(f"{_HOME}/recipes", home=_HOME, translator=_Conditions())
    engine = dg.AutomationConditionSensorDefinition(
        "engine",
        target=dg.AssetSelection.all(),
        minimum_interval_seconds=4,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    return dg.Definitions(
        made.assets, jobs=made.jobs, asset_checks=made.asset_checks, sensors=[engine]
    )


def _ours() -> dg.Definitions:
    if _FORM == "sensor":
        return build_recipe_defs(f"{_HOME}/recipes", home=_HOME)
    return build_recipe_defs(f"{_HOME}/recipes", home=_HOME, automation="condition")


defs = dg.Definitions.merge(
    build_inbox_defs(home=_HOME),
    _ours() if _FORM in ("sensor", "condition") else _engines(),
    dg.Definitions(executor=dg.in_process_executor),
)
