"""How the work of an asset fails: with one text, the cause first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import dagster as dg

from mergepipe_pipeline.errors import MergePipeError


def as_failure(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work whose errors become failures that lead with the error's own text.

    The run does not try them again: sensors do, with back-off, unless they would fail again.
    """
    if inspect.isgeneratorfunction(work):

        @wraps(work)
        def several(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _failing():
                yield from work(*args, **kwargs)

        return several

    @wraps(work)
    def once(*args: Any, **kwargs: Any) -> Any:
        with _failing():
            return work(*args, **kwargs)

    return once


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except MergePipeError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    except Exception as error:
        raise dg.Failure(f"{type(error).__name__}: {error}", allow_retries=False) from error
