"""Tells people of a run that failed, or of a recipe that stands still.

In one sentence, and by a webhook where one is set.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from mergepipe_pipeline.deploy.faults import Fault
from mergepipe_pipeline.deploy.retry import MOST_ATTEMPTS, NEXT

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
    """What failed, why, and what to do; `recipe` is "" for a run that belongs to none.

    `run_id` is "" where nothing could be run.
    """

    text: str
    recipe: str
    run_id: str
    cause: str
    next_step: str


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
