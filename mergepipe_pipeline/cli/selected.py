"""How the selectors of a recipe are shown: what each takes, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mergepipe_pipeline.cli.common import table

if TYPE_CHECKING:
    from mergepipe_pipeline.domain.selector import Selected


def selected_lines(selected: Sequence[Selected]) -> list[str]:
    """Which experts each selector takes, and which it leaves and why; nothing without selectors."""
    if not selected:
        return []
    rows = [(s.label, name, why) for s in selected for name, why in s.answers]
    return ["", *table(("selector", "expert", "taken, or why not"), rows)]
