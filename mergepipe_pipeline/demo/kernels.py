"""Compiles kernels ahead of the first merge: `python -m mergepipe_pipeline.demo.kernels`.

Numba compiles for types. Those that merges meet stand in signatures.txt, since nothing can be
merged where a wheel is built: `python -m tests.house.signatures` writes it.

With `--carried` they are compiled into the package for all processors of a kind, as setup.py asks
for a wheel, and `make kernels` for suites, whose workers would each compile them. Without, for this
processor, into `jit.kernel_cache`, which is preferred: for an image.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergepipe_pipeline.jit import carried_folder, kernel_cache, kernel_sources

SIGNATURES = Path(__file__).with_name("signatures.txt")
#: By kind of processor (`jit.KINDS`), LLVM's options and the room of the kernels. Longer vectors
#: make merges alone faster, whose random numbers are products of 64 bits; unasked, LLVM leaves half
#: of each vector unused.
_BUILDS = {"x86-64-v4": ("-prefer-256-bit", "operators.kernels."), "x86-64-v3": ("", "")}


def parsed(line: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of a line of signatures.txt, and the types to compile it for."""
    import numba
    import numpy as np

    path, _, types = line.partition(" ")
    module, _, name = path.rpartition(".")
    names = vars(import_module(f"mergepipe_pipeline.{module}"))
    of_numba = {**vars(numba.types), "bool": numba.types.boolean, "from_dtype": numba.from_dtype}
    return names[name], eval(types, {**names, "dtype": np.dtype, **of_numba})


def compile_kernels() -> Path:
    """Compile all kernels for this processor; the folder where they are."""
    for path in kernel_sources():  # an image keeps full seconds, and Numba looks at the time
        if os.access(path, os.W_OK):
            seconds = int(path.stat().st_mtime)
            os.utime(path, (seconds, seconds))
    _each(_compile)
    return kernel_cache()


def carry_kernels() -> Path:
    """Compile for all processors of the kinds what is not carried yet; the folder where it is."""
    folder = carried_folder()
    for other in set(folder.parent.glob("*")) - {folder}:  # of other sources
        shutil.rmtree(other)
    for kind, (features, room) in _BUILDS.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as cache:  # of kernels that others are compiled from
            options = {"CPU_NAME": kind, "CPU_FEATURES": features, "DISABLE_INTEL_SVML": "1"}
            # Numba looks when it is loaded.
            os.environ.update({f"NUMBA_{k}": v for k, v in options.items()}, NUMBA_CACHE_DIR=cache)
            _each(partial(_carry, folder / kind), room)
    return folder


def _each(compiled: Callable[[str], None], room: str = "") -> None:
    lines = SIGNATURES.read_text(encoding="utf-8").splitlines()
    with ProcessPoolExecutor() as pool:
        list(pool.map(compiled, [line for line in lines if line.startswith(room)]))


def _compile(line: str) -> None:
    from mergepipe_pipeline.carried import KernelCache

    KernelCache.takes_carried = False
    kernel, types = parsed(line)
    kernel.compile(types)


def _carry(folder: Path, line: str) -> None:
    from mergepipe_pipeline.carried import carry

    carry(*parsed(line), folder)


if __name__ == "__main__":
    is_carried = sys.argv[1:] == ["--carried"] and platform.machine() == "x86_64"
    print(carry_kernels() if is_carried else compile_kernels())
