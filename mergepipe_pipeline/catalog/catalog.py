"""The way into the catalog: names, contents, and how experts differ from bases.

Every write is one immutable file that appears whole; every read is of files, so that any number of
processes may use one catalog at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.catalog import arrow_tables as tables
from mergepipe_pipeline.catalog.contents import ContentFiles, whole_ids
from mergepipe_pipeline.catalog.formats import CHECKPOINTS, SIDE_FILES
from mergepipe_pipeline.catalog.pairs import Content, Origin, PairFacts, known_contents
from mergepipe_pipeline.catalog.seals import find_sealed, read_facts, version, write_sealed
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.bounds import NAME, NAME_FORM
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain, read_chains
from mergepipe_pipeline.storage.roots import Roots, refuse_unmounted, why_unmounted
from mergepipe_pipeline.storage.side_files import SideStamp, gone, side_sha256, side_stamps
from mergepipe_pipeline.storage.source import open_source

if TYPE_CHECKING:
    from mergepipe_pipeline.catalog.queries import Limits, Rows

#: Size and time of last change of a file (`seals.version`).
Version = tuple[int, int] | None


@dataclass(frozen=True)
class Registration:
    """Version `version` of a name: its checkpoint, and the name of its base if it has one.

    `is_new`: `register` has just added this version.
    """

    name: str
    version: int
    checkpoint: Checkpoint
    base: str | None
    is_new: bool = field(default=False, compare=False)


class Catalog:
    """The folder `catalog` of a warehouse.

    A damaged file of facts is reported and counts as absent; see `seals`. Folders of checkpoints
    are recorded by the root of `roots` that they lie below; readers get them as they are here.
    """

    def __init__(self, folder: Path, roots: Roots | None = None) -> None:
        self._folder, self.roots = folder, roots or Roots({})

    def register(
        self,
        checkpoint: Checkpoint,
        base: str | None,
        *,
        is_meant: bool = False,
        by_link: bool | None = None,
    ) -> Registration:
        """Make `checkpoint` the current version of its name; an equal one adds no version.

        If it `is_meant` to be as it is, files beside the weights that are gone are not missed.
        `by_link`: whether it came by a link of the inbox; None for what is known of this place.
        Raises MergePipeError for a name that cannot be one.
        """
        if not NAME.fullmatch(checkpoint.name):
            raise MergePipeError(
                "Not a name for a checkpoint",
                where="name",
                found=repr(checkpoint.name),
                expected=NAME_FORM,
                next_step="choose one with --name",
            )
        records = find_sealed(self._folder / CHECKPOINTS, checkpoint.checkpoint_id)
        if not any(read_facts(path, len) for path in records):
            self._put_checkpoint(checkpoint)
        self._put_side_files(checkpoint, with_gone=is_meant)
        chain = self._chain(checkpoint.name)
        value: dict[str, Any] = {
            "checkpoint_id": checkpoint.checkpoint_id,
            "root": self.roots.recorded(checkpoint.root),
            "base": base,
        }
        current = None
        with suppress(CorruptionError):  # the next version gets past a damaged one
            current = chain.current()
        if current and base is None:
            value["base"] = current[1]["base"]
        if current and checkpoint.is_offline:  # its name still means the place that it left
            value["root"] = current[1]["root"]
        if by_link is None and current and current[1]["root"] == value["root"]:
            by_link = current[1].get("by_link")
        if by_link:  # else there is no such key, as in earlier versions
            value["by_link"] = True
        if current and current[1] == value:
            return Registration(checkpoint.name, current[0], checkpoint, value["base"])
        version = chain.append(value)
        return Registration(checkpoint.name, version, checkpoint, value["base"], is_new=True)

    def names(self) -> list[str]:
        """All registered names, sorted; those with damaged versions among them."""
        return chain_names(self._folder / "names")

    def __contains__(self, name: str) -> bool:
        """Whether a name is one of `names`; no other name is looked at."""
        return bool(NAME.fullmatch(name)) and is_chain(self._folder / "names" / name)

    def get(self, name: str) -> Registration:
        """The current version of a name.

        Raises NotFoundError with the nearest names, or if the record of the checkpoint is gone and
        its files are not what they were.
        """
        number, value = self._current(name)
        registration = self._registration(name, number, value)
        if registration is None:
            root = self.roots.here(value["root"])
            if why_unmounted(root):
                refuse_unmounted(root)
            raise NotFoundError(
                "What was registered is not known any more, and its files are not what they were",
                where=root,
                expected=f"the files of {name!r}, version {number}",
                found="no record of their tensors, and other files or none",
                next_step=f"register it again: `mergepipe register {root} --name {name}`",
            )
        return registration

    def root(self, name: str) -> str:
        """Folder or address of a name's current version. Raises NotFoundError."""
        return self.roots.here(str(self._current(name)[1]["root"]))

    def came_by_link(self, name: str) -> bool:
        """Whether a name's current version came by a link of the inbox. Raises NotFoundError."""
        return bool(self._current(name)[1].get("by_link"))

    def digested(self) -> frozenset[str]:
        """The ids of checkpoints whose digests are there, damaged or not; reads none."""
        return whole_ids(self._folder)

    def has_content(self, name: str, digested: Collection[str] | None = None) -> bool:
        """Whether the content of a name's current version is known, as far as names of files tell.

        `digested`: what the method of this name gives, to call it once for many names. False for a
        damaged version: another one gets past it.
        """
        try:
            _, value = self._current(name)
        except (NotFoundError, CorruptionError):
            return False
        return value["checkpoint_id"] in (self.digested() if digested is None else digested)

    def _current(self, name: str) -> tuple[int, dict[str, Any]]:
        current = self._chain(name).current() if NAME.fullmatch(name) else None
        if current is None:
            near = get_close_matches(name, self.names(), n=3)
            raise NotFoundError(
                "No checkpoint of this name",
                where=str(self._folder),
                found=repr(name),
                expected=", ".join(near or self.names()[:5]) or "none is registered yet",
                next_step=f"did you mean {near[0]!r}?"
                if near
                else "register it: `mergepipe register PATH`",
            )
        return current

    def history(self, name: str) -> list[Registration]:
        """The versions of a name whose tensors are known, oldest first. Raises NotFoundError."""
        self._current(name)
        chain = self._chain(name)
        registrations = (self._registration(name, n, chain.get(n)) for n in chain.versions())
        return [r for r in registrations if r is not None]

    def registrations(self) -> Iterator[tuple[str, int, str, str | None, str]]:
        """Name, version, checkpoint id, base and root of every readable version, in order."""
        for name, n, value in read_chains(self._folder / "names"):
            if not isinstance(value, CorruptionError):
                root = self.roots.here(value["root"])
                yield (name, n, value["checkpoint_id"], value["base"], root)

    def damaged(self) -> list[CorruptionError]:
        """The errors of the versions that `registrations` leaves out."""
        versions = read_chains(self._folder / "names")
        return [value for *_, value in versions if isinstance(value, CorruptionError)]

    def tags(self, name: str) -> frozenset[str]:
        """The tags of a name, which need not be registered yet. Raises CorruptionError."""
        current = self._tags(name).current() if NAME.fullmatch(name) else None
        return frozenset(current[1]["tags"] if current else ())

    def put_tags(self, name: str, add: Collection[str], remove: Collection[str]) -> frozenset[str]:
        """Change the tags of a name; returns all that it has then.

        Raises CorruptionError, CommitConflictError.
        """
        chain, had = self._tags(name), self.tags(name)
        tags = (had | set(add)) - set(remove)
        if tags != had:
            chain.append({"tags": sorted(tags)}, max(chain.versions(), default=0))
        return tags

    def checkpoint(self, checkpoint_id: str, name: str, root: str) -> Checkpoint | None:
        """A checkpoint by its id, whether its files are still there or not; None if not known.

        Name and root are as given.
        """
        for path in find_sealed(self._folder / CHECKPOINTS, checkpoint_id):
            checkpoint = _checkpoint(path, version(path), name, root)
            if checkpoint is not None:
                return checkpoint
        return None

    def contents(self, checkpoint_id: str) -> ContentFiles:
        """The digests of a checkpoint's tensors and of their segments."""
        return ContentFiles(self._folder, checkpoint_id)

    def digests(self, checkpoint_id: str) -> Mapping[str, str] | None:
        """Tensor name to digest, or None if not all are known."""
        return self.contents(checkpoint_id).all_known()

    def facts(self, base_id: str, owner_id: str) -> PairFacts:
        """The facts of an expert, or of a group of them, against a base."""
        return PairFacts(self._folder, base_id, owner_id)

    def known_contents(self, block_elems: int) -> Mapping[Content, Origin]:
        """Where the statistics of each analysed content are."""
        return known_contents(self._folder, block_elems)

    def side_digests(self, checkpoint_id: str) -> Mapping[SideStamp, str]:
        """SHA-256 of files beside a checkpoint's weights, as each was when it was registered.

        "" under the stamp `gone` of one that was not there any more at a later registration.
        """
        sha256s: dict[SideStamp, str] = {}
        for path in find_sealed(self._folder / SIDE_FILES, checkpoint_id):
            sha256s |= _side_digests(path, version(path)) or {}
        return sha256s

    def content_sha256(self, checkpoint_id: str) -> str:
        """One digest over all tensors' names and digests.

        Raises NotFoundError if they are not known.
        """
        sha256 = self.contents(checkpoint_id).content_sha256()
        if sha256 is None:
            raise NotFoundError(
                "A checkpoint's content is not known yet",
                where=checkpoint_id,
                found="no digests",
                next_step="run `mergepipe analyze` on it",
            )
        return sha256

    def sql(
        self, query: str, rows: Rows | None = None, limits: Limits | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a query over the views of `views.VIEWS`.

        `rows` are of the views that the catalog does not know; without, those are empty.
        """
        from mergepipe_pipeline.catalog import queries

        all_rows = {"registrations": self.registrations, **(rows or {})}
        return queries.run(self._folder, all_rows, query, limits)

    def export(self, target: Path, rows: Rows | None = None) -> None:
        """Write everything, and `rows` as in `sql`, as tables of one new DuckDB file."""
        from mergepipe_pipeline.catalog import queries

        queries.export(self._folder, {"registrations": self.registrations, **(rows or {})}, target)

    def _registration(
        self, name: str, version: int, value: Mapping[str, Any]
    ) -> Registration | None:
        """A version; None if its record is gone and its files are not what they were."""
        checkpoint_id, root = value["checkpoint_id"], self.roots.here(value["root"])
        checkpoint = self.checkpoint(checkpoint_id, name, root)
        if checkpoint is None:
            try:
                checkpoint = open_checkpoint(root, name)
            except CheckpointError:
                return None
            if checkpoint.checkpoint_id != checkpoint_id:
                return None
            self._put_checkpoint(checkpoint)
        return Registration(name, version, checkpoint, value["base"])

    def _put_checkpoint(self, checkpoint: Checkpoint) -> None:
        data = tables.encode_checkpoint(checkpoint)
        write_sealed(self._folder / CHECKPOINTS, checkpoint.checkpoint_id, data)

    def _put_side_files(self, checkpoint: Checkpoint, *, with_gone: bool) -> None:
        """Store the digests of side files that are new or changed, and which files are gone."""
        recorded = self.side_digests(checkpoint.checkpoint_id)
        fresh: dict[SideStamp, str] = {}
        # Later readers of an unreadable folder or file raise the error.
        with suppress(CheckpointError), open_source(checkpoint.root) as source:
            there = side_stamps(source, checkpoint.root)
            went = {stamp.file for stamp in recorded if with_gone} - {stamp.file for stamp in there}
            fresh |= dict.fromkeys(set(map(gone, went)).difference(recorded), "")
            for stamp in there:
                if stamp not in recorded:
                    with suppress(CheckpointError):
                        fresh[stamp] = side_sha256(source, stamp)
        if fresh:
            data = tables.encode_side_files(fresh)
            write_sealed(self._folder / SIDE_FILES, checkpoint.checkpoint_id, data)

    def _chain(self, name: str) -> VersionChain:
        return VersionChain(self._folder / "names" / name)

    def _tags(self, name: str) -> VersionChain:
        return VersionChain(self._folder / "tags" / name)


# One verb reads these several times for every expert, and sensors at each tick.
@lru_cache(maxsize=512)
def _side_digests(path: Path, _version: Version) -> Mapping[SideStamp, str] | None:
    return read_facts(path, lambda data: tables.decode_side_files(data, str(path)))


@lru_cache(maxsize=512)
def _checkpoint(path: Path, _version: Version, name: str, root: str) -> Checkpoint | None:
    return read_facts(path, lambda data: tables.decode_checkpoint(data, str(path), name, root))
