"""Which contents of experts are kept out of merges: a verdict on bytes, not on a name.

A content stays in quarantine until it is released, whenever it lies under its name; any other
content of the name is free. Each decision is one more version of a chain, so that none is lost, and
a damaged one stops what asks instead of letting the expert in. The inbox has a quarantine of its
own, for what cannot be indexed (`deploy.arrivals`): that counts failures of one arrival, ends with
any change of a file, and may be forgotten.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.facts.contents import content_of
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain
from mergepipe_pipeline.text import now
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A decision about one content of an expert: kept out or let in, when, by whom and why."""

    name: str
    content: str
    reason: str
    decided: str
    is_kept_out: bool = True
    by: str = ""

    def __str__(self) -> str:
        """One sentence for people, with what they can do."""
        return (
            f"{self.name} is quarantined since {self.decided}"
            f"{f' by {self.by}' if self.by else ''}: {self.reason}; another version is "
            f"taken by itself, and `mergepipe quarantine {self.name} --release` lets this one in"
        )


def is_quarantined(warehouse: Warehouse, name: str) -> bool:
    """Whether the content that is registered under a name is kept out of merges.

    Raises CorruptionError where a decision about the name cannot be read.
    """
    return quarantine_of(warehouse, name) is not None


def quarantine_of(
    warehouse: Warehouse, name: str, checkpoint: Checkpoint | None = None
) -> Quarantine | None:
    """Why a checkpoint (by default the registered one) is kept out under this name; None if not.

    None if its content is not indexed yet. Raises CorruptionError where a decision about the name
    cannot be read.
    """
    decided = _decisions(warehouse, name)
    catalog = warehouse.catalog
    if not decided or (checkpoint is None and name not in catalog):
        return None
    try:
        content = content_of(catalog, checkpoint or catalog.get(name).checkpoint)
    except NotFoundError:
        return None
    decision = decided.get(content)
    return decision if decision is not None and decision.is_kept_out else None


def decide(
    warehouse: Warehouse, name: str, content: str, reason: str, *, is_kept_out: bool, by: str = ""
) -> Quarantine:
    """Keep a content out under a name, or let it in; what holds already is not decided again."""
    last = _decisions(warehouse, name).get(content)
    if last is not None and last.is_kept_out == is_kept_out:
        return last
    decision = Quarantine(name, content, reason, now(), is_kept_out, by)
    value = asdict(decision)
    del value["name"]
    VersionChain(warehouse.quarantined_dir / name).append(value)
    return decision


def quarantined_names(warehouse: Warehouse) -> list[str]:
    """The names about which something was decided, sorted."""
    return chain_names(warehouse.quarantined_dir)


def kept_out(warehouse: Warehouse, name: str) -> tuple[Quarantine, ...]:
    """The contents that are kept out under a name, whether one of them lies there or not.

    Raises CorruptionError where a decision cannot be read.
    """
    return tuple(d for d in _decisions(warehouse, name).values() if d.is_kept_out)


def _decisions(warehouse: Warehouse, name: str) -> dict[str, Quarantine]:
    """The last decision about each content of a name."""
    folder = warehouse.quarantined_dir / name
    if not is_chain(folder):
        return {}
    chain = VersionChain(folder)
    decisions = (Quarantine(name=name, **chain.get(number)) for number in chain.versions())
    return {decision.content: decision for decision in decisions}
