"""Merge operators: pure maths on windows of float32 tensors, one family per file.

No I/O, no catalog, no torch import: an operator only calls methods of the tensors it is handed, so
schemas load quickly in processes that never merge. Every module of this package is imported here,
but for compiled ones (`*_kernel`), which load a compiler; a new operator is one new file with
`@operator(...)` on a function, and its formula in `tests/oracles.py`.

Results never depend on how a tensor is cut into windows nor on the number of threads: operators use
steps within one element, or one row, and add experts one after the other in recipe order, with
`mul_` and `add_` apart, because fused or tree-shaped sums round differently in vector bodies and
tails. What needs more of a tensor than a row is a measure, known before merging.
"""

from importlib import import_module
from pkgutil import iter_modules

from mergepipe_pipeline.operators.registry import OPERATORS, Operator, Window

__all__ = ["OPERATORS", "Operator", "Window"]

for _module in sorted(m.name for m in iter_modules(__path__)):
    if not _module.endswith("_kernel"):
        import_module(f"{__name__}.{_module}")
