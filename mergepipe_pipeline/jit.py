"""Numba's `njit` with a cache that is as fresh as all that a kernel is compiled from.

Functions and constants of other modules are compiled into a kernel, and Numba looks at the kernel's
own file alone to tell whether what it kept of it is stale: after an update of another file it would
compute as before.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from mergepipe_pipeline.digest import sha256_hex

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
#: Where kernels are.
KERNELS = ("analysis", "checkpoints", "operators/kernels", "packs", "planner", "storage")
#: What the kinds of processors that kernels are carried for have, by LLVM's names, the best first:
#: those since 2019, or 2022 of AMD, which do not slow down for the longest vectors as others did,
#: and those since 2013, or 2015 of AMD.
_V3 = "avx avx2 bmi bmi2 crc32 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave"
_LONG = "avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vl"
KINDS = {"x86-64-v4": f"{_V3} {_LONG}", "x86-64-v3": _V3}
_IMPORT = re.compile(r"^from mergepipe_pipeline\.(\S+) import (.*)$", re.MULTILINE)


def cached_njit(**options: Any) -> Callable[[Function], Function]:
    """`numba.njit` with these options for a function whose compiled code is kept in a file."""
    import numba

    from mergepipe_pipeline.carried import KernelCache

    def decorate(function: Function) -> Function:
        compiled: Any = numba.njit(**options)(function)
        carried = {carried_folder() / kind: features for kind, features in KINDS.items()}
        compiled._cache = KernelCache(function, carried, kernel_cache)
        return cast(Function, compiled)

    return decorate


@cache
def carried_folder() -> Path:
    """Where the wheel carries kernels of the sources as they are, for this Numba and Python."""
    system = f"{sys.implementation.cache_tag}{sys.abiflags}-{sys.platform}-{platform.machine()}"
    return _PACKAGE / "compiled" / f"{_sources_digest()}-numba-{version('numba')}-{system}"


@cache
def _sources_digest() -> str:
    """Of the sources as this process has loaded them: asked for first when a kernel is defined."""
    return sha256_hex(b"".join(path.read_bytes() for path in sorted(kernel_sources())))[:16]


@cache
def kernel_cache() -> Path:
    """The folder of kernels that were compiled from the sources as they are.

    In `NUMBA_CACHE_DIR`, or beside the sources; where that cannot be written, in the user's cache,
    or for as long as this process lives. These take over what was compiled beside the sources, as
    when an image was built: Numba reads no folder that it cannot write.
    """
    folder = f"kernels-{_sources_digest()}"
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
