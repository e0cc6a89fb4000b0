"""The asset that keeps the disk from filling: once a day, what nobody needs goes."""

import shutil
from typing import Any

import dagster as dg

from mergepipe_pipeline.assets.labels import failing, owners
from mergepipe_pipeline.assets.metadata import description, gib, table
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.resources import MergePipe
from mergepipe_pipeline.settings import KEEP_VERSIONS
from mergepipe_pipeline.verbs.gc import GcReport, collect

_WITHOUT_LOCKS = (
    "the leases are on a file system without locks, so that a long merge may be taken for dead: "
    "run `mergepipe gc` while nothing merges"
)
#: For how long after its last use something stays that nobody needs.
_AGE_S = 86_400.0


def build_free_space(place: Place = ALONE) -> dg.AssetsDefinition:
    """The asset that removes what nobody needs."""

    @dg.asset(
        key=place.key("", "free_space"),
        group_name=place.group_of("catalog"),
        kinds={"python"},
        owners=owners(),
    )
    @place.bound
    @failing()
    def free_space(
        context: dg.AssetExecutionContext, mergepipe: MergePipe
    ) -> dg.MaterializeResult[None]:
        """Removes what nobody needs and nobody used for a day, as `mergepipe gc` does.

        Results of older versions of a ref go, too, where MERGEPIPE_KEEP_VERSIONS says how many to
        keep.
        """
        home = mergepipe.warehouse
        if home.leases.living(_AGE_S).judged_by_age:
            return dg.MaterializeResult(metadata={"not done": _WITHOUT_LOCKS})
        done = collect(home, older_than_s=_AGE_S, keep_versions=KEEP_VERSIONS.value())
        for note in done.notes:
            context.log.warning(note)
        return dg.MaterializeResult(metadata=_metadata(done, shutil.disk_usage(home.root).free))

    return free_space


def _metadata(done: GcReport, free_nbytes: int) -> dict[str, Any]:
    rows = [(snapshot_id,) for snapshot_id in done.snapshots]
    notes = "\n".join(f"- {description(note)}" for note in done.notes)
    return {
        "disk GiB free": gib(free_nbytes),
        "GiB removed": gib(done.nbytes),
        "files removed": done.files,
        "versions kept": KEEP_VERSIONS.text or KEEP_VERSIONS.shown,
        **({"snapshots removed": table(("snapshot",), rows)} if rows else {}),
        **({"notes": dg.MetadataValue.md(notes)} if notes else {}),
    }
