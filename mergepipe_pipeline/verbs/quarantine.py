"""The verb `quarantine`: keep an expert's content out of merges until it changes, or let it in."""

from __future__ import annotations

from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.facts.quarantine import Quarantine, decide, quarantine_of
from mergepipe_pipeline.facts.tensor_digests import Contents, content_of
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.storage.permissions import this_user
from mergepipe_pipeline.warehouse import Warehouse


def quarantine(
    warehouse: Warehouse,
    name: str,
    *,
    reason: str = "by hand",
    release: bool = False,
    progress: Progress | None = None,
) -> Quarantine:
    """Decide about the content that is registered under a name.

    Recipes that name the expert wait then, and their refs stay; a version with another content is
    taken by itself. Raises NotFoundError for an unknown name, and for a release of what is not in
    quarantine.
    """
    checkpoint = warehouse.catalog.get(name).checkpoint
    Contents(warehouse, checkpoint, progress).digests()
    if release and quarantine_of(warehouse, name) is None:
        raise NotFoundError(
            "This expert is not in quarantine",
            where=name,
            expected="an expert whose present content is kept out",
            found=f"checkpoint {checkpoint.checkpoint_id[:8]}, which recipes may merge",
            next_step="see `mergepipe ls` for those that are",
        )
    content = content_of(warehouse.catalog, checkpoint)
    return decide(warehouse, name, content, reason, is_kept_out=not release, by=this_user())
