"""Compiles the kernels that a wheel carries, as setup.py asks.

Numba compiles for types. Those that merges meet stand in signatures.txt, since nothing can be
merged where a wheel is built: `python -m tests.house.signatures` writes it.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np

from mergepipe_pipeline.carried import carry
from mergepipe_pipeline.jit import carried_folder

SIGNATURES = Path(__file__).with_name("signatures.txt")


def text_of(kind: Any) -> str:
    """A type of Numba as signatures.txt has it: in Python, by the names of the kernel's module."""
    match kind:
        case numba.types.NamedTuple():
            fields = "".join(f"{text_of(field)}, " for field in kind.types)
            return f"NamedTuple(({fields}), {kind.instance_class.__name__})"
        case numba.types.Array(dtype=numba.types.Record() as record):
            item = f"from_dtype({numba.np.numpy_support.as_dtype(record)!r})"
        case numba.types.Array():
            item = repr(kind.dtype)
        case _:
            return repr(kind)
    return f"Array({item}, {kind.ndim}, {kind.layout!r}{'' if kind.mutable else ', True'})"


def parsed(line: str) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of a line of signatures.txt, and the types to compile it for."""
    path, _, types = line.partition(" ")
    module, _, name = path.rpartition(".")
    names = vars(import_module(f"mergepipe_pipeline.{module}"))
    of_numba = {**vars(numba.types), "bool": numba.types.boolean, "from_dtype": numba.from_dtype}
    return names[name], eval(types, {**names, "dtype": np.dtype, **of_numba})


def carry_line(line: str) -> None:
    """Compile what a line of signatures.txt says."""
    carry(*parsed(line), carried_folder())


if __name__ == "__main__":
    carried_folder().mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        lines = SIGNATURES.read_text(encoding="utf-8").splitlines()
        print(len(list(pool.map(carry_line, lines))), "kernels in", carried_folder())
