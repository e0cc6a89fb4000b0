"""`python -m tests.lab.bench.bench_windows -k 20`: windows of a run against reading and writing.

A family's experts stand for the steps of a run, as `run.step-1` and so on; what indexing knows of
them is known before. Each merge reads cold inputs: the window by `minus_sqrt` and by `mean`, then
the `mean` slid by one. Beside each stands the limit, which reads and writes as many bytes in the
same minute and looks at none, and what of the time is the ratio of both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER, limit
from tests.lab.bench.family import cached_family, expert_name
from tests.lab.bench.layouts import PRESETS
from tests.lab.bench.measure import make_cold, run, weight_files

_MODELS = "models: [{{run: run, last: {k}{weights}}}]\ndtype: bfloat16\n"


def main() -> None:
    """Measure, and print a line for each merge."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bench.bench_windows")
    parser.add_argument("-k", type=int, default=20, help="steps of a window")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--families", type=Path, default=FOLDER, help="beside them it writes")
    chosen = parser.parse_args()
    family = cached_family(chosen.families, chosen.preset, chosen.k + 1)
    for number in range(chosen.rounds):
        home = chosen.families / "windows"
        shutil.rmtree(home, ignore_errors=True)
        warehouse = Warehouse.at(home).ensure()
        for step in range(1, chosen.k + 1):
            _save(warehouse, family, step)
        _merge(warehouse, family, chosen.k, "linear", ", weights: {schedule: minus_sqrt}", number)
        _merge(warehouse, family, chosen.k, "mean", "", number)
        _save(warehouse, family, chosen.k + 1)
        _merge(warehouse, family, chosen.k, "mean", "", number)


def _save(warehouse: Warehouse, family: Path, step: int) -> None:
    made = register(warehouse, family / expert_name(step - 1), f"run.step-{step}")
    Contents(warehouse, made.checkpoint).learn()


def _merge(
    warehouse: Warehouse, family: Path, k: int, method: str, weights: str, number: int
) -> None:
    recipe, log = warehouse.root / f"{method}.yml", warehouse.root / "log.json"
    text = _MODELS.format(k=k, weights=weights)
    recipe.write_text(f"merge_method: {method}\n{text}")
    files = [*weight_files(sorted(family.glob("expert_*"))), *warehouse.sums_dir.glob("*/*")]
    command = [sys.executable, "-m", "mergepipe_pipeline.cli.main", "--home", str(warehouse.root)]
    took = run([*command, "--json", "merge", str(recipe)], cold=files, log=log)
    said = json.loads(log.read_text())
    read, written = said["expert_bytes_read"] + said["sum_bytes_read"], said["bytes_written"]
    parts, left = [], read
    for file in files:
        parts.append(f"{file}:{min(left, file.stat().st_size)}")
        left -= min(left, file.stat().st_size)
    make_cold(files)
    out = f"{warehouse.root / 'limit.bin'}:{written}"
    least = run([sys.executable, limit.__file__, "--read", *parts, "--write", out], cold=files)
    print(
        f"{number} {method}{weights or ''}: experts {said['expert_bytes_read'] / 1e9:.2f} GB, sums "
        f"{said['sum_bytes_read'] / 1e9:.2f} GB read, {written / 1e9:.2f} GB written in "
        f"{took.wall_s:.1f} s; the limit {least.wall_s:.1f} s; ratio "
        f"{took.wall_s / least.wall_s:.2f}; CPU {took.cpu_s:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
