"""Collects what is wrong with a warehouse: a bad file is a finding, and never stops the walk."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from mergepipe_pipeline.errors import CorruptionError, MergePipeError

Scope = Literal["structure", "digests", "lineage", "inputs"]
SCOPES: tuple[Scope, ...] = ("structure", "digests", "lineage", "inputs")
#: What reading a file raises that is not what it should be.
_UNREADABLE = (OSError, LookupError, TypeError, ValueError, AttributeError)
T = TypeVar("T")
_REMADE = "its content is computed again"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: in which file, and where in it (tensor, block, layer, key) if that is known.

    `is_derivable`: the file tells nothing that cannot be found again, so `repair` may take it away.
    """

    scope: Scope
    what: str
    file: str
    where: str
    expected: str
    found: str
    next_step: str
    is_derivable: bool

    def __str__(self) -> str:
        error = MergePipeError(
            self.what,
            where=self.where,
            expected=self.expected,
            found=self.found,
            next_step=self.next_step,
        )
        return str(error)


class Auditor:
    """The findings of a verification, and the count of what it looked at; safe for threads.

    `notes` are what a user may want to know and nothing is wrong with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.files = 0
        self.nbytes = 0

    def check(
        self,
        scope: Scope,
        path: Path,
        act: Callable[[], T],
        *,
        is_derivable: bool = False,
        remade: str = _REMADE,
    ) -> T | None:
        """The result of `act`; None if it raises, which is a finding about the file at `path`.

        `remade` says how what is derivable comes back once `repair` has taken it away.
        """
        try:
            _refuse_irregular(path)
            outcome = act()
        except MergePipeError as error:
            self.report(scope, path, error, is_derivable=is_derivable, remade=remade)
            return None
        except _UNREADABLE as error:
            if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                return None  # a collection or another repair removed it meanwhile
            odd = CorruptionError(
                "A file cannot be read as what it should be",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                next_step="restore it, or remove it",
            )
            self.report(scope, path, odd, is_derivable=is_derivable, remade=remade)
            return None
        finally:
            with self._lock:
                self.files += 1
        return outcome

    def report(
        self,
        scope: Scope,
        path: Path,
        error: MergePipeError,
        *,
        is_derivable: bool = False,
        remade: str = _REMADE,
    ) -> None:
        """Add a finding about the file at `path`; `remade` as for `check`."""
        next_step = f"`mergepipe repair` takes it away; {remade}"
        finding = Finding(
            scope,
            error.what,
            str(path),
            error.where or str(path),
            error.expected or "",
            error.found or "",
            next_step if is_derivable else error.next_step or "",
            is_derivable,
        )
        with self._lock:
            self.findings.append(finding)

    def withdraw(self, folder: Path) -> None:
        """Take back the findings about a folder and what is in it."""
        with self._lock:
            kept = [f for f in self.findings if not Path(f.file).is_relative_to(folder)]
            self.findings[:] = kept

    def hashed(self, nbytes: int) -> None:
        """Count bytes that were found right."""
        with self._lock:
            self.nbytes += nbytes


def _refuse_irregular(path: Path) -> None:
    """Raise CorruptionError for what would block whoever reads it."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever reads it reports that
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CorruptionError(
            "Not a regular file",
            where=str(path),
            expected="a regular file",
            found="a pipe, socket or device",
            next_step="remove it",
        )
