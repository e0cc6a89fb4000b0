"""Kernels that the wheel carries: compiled when it was built, for every processor of some kinds.

Numba keeps what it compiles for one processor. That may be faster, and never gives other bits, so
it is preferred; what is carried spares a new installation the wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core.caching import NullCache

from mergepipe_pipeline.digest import sha256_hex

_core: Any = numba.core


class KernelCache(NullCache):
    """A kernel's compiled code: for this processor if it is kept, else as it is carried.

    Folders of what is carried are given by the features that its processors have, the best first.
    """

    takes_carried: ClassVar[bool] = True

    def __init__(
        self, function: Any, carried: Mapping[Path, str], kept: Callable[[], Path]
    ) -> None:
        self._function, self._carried, self._kept = function, carried, kept

    @cached_property
    def _own(self) -> Any:
        config: Any = numba.config
        given, config.CACHE_DIR = config.CACHE_DIR, str(self._kept())
        try:  # the folder is looked at now
            return _core.caching.FunctionCache(self._function)
        finally:
            config.CACHE_DIR = given

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types; None if there is none."""
        # What stands compiled needs the runtime alone. Numba would load all that it compiles with,
        # too, for half a second.
        _core.runtime.rtsys.initialize(target_context)
        own = self._loaded(sig, target_context) if self._kept().exists() else None
        for folder, features in self._carried.items() if own is None and self.takes_carried else ():
            path = carried_path(folder, self._function, sig)
            if path.exists() and fits(target_context.codegen(), features):
                _core.caching._cache_log("[cache] data loaded from %r", str(path))
                return _core.compiler.CompileResult._rebuild(
                    target_context, *pickle.loads(path.read_bytes())
                )
        return own

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        with self._own._guard_against_spurious_io_errors():
            return self._own._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, for this processor."""
        self._own.save_overload(sig, data)


def fits(codegen: Any, features: str) -> bool:
    """Whether the processor that code is generated for has these features."""
    has = codegen.magic_tuple()[2].split(",")
    return {f"+{feature}" for feature in features.split()} <= set(has)


def carry(kernel: Any, types: tuple[Any, ...], folder: Path) -> None:
    """Compile a kernel for these types, and write it to a folder to carry, if it is not there."""
    path = carried_path(folder, kernel.py_func, types)
    if not path.exists():
        kernel.compile(types)
        path.write_bytes(_core.serialize.dumps(kernel.overloads[types]._reduce()))


def carried_path(folder: Path, function: Any, types: tuple[Any, ...]) -> Path:
    """Where the code of a function for these types is carried."""
    name = f"{function.__module__}.{function.__qualname__}"
    return folder / f"{name.partition('.')[2]}-{sha256_hex(repr(types).encode())[:16]}"
