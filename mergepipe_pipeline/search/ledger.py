"""The ledger of a search: immutable, sealed facts in the catalog, and who works on which.

    catalog/searches/NAME/search.json            what was asked for, and of which contents
    catalog/searches/NAME/prior.json
    catalog/searches/NAME/proposals/0007.json
    catalog/searches/NAME/results/0007.json      missing until it was evaluated

A fact is written once: of two writers the first one counts. Removing a result has it made again;
a proposal may be removed, too: its result tells the same, and without one another takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import BusyError, CorruptionError, NotFoundError
from mergepipe_pipeline.search.records import Prior, Proposal, Result, Search
from mergepipe_pipeline.search.search_file import parse_search
from mergepipe_pipeline.search.space import Layer
from mergepipe_pipeline.storage.atomic import create_exclusive
from mergepipe_pipeline.storage.locks import claimed, is_held, locked, this_process
from mergepipe_pipeline.warehouse import Warehouse

FORMAT = "mergepipe-search/1"
_FILE = re.compile(r"(\d{4,})\.json")
T = TypeVar("T")


def searches(warehouse: Warehouse) -> list[str]:
    """The names of all searches that began, sorted."""
    return sorted(p.parent.name for p in warehouse.search_ledgers.glob("*/search.json"))


class Ledger:
    """The facts of one search, by its name."""

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        self._warehouse, self.name = warehouse, name
        self.folder = warehouse.search_ledgers / name

    def search(self) -> Search:
        """What was asked for. Raises NotFoundError, CorruptionError."""
        path = self.folder / "search.json"
        if not path.is_file():
            raise NotFoundError(
                "No such search",
                where=str(self.folder.parent),
                expected=", ".join(searches(self._warehouse)) or "none has begun",
                found=repr(self.name),
                next_step="begin it with `mergepipe search FILE`",
            )
        return self._read(path, self._search)

    def begin(self, search: Search) -> Search:
        """Write down what is asked for, once. Raises StorageFullError."""
        layers = [[x.name, x.filters] for x in search.layers]
        value = {
            "text": search.text,
            "folder": self._warehouse.roots.recorded(str(search.folder)),
            "contents": dict(search.contents),
            "evaluator_id": search.evaluator_id,
            "layers": layers,
            "began": now(),
        }
        self._write("search.json", value)
        return self.search()

    def prior(self) -> Prior | None:
        """The prior; None before it is known. Raises CorruptionError."""
        return self._found("prior.json", Prior.from_json)

    def put_prior(self, prior: Prior) -> None:
        """Remember the prior, once."""
        self._write("prior.json", asdict(prior))

    def proposals(self) -> dict[int, Proposal]:
        """All proposals by number; a lost one is what its result tells. Raises CorruptionError."""
        of_results = {n: Proposal(n, r.point, "", r.ended) for n, r in self.results().items()}
        return of_results | self._all("proposals", Proposal.from_json)

    def put_proposal(self, number: int, point: tuple[float, ...]) -> None:
        """Remember a proposal, once."""
        proposal = Proposal(number, point, this_process(), now())
        self._write(f"proposals/{number:04d}.json", asdict(proposal))

    def results(self) -> dict[int, Result]:
        """All results by number. Raises CorruptionError."""
        return self._all("results", Result.from_json)

    def result(self, number: int) -> Result | None:
        """The result of a proposal; None before it was evaluated. Raises CorruptionError."""
        return self._found(f"results/{number:04d}.json", Result.from_json)

    def put_result(self, result: Result) -> Result:
        """Remember a result, once; the one that counts."""
        self._write(f"results/{result.number:04d}.json", result.to_json())
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

    def _search(self, value: Mapping[str, Any]) -> Search:
        text = value["text"]
        layers = [(name, tuple(map(tuple, filters))) for name, filters in value["layers"]]
        return Search(
            name=self.name,
            text=text,
            file=parse_search(text, f"the search {self.name}"),
            folder=Path(self._warehouse.roots.here(value["folder"])),
            layers=tuple(Layer(name, filters) for name, filters in layers),
            evaluator_id=value["evaluator_id"],
            contents={k: tuple(v) for k, v in value["contents"].items()},
            began=value["began"],
        )

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        with suppress(FileExistsError):
            fact = {"format": FORMAT, "search": self.name, "fact": name, **value}
            create_exclusive(self.folder / name, seal(fact))

    def _found(self, name: str, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        try:
            return self._read(self.folder / name, read)
        except FileNotFoundError:
            return None

    def _all(self, kind: str, read: Callable[[Mapping[str, Any]], T]) -> dict[int, T]:
        folder = self.folder / kind
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        named = ((_FILE.fullmatch(path.name), path) for path in paths)
        return {int(m[1]): self._read(path, read) for m, path in named if m}

    def _read(self, path: Path, read: Callable[[Mapping[str, Any]], T]) -> T:
        """A fact that is what it was written as: of this search, and under this name."""
        value = unseal(path.read_bytes(), str(path))
        try:
            head = tuple(value.pop(key, None) for key in ("format", "search", "fact"))
            if head != (FORMAT, self.name, str(path.relative_to(self.folder))):
                raise ValueError(f"{head[0]}, {head[2]} of {head[1]}")
            return read(value)
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            raise CorruptionError(
                "A fact of a search is not its own, or of another form than this version writes",
                where=str(path),
                expected=f"{FORMAT}, {path.relative_to(self.folder)} of {self.name}",
                found=str(error),
                next_step="bring back what was there; a result or proposal can be removed: the "
                "search goes on without it",
            ) from error


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
