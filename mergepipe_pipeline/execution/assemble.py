"""Turns a plan whose layers are all merged into a snapshot: the last step of the verb `merge`.

Decides what stands beside the weights (config, tokenizer, index, card) and what is recorded of the
merge: in the manifest what determines the result, in the provenance the rest, as what the inputs'
cards say of their models, licences and languages. Computes no weight.
"""

from __future__ import annotations

import re
import time
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import new_hash, sha256_hex, unseal
from mergepipe_pipeline.domain.outcome import Realised, StoredObject, Times, rounding_error
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan, Source
from mergepipe_pipeline.domain.snapshot import (
    PROVENANCE,
    LineageEntry,
    Manifest,
    OperatorCount,
    ShardEntry,
    SideFile,
    Snapshot,
    operator_counts,
)
from mergepipe_pipeline.errors import DamagedLayerError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging as staging_of
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.facts.side_file_digests import refuse_changed_file
from mergepipe_pipeline.remote.address import HUB, hub_name, parse_address
from mergepipe_pipeline.snapshots.commit import (
    Checked,
    commit_snapshot,
    damage_of,
    files_state,
    made_here,
    stage_snapshot,
)
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.snapshots.model_folder import (
    STATED,
    config_json,
    index_json,
    model_card,
    shard_name,
)
from mergepipe_pipeline.snapshots.stores import Marks, ObjectStore
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.side_files import CARD, CONFIG, SideStamp, pieces, side_files
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.tokenizer.model_tokenizer import of_tokenizer
from mergepipe_pipeline.warehouse import Warehouse

#: What is read of a card: its front matter stands first.
_MOST_NBYTES = 64 << 10
_FRONT = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
#: How the hub writes licences and languages.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Licences that say nothing without the name that stands beside them.
_OTHER = "other"

Facts = dict[str, Any]


def card_facts(warehouse: Warehouse, plan: MergePlan) -> Facts:
    """The keys of a card's front matter that all inputs of a plan give, by name.

    `base_model` lists those of the hub, a base first; `license` and `language` are there where
    every input says the same.
    """
    by_role = sorted(zip(plan.roles, plan.sources, strict=True), key=lambda pair: pair[0])
    inputs = [_facts_of(warehouse, source) for _, source in by_role]
    named = dict.fromkeys(name for facts in inputs for name in facts.get("base_model", ()))
    facts: Facts = {}
    if named:
        facts |= {"base_model": list(named), "base_model_relation": "merge"}
    for key in ("license", "language"):
        values = [facts_of_one.get(key) for facts_of_one in inputs]
        if values[0] is not None and all(value == values[0] for value in values):
            facts[key] = values[0]
    return facts


def _facts_of(warehouse: Warehouse, source: Source) -> Facts:
    """Return what one input says of itself; an earlier stage says what its inputs did."""
    if Path(source.root).parent == warehouse.snapshots:
        path = Path(source.root) / PROVENANCE
        try:
            stated = unseal(path.read_bytes(), str(path)).get(STATED)
        except (OSError, MergePipeError):
            return {}
        return stated if isinstance(stated, dict) else {}
    name = _hub_model(source.root)
    return {"base_model": [name] if name else [], **dict(_stated(_front(warehouse, source)))}


def _hub_model(root: str) -> str | None:
    """The name on the hub of what lies at a root, a folder of the hub's cache or an address."""
    scheme, separator, _ = root.partition("://")
    if separator:
        return parse_address(root).place if scheme == HUB else None
    return hub_name(Path(root))


def _front(warehouse: Warehouse, source: Source) -> Mapping[str, Any]:
    """The front matter of an input's card; empty where there is none that can be read."""
    root = present_root(warehouse, source.checkpoint_id, source.root)
    try:
        with open_source(root) as files:
            if CARD not in files.list():
                return {}
            data = files.read_range(CARD, 0, min(files.size(CARD), _MOST_NBYTES))
    except MergePipeError:
        return {}
    match = _FRONT.match(data.decode("utf-8", "replace"))
    try:
        # Plain texts: `no` is a language, and no tag makes anything.
        front = yaml.BaseLoader(match[1]).get_single_data() if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return front if isinstance(front, dict) else {}


def _stated(front: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Licence and languages of a front matter, as far as it has them in the hub's form."""
    licence = front.get("license")
    if isinstance(licence, str) and _WORD.fullmatch(licence) and licence.lower() != _OTHER:
        yield "license", licence
    languages = front.get("language")
    words = languages if isinstance(languages, list) else [languages]
    if words and all(isinstance(word, str) and _WORD.fullmatch(word) for word in words):
        yield "language", sorted(set(words))


#: Layers that an error names.
_MOST_NAMED = 5


def commit(
    warehouse: Warehouse,
    plan: MergePlan,
    realised: Realised | None = None,
    times: Times | None = None,
    *,
    is_stage: bool = False,
    made: Collection[str] = (),
) -> tuple[Snapshot, Checked]:
    """Build the snapshot of a plan whose layers are all in the object store, and commit it.

    `realised` and `times` go to the provenance; `is_stage` as in `merge`. For a new snapshot the
    bytes of all layers are read but of those that were `made` just now, by name; of one that is
    there all bytes are read, unless they were right before and nobody touched its files since, and
    if it is damaged, it is made anew and set aside. What was read now and found right comes with
    the snapshot. Raises NotFoundError naming the first layer that
    is not merged yet, and DamagedLayerError for layers that are set aside, to be merged again.
    """
    store = warehouse.objects
    merged = [(layer, _merged(store, layer)) for layer in plan.layers]
    shards = _shards(merged)
    inputs, operators = _lineage(warehouse, plan), operator_counts(plan)
    written = _made_files(warehouse, plan, shards, inputs, operators)
    with staging_of(warehouse, "commit") as staging:
        copied = _copied_files(warehouse, plan, staging, written)
        own = [SideFile(name, sha256_hex(data), len(data)) for name, data in written.items()]
        manifest = Manifest(
            plan_id=plan.plan_id,
            method=plan.method,
            inputs=inputs,
            operators=operators,
            shards=shards,
            side_files=tuple(sorted((*own, *copied), key=lambda side: side.file)),
        )
        files: dict[str, bytes | Path] = {side.file: staging / side.file for side in copied}
        final = warehouse.snapshots / manifest.snapshot_id
        marks, is_new = Marks(warehouse.stages), not final.exists()
        if not is_new and (found := _found_right(marks, final, manifest, is_stage=is_stage)):
            return found
        provenance = _provenance(warehouse, plan, realised, times)
        if plan.is_coded:
            provenance["rounding_error"] = rounding_error(stored for _, stored in merged)
        staged = stage_snapshot(staging, manifest, store, written | files, provenance)
        began_ns = time.time_ns()  # a file counts as touched when it is linked
        reused = [pair for pair in merged if pair[0].name not in made]
        _refuse_damaged(warehouse, reused)
        snapshot = commit_snapshot(staged, warehouse.snapshots, warehouse.new_aside)
        marks.mark(snapshot.snapshot_id, is_stage=is_stage, is_new=is_new)
        marks.keep_state(snapshot.snapshot_id, files_state(final, manifest, began_ns))
        return snapshot, Checked(frozenset(stored.sha256 for _, stored in reused), began_ns)


def _found_right(
    marks: Marks, folder: Path, manifest: Manifest, *, is_stage: bool
) -> tuple[Snapshot, Checked] | None:
    """The snapshot in a folder and what was read of it just now; None for a damaged one."""
    now = Checked(frozenset(s.sha256 for s in manifest.shards), time.time_ns())
    state = files_state(folder, manifest, now.at_ns)
    is_known = state is not None and state == marks.state(folder.name)
    if damage_of(folder, checked=now if is_known else Checked()) is not None:
        return None
    marks.mark(folder.name, is_stage=is_stage, is_new=False)
    if not is_known:
        marks.keep_state(folder.name, state)
    return load_snapshot(folder.parent, folder.name), Checked() if is_known else now


def _merged(store: ObjectStore, layer: LayerTask) -> StoredObject:
    """The object of a layer. Raises NotFoundError if it is not merged yet."""
    stored = store.lookup(layer.action_key)
    if stored is None:
        raise NotFoundError(
            "A layer of the plan is not merged yet",
            where=layer.name,
            expected=f"an object for layer key {layer.layer_key[:16]}",
            found="none",
            next_step="run `mergepipe merge` on the recipe",
        )
    return stored


def _shards(merged: Sequence[tuple[LayerTask, StoredObject]]) -> tuple[ShardEntry, ...]:
    """The weight files of a snapshot: one per layer, numbered from 1."""
    return tuple(
        ShardEntry(
            file=shard_name(number, len(merged)),
            layer=layer.name,
            layer_key=layer.layer_key,
            sha256=stored.sha256,
            nbytes=stored.nbytes,
            tensors=stored.tensors,
        )
        for number, (layer, stored) in enumerate(merged, 1)
    )


def _refuse_damaged(warehouse: Warehouse, reused: Sequence[tuple[LayerTask, StoredObject]]) -> None:
    """Raise DamagedLayerError if layers' bytes are not those written; all such are set aside."""
    store = warehouse.objects
    with Workers(threads.FILES) as workers:
        intact = list(workers.map(store.is_intact, (stored for _, stored in reused)))
    damaged = [pair for pair, good in zip(reused, intact, strict=True) if not good]
    if damaged:
        aside = warehouse.new_aside()
        for layer, stored in damaged:
            store.set_aside(layer.action_key, stored, aside)
        layer, stored = damaged[0]
        names = listed([layer.name for layer, _ in damaged], _MOST_NAMED, "layers more")
        raise DamagedLayerError(
            "A stored layer's bytes are not the bytes that were written",
            where=f"{store.path_of(stored.sha256)}, layer {names}",
            expected=f"sha256 {stored.sha256[:16]}",
            found=f"other bytes, which lie in {aside}",
            next_step="merge the recipe again: the layer is made anew",
        )


def _lineage(warehouse: Warehouse, plan: MergePlan) -> tuple[LineageEntry, ...]:
    catalog = warehouse.catalog
    return tuple(
        LineageEntry(role, s.name, catalog.content_sha256(s.checkpoint_id))
        for role, s in zip(plan.roles, plan.sources, strict=True)
    )


def _made_files(
    warehouse: Warehouse,
    plan: MergePlan,
    shards: Sequence[ShardEntry],
    inputs: Sequence[LineageEntry],
    operators: Sequence[OperatorCount],
) -> dict[str, bytes]:
    """Make the files that differ from the template's: config, tokenizer, index, card."""
    files = {name: b64decode(text) for name, text in plan.side.files or ()}
    root = plan.sources[plan.side.template].root
    with open_source(root) as source:
        nbytes = side_files(source, root).get(CONFIG)
        if nbytes is not None:
            dtypes = {t.out_dtype for layer in plan.layers for t in layer.tasks if t.experts}
            dtype = "BF16" if plan.is_coded else dtypes.pop() if len(dtypes) == 1 else None
            original = source.read_range(CONFIG, 0, nbytes)
            _refuse_changed(warehouse, plan, SideFile(CONFIG, sha256_hex(original), nbytes), source)
            files[CONFIG] = config_json(original, dtype, plan.side.config)
    total = sum(task.out_nbytes for layer in plan.layers for task in layer.tasks)
    files["model.safetensors.index.json"] = index_json(shards, total)
    files["README.md"] = model_card(plan.method, plan.plan_id, inputs, operators)
    return files


def _copied_files(
    warehouse: Warehouse, plan: MergePlan, staging: Path, made: Collection[str]
) -> list[SideFile]:
    """Copy the template's other side files to `staging`, a piece at a time; what was written."""
    root = plan.sources[plan.side.template].root
    copied = []
    with open_source(root) as source:
        for name, nbytes in side_files(source, root).items():
            is_replaced = plan.side.files is not None and of_tokenizer(name)
            if name not in made and not is_replaced:
                digest = new_hash()
                write_atomic(staging / name, pieces(source, name, nbytes, digest.update))
                copied.append(SideFile(name, digest.hexdigest(), nbytes))
                _refuse_changed(warehouse, plan, copied[-1], source)
    return copied


def _refuse_changed(
    warehouse: Warehouse, plan: MergePlan, side: SideFile, source: CheckpointSource
) -> None:
    template = plan.sources[plan.side.template]
    stamp = SideStamp(side.file, side.nbytes, source.mtime_ns(side.file))
    refuse_changed_file(warehouse, template.checkpoint_id, template.root, stamp, side.sha256)


def _provenance(
    warehouse: Warehouse, plan: MergePlan, realised: Realised | None, times: Times | None
) -> dict[str, Any]:
    """Return what no id covers: who, when, where, how asked for, what it cost.

    `choices`: tensor to [operator, reason], where the method left the operator open.
    """
    chosen = {t.name: [t.operator, t.reason] for lay in plan.layers for t in lay.tasks if t.reason}
    stated = card_facts(warehouse, plan)
    return {
        "recipe_name": plan.recipe_name,
        "recipe": plan.recipe_text,
        "ref": plan.ref,
        "request": asdict(plan.request),
        "estimates": asdict(plan.estimates),
        "warnings": list(plan.warnings),
        **({"choices": chosen} if chosen else {}),
        **({STATED: stated} if stated else {}),
        "realised": realised and asdict(realised),
        "time": times and times.to_json(),
        **({"downloads": downloads} if times and (downloads := times.downloaded()) else {}),
        "sources": [asdict(s) for s in plan.sources],
        **made_here(),
    }
