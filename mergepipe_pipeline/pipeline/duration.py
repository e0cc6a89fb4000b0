"""How long a merge will take, from what it does and how fast this machine does it. Pure.

Workers read and compute in turn, so disk and cores are a closed queueing network, whose pace is
known exactly (`overlapped_s`); writing, and the one thread that hashes, may be slower still. What
does not overlap is added. No page cache and no catalog here: `forecast` asks them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from mergepipe_pipeline.spec.engine_pace import EnginePace, Flow
from mergepipe_pipeline.spec.storage_profile import StorageProfile


@dataclass(frozen=True, slots=True)
class Work:
    """What a merge does, as far as it takes time; bytes, elements and counts.

    `cold_bytes` of what the merge reads are not in the page cache, of which `early_bytes` are read
    while it is planned; and `analysis_cold_bytes` of
    the `analysis_bytes` that are read before; `passes_cache`: the merge reads past it. `elems` are
    of the output, `expert_elems` of experts that are merged, `analysis_elems` of experts to take
    statistics of (0: only digests). `has_first_pass`: the merge looks at each tensor before it
    merges it, as a random drop does that keeps norms. `inputs` are (tensor, expert) pairs.
    """

    method: str
    cold_bytes: int
    early_bytes: int
    passes_cache: bool
    elems: int
    expert_elems: int
    inputs: int
    has_budget: bool
    has_first_pass: bool
    analysis_elems: int
    analysis_bytes: int
    analysis_cold_bytes: int
    output_bytes: int
    layers: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """Predicted seconds. The merge takes no less than the slowest of the four behind it.

    Each of these is what it would take if the others cost nothing: `reading_s` from storage,
    `arithmetic_s` on all cores, `hashing_s` by one thread, `writing_s` until all is durable. What
    is read early counts in `reading_s`, but the merge does not wait for it.
    """

    start_s: float
    analysis_s: float
    planning_s: float
    merging_s: float
    commit_s: float
    reading_s: float
    arithmetic_s: float
    hashing_s: float
    writing_s: float

    @property
    def total_s(self) -> float:
        """Wall seconds of the verb `merge`."""
        return self.start_s + self.analysis_s + self.planning_s + self.merging_s + self.commit_s

    def to_json(self) -> dict[str, float]:
        """All figures, to the millisecond."""
        return {"total_s": round(self.total_s, 3)} | {
            name: round(s, 3) for name, s in asdict(self).items()
        }


def seconds(work: Work, profile: StorageProfile) -> Seconds:
    """What `work` will take. Raises KeyError for a method that the engine's pace lacks."""
    engine = profile.engine
    assert engine is not None
    pace = engine.methods[work.method]
    flow = engine.past_cache if work.passes_cache else engine.cold
    input_s = pace.plan_input_s + (pace.budget_input_s if work.has_budget else 0)
    planning_s = pace.plan_s + work.inputs * input_s
    early_s = min(work.early_bytes / flow.bytes_per_s, planning_s)
    reading_s = work.cold_bytes / flow.bytes_per_s
    writing_s = work.output_bytes / profile.write_bytes_per_s
    merge_cpu_s = work.elems * pace.elem_s + work.expert_elems * pace.expert_elem_s
    arithmetic_s = (merge_cpu_s + work.cold_bytes * _more_cpu(flow, engine)) / engine.cores
    disk_s = max(reading_s - early_s, writing_s)
    if work.has_first_pass:  # the first waits for the disk, the second finds all in memory
        working_s = disk_s + arithmetic_s
    else:
        cpu_s = arithmetic_s * engine.cores
        working_s = overlapped_s(disk_s, cpu_s, engine.cores, engine.threads)
    hashing_s = work.output_bytes / engine.hash_bytes_per_s
    last_layer_s = writing_s / max(1, work.layers)
    return Seconds(
        start_s=engine.start_s,
        analysis_s=_analysis_s(work, engine),
        planning_s=planning_s,
        merging_s=max(working_s, hashing_s),
        commit_s=engine.commit_s + last_layer_s,
        reading_s=reading_s,
        arithmetic_s=arithmetic_s,
        hashing_s=hashing_s,
        writing_s=writing_s,
    )


def overlapped_s(disk_s: float, cpu_s: float, cores: int, threads: int) -> float:
    """Seconds until `threads` that read and compute in turn have done both.

    Mean value analysis of a closed network of one disk and `cores` servers: the exact pace for
    random lengths of reads and windows. Source: https://doi.org/10.1145/322186.322195.
    """
    if not disk_s + cpu_s:
        return 0.0
    rate, waiting = 0.0, 0.0  # of passes per second; workers at the disk
    computing = [1.0]  # chance of so many workers at the cores
    for n in range(1, threads + 1):
        at_disk_s = disk_s * (1 + waiting)
        at_cores_s = cpu_s * sum(j / min(j, cores) * p for j, p in enumerate(computing, 1))
        rate = n / (at_disk_s + at_cores_s)
        waiting = rate * at_disk_s
        busy = [rate * cpu_s / min(j, cores) * p for j, p in enumerate(computing, 1)]
        computing = [max(0.0, 1 - sum(busy)), *busy]
    return 1 / rate


def total(parts: list[Seconds]) -> Seconds:
    """The stages of a recipe one after the other, in one process."""
    sums = {f.name: sum(getattr(p, f.name) for p in parts) for f in fields(Seconds)}
    return Seconds(**{**sums, "start_s": max(p.start_s for p in parts)})


def _analysis_s(work: Work, engine: EnginePace) -> float:
    facts_elem_s = engine.methods[work.method].facts_elem_s
    more_s = work.analysis_cold_bytes * _more_cpu(engine.cold, engine)
    reading_s = work.analysis_cold_bytes / engine.cold.bytes_per_s
    looking_s = work.analysis_elems * engine.analysis_elem_s
    # Statistics come with digests; where there are none, that is all there is to do.
    cpu_s = more_s + (looking_s or work.analysis_bytes / engine.hash_bytes_per_s)
    facts_s = work.analysis_elems * facts_elem_s / engine.cores
    return max(reading_s, cpu_s / engine.cores) + facts_s


def _more_cpu(flow: Flow, engine: EnginePace) -> float:
    """CPU seconds per byte beyond those of a cached read, which are part of all other figures."""
    return max(0.0, flow.cpu_s_per_byte - engine.cached.cpu_s_per_byte)
