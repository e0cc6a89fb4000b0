"""Writes what kernels a wheel carries: `python -m tests.house.signatures`.

It merges twice: while one kernel is compiled, those that it calls are met, too.
"""

from __future__ import annotations

import subprocess
import sys

from numba.core.dispatcher import Dispatcher

from mergepipe_pipeline.demo.carry import SIGNATURES, parsed, text_of
from mergepipe_pipeline.demo.kernels import compile_kernels


def met() -> list[str]:
    """The kernels that `compile_kernels` calls and the types they are called with, as lines."""
    subprocess.run([sys.executable, "-m", "mergepipe_pipeline.demo.kernels"], check=True)
    compile_kernels()
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
    SIGNATURES.write_text("".join(f"{line}\n" for line in met()), encoding="utf-8")
