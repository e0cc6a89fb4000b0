"""Writes what kernels a wheel carries: `python -m tests.house.signatures`.

It merges twice: while one kernel is compiled, those that it calls are met, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

from mergepipe_pipeline.checkpoints.codes import decode_run, decode_run_bfloat16, small_float
from mergepipe_pipeline.checkpoints.fp8_blocks import code_rows
from mergepipe_pipeline.demo.kernels import SIGNATURES, parsed
from tests.house.kernel_merges import merge_all


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


def call_all() -> None:
    """Call every kernel that merges call, and those that a tiny family does not need."""
    with TemporaryDirectory(prefix="mergepipe-kernels-") as folder:
        merge_all(Path(folder))
    values, codes = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.uint8)
    code_rows(values, codes, np.zeros(1, np.float32))
    sizes, table = np.ones(7, np.int64), np.zeros(256, np.float32)
    coded = codes[0], 0, False, table, small_float("F8_E4M3")
    scaled = values[0], 0, values[0], sizes, 0
    decode_run(*coded, *scaled, values[0])
    decode_run_bfloat16(*coded, *scaled, np.zeros(1, np.uint16))


def met() -> list[str]:
    """The kernels that are called, and the types they are called with, as lines."""
    call_all()
    lines = list[str]()
    for name, module in sorted(sys.modules.items()):
        of_module = [k for k in vars(module).items() if isinstance(k[1], Dispatcher)]
        for kernel, dispatcher in of_module if name.startswith("mergepipe_pipeline.") else ():
            if dispatcher.py_func.__module__ == name:
                path = f"{name.partition('.')[2]}.{kernel}"
                lines += [f"{path} ({', '.join(map(text_of, t))},)" for t in dispatcher.overloads]
    for line in lines:
        kernel, types = parsed(line)
        assert types in kernel.overloads, line
    return sorted(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["once"]:
        call_all()
    else:
        subprocess.run([sys.executable, "-m", "tests.house.signatures", "once"], check=True)
        SIGNATURES.write_text("".join(f"{line}\n" for line in met()), encoding="utf-8")
