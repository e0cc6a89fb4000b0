"""The inputs of a standing recipe as they were indexed, and nothing else.

Folders change at any moment, one file after the other, so what lies there may be half of one
version and half of another. A recipe takes an input only if all its files are those that the
catalog recorded, and what it made gets a name only if they still are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mergepipe_pipeline.deploy.arrivals import arrival, found, mark_changed, place_of, stamps_of
from mergepipe_pipeline.deploy.inbox import reason_not_indexed
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CheckpointError, InputChangedError, MergePipeError
from mergepipe_pipeline.facts.offline import offline_at, open_root
from mergepipe_pipeline.facts.quarantine import quarantine_of
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.resolution.locate import expected_place
from mergepipe_pipeline.storage.roots import why_unmounted
from mergepipe_pipeline.warehouse import Warehouse


def gone_inputs(warehouse: Warehouse, names: Collection[str]) -> list[str]:
    """Names under which nothing lies in the inbox, nor where they were registered, if they were."""
    return sorted(name for name in names if _is_gone(warehouse, name))


def _is_gone(warehouse: Warehouse, name: str) -> bool:
    root = warehouse.catalog.root(name) if name in warehouse.catalog else ""
    if "://" in root or place_of(warehouse, name) is not None:
        return False
    return not root or offline_at(warehouse, root) is None


def reason_to_wait_for(warehouse: Warehouse, names: Collection[str]) -> str | None:
    """Which inputs may not be read as they lie there, and why; None if all may.

    From names, sizes and times of files alone. Raises NotFoundError for a name without a record.
    """
    return "; ".join(filter(None, (_reason(warehouse, name) for name in names))) or None


def _reason(warehouse: Warehouse, name: str) -> str | None:
    catalog = warehouse.catalog
    if "/" in name:
        return f"{name} is a path: a standing recipe takes names of the inbox, or registered ones"
    if name not in catalog:
        return reason_not_indexed(warehouse, name) or f"{name} is not indexed yet"
    if _is_gone(warehouse, name):
        place = expected_place(warehouse, name, catalog.root(name))
        return f"{name} is gone: nothing lies at {place}"
    unmounted = why_unmounted(catalog.root(name))
    if unmounted:
        return f"{name} lies below a root that is not mounted here: {unmounted}"
    if not _is_as_recorded(warehouse, catalog.get(name).checkpoint):
        waits = f"{name} waits for its index: its files are not those that were indexed"
        fault = reason_not_indexed(warehouse, name)
        return f"{waits}; {fault}" if fault else waits
    kept_out = quarantine_of(warehouse, name)
    return None if kept_out is None else str(kept_out)


def _is_as_recorded(warehouse: Warehouse, recorded: Checkpoint) -> bool:
    """Whether the files at a checkpoint's root have the sizes and times of the record."""
    if "://" in recorded.root or offline_at(warehouse, recorded.root) is not None:
        return True  # who reads it compares
    indexed = arrival(warehouse, recorded.name).indexed
    if indexed and _token(warehouse, recorded.name) not in (indexed, ""):
        return False
    root = Path(recorded.root)
    for file in recorded.files:
        try:
            stat = (root if root.is_file() else root / file.path).stat()
        except OSError:
            return False
        if (stat.st_size, stat.st_mtime_ns) != (file.nbytes, file.mtime_ns):
            return False
    return True


def _token(warehouse: Warehouse, name: str) -> str:
    """Changes with every file beside an expert's weights, too; "" for one at an address."""
    there = found(warehouse, name)
    return there.token if there else ""


def last_written_s(warehouse: Warehouse, names: Collection[str]) -> float:
    """When a file of inputs was written last, as the system says, whatever time a copy kept.

    Seconds since 1970; 0 where nothing can be read.
    """
    last_ns = 0
    for name in names:
        with suppress(OSError):
            if place := place_of(warehouse, name):
                last_ns = max(last_ns, stamps_of(place)[1])
    return last_ns / 1e9


def recorded_inputs(warehouse: Warehouse, names: Collection[str]) -> dict[str, Checkpoint]:
    """Inputs by name, as their headers are at this moment, which are those of the record.

    Raises InputChangedError naming those that may not be read, NotFoundError.
    """
    reason = reason_to_wait_for(warehouse, names)
    if reason is not None:
        raise _changed(reason)
    catalog, inputs = warehouse.catalog, {}
    for name in names:
        recorded = catalog.get(name).checkpoint
        try:
            inputs[name] = open_root(warehouse, recorded.root, name)
        except CheckpointError as error:
            if is_address(recorded.root):
                raise _changed_at_address(recorded, error) from error
            raise _changed(f"{name} waits for its index: {error.what}") from error
        if inputs[name].checkpoint_id != recorded.checkpoint_id:
            if is_address(recorded.root):
                raise _changed_at_address(recorded)
            mark_changed(warehouse, name)
            raise _changed(f"{name} waits for its index: its files are not those that were indexed")
    return inputs


def states_of(warehouse: Warehouse, inputs: Mapping[str, Checkpoint]) -> dict[str, str]:
    """A text per input that changes with any of its files, and is the same on all machines."""
    recorded = warehouse.roots.recorded
    states = {
        name: [recorded(c.root), c.checkpoint_id, c.config, _token(warehouse, c.name)]
        for name, c in inputs.items()
    }
    return {name: digest_json(state)[:24] for name, state in states.items()}


def refuse_changed_inputs(warehouse: Warehouse, states: Mapping[str, str]) -> None:
    """Raise InputChangedError if an input is not in the state that `states_of` gave."""
    states_now = states_of(warehouse, recorded_inputs(warehouse, states))
    for name, state in states.items():
        if states_now[name] != state:
            raise _changed(f"{name} has a newer version than the one that was planned")


@contextmanager
def blaming_inputs(warehouse: Warehouse, states: Mapping[str, str]) -> Iterator[None]:
    """Of what fails while an input changes, raise InputChangedError: that is the cause."""
    try:
        yield
    except MergePipeError:
        refuse_changed_inputs(warehouse, states)
        raise


def _changed_at_address(
    recorded: Checkpoint, error: CheckpointError | None = None
) -> InputChangedError:
    """Why an input at an address cannot be read as it was registered: nobody watches it."""
    name = recorded.name
    take = f"`mergepipe register ADDRESS --name {name}` and `mergepipe analyze {name}` take"
    if error is None:
        return InputChangedError(
            f"{name} is not what was registered: its files have changed",
            where=recorded.root,
            next_step=f"{take} it as it is now; the recipe is merged again then",
        )
    return InputChangedError(
        f"{name} cannot be had as it was registered: {error.what}",
        where=recorded.root,
        expected=error.expected,
        found=error.found,
        next_step=f"{error.next_step or 'wait until it answers'}; if it is gone for good, {take} "
        "what is there instead",
    )


def _changed(reason: str) -> InputChangedError:
    return InputChangedError(
        reason,
        next_step="the sensors index what is whole, and run the recipe again then; without them, "
        "materialize expert_index for it and then the recipe",
    )
