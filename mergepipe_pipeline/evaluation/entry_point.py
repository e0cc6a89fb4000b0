"""The process of an evaluator in Python: `python -m … MODULE:FUNCTION SNAPSHOT` prints metrics.

The module is looked for in the recipe's folder first. What the function prints is kept in the log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def main(entry: str, snapshot: str) -> None:
    """Call the function with the snapshot's path, and print the mapping that it returns."""
    module, _, name = entry.partition(":")
    function: Any = import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    metrics = function(snapshot)
    if not isinstance(metrics, Mapping):
        sys.exit(
            f"{entry} returns {type(metrics).__name__}; expected a mapping of names to numbers"
        )
    print(f"\n{json.dumps(dict(metrics), default=_plain)}", flush=True)


def _plain(value: object) -> object:
    """A number of another library, as NumPy's or a tensor's, as Python's own."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
