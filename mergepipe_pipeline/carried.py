"""Kernels that the wheel carries: compiled when it was built, for every processor of a kind.

Numba keeps what it compiles for one processor. That may be faster, and never gives other bits, so
it is preferred; what is carried spares a new installation the wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core.caching import NullCache

from mergepipe_pipeline.digest import sha256_hex

_core: Any = numba.core
#: What LLVM calls x86-64-v3, beyond what all x86-64 have; `demo/kernels.py` compiles for it.
FEATURES = (
    "avx avx2 bmi bmi2 crc32 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave"
)


class KernelCache(NullCache):
    """A kernel's compiled code: for this processor if it is kept, else as it is carried."""

    takes_carried: ClassVar[bool] = True

    def __init__(self, function: Any, carried: Path, kept: Callable[[], Path]) -> None:
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
        path = carried_path(self._carried, self._function, sig)
        is_carried = self.takes_carried and path.exists() and fits(target_context.codegen())
        if own is not None or not is_carried:
            return own
        result = _core.compiler.CompileResult._rebuild(
            target_context, *pickle.loads(path.read_bytes())
        )
        _core.caching._cache_log("[cache] data loaded from %r", str(path))
        return result

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        with self._own._guard_against_spurious_io_errors():
            return self._own._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, for this processor."""
        self._own.save_overload(sig, data)


def fits(codegen: Any) -> bool:
    """Whether the processor that code is generated for runs what is carried."""
    has = codegen.magic_tuple()[2].split(",")
    return {f"+{feature}" for feature in FEATURES.split()} <= set(has)


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
