"""Claim: what a merge of many large experts takes on 1, 8 and 64 workers, and what stops it there.

    python -m tests.lab.bench.scale [--experts 20] [--workers 1 8 64] [--core 1.05] [--cores 2]
        [--link 0.9] [--storage 0] [--step 4] [--plan 30] [--start 2]

Arithmetic, no run: nobody here has 3 TB of experts. Rates are in GB/s and seconds; their defaults
were measured on a machine of 2 cores, as `Rates` says. Layers are those of a Llama of 70B in
bfloat16, and go to shards as `timing.shards` has it: the dearest first, to whoever has least.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf

_GB = 1e9
#: Elements of Llama 3 70B: 80 layers, and beside them an embedding and a head of the same size.
_HIDDEN, _INTER, _KV, _VOCAB, _LAYERS = 8192, 28672, 1024, 128256, 80
_LAYER = 2 * _HIDDEN * (_HIDDEN + _KV) + 3 * _HIDDEN * _INTER + 2 * _HIDDEN
LAYER_ELEMS = (_VOCAB * _HIDDEN, *(_LAYER for _ in range(_LAYERS)), (_VOCAB + 1) * _HIDDEN)
_ITEM_NBYTES = 2
#: How often the output is read after it was merged: for its snapshot, its digests, and its values.
_READS_AFTER = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker and the storage behind it do; seconds, and GB/s of input.

    `core`: ties at K = 20 over 0.6B took 24 s of processor for 25 GB (docs/reliability.md).
    `link`: K = 5 read cold, 7.2 GB in 7.9 s (`bench_shards`). `storage`: all workers together, 0
    for as much as they ask. `step`: one that merges nothing, 3.9 to 4.1 s, and `start`: until
    one begins, 1.2 to 2.6 s while no core is missing (both `bench_shards`). `plan`: 100
    experts of 70B took 24 to 29 s (`bench_planning`).
    """

    core: float = 1.05
    cores: float = 2
    link: float = 0.9
    storage: float = 0.0
    step: float = 4.0
    plan: float = 30.0
    start: float = 2.0

    @property
    def worker_nbytes_s(self) -> float:
        """Input that one worker merges in a second, alone."""
        return _GB * min(self.link, self.core * self.cores)


@dataclass(frozen=True, slots=True)
class Figures:
    """A merge on `workers`: seconds of its parts, and bytes of the worker that has most."""

    workers: int
    merge_s: float
    alone_s: float
    read_nbytes: int
    written_nbytes: int
    bound_by: str

    @property
    def total_s(self) -> float:
        """From the request to the release."""
        return self.merge_s + self.alone_s


def figures(rates: Rates, workers: int, experts: int) -> Figures:
    """What a merge of so many experts and their base takes on so many workers.

    `alone_s` is what one process does while the others wait: plan, snapshot and audit.
    """
    outputs = [n * _ITEM_NBYTES for n in LAYER_ELEMS]
    inputs = [(experts + 1) * nbytes for nbytes in outputs]
    loads = [0] * min(workers, len(inputs))
    for nbytes in sorted(inputs, reverse=True):
        loads[loads.index(min(loads))] += nbytes
    storage = rates.storage * _GB or inf
    alone = max(loads) / rates.worker_nbytes_s
    shared = sum(inputs) / storage
    reads_after = _READS_AFTER * sum(outputs) / min(rates.link * _GB, storage)
    if shared > alone:
        bound_by = "storage"
    elif max(loads) == max(inputs):
        bound_by = "the largest layer"
    else:
        bound_by = "disk or network" if rates.link < rates.core * rates.cores else "cores"
    steps_s = rates.start + rates.step
    if reads_after + rates.plan + steps_s > max(alone, shared):
        bound_by = "plan, snapshot and audit"
    return Figures(
        workers,
        max(alone, shared) + steps_s,
        rates.plan + reads_after + 2 * steps_s,
        max(loads),
        max(loads) // (experts + 1),
        bound_by,
    )


def table(rates: Rates, workers: Sequence[int], experts: int) -> str:
    """The figures as Markdown."""
    rows = [figures(rates, n, experts) for n in workers]
    first = rows[0]
    head = (
        "| workers | merge | plan, snapshot, audit | in all | gain | most that one reads, writes "
        "| bound by |\n|---|---|---|---|---|---|---|"
    )
    lines = [
        f"| {r.workers} | {_time(r.merge_s)} | {_time(r.alone_s)} | {_time(r.total_s)} "
        f"| {first.total_s / r.total_s:.1f} | {_size(r.read_nbytes)}, {_size(r.written_nbytes)} "
        f"| {r.bound_by} |"
        for r in rows
    ]
    return "\n".join([head, *lines])


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e12:.1f} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.0f} GB"


def main(argv: Sequence[str]) -> None:
    """Print the table for the rates that are given."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bench.scale", description=__doc__)
    for field in fields(Rates):
        parser.add_argument(f"--{field.name}", type=float, default=field.default)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    given = vars(parser.parse_args(argv))
    workers, experts = given.pop("workers"), given.pop("experts")
    print(table(Rates(**given), workers, experts))


if __name__ == "__main__":
    main(sys.argv[1:])
