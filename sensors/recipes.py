"""Watches recipes: wanted state against released state, so that no event can be lost.

`recipe_sensor` launches a recipe's chain; `nightly` schedules do the same by the clock;
`reload_sensor` asks the webserver to load definitions anew when recipe files changed.
"""

import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlparse

import dagster as dg
from dagster import DagsterRunStatus as Status

from mergepipe_pipeline.pipeline.cards import RecipeCard, recipe_cards
from mergepipe_pipeline.pipeline.deploy import last_release, wanted
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.text import visible
from mergepipe_pipeline.warehouse import Warehouse
from sensors import interval_s

#: What `dg.define_asset_job` returns; Dagster exports no name for it.
AssetJob = Any

_ACTIVE = [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
DEFAULT_UI_URL = "http://127.0.0.1:3000"


def job_name(card: RecipeCard) -> str:
    """The job that runs a recipe's whole chain."""
    return f"merge_{card.identifier}"


def request_or_reason(
    home: Warehouse, card: RecipeCard, instance: dg.DagsterInstance
) -> dg.RunRequest | str:
    """A run of the recipe's chain if its release is not what its inputs ask for, else why not.

    The sequence in the run key lets a change and its undoing both run; a run that failed is not
    requested again until something changes.
    """
    state = wanted(home, card)
    if state is None:
        return f"{card.name}: an input is not indexed yet"
    last = last_release(home, card.name)
    if last and last.wanted == state:
        return f"{card.name}: the release is current"
    if instance.get_runs_count(dg.RunsFilter(job_name=job_name(card), statuses=_ACTIVE)):
        return f"{card.name}: a run is under way"
    sequence = last.sequence if last else 0
    return dg.RunRequest(
        job_name=job_name(card),
        run_key=f"{card.name}:{sequence}:{state}",
        tags={"mergepipe/recipe": card.name, "mergepipe/wanted": state},
    )


def _request_or_failure(
    home: Warehouse, card: RecipeCard, instance: dg.DagsterInstance
) -> dg.RunRequest | str:
    """As `request_or_reason`; a file that cannot be read stops no other recipe."""
    try:
        return request_or_reason(home, card, instance)
    except Exception as error:
        return f"{card.name}: {error}"


def build_recipe_sensor(
    cards: Sequence[RecipeCard], jobs: Sequence[AssetJob]
) -> dg.SensorDefinition:
    """The level-triggered sensor over all loaded recipes, those that cannot be used among them."""

    @dg.sensor(
        name="recipe_sensor",
        jobs=list(jobs),
        minimum_interval_seconds=interval_s(15),
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def recipe_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SensorResult:
        """Requests the chain of every recipe whose inputs, as indexed, are not what it released.

        Recipes that cannot be used are told with their problem whenever nothing is requested.
        """
        found = [
            f"{c.name}: {c.problem}"
            if c.problem
            else _request_or_failure(mergepipe.warehouse, c, context.instance)
            for c in cards
        ]
        requests = [f for f in found if isinstance(f, dg.RunRequest)]
        reasons = [visible(f) for f in found if isinstance(f, str)]
        if requests:
            return dg.SensorResult(run_requests=requests)
        return dg.SensorResult(skip_reason=dg.SkipReason("\n".join(reasons) or "no recipes"))

    return recipe_sensor


def build_nightly(card: RecipeCard, job: AssetJob) -> dg.ScheduleDefinition:
    """The recipe's nightly run, at the cron time its `schedule` names."""

    @dg.schedule(
        name=f"nightly_{job.name}",
        job=job,
        cron_schedule=card.recipe.schedule,
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    def nightly(
        context: dg.ScheduleEvaluationContext, mergepipe: MergePipe
    ) -> dg.RunRequest | dg.SkipReason:
        """Runs the chain unless the release is already what the inputs ask for."""
        found = request_or_reason(mergepipe.warehouse, card, context.instance)
        if isinstance(found, str):
            return dg.SkipReason(visible(found))
        # The clock may retry what failed: the time makes the key new each night.
        return dg.RunRequest(
            run_key=f"{found.run_key}:{context.scheduled_execution_time:%F}", tags=found.tags
        )

    return nightly


def build_reload_sensor(loaded: str) -> dg.SensorDefinition:
    """The sensor that reloads definitions; `loaded` is the token of the loaded recipes."""

    @dg.sensor(
        name="reload_sensor",
        minimum_interval_seconds=interval_s(30),
        target=None,
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def reload_sensor(context: dg.SensorEvaluationContext, mergepipe: MergePipe) -> dg.SkipReason:
        """Asks the webserver (MERGEPIPE_UI_URL) to reload when recipe files changed."""
        cards = recipe_cards(mergepipe.warehouse)
        now = recipes_token(cards)
        if now == loaded or context.cursor == now:
            return dg.SkipReason("recipes are loaded as they are")
        context.update_cursor(now)
        return dg.SkipReason(_reload())

    return reload_sensor


def recipes_token(cards: Sequence[RecipeCard]) -> str:
    """Changes when any recipe's definitions would change."""
    return "-".join(c.token for c in cards) or "none"


def _reload() -> str:
    from dagster_graphql import DagsterGraphQLClient

    url = urlparse(os.environ.get("MERGEPIPE_UI_URL", DEFAULT_UI_URL))
    try:
        client = DagsterGraphQLClient(
            url.hostname or "127.0.0.1", port_number=url.port, use_https=url.scheme == "https"
        )
        status = client.reload_repository_location("mergepipe").status
    except Exception as error:  # the webserver may be down; the next change or a restart reloads
        return f"recipes changed, but {url.geturl()} did not reload: {error}"
    return f"recipes changed; reload of definitions: {status.value}"
