"""Makes a golden warehouse: a small, complete one of one release, which every later release opens.

`python -m tests.golden.make_warehouse NUMBER` writes `warehouse-NUMBER.tar.xz` (inputs and
warehouse) and `warehouse-NUMBER.json` (the ids that it must keep) beside this file. One that is
recorded is never made again: a change of a format adds the next number, see FORMATS.md. To record
an earlier release, run this file from a copy in a checkout of that release.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main as mergepipe
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import Size, tensors_of, write_adapter, write_model

#: Where every golden warehouse was made. The records in it name this place, which is gone.
PLACE = Path("/tmp/mergepipe-golden")
#: The modification time of all inputs, in seconds: a part of their ids, so the archive keeps it.
INPUT_MTIME_S = 1_700_000_000
_SIZES: Size = {"layers": 1, "hidden": 16, "vocab": 64}

TIES = """\
merge_method: ties
base_model: base
models:
- {model: math, parameters: {weight: 1.0, density: 0.4}}
- {model: code, parameters: {weight: 0.5, density: 0.4}}
"""
#: Name to recipe. Inputs are given by registered names, which find them wherever they lie.
RECIPES = {
    "ties": TIES,
    "ties-half": TIES + "budget: 50%\n",
    "stages": "name: skills\n"
    + TIES
    + """\
---
merge_method: task_arithmetic
base_model: base
models:
- {model: skills, parameters: {weight: 0.7}}
- {model: base+lora, parameters: {weight: 0.3}}
""",
    "union": """\
merge_method: linear
models:
- {model: math, parameters: {weight: 0.5}}
- {model: code, parameters: {weight: 0.5}}
tokenizer_source: union
""",
}


def call(home: Path, *args: str | Path) -> Any:
    """What a command shows as JSON. Raises AssertionError with its messages where it fails."""
    done = CliRunner().invoke(mergepipe, ["--home", str(home), *map(str, args), "--json"])
    assert done.exit_code == 0, f"{args}: {done.exit_code}\n{done.output}"
    return json.loads(done.stdout)


def write_inputs(folder: Path) -> None:
    """Base, two experts, of which `code` exists in two versions, and a LoRA adapter."""
    for name, expert in (("base", None), ("math", 0), ("code-1", 1), ("code-2", 2)):
        write_model(folder / name, tensors_of(7, expert, **_SIZES), **_SIZES)
    tokenizer = folder / "math" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w63"', '"sum"'))
    write_adapter(folder / "lora", 3, hidden=_SIZES["hidden"])
    for path in folder.rglob("*"):
        os.utime(path, (INPUT_MTIME_S, INPUT_MTIME_S))


def fill(home: Path, inputs: Path) -> dict[str, Any]:
    """Use every verb that leaves something; the ids that the warehouse must keep."""
    Warehouse.at(home).ensure()
    call(home, "register", inputs / "base")
    for folder, name in (("math", "math"), ("code-1", "code"), ("lora", "lora")):
        call(home, "register", inputs / folder, "--name", name, "--base", "base")
    paths = {name: Path(home) / "recipes" / f"{name}.yml" for name in RECIPES}
    for name, text in RECIPES.items():
        paths[name].write_text(text)
    call(home, "analyze", "math", "code", "--base", "base")
    first = call(home, "merge", paths["ties"], "--publish")["snapshot_id"]
    call(home, "register", inputs / "code-2", "--name", "code")
    merged = {name: call(home, "merge", path) for name, path in paths.items()}
    call(home, "publish", merged["ties"]["snapshot_id"], "--ref", "ties")
    call(home, "rollback", "ties")
    call(home, "publish", merged["stages"]["snapshot_id"], "--ref", "skills")
    _release(Warehouse.at(home), "ties-half")
    ids = ("snapshot_id", "plan_id", "expert_bytes_read")
    listed = call(home, "ls")
    return {
        "first": first,
        "merged": {name: {key: m[key] for key in ids} for name, m in merged.items()},
        "snapshots": sorted(s["snapshot_id"] for s in listed["snapshots"]),
        "refs": {r: call(home, "history", r) for r in ("ties", "skills", "ties-half")},
    }


def _release(home: Warehouse, recipe: str) -> None:
    """Release a standing recipe, as the assets do."""
    recipe_file = next(
        recipe_file for recipe_file in recipe_files(home) if recipe_file.name == recipe
    )
    deploy.plan_recipe(home, recipe_file)
    list(deploy.merge_recipe(home, recipe, recipe_file.layers, EngineOptions()))
    deploy.snapshot_recipe(home, recipe)
    deploy.release_recipe(home, recipe_file)


def pack(folder: Path, target: Path) -> None:
    """The tree as a compressed tar: sorted, nobody's, links and times of files kept."""

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with (
        lzma.open(target, "wb", preset=9 | lzma.PRESET_EXTREME) as out,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=anonymous)


def main() -> None:
    """Make the golden warehouse of the number that the command line gives."""
    out = Path(__file__).parent / f"warehouse-{int(sys.argv[1])}.json"
    platform.node = lambda: "golden"  # goes to provenance
    PLACE.mkdir()
    try:
        write_inputs(PLACE / "inputs")
        recorded = fill(PLACE / "warehouse", PLACE / "inputs")
        out.write_text(json.dumps(recorded, indent=1) + "\n")
        pack(PLACE, out.with_suffix(".tar.xz"))
    finally:
        shutil.rmtree(PLACE)


if __name__ == "__main__":
    main()
