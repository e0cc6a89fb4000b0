"""The verb `push`: a snapshot's model folder goes to the hub, into a bucket, or into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mergepipe_pipeline.errors import CorruptionError, RemoteError
from mergepipe_pipeline.execution.lookup import snapshot_of
from mergepipe_pipeline.packs.portable import PACKS
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.quality.measure import evaluations_of
from mergepipe_pipeline.remote.address import BUCKETS, HUB, Address, parse_address
from mergepipe_pipeline.remote.push import Parcel, PushResult, push_parcel
from mergepipe_pipeline.snapshots.commit import verify_with_progress
from mergepipe_pipeline.snapshots.export import FIRST_OPENED, files_named, outgoing_files
from mergepipe_pipeline.snapshots.find import load_snapshot, manifest_of
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.warehouse import Warehouse


def push(
    warehouse: Warehouse,
    what: str,
    to: str,
    *,
    public: bool = False,
    provenance: bool | None = None,
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Put the model folder of a snapshot at an address, after checking every byte of it.

    Args:
        warehouse: where the snapshot is.
        what: a ref, `REF@VERSION`, an id, or a unique prefix.
        to: `hf://org/model`, with `@branch` or not; or a bucket, as `s3://bucket/prefix`.
        public: make a repository of the hub that anybody can read; one that is there stays as it
            is.
        provenance: also send provenance and recipe, which name folders of this machine; by default
            unless `public`.
        replace: let go what else is at the address.
        dry_run: only say what would be sent.
        progress: draws the work.

    What is there already is not sent again. Raises CorruptionError for a damaged snapshot, before
    anything is sent; MergePipeError for an address that holds something else; CommitConflictError,
    StorageFullError and RemoteError.
    """
    address, progress = writable(to), progress or Silent()
    snapshot = load_snapshot(warehouse.snapshots, snapshot_of(warehouse, what))
    need = Need(snapshot_ids=frozenset([snapshot.snapshot_id]))
    with warehouse.leases.hold(need, "push"):
        verify_with_progress(snapshot, progress)
        evaluations = [asdict(e) for e in evaluations_of(warehouse, snapshot.snapshot_id)]
        wanted = not public if provenance is None else provenance
        parcel = Parcel(
            outgoing_files(snapshot, evaluations, with_provenance=wanted),
            f"Push snapshot {snapshot.snapshot_id} by MergePipe",
            FIRST_OPENED,
            PACKS,
            older=_files_of_older,
        )
        total = 0 if dry_run else parcel.nbytes
        with progress.task(f"push {snapshot.snapshot_id[:12]}", total) as advance:
            options = {"public": public, "replace": replace, "dry_run": dry_run}
            return push_parcel(address, parcel, **options, advance=advance)


def writable(to: str) -> Address:
    """The address of a bucket or of the hub. Raises RemoteError for another."""
    address = parse_address(to)
    if address.scheme in (HUB, *BUCKETS):
        return address
    raise RemoteError(
        "Nothing can be pushed there",
        where=to,
        expected="hf://org/model, or a bucket: " + ", ".join(f"{s}://" for s in BUCKETS),
        found=f"{address.scheme}://",
        next_step="choose another address; a plain folder comes from `mergepipe merge --out`",
    )


def _files_of_older(manifest: bytes) -> Sequence[str]:
    """The files of the model that a manifest at an address tells of; none if it is no manifest."""
    try:
        return files_named(manifest_of(manifest, "the manifest at the address"))
    except CorruptionError:
        return ()
