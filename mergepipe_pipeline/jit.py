"""Numba's `njit` with a cache that is as fresh as all that a kernel is compiled from.

Functions and constants of other modules are compiled into a kernel, and Numba looks at the kernel's
own file alone to tell whether what it kept of it is stale: after an update of another file it would
compute as before.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mergepipe_pipeline.digest import sha256_hex

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
#: Where kernels are.
KERNELS = ("analysis", "checkpoints", "operators/kernels", "packs", "planner", "storage")
_IMPORT = re.compile(r"^from mergepipe_pipeline\.(\S+) import (.*)$", re.MULTILINE)


def cached_njit(**options: Any) -> Callable[[Function], Function]:
    """`numba.njit` with these options for a function whose compiled code is kept in a file."""
    import numba

    def decorate(function: Function) -> Function:
        config: Any = numba.config
        given, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache())
        try:  # the folder is looked at now, not when the function is compiled
            compiled: Function = numba.njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR = given
        return compiled

    return decorate


@cache
def kernel_cache() -> Path:
    """The folder of kernels that were compiled from the sources as they are.

    In `NUMBA_CACHE_DIR`, or beside the sources; where that cannot be written, in the user's cache,
    or for as long as this process lives. These take over what was compiled beside the sources, as
    when an image was built: Numba reads no folder that it cannot write.
    """
    sources = b"".join(path.read_bytes() for path in sorted(kernel_sources()))
    folder = f"kernels-{sha256_hex(sources)[:16]}"
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given) / folder
    beside = _PACKAGE / "__pycache__" / folder
    if _may_write(_PACKAGE):
        return beside
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergepipe"
    own = (users if _may_write(users) else _of_this_process()) / folder
    for kernel in beside.glob("*/*"):
        link = own / kernel.relative_to(beside)
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(kernel)
    return own


def _may_write(folder: Path) -> bool:
    """Whether this user can write into a folder, which is made if it is not there."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _of_this_process() -> Path:
    folder = TemporaryDirectory(prefix="mergepipe-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def kernel_sources() -> set[Path]:
    """The files of kernels, and those that they import."""
    files: set[Path] = set()
    for folder in KERNELS:
        for path in (_PACKAGE / folder).glob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "njit" in text:
                files |= {path, *_imported(text)}
    return files


def _imported(text: str) -> Iterator[Path]:
    for module, names in _IMPORT.findall(text):
        place = _PACKAGE / module.replace(".", "/")
        parts = (place / f"{name.strip()}.py" for name in names.split(","))
        yield from (path for path in (place.with_suffix(".py"), *parts) if path.is_file())
