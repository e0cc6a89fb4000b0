"""Tells of every run that failed, and of recipes of which nothing is made for long.

In the log, and to a webhook.
"""

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import dagster as dg

from mergepipe_pipeline.assets.experts import EXPERTS_TAG, index_key
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.assets.searches import SEARCH_TAG
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.retry import MOST_ATTEMPTS, NEXT, Fault
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.sensors.inbox import ONE
from mergepipe_pipeline.sensors.ticks import (
    RECIPE_TAG,
    Ours,
    attempt_of,
    interval_s,
    standing_sensor,
)
from mergepipe_pipeline.settings import STALLED, WEBHOOK
from mergepipe_pipeline.text import in_one_line
from mergepipe_pipeline.verbs.deploy import Due, due

#: Recipes that one tick tells of: a webhook may take its time, and a tick has a minute.
_MOST_AT_ONCE = 3
_URL = WEBHOOK.value()
#: Seconds that a webhook may take, from the look-up of its name to the end of its answer. One tick
#: tells of five failures, and has a minute.
_TIMEOUT_S = 10.0
_NEXT = {
    Fault.LASTING: "mend the cause: the same recipe and inputs would fail again",
    Fault.UNKNOWN: f"wait: it is tried {MOST_ATTEMPTS} times in all, by itself",
    Fault.SURROUNDINGS: "wait: it is tried again by itself until it works, at least once an hour",
}


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A failure, its cause, and what to do; `recipe` is "" for a run that belongs to none.

    `run_id` is "" where nothing could be run.
    """

    text: str
    recipe: str
    run_id: str
    cause: str
    next_step: str


def build_failure_sensor(place: Place = ALONE) -> dg.SensorDefinition:
    """The sensor that tells of each run of ours that failed."""

    @dg.run_failure_sensor(
        name=place.name("failure_sensor"),
        description=(
            "Says in one sentence why a run failed and what to do: in its tick's log and, if "
            f"{WEBHOOK.variable} is set, by a POST of JSON with text, recipe, run_id, cause and "
            "next_step."
        ),
        minimum_interval_seconds=interval_s(30),
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    @place.bound
    def failure_sensor(context: dg.RunFailureSensorContext, mergepipe: MergePipe) -> None:
        """Tells of one failed run of ours; a webhook that fails harms nothing."""
        if Ours(context.instance, mergepipe.tags, place=place).has(context.dagster_run):
            tell(context.log, failure_of(context.instance, context.dagster_run, place))

    return failure_sensor


def tell(log: logging.Logger, failure: RunFailure) -> None:
    """Tell of a failure in a tick's log and, if one is set, to the webhook."""
    log.error(failure.text)
    if problem := post(_URL, failure) if _URL else None:
        log.warning(f"{WEBHOOK.variable}: {problem}")


def failure_of(
    instance: dg.DagsterInstance, run: dg.DagsterRun, place: Place = ALONE
) -> RunFailure:
    """Why a run failed, in words."""
    attempt = attempt_of(instance, run.run_id)
    recipe = run.tags.get(RECIPE_TAG, "")
    experts = run.tags.get(EXPERTS_TAG)
    if run.job_name == place.name(ONE) or index_key(place) in (run.asset_selection or ()):
        experts = run.tags.get("dagster/partition", experts)
    search = run.tags.get(SEARCH_TAG)
    named = f"Recipe {recipe}" if recipe else f"The search {search}" if search else ""
    what = named or (f"Landing, indexing or packing of {experts}" if experts else run.job_name)
    error = in_one_line(attempt.error)
    return run_failure(what, recipe, run.run_id, error, fault=attempt.fault)


def build_stalled_sensor(place: Place = ALONE) -> dg.SensorDefinition:
    """The sensor that tells of each recipe that stands still."""

    @standing_sensor(
        "Says once of a recipe that cannot be used, or waits for an input, since "
        f"{STALLED.variable} ({STALLED.shown}): in its tick's log and, if {WEBHOOK.variable} is "
        "set, as of a run that failed.",
        60,
        place=place,
    )
    def stalled_sensor(
        context: dg.SensorEvaluationContext, mergepipe: MergePipe
    ) -> dg.SensorResult:
        """Tells of each recipe that stands still, once until it goes on.

        The cursor says since when.
        """
        before, now_s = json.loads(context.cursor or "{}"), time.time()
        after: dict[str, tuple[float, bool]] = {}
        count = 0
        for file in recipe_files(mergepipe.warehouse):
            where = due(mergepipe.warehouse, file)
            if isinstance(where, Due) or where.state not in ("waiting", "cannot be used"):
                continue
            since_s, is_reported = before.get(file.name, (now_s, False))
            since_s = min(since_s, now_s)  # the clock may have been set back
            if not is_reported and count < _MOST_AT_ONCE and now_s - since_s >= STALLED.value():
                count += 1
                failure = stalled(file.name, in_one_line(where.told), now_s - since_s)
                tell(context.log, failure)
                is_reported = True
            after[file.name] = since_s, is_reported
        said = ", ".join(sorted(after)) or "none"
        return dg.SensorResult(
            cursor=json.dumps(after), skip_reason=dg.SkipReason(f"recipes that stand still: {said}")
        )

    return stalled_sensor


def run_failure(what: str, recipe: str, run_id: str, error: str, *, fault: Fault) -> RunFailure:
    """A failure in words. `what` failed with the text of `error`, which may name the next step."""
    cause, step = _cause_and_step(error)
    next_step = step or _NEXT[fault]
    text = f"{what} failed: {cause}.{NEXT}{next_step}. Run {run_id[:8]}."
    return RunFailure(text, recipe, run_id, cause, next_step)


def stalled(recipe: str, reason: str, seconds: float) -> RunFailure:
    """A recipe of which nothing could be made for so long, in words."""
    cause, step = _cause_and_step(reason)
    step = step or "mend the recipe or bring the input; then it goes on by itself"
    text = f"Recipe {recipe} stands still for {seconds / 60:.0f} min: {cause}.{NEXT}{step}."
    return RunFailure(text, recipe, "", cause, step)


def _cause_and_step(error: str) -> tuple[str, str]:
    """The parts of an error's text, which may name the next step."""
    cause, _, step = error.strip().rpartition(NEXT) if NEXT in error else (error.strip(), "", "")
    return cause.strip().rstrip("."), step.strip().rstrip(".")


def post(url: str, failure: RunFailure) -> str | None:
    """POST a failure as JSON; what is wrong if that did not work. Raises nothing.

    The address is a secret of who gave it, and no text names it.
    """
    # The library's timeout begins anew with each address of a name and each part of an answer.
    problems: list[str | None] = []
    asking = threading.Thread(target=lambda: problems.append(_post(url, failure)), daemon=True)
    asking.start()
    asking.join(_TIMEOUT_S)
    return problems[0] if problems else "no answer: TimeoutError"


def _post(url: str, failure: RunFailure) -> str | None:
    try:
        if urlsplit(url).scheme not in {"http", "https"}:
            return "the webhook is no http or https address"
        body = json.dumps(asdict(failure)).encode()
        request = Request(url, body, {"Content-Type": "application/json"}, method="POST")
        with urlopen(request, timeout=_TIMEOUT_S):
            return None
    except (OSError, ValueError, HTTPException) as error:
        status = getattr(error, "code", None)
        return f"the webhook answered {status}" if status else f"no answer: {type(error).__name__}"
