"""The asset that shows at a glance where every recipe is; sensors keep it, and no run makes it."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import dagster as dg

from mergepipe_pipeline.assets.labels import owners
from mergepipe_pipeline.assets.metadata import table
from mergepipe_pipeline.assets.place import ALONE, Place
from mergepipe_pipeline.deploy.standing import Standing
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.text import in_one_line

#: Recipes that have a row, those that are current last; characters of a reason and of a word.
_MOST_ROWS, _MOST_SHOWN, _LONGEST = 60, 140, 18
#: The last statuses on the instance, among which ours is looked for.
_MOST_READ = 10
_HEADERS = ("recipe", "state", "why", "since", "next")
_TABLE, _VERSION = "recipes", "dagster/data_version"


def build_status(first_steps: str, place: Place = ALONE) -> dg.AssetsDefinition:
    """The asset, which says how to begin, too: definitions do not know when somebody has."""
    spec = dg.AssetSpec(
        _key(place),
        description=(
            "Says of each recipe where it is, why, since when, and what comes next. "
            f"recipe_sensor writes it whenever that changes; no run makes it.\n\n{first_steps}"
        ),
        group_name=place.group_of("catalog"),
        owners=owners(),
        kinds={"table"},
    )
    return dg.AssetsDefinition(specs=[spec])


def changed_status(
    instance: dg.DagsterInstance,
    tags: Mapping[str, str],
    states: Mapping[str, Standing],
    first: str | None,
    now: datetime,
    place: Place = ALONE,
) -> list[dg.AssetMaterialization]:
    """The event that shows the states, if others were shown last; `first` is shown without any.

    `tags` tell our warehouse from others, which may show a status of theirs on the same instance. A
    recipe's `since` is when the table first showed its state.
    """
    last = _last(instance, _key(place), tags)
    rows = [(name, s.state, _short(s.why), _short(s.then)) for name, s in states.items()]
    version = digest_json([rows, first])[:32]
    if last is not None and (last.tags or {}).get(_VERSION) == version:
        return []
    since = _since(last)
    begun = f"{now:%Y-%m-%d %H:%M} UTC"
    shown = [
        (name, state, why, since.get((name, state), begun), then)
        for name, state, why, then in sorted(rows, key=lambda row: (row[1] == "current", row[0]))
    ]
    metadata = _metadata(shown) if shown else {"what to do first": first or "no recipes"}
    return [
        dg.AssetMaterialization(_key(place), metadata=metadata, tags={**tags, _VERSION: version})
    ]


def _key(place: Place) -> dg.AssetKey:
    return place.key("", "pipeline_status")


def _last(
    instance: dg.DagsterInstance, key: dg.AssetKey, tags: Mapping[str, str]
) -> dg.AssetMaterialization | None:
    records = instance.fetch_materializations(key, limit=_MOST_READ).records
    made = [r.asset_materialization for r in records]
    return next((m for m in made if m and tags.items() <= (m.tags or {}).items()), None)


def _metadata(rows: Sequence[tuple[str, ...]]) -> dict[str, dg.TableMetadataValue | int | str]:
    left = len(rows) - _MOST_ROWS
    return {
        _TABLE: table(_HEADERS, rows[:_MOST_ROWS]),
        **({"recipes that are not shown": left} if left > 0 else {}),
        "recipes that are current": sum(state == "current" for _, state, *_ in rows),
        "recipes in all": len(rows),
    }


def _since(last: dg.AssetMaterialization | None) -> dict[tuple[str, str], str]:
    """By recipe and state, since when the table has shown it."""
    shown = last.metadata.get(_TABLE) if last else None
    records = shown.records if isinstance(shown, dg.TableMetadataValue) else ()
    found = [r.data for r in records]
    return {(str(d["recipe"]), str(d["state"])): str(d["since"]) for d in found}


def _short(text: str) -> str:
    """The beginning of a text, without its longest words: the UI breaks no word, and cuts off what
    is beside wide columns.
    """
    words = map(in_one_line, text.split())
    line = " ".join(w if len(w) <= _LONGEST else f"{w[:6]}…{w[-11:]}" for w in words)
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}…"
