"""MergePipe: merging LLM checkpoints as data management.

The interface for scripts and notebooks is `Planner`, `Engine` with its `EngineOptions`, and
`Catalog`. They are loaded when first asked for, so that importing any one module stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergepipe_pipeline.api import Catalog, Engine, Planner
    from mergepipe_pipeline.engine.options import EngineOptions

__version__ = "0.1.0"
__all__ = ["Catalog", "Engine", "EngineOptions", "Planner", "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mergepipe_pipeline import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
