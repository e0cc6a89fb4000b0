"""A tiny family, recipes over it, and what a warehouse holds, so that two can be compared."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.family import Size, tensors_of, write_adapter, write_model

SIZE: Size = {"layers": 1, "hidden": 32, "vocab": 96}
_EXPERTS = 2


def make_world(folder: Path) -> Path:
    """`base`, `expert_00`, `expert_01` (in two shards), `adapter`, and recipes over them."""
    write_model(folder / "base", tensors_of(7, None, **SIZE), **SIZE)
    for e in range(_EXPERTS):
        write_model(
            folder / f"expert_{e:02d}", tensors_of(7, e, **SIZE), shards=1 + (e == 1), **SIZE
        )
    write_adapter(folder / "adapter", 7, SIZE["hidden"])
    for name, text in recipes(folder).items():
        (folder / f"{name}.yml").write_text(text)
    return folder


def recipes(folder: Path) -> dict[str, str]:
    """Name to text: full, other (another result), budget, staged, adapted."""

    def text(method: str, parameters: str, models: Sequence[str], extra: str = "") -> str:
        lines = [f"merge_method: {method}", f"base_model: {folder / 'base'}", "models:"]
        for number, model in enumerate(models):
            lines += [f"  - model: {model}", f"    parameters: {{weight: {1 - number / 4}}}"]
        return "\n".join([*lines, f"parameters: {parameters}", "dtype: bfloat16", extra, ""])

    experts = [str(folder / f"expert_{e:02d}") for e in range(_EXPERTS)]
    last = text("task_arithmetic", "{lambda: 0.9}", ["first", experts[1]])
    return {
        "full": text("ties", "{density: 0.3}", experts),
        "other": text("dare_ties", "{density: 0.5}", experts[:2]),
        "budget": text("ties", "{density: 0.3}", experts, "budget: 40%"),
        "staged": f"{text('linear', '{}', experts[:2])}name: first\n---\n{last}",
        "adapted": text(
            "task_arithmetic", "{}", [experts[0], f"{folder / 'base'}+adapter"]
        ).replace("+adapter", f"+{folder / 'adapter'}"),
    }


def new_version(folder: Path, expert: int, version: int) -> None:
    """Replace an expert's files, as another training run would."""
    tensors = tensors_of(7 + version, expert, **SIZE)
    tensors |= {n: t for n, t in tensors_of(7, expert, **SIZE).items() if "mlp" in n}
    target = folder / f"expert_{expert:02d}"
    shutil.rmtree(target)
    write_model(target, tensors, shards=1 + (expert == 1), **SIZE)


@dataclass
class State:
    """What a warehouse and an exported folder hold; `damage`: what is wrong with it.

    Ids and digests only: times, hosts and places are left out. `derived` is what may be missing.
    """

    snapshots: dict[str, str] = field(default_factory=dict)
    refs: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)
    derived: dict[str, str] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)

    @property
    def results(self) -> dict[str, object]:
        """All that must never be lost or wrong."""
        return {"snapshots": self.snapshots, "refs": self.refs, "names": self.names}


def state_of(place: Path, *, strict: bool = True) -> State:
    """Read the warehouse `place/w` and the folder `place/out`, every byte.

    With `strict`, damage of what can be made again (objects, actions, plans) is damage too.
    """
    from mergepipe_pipeline.errors import MergePipeError
    from mergepipe_pipeline.execution.lookup import load_plan
    from mergepipe_pipeline.snapshots.commit import verify_snapshot
    from mergepipe_pipeline.warehouse import Warehouse

    home, state = Warehouse(place / "w"), State()
    if not home.root.exists():
        return state
    for folder in _visible(home.snapshots):
        try:
            verify_snapshot(folder)
        except MergePipeError as error:
            state.damage.append(f"snapshot {folder.name}: {error}")
        state.snapshots[folder.name] = _tree_digest(folder)
    refs, catalog = home.refs, home.catalog
    try:
        state.refs = {n: [r.snapshot_id for r in refs.history(n)] for n in refs.names()}
        for name, _, checkpoint_id, _, _ in catalog.registrations():
            state.names.setdefault(name, []).append(checkpoint_id)
    except MergePipeError as error:
        state.damage.append(f"refs or names: {error}")
    for name, versions in state.refs.items():
        state.damage += [f"ref {name} names {v}" for v in versions if v not in state.snapshots]
    for path in _visible(home.objects_dir, 2):
        state.derived[f"object {path.name}"] = "" if path.name == _sha256(path) else "damaged"
    for path in _visible(home.actions_dir, 2):
        try:
            state.derived[f"action {path.stem}"] = json.loads(path.read_bytes())["object"]
        except (ValueError, KeyError) as error:
            state.derived[f"action {path.stem}"] = f"damaged: {error}"
    for path in _visible(home.plans):
        try:
            load_plan(home, path.stem)
            state.derived[f"plan {path.stem}"] = ""
        except MergePipeError as error:
            state.derived[f"plan {path.stem}"] = f"damaged: {error}"
    for pack_id in home.packs.ids():
        state.derived[f"pack {pack_id}"] = "" if home.packs.find(pack_id) else "damaged"
    if strict:
        state.damage += [f"{k} {v}" for k, v in state.derived.items() if v.startswith("damaged")]
    if (place / "out").is_dir():
        state.out = {p.name: _sha256(p) for p in _visible(place / "out") if p.is_file()}
        state.out.pop("provenance.json", None)
    return state


def leftovers(place: Path) -> list[str]:
    """What a collection should have removed: staging, and files without their final name."""
    found = [*(place / "w" / "staging").glob("*"), *(place / "w").rglob(".*.tmp")]
    return [str(p.relative_to(place)) for p in [*found, *place.glob(".out.*")]]


def copy_place(source: Path, target: Path) -> None:
    """A copy of a warehouse and what is beside it; files that are one stay one; times stay."""
    first: dict[int, Path] = {}
    for folder, _, files in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True)
        for name in files:
            old, new = Path(folder) / name, here / name
            number = old.stat().st_ino
            if number in first:
                os.link(first[number], new)
            else:
                shutil.copy2(old, new)
                first[number] = new


def _visible(folder: Path, depth: int = 1) -> list[Path]:
    if not folder.is_dir():
        return []
    found = folder.glob("/".join("*" * depth))
    return sorted(p for p in found if not p.name.startswith("."))


def _tree_digest(folder: Path) -> str:
    files = [p for p in _visible(folder) if p.name != "provenance.json"]
    return hashlib.sha256(str([(p.name, _sha256(p)) for p in files]).encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
