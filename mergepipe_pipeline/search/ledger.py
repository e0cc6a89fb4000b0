"""The facts of a search in the catalog, and who works on which.

    catalog/searches/NAME/search.json            what was asked for, and of which contents
    catalog/searches/NAME/prior.json
    catalog/searches/NAME/proposals/0007.json
    catalog/searches/NAME/results/0007.json      missing until it was evaluated

A fact is written once: of two writers the first one counts. Removing a result has it made again;
a proposal may be removed, too: its result says the same, and without one another takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import BusyError, CorruptionError, NotFoundError
from mergepipe_pipeline.search.search_file import SearchFile, parse_search
from mergepipe_pipeline.search.space import Layer
from mergepipe_pipeline.storage.atomic import create_exclusive
from mergepipe_pipeline.storage.forms import check_form
from mergepipe_pipeline.storage.locks import claimed, is_held, locked, this_process
from mergepipe_pipeline.warehouse import Warehouse

Point = tuple[float, ...]


@dataclass(frozen=True)
class Search:
    """A search that has begun, or could (`began` "" until then).

    `text` is its file's, whose relative paths start from `place`. `contents` are the digests of
    what its models held when it began, by their texts; `evaluator_id` is its evaluator's.
    """

    name: str
    text: str = field(repr=False)
    place: str
    layers: tuple[Layer, ...] = field(repr=False)
    evaluator_id: str
    contents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    began: str = ""

    @property
    def folder(self) -> Path:
        """Where relative paths of its file start."""
        return Path(self.place)

    @cached_property
    def file(self) -> SearchFile:
        """The request in its text. Raises RecipeError."""
        return parse_search(self.text, f"the search {self.name}")


@dataclass(frozen=True, slots=True)
class Prior:
    """The expectation of each coordinate before anything is evaluated.

    `parameter` are differences per numbered layer, `blocks`
    the layers that share a weight, `scores` and `length_scales` per coordinate in the order of
    `labels`.
    """

    labels: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    parameter: tuple[float, ...]
    scores: tuple[float, ...]
    length_scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A point to evaluate, who asked for it, and when (UTC)."""

    number: int
    point: Point
    asked_by: str
    asked: str


@dataclass(frozen=True, slots=True)
class MergeCost:
    """The cost of merging a candidate: layers, bytes read of sources and base, and seconds.

    `scratch_nbytes` is what is read where no layer is known already.
    """

    layers_merged: int
    layers_reused: int
    nbytes_read: int
    scratch_nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a proposal; `ended` is a time in UTC.

    A failure says why in `failure`, has no metrics, and the lowest value in each objective; without
    a snapshot it could not be merged.
    """

    number: int
    point: Point
    values: tuple[float, ...]
    metrics: Mapping[str, float]
    failure: str
    snapshot_id: str | None
    merge: MergeCost | None
    evaluation_s: float
    ended: str

    @property
    def is_failure(self) -> bool:
        """Whether nothing was measured."""
        return bool(self.failure)


FORMAT = "mergepipe-search/1"
_FILE = re.compile(r"(\d{4,})\.json")
T = TypeVar("T")
_RESTORE = (
    "bring back what was there; a result or proposal can be removed: the search goes on without it"
)


def searches(warehouse: Warehouse) -> list[str]:
    """The names of all searches that began, sorted."""
    return sorted(p.parent.name for p in warehouse.search_ledgers.glob("*/search.json"))


class Ledger:
    """The facts of one search, by its name."""

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        self._warehouse, self.name = warehouse, name
        self.folder = warehouse.search_ledgers / name

    def search(self) -> Search:
        """The search as it began. Raises NotFoundError, CorruptionError."""
        path = self.folder / "search.json"
        if not path.is_file():
            raise NotFoundError(
                "No such search",
                where=str(self.folder.parent),
                expected=", ".join(searches(self._warehouse)) or "none has begun",
                found=repr(self.name),
                next_step="begin it with `mergepipe search FILE`",
            )
        search = self._read(path, Search)
        return replace(search, place=self._warehouse.roots.here(search.place))

    def begin(self, search: Search) -> Search:
        """Write down what is asked for, once. Raises StorageFullError."""
        place = self._warehouse.roots.recorded(search.place)
        self._write("search.json", replace(search, place=place, began=now()))
        return self.search()

    def prior(self) -> Prior | None:
        """The prior; None before it is known. Raises CorruptionError."""
        return self._found("prior.json", Prior)

    def put_prior(self, prior: Prior) -> None:
        """Remember the prior, once."""
        self._write("prior.json", prior)

    def proposals(self) -> dict[int, Proposal]:
        """All proposals by number; a lost one is what its result tells. Raises CorruptionError."""
        of_results = {n: Proposal(n, r.point, "", r.ended) for n, r in self.results().items()}
        return of_results | self._all("proposals", Proposal)

    def proposal(self, number: int) -> Proposal:
        """A proposal by its number. Raises NotFoundError."""
        proposals = self.proposals()
        if number not in proposals:
            raise NotFoundError(
                "No such candidate",
                where=f"the search {self.name}",
                expected=f"a number up to {max(proposals, default=0)}",
                found=str(number),
                next_step=f"see `mergepipe front {self.name}`",
            )
        return proposals[number]

    def put_proposal(self, number: int, point: tuple[float, ...]) -> None:
        """Remember a proposal, once."""
        proposal = Proposal(number, point, this_process(), now())
        self._write(f"proposals/{number:04d}.json", proposal)

    def results(self) -> dict[int, Result]:
        """All results by number. Raises CorruptionError."""
        return self._all("results", Result)

    def result(self, number: int) -> Result | None:
        """The result of a proposal; None before it was evaluated. Raises CorruptionError."""
        return self._found(f"results/{number:04d}.json", Result)

    def put_result(self, result: Result) -> Result:
        """Remember a result, once; the one that counts."""
        self._write(f"results/{result.number:04d}.json", result)
        return self.result(result.number) or result

    def turn(self) -> AbstractContextManager[None]:
        """Propose alone, after those who do."""
        return locked(self._warehouse.leases_dir / f"search-{self.name}.turn")

    @contextmanager
    def claim(self, number: int) -> Iterator[None]:
        """Evaluate a proposal alone. Raises BusyError, naming who does."""
        path = self._claim_path(number)
        with claimed(path, this_process().encode()) as other:
            if other is not None:
                raise BusyError(
                    "Somebody else evaluates this candidate",
                    where=f"number {number} of the search {self.name}",
                    found=other.decode(errors="replace"),
                    next_step="let it end, or evaluate another one",
                )
            yield
            # Who comes later finds the result, whichever file it locks.
            if self.result(number) is not None:
                path.unlink(missing_ok=True)

    def is_claimed(self, number: int) -> bool:
        """Whether a living process evaluates this proposal, so far as anybody can know."""
        return is_held(self._claim_path(number)) is True

    def _claim_path(self, number: int) -> Path:
        return self._warehouse.leases_dir / f"search-{self.name}-{number:04d}.lock"

    def _write(self, fact_name: str, fact: Search | Prior | Proposal | Result) -> None:
        with suppress(FileExistsError):
            head = {"format": FORMAT, "search": self.name, "fact": fact_name}
            create_exclusive(self.folder / fact_name, seal(head | asdict(fact)))

    def _found(self, name: str, kind: type[T]) -> T | None:
        try:
            return self._read(self.folder / name, kind)
        except FileNotFoundError:
            return None

    def _all(self, part: str, kind: type[T]) -> dict[int, T]:
        folder = self.folder / part
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        named = ((_FILE.fullmatch(path.name), path) for path in paths)
        return {int(m[1]): self._read(path, kind) for m, path in named if m}

    def _read(self, path: Path, kind: type[T]) -> T:
        """A fact that is what it was written as: of this search, and under this name."""
        value, name = unseal(path.read_bytes(), str(path)), str(path.relative_to(self.folder))
        head = tuple(value.pop(key, None) for key in ("format", "search", "fact"))
        if head != (FORMAT, self.name, name):
            raise CorruptionError(
                "A fact of a search is not its own",
                where=str(path),
                expected=f"{FORMAT}, {name} of {self.name}",
                found=f"{head[0]}, {head[2]} of {head[1]}",
                next_step=_RESTORE,
            )
        return check_form(kind, value, str(path), "A fact of a search", _RESTORE)


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
