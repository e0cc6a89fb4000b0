"""What the soak measured: the table of events, ticks, latencies, memory and storage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from mergepipe_pipeline.sensors.housekeeping import IDLE_TICKS_S
from tests.lab.soak.deployment import Deployment
from tests.lab.soak.judge import Latency, Row
from tests.lab.soak.watch import Watch

_MIB = 1 << 20
#: Seconds that a start may take until sensors tick.
_START_S = 150.0


class Figures:
    """Samples of a deployment over time."""

    def __init__(self, deployment: Deployment, watch: Watch) -> None:
        self._deployment, self._watch = deployment, watch
        self._samples = list[tuple[float, dict[str, float], dict[str, int], int]]()
        self._idle = ""

    def sample(self) -> None:
        """Note memory, storage and how many runs there were."""
        self._samples.append(
            (
                time.time(),
                self._deployment.memory_mib(),
                self._deployment.storage_nbytes(),
                len(self._watch.runs()),
            )
        )

    def idle(self, seconds: float) -> None:
        """Start anew with default settings, and note what a time without events adds."""
        self._deployment.stop()
        self._deployment.leave_settings()
        began = time.time()
        self._deployment.start()
        while not self._ticked("retention_sensor", began) and time.time() < began + _START_S:
            time.sleep(1)
        before, since = self._deployment.database_nbytes(), time.time()
        time.sleep(seconds)
        grown, took_s = self._deployment.database_nbytes() - before, time.time() - since
        ticks = sum(began >= since for _, began, _ in self._watch.ticks(since))
        hour, daemon = grown / took_s * 3600 / _MIB, self._deployment.memory_mib()["daemon"]
        self._idle = (
            f"{took_s:.0f} s without events, default settings: {ticks} ticks, "
            f"{grown / 1024:.0f} KiB of databases more, {hour:.2f} MiB an hour; ticks are kept for "
            f"{IDLE_TICKS_S / 3600:.0f} hours: at most {hour * IDLE_TICKS_S / 3600:.1f} MiB, "
            f"however many days; memory of the daemon: {daemon:.0f} MiB"
        )

    def _ticked(self, sensor: str, since: float) -> bool:
        return any(name.endswith(sensor) for name, _, _ in self._watch.ticks(since))

    def show(self, rows: Sequence[Row], latencies: Sequence[Latency]) -> None:
        """Print everything."""
        _table(rows)
        for row in rows:
            for what in (*row.missed, *row.superfluous, *row.wrong):
                print(f"  {row.event}: {what}")
        self._ticks()
        if latencies:
            index, ref = (
                median(getattr(t, x) for t in latencies) for x in ("to_index_s", "to_ref_s")
            )
            print(
                f"last byte to index started {index:.1f} s, to ref moved {ref:.1f} s "
                f"(median of {len(latencies)})"
            )
        self._growth()
        if self._idle:
            print(self._idle)

    def _ticks(self) -> None:
        took: dict[str, list[float]] = {}
        for name, began, ended in self._watch.ticks():
            took.setdefault(name, []).append(ended - began)
        for name, seconds in sorted(took.items()):
            print(
                f"{name}: {len(seconds)} ticks, median {median(seconds):.2f} s, "
                f"longest {max(seconds):.2f} s"
            )

    def _growth(self) -> None:
        if len(self._samples) < 2:
            return
        (began, _, first, runs), (ended, _, last, all_runs) = self._samples[0], self._samples[-1]
        for role in ("daemon", "code server", "webserver"):
            seen = [memory[role] for _, memory, _, _ in self._samples if role in memory]
            if seen:
                print(f"memory of the {role}: {seen[0]:.0f} MiB at first, {seen[-1]:.0f} at last")
        grown = sum(last.values()) - sum(first.values())
        print(
            f"DAGSTER_HOME: {sum(last.values()) / _MIB:.1f} MiB; in {(ended - began) / 60:.1f} "
            f"minutes {all_runs - runs} runs and {grown / _MIB:.1f} MiB more, "
            f"{grown / _MIB / max(all_runs - runs, 1):.2f} MiB a run"
        )
        for part in sorted(last, key=lambda p: first.get(p, 0) - last[p])[:4]:
            print(f"  {part}: {first.get(part, 0) / _MIB:.1f} to {last[part] / _MIB:.1f} MiB")


def _table(rows: Sequence[Row]) -> None:
    head = ("event", "launched", "needed", "missed", "superfluous", "wrong", "seconds")
    cells = [
        (
            r.event,
            str(r.launched),
            str(r.needed),
            *(str(len(x)) for x in (r.missed, r.superfluous, r.wrong)),
            f"{r.seconds:.0f}",
        )
        for r in rows
    ]
    rule = ("---", *("--:" for _ in head[1:]))
    for line in (head, rule, *cells):
        print(f"| {' | '.join(line)} |")
    print()
