"""A folder of numbered versions, the highest is current.

Each version is one sealed JSON file created exclusively, so two writers cannot both publish the
next one and history is never rewritten. A damaged one can be set aside: it keeps its number and
does not count.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CommitConflictError, CorruptionError, NotFoundError
from mergepipe_pipeline.storage.atomic import create_exclusive, rename

#: Numbers have eight digits.
MOST_VERSIONS = 99_999_999
_FILE = re.compile(r"(\d{8})\.json")
_ASIDE = re.compile(r"(\d{8})\.json\.damaged")
#: Key under which a version states its chain's name and its number; older versions lack it.
_OF = "version_of"
#: Errors of a damaged disk, or for something that is no file; None: it is no regular file.
_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EISDIR, None})
_NEXT = (
    "run `mergepipe repair`: it sets a damaged version aside, so that the newest good one counts; "
    "or restore the file from a copy first"
)
_TRIES = 64


class VersionChain:
    """The versions in one folder, numbered from 1."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def versions(self) -> list[int]:
        """All version numbers that count, ascending; empty if the folder is not there.

        Raises CorruptionError for a folder that cannot be listed.
        """
        return self._numbers(_FILE)

    def aside(self) -> list[int]:
        """The numbers of versions that were set aside, ascending. Raises as `versions`."""
        return self._numbers(_ASIDE)

    def damaged(self) -> list[int]:
        """The numbers of versions that are not what was written. Raises as `versions`."""
        return [n for n in self.versions() if self._is_damaged(n)]

    def set_aside(self, number: int) -> Path:
        """Let a version not count any more; where it lies then. Its number is not used again."""
        path = self._path(number)
        return rename(path, path.with_name(f"{path.name}.damaged"))

    def _numbers(self, names: re.Pattern[str]) -> list[int]:
        if not self._folder.is_dir():
            return []
        try:
            matches = [names.fullmatch(p.name) for p in self._folder.iterdir()]
        except OSError as error:
            raise _unreadable(self._folder, error) from error
        return sorted(int(m.group(1)) for m in matches if m)

    def _is_damaged(self, number: int) -> bool:
        try:
            self.get(number)
        except CorruptionError as error:
            cause = error.__cause__
            return not isinstance(cause, OSError) or cause.errno in _DAMAGE
        return False

    def get(self, number: int) -> dict[str, Any]:
        """The value of one version. Raises NotFoundError, CorruptionError."""
        path = self._path(number)
        try:
            if path.exists() and not path.is_file():
                raise OSError("not a regular file")
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotFoundError(
                "No such version",
                where=str(self._folder),
                found=str(number),
                expected=", ".join(map(str, self.versions()[-5:])) or "none exists yet",
                next_step="choose one that exists",
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            value = unseal(data, str(path))
            if (of := value.pop(_OF, self._of(number))) != self._of(number):
                raise CorruptionError(
                    "A version is another's", where=str(path), expected=self._of(number), found=of
                )
        except CorruptionError as error:
            error.next_step = _NEXT
            raise
        return value

    def current(self) -> tuple[int, dict[str, Any]] | None:
        """The highest version and its value, or None. Raises CorruptionError."""
        versions = self.versions()
        return (versions[-1], self.get(versions[-1])) if versions else None

    def append(self, value: dict[str, Any], expected: int | None = None) -> int:
        """Add a version and return its number.

        With `expected`, the current number must be that (0 for none), else CommitConflictError;
        without, the version goes after whatever is current when it is written.
        """
        for _ in range(_TRIES):
            current = max(self.versions(), default=0)
            if expected is not None:
                self.refuse_other(expected)
            number = max([current, *self.aside()]) + 1
            try:
                create_exclusive(self._path(number), seal({**value, _OF: self._of(number)}))
            except FileExistsError:
                if expected is not None:
                    raise self._conflict(expected, number) from None
                continue
            return number
        raise self._conflict(-1, -1)

    def refuse_other(self, expected: int) -> None:
        """Raise CommitConflictError unless the current number is `expected` (0 for none)."""
        current = max(self.versions(), default=0)
        if current != expected:
            raise self._conflict(expected, current)

    def _of(self, number: int) -> str:
        return f"{self._folder.name}/{number}"

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"

    def _conflict(self, expected: int, current: int) -> CommitConflictError:
        return CommitConflictError(
            "Another writer was first",
            where=str(self._folder),
            expected=f"version {expected}",
            found=f"version {current}",
            next_step="look at the current version, then try again",
        )


def chain_names(folder: Path) -> list[str]:
    """The folders in `folder` that have a version or cannot be listed, sorted.

    A crash may leave a folder without its first version, which is none.
    """
    return sorted(p.name for p in folder.iterdir() if is_chain(p)) if folder.is_dir() else []


def read_chains(folder: Path) -> Iterator[tuple[str, int, dict[str, Any] | CorruptionError]]:
    """Name, number and value of every version of every chain in `folder`, or why it is unreadable.

    The number is 0 for a chain that cannot be listed.
    """
    for name in chain_names(folder):
        chain = VersionChain(folder / name)
        try:
            numbers = chain.versions()
        except CorruptionError as error:
            yield name, 0, error
            continue
        for number in numbers:
            try:
                yield name, number, chain.get(number)
            except CorruptionError as error:
                yield name, number, error


def is_chain(folder: Path) -> bool:
    """Whether a folder has a version, or cannot be listed; looks no further than the first."""
    if not folder.is_dir():
        return False
    try:
        with os.scandir(folder) as entries:
            return any(_FILE.fullmatch(entry.name) for entry in entries)
    except OSError:
        return True


def _unreadable(path: Path, error: OSError) -> CorruptionError:
    return CorruptionError(
        "A version cannot be read",
        where=str(path),
        found=error.strerror or str(error),
        next_step=_NEXT,
    )
