"""The way into a warehouse: every path in one place, and the stores over them.

A store holds no state of its own, so that one warehouse may be kept for as long as a process runs.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.snapshots.leases import Leases
from mergepipe_pipeline.snapshots.stores import ObjectStore, RefStore
from mergepipe_pipeline.storage.atomic import make_dirs, write_atomic
from mergepipe_pipeline.storage.permissions import share_as
from mergepipe_pipeline.storage.roots import FILE, Roots, roots_of, with_default_places
from mergepipe_pipeline.text import listed

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.catalog import Catalog
    from mergepipe_pipeline.packs.offline import OfflineStore
    from mergepipe_pipeline.packs.store import PackStore
    from mergepipe_pipeline.snapshots.mirror import Mirror

ENVIRONMENT = "MERGEPIPE_HOME"
#: What begins with a scheme, though a path may have lost a slash of it, or stand below a folder.
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]+:/|/(?:s3|gs|az|hf|https?):/", re.IGNORECASE)
#: The variable that names the bucket which results are published to.
BUCKET = "MERGEPIPE_BUCKET"
DEFAULT = "warehouse"


class _Place:
    """A path of a warehouse, by its parts below the root."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, warehouse: Warehouse, owner: type[Warehouse]) -> Path:
        return warehouse.root.joinpath(*self._parts)


@dataclass(frozen=True)
class Warehouse:
    """One folder that holds everything: catalog, plans, objects, snapshots, refs."""

    root: Path

    #: What became of each folder of the inbox.
    arrivals = _Place("arrivals")
    #: Recipe files that run by themselves.
    recipes = _Place("recipes")
    #: Search files that run by themselves.
    searches = _Place("searches")
    #: Parquet facts.
    catalog_dir = _Place("catalog")
    #: Which contents of experts are kept out of merges, a chain of decisions per name.
    quarantined_dir = _Place("catalog", "quarantined")
    #: What each search asked for, proposed and found, a folder for each.
    search_ledgers = _Place("catalog", "searches")
    #: Embedding rows made for tokens that a model lacks.
    token_rows = _Place("catalog", "token_rows")
    #: Packs by id.
    packs_dir = _Place("packs")
    #: Files beside packs that give experts' files back, by checkpoint id.
    offline_dir = _Place("offline")
    #: Plans by id.
    plans = _Place("plans")
    #: What each standing recipe planned and released last.
    releases = _Place("releases")
    #: Merged layers by content.
    objects_dir = _Place("objects")
    #: Layer key to object.
    actions_dir = _Place("actions")
    #: Exact sums that the last merge of each ref kept, by layer.
    sums_dir = _Place("sums")
    #: Committed snapshots by id.
    snapshots = _Place("snapshots")
    #: What was measured of snapshots, a folder for each.
    evaluations = _Place("evaluations")
    #: Version chains of published names.
    refs_dir = _Place("refs")
    #: Work in progress; never read by anyone else.
    staging = _Place("staging")
    #: What living processes need.
    leases_dir = _Place("leases")
    #: Which snapshots are results that somebody asked for, and which are stages of others.
    stages = _Place("stages")
    #: What `repair` set aside, and snapshots that were damaged and made anew; by time.
    aside = _Place("set_aside")
    #: Dagster's own storage, if it is kept beside the data.
    dagster_home = _Place("dagster")

    @staticmethod
    def at(root: str | Path | None = None) -> Warehouse:
        """The warehouse at `root`, or where MERGEPIPE_HOME says, or `./warehouse`; absolute.

        In one that its group may write, what this process makes is the group's, too.
        Raises MergePipeError for a place that cannot be, as an empty name, `~nobody` or an address.
        """
        chosen = os.environ.get(ENVIRONMENT, DEFAULT) if root is None else root
        try:
            if not str(chosen):
                raise RuntimeError("an empty name")
            if _ADDRESS.search(str(chosen)):
                raise RuntimeError("an address; `push` takes results to buckets and to the hub")
            warehouse = Warehouse(Path(chosen).expanduser().resolve())
        except RuntimeError as error:  # from pathlib, for ~ of a user that is not there, and loops
            raise MergePipeError(
                "The warehouse has no place",
                where=f"--home or {ENVIRONMENT}, {str(chosen)!r}",
                expected="a folder",
                found=str(error),
                next_step="give another folder, on this machine or mounted",
            ) from error
        share_as(warehouse.root)
        return warehouse

    @property
    def is_there(self) -> bool:
        """Whether the folder is a warehouse."""
        return self.catalog_dir.is_dir()

    def _refuse_other_folder(self) -> None:
        dagster = self.dagster_home / "dagster.yaml"
        own = (self.catalog_dir, self.inbox, self.recipes, self.root / FILE, dagster)
        if not self.root.is_dir() or any(path.exists() for path in own):
            return
        foreign = [n for n in os.listdir(self.root) if n != "lost+found" and not n.startswith(".")]
        if foreign:
            raise MergePipeError(
                "This folder is no warehouse",
                where=f"--home or {ENVIRONMENT}, {self.root}",
                expected="a warehouse, an empty folder or none",
                found=listed([repr(n) for n in sorted(foreign)], 1),
                next_step="give the warehouse's folder, or a new one",
            )

    def ensure(self) -> Warehouse:
        """Create the folders that are missing; returns itself.

        Places of roots that only this process knows become the warehouse's defaults.
        Raises MergePipeError for a folder of something else.
        """
        self._refuse_other_folder()
        make_dirs(
            self.inbox,
            self.arrivals,
            self.recipes,
            self.searches,
            self.catalog_dir,
            self.packs_dir,
            self.offline_dir,
            self.plans,
            self.objects_dir,
            self.actions_dir,
            self.snapshots,
            self.refs_dir,
            self.staging,
            self.releases,
            self.leases_dir,
            self.stages,
            self.evaluations,
        )
        places = with_default_places(self.root, self.roots)
        if places is not None:
            write_atomic(self.root / FILE, places)
        return self

    @cached_property
    def roots(self) -> Roots:
        """Where this machine has the folders that records name. Raises MergePipeError."""
        return roots_of(self.root)

    @cached_property
    def catalog(self) -> Catalog:
        """Contents, statistics and facts of checkpoints."""
        # It loads pyarrow, a quarter of a second that commands about results do without.
        from mergepipe_pipeline.catalog.catalog import Catalog

        return Catalog(self.catalog_dir, self.roots)

    @cached_property
    def packs(self) -> PackStore:
        """Experts' deltas in tiers."""
        from mergepipe_pipeline.packs.store import PackStore  # pyarrow, as above

        return PackStore(self.packs_dir)

    @cached_property
    def offline(self) -> OfflineStore:
        """The records beside packs that stand for experts' weight files."""
        from mergepipe_pipeline.packs.offline import OfflineStore

        return OfflineStore(self.offline_dir, self.roots)

    @cached_property
    def objects(self) -> ObjectStore:
        """Merged layers, and the action cache that names them."""
        return ObjectStore(self.objects_dir, self.actions_dir)

    @cached_property
    def refs(self) -> RefStore:
        """Published names."""
        return RefStore(self.refs_dir)

    @cached_property
    def mirror(self) -> Mirror | None:
        """The copy of results in a bucket; None unless MERGEPIPE_BUCKET names one.

        Raises RemoteError for what is no bucket's address.
        """
        address = os.environ.get(BUCKET)
        if not address:
            return None
        from mergepipe_pipeline.snapshots.mirror import mirror_at

        return mirror_at(address, BUCKET)

    def require_mirror(self, use: str, or_else: str = "") -> Mirror:
        """The mirror, for a use of it. Raises MergePipeError where there is none."""
        if self.mirror is None:
            raise MergePipeError(
                f"There is no bucket to {use}",
                where=BUCKET,
                expected="the address of a bucket",
                found="nothing",
                next_step=f"set {BUCKET}=s3://bucket/prefix{or_else}",
            )
        return self.mirror

    @cached_property
    def leases(self) -> Leases:
        """Leases on what work that goes on needs."""
        return Leases(self.leases_dir)

    @property
    def inbox(self) -> Path:
        """Where experts land, one folder each."""
        return self.roots.places["inbox"].path

    def arrival_path(self, name: str) -> Path:
        """Record of what became of one folder of the inbox."""
        return self.arrivals / f"{name}.json"

    def recipe_path(self, name: str) -> Path:
        """The file of one standing recipe."""
        return self.recipes / f"{name}.yml"

    def plan_path(self, plan_id: str) -> Path:
        """The file of one plan."""
        return self.plans / f"{plan_id}.json"

    def current_plan_path(self, recipe: str) -> Path:
        """Pointer to the plan a standing recipe works on."""
        return self.releases / f"{recipe}.current.json"

    def sums_path(self, ref: str, layer: str) -> Path:
        """The sums of a layer that the last merge for a ref kept."""
        return self.sums_dir / ref / f"{layer}.sums"

    def working_plan_path(self, recipe: str, sha256: str) -> Path:
        """That whole plan: another one of its id may have other files beside the weights."""
        return self.releases / f"{recipe}.{sha256[:16]}.plan"

    def layer_records_dir(self, recipe: str) -> Path:
        """The cost of each layer of that plan, a file per layer."""
        return self.releases / f"{recipe}.layers"

    def release_path(self, recipe: str) -> Path:
        """Record of a standing recipe's last release."""
        return self.releases / f"{recipe}.released.json"

    def postponed_path(self, recipe: str) -> Path:
        """A file that is there while a standing recipe is owed what its schedule asked for."""
        return self.releases / f"{recipe}.postponed"

    def refusal_path(self, recipe: str) -> Path:
        """Record of the candidate of a standing recipe that its gate refused last."""
        return self.releases / f"{recipe}.refused.json"

    def bisection_path(self, recipe: str) -> Path:
        """Record of what a standing recipe's last refusal was traced to."""
        return self.releases / f"{recipe}.bisected.json"

    def audit_path(self, recipe: str) -> Path:
        """Record of the last audit of a standing recipe's snapshot."""
        return self.releases / f"{recipe}.audited.json"

    def evaluation_path(self, snapshot_id: str, evaluator_id: str) -> Path:
        """Record of what one evaluator measured of a snapshot; its log lies beside it."""
        return self.evaluations / snapshot_id / f"{evaluator_id}.json"

    def new_aside(self) -> Path:
        """A new folder for what is set aside now; it does not exist yet."""
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        return self.aside / name

    def unnamed(self) -> Iterator[Path]:
        """Files that have no final name yet; killed processes leave such behind."""
        yield from sorted(self.root.glob(".*.tmp"))
        for folder in (
            self.arrivals,
            self.catalog_dir,
            self.plans,
            self.objects_dir,
            self.actions_dir,
            self.refs_dir,
            self.releases,
            self.leases_dir,
            self.stages,
            self.evaluations,
        ):
            yield from sorted(folder.rglob(".*.tmp"))
