"""Merge operators: pure maths on windows of float32 tensors.

Three rooms, each of which imports from the ones after it only. `methods` holds the merge methods,
one family per file; `steps` their common steps and the registry; `kernels` all compiled code.
Nothing here does I/O or knows the catalog. Loading the package loads neither torch nor a compiler,
so that processes which never merge get the schemas quickly.

A new operator is one new file in `methods` with `@operator(...)` on a function, and its formula in
`tests/support/oracles.py`.

Results never depend on how a tensor is cut into windows nor on the number of threads: operators use
steps within one element, or one row, and add experts one after the other in recipe order, with
`mul_` and `add_` apart, because fused or tree-shaped sums round differently in vector bodies and
tails. What needs more of a tensor than a row is a measure, known before merging.
"""

import mergepipe_pipeline.operators.methods  # noqa: F401
from mergepipe_pipeline.operators.steps.registry import OPERATORS, Operator, Window

__all__ = ["OPERATORS", "Operator", "Window"]
