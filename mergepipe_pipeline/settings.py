"""The settings of the standing pipeline: what each one means, its variable, unit and default.

The one place that knows them: `docs/settings.md` is made from `SETTINGS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.recipe.budget import parse_budget

T = TypeVar("T")

#: What may run the steps of a run, and where Dagster's definition of it is.
EXECUTORS = {
    "in_process": "dagster:in_process_executor",
    "multiprocess": "dagster:multiprocess_executor",
    "ray": "dagster_ray:ray_executor",
    "celery": "dagster_celery:celery_executor",
    "k8s": "dagster_k8s:k8s_job_executor",
}
#: Each shard is a step that Dagster draws, so that many more are a burden and no gain.
MOST_SHARDS = 512


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One setting: the environment variable that gives it, and what the values are.

    `read` gives the value of a text, and raises MergePipeError with the place it is given. Where
    `default` is None, somebody else decides, as `otherwise` says.
    """

    variable: str
    unit: str
    default: T
    meaning: str
    read: Callable[[str, str], T]
    otherwise: str = ""

    @property
    def field(self) -> str:
        """Its name in the resource `engine`, if a run's config may say it."""
        return self.variable.removeprefix("MERGEPIPE_").lower()

    @property
    def shown(self) -> str:
        """The default in words."""
        return self.otherwise or f"{self.default:g}"

    @property
    def text(self) -> str | None:
        """The text in the environment; None if it says nothing. An empty variable says nothing."""
        return os.environ.get(self.variable) or None

    def value(self) -> T:
        """The value in the environment, or the default. Raises MergePipeError for a wrong one."""
        return self.default if self.text is None else self.read(self.text, self.variable)


def _refuse(where: str, expected: str, text: str) -> MergePipeError:
    return MergePipeError(
        "A setting has a wrong value",
        where=where,
        expected=expected,
        found=repr(text),
        next_step="correct it, or leave it out for the default",
    )


def _matching(pattern: str, expected: str, kind: Callable[[str], T]) -> Callable[[str, str], T]:
    """A reader of texts that match a pattern as a whole."""

    def read(text: str, where: str) -> T:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise _refuse(where, expected, text)
        return kind(text)

    return read


_count = _matching("0*[1-9][0-9]{0,8}", "a whole number from 1 up", int)
_number = _matching(r"[0-9]{1,9}(\.[0-9]{1,9})?", "a number from 0 up", float)
_switch = _matching("[01]", "0 or 1", "1".__eq__)
_device = _matching("cpu|cuda(:[0-9]{1,3})?", "cpu, cuda or cuda:0, cuda:1 and so on", str)


def _shards(text: str, where: str) -> int:
    if (count := _count(text, where)) > MOST_SHARDS:
        raise _refuse(where, f"a whole number from 1 to {MOST_SHARDS}", text)
    return count


def _executor(text: str, where: str) -> str:
    if text not in EXECUTORS:
        raise _refuse(where, "one of " + ", ".join(EXECUTORS), text)
    return text


def _budget(text: str, where: str) -> str:
    parse_budget(text, where)
    return text


def _owners(text: str, where: str) -> tuple[str, ...]:
    named = [owner for part in text.split(",") if (owner := part.strip())]
    for owner in named:
        # Stricter than Dagster, which refuses a whole definition for an owner it does not take.
        if not re.fullmatch(r"team:[\w.-]+|[\w.+-]+@[\w-]+(\.[\w-]+)+", owner, re.ASCII):
            raise _refuse(where, "emails and teams, like `ann@example.org, team:models`", owner)
    return tuple(named)


def _url(text: str, where: str) -> str:
    if not re.fullmatch(r"https?://[!-~]+", text, re.ASCII):
        # An address may be a secret.
        raise _refuse(where, "an address that begins with http:// or https://", text[:5] + "…")
    return text


THREADS = Setting[int | None](
    "MERGEPIPE_THREADS",
    "threads",
    None,
    "For arithmetic and reading.",
    _count,
    "one more than cores, four more for large inputs",
)
MEMORY = Setting[int | None](
    "MERGEPIPE_MEMORY_MIB",
    "MiB",
    None,
    "For a merge's plan and windows, beside some 100 MiB of program.",
    _count,
    "128, 192 for large inputs, 256 from packs",
)
DEVICE = Setting[str | None](
    "MERGEPIPE_DEVICE",
    "name",
    None,
    "Where merges compute: cpu, cuda, or one of several as cuda:1.",
    _device,
    "cpu",
)
BUDGET = Setting[str | None](
    "MERGEPIPE_BUDGET",
    "amount",
    None,
    "Expert bytes that may be read, written as in recipes.",
    _budget,
    "the recipe's",
)
INBOX_QUIET = Setting[float](
    "MERGEPIPE_INBOX_QUIET_S",
    "seconds",
    4.0,
    "A copy into the inbox is whole when its files have not changed for so long.",
    _number,
)
INBOX_RETRY = Setting[float](
    "MERGEPIPE_INBOX_RETRY_S",
    "seconds",
    30.0,
    "The pause after a failed index run; each further one is four times as long, an hour at most.",
    _number,
)
PACK = Setting[bool](
    "MERGEPIPE_PACK",
    "0 or 1",
    False,
    "1: every expert is packed against its bases when it is indexed.",
    _switch,
)
SHARDS = Setting[int](
    "MERGEPIPE_SHARDS",
    "steps",
    1,
    "How many steps of their own share the layers of a merge, or the experts of a burst.",
    _shards,
)
EXECUTOR = Setting[str](
    "MERGEPIPE_EXECUTOR",
    "name",
    "in_process",
    "What runs the steps of a run: in_process, multiprocess, ray, celery or k8s.",
    _executor,
    "in_process",
)
RETRY = Setting[float](
    "MERGEPIPE_RETRY_S",
    "seconds",
    30.0,
    "The pause after a failed merge; further ones grow as for the inbox.",
    _number,
)
SENSOR_INTERVAL = Setting[int | None](
    "MERGEPIPE_SENSOR_INTERVAL_S",
    "seconds",
    None,
    "Between two ticks of each sensor.",
    _count,
    "each its own",
)
KEEP_RUNS = Setting[float](
    "MERGEPIPE_KEEP_RUNS_DAYS",
    "days",
    30.0,
    "Older finished runs are deleted with their files, but not what an asset shows last.",
    _number,
)
KEEP_VERSIONS = Setting[int | None](
    "MERGEPIPE_KEEP_VERSIONS",
    "versions",
    None,
    "How many versions of each ref keep their result; others are removed once a day, with their "
    "layers.",
    _count,
    "all",
)
OWNERS = Setting[tuple[str, ...]](
    "MERGEPIPE_OWNERS",
    "emails, teams",
    (),
    "Who is asked about the assets, with commas between them.",
    _owners,
    "nobody",
)
STALLED = Setting[float](
    "MERGEPIPE_STALLED_S",
    "seconds",
    3600.0,
    "A recipe that cannot be used, or waits for an input, is reported after so long.",
    _number,
)
WEBHOOK = Setting[str | None](
    "MERGEPIPE_WEBHOOK",
    "URL",
    None,
    "Gets a POST of JSON for each failed run and each recipe that stands still.",
    _url,
    "none",
)

#: How a merge runs, and what it may read: a run's config may say these, too.
OF_A_RUN: tuple[Setting[Any], ...] = (THREADS, MEMORY, DEVICE, BUDGET)
SETTINGS: tuple[Setting[Any], ...] = tuple(x for x in globals().values() if type(x) is Setting)
