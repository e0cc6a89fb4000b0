"""The warehouse as a resource of one's own assets.

Definitions load in each process of Dagster: what a verb needs is loaded when it is called.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.resources import MergePipe

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.catalog import Registration
    from mergepipe_pipeline.domain.evaluation import Evaluation
    from mergepipe_pipeline.verbs.land import Landing
    from mergepipe_pipeline.verbs.merge import Merged


class MergePipeResource(MergePipe):
    """The warehouse at `home`, and what one's own assets do with it.

    While a run has it, a lease says that the run's process lives, and the run carries the tag of
    the warehouse.
    """

    def land(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        link: bool = False,
        tags: Collection[str] = (),
    ) -> Landing:
        """Put a checkpoint into the inbox whole, by one rename. See `mergepipe land`."""
        from mergepipe_pipeline.verbs.land import land

        return land(self.warehouse, str(path), name, link=link, tags=tags)

    def register(
        self, path: str | Path, name: str | None = None, base: str | None = None
    ) -> Registration:
        """Make a checkpoint known where it lies. See `mergepipe register`."""
        from mergepipe_pipeline.verbs.register import register

        return register(self.warehouse, path, name, base)

    def merge(self, recipe: str | Path, *, publish: bool = False, **options: Any) -> Merged:
        """Merge a recipe file through its gate, and `publish` it. See `mergepipe merge`.

        `options` are those of `mergepipe_pipeline.verbs.merge.merge`, as `out`, `budget`, `fresh`.
        """
        from mergepipe_pipeline.verbs.merge import merge

        path = Path(recipe)
        options = {"relative_to": path.resolve().parent, **options}
        return merge(self.warehouse, path, publish_ref=publish, **options)

    def evaluate(self, snapshot: str, recipe: str | Path, *, fresh: bool = False) -> Evaluation:
        """Measure a snapshot, or what a ref names, as the recipe's `evaluate:` says."""
        from mergepipe_pipeline.verbs.gate import measure

        return measure(self.warehouse, snapshot, Path(recipe), fresh=fresh)
