"""The common parts of assets of recipes and searches: how they are made, and their labels."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import dagster as dg

from mergepipe_pipeline.assets.metadata import description
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.deploy.recipe_files import StandingFile
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.settings import OWNERS
from mergepipe_pipeline.text import visible


def owners() -> list[str]:
    """The people and teams that are asked about the assets."""
    return list(OWNERS.value())


class Labels(TypedDict):
    """Keywords of `dg.asset` and `dg.AssetSpec`."""

    group_name: str
    tags: dict[str, str]
    owners: list[str]
    kinds: set[str]


def labels(file: StandingFile, *kinds: str, place: Place = ALONE) -> Labels:
    """The labels of an asset of a recipe or search; `kinds` are at most three.

    The tag `expert/<name>` finds every asset that depends on an expert.
    """
    # Dagster's tags take 63 characters; names may be longer.
    experts = {f"expert/{member[:63]}": "" for member in file.members}
    return {
        "group_name": place.group_of(file.name),
        "tags": {file.kind: file.name, **experts},
        "owners": owners(),
        "kinds": set(kinds),
    }


def asset_of(
    file: StandingFile,
    *kinds: str,
    place: Place,
    after: Sequence[str | dg.AssetDep] = (),
    pool: str | None = None,
    is_heavy: bool = False,
    partitions: dg.PartitionsDefinition[str] | None = None,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """An asset of a recipe or search from a function, whose name it has, and whose errors it tells.

    It follows what `after` names: others of the same recipe or search, or any. One that is heavy
    runs as the place's `running` says.
    """

    def decorate(work: Callable[..., Any]) -> dg.AssetsDefinition:
        asset = dg.asset(
            key=place.key(file.name, work.__name__),
            deps=[dg.AssetDep(place.key(file.name, x)) if isinstance(x, str) else x for x in after],
            pool=place.running.pool if is_heavy else pool,
            op_tags=place.running.op_tags if is_heavy else None,
            partitions_def=partitions,
            **labels(file, *kinds, place=place),
        )
        return asset(place.bound(failing()(work)))

    return decorate


def problem_asset(
    file: StandingFile, first: str, deps: Sequence[dg.AssetDep] = (), place: Place = ALONE
) -> dg.AssetsDefinition:
    """An asset that says why a recipe or search cannot be used, in the place of its `first` one."""
    spec = dg.AssetSpec(
        place.key(file.name, first),
        deps=deps,
        description=description(file.problem or ""),
        metadata={"problem": dg.MetadataValue.text(visible(file.problem or ""))},
        group_name=place.group_of(file.name),
        owners=owners(),
        kinds={"problem"},
    )
    return dg.AssetsDefinition(specs=[spec])


class _Interrupted(dg.DagsterExecutionInterruptedError, dg.DagsterError):
    """A step's run is terminated: also one whose job has a retry policy, which looks at no
    DagsterError, and by which Dagster would begin an interrupted step again.
    """


@contextmanager
def failing() -> Iterator[None]:
    """Have errors become failures that lead with the error's own text; also a decorator.

    The run does not try them again: sensors do, with back-off, unless they would fail again. A
    generator has this inside: decorated, it would have begun nothing when this ends.
    """
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError) as interrupt:
        raise _Interrupted from interrupt
    except MergePipeError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    except Exception as error:
        raise dg.Failure(f"{type(error).__name__}: {error}", allow_retries=False) from error
