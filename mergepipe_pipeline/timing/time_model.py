"""How long a merge takes: the longest of reading, computing and writing, which go on side by side.

Before it come the start of the program, learning what is not known of the experts, and planning.
Pure: no page cache and no catalog here, `forecast` asks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from mergepipe_pipeline.domain.machine_profile import EnginePace, MachineProfile
from mergepipe_pipeline.packs.pace import DECODE_EXACT_ELEM_S, DECODE_NEAR_ELEM_S

#: An element of the output takes about as long as two of experts: it is also rounded, looked at for
#: NaN, hashed and written. Measured, in elements of an expert: linear 2.6, task_arithmetic 3.6,
#: ties 2.6, dare_ties 3.1, breadcrumbs 2.1, sce 1.2.
OUTPUT_WEIGHT = 2
#: Methods whose kernels are those of another one, which is measured for both.
SAME_KERNELS = {
    "breadcrumbs_ties": "breadcrumbs",
    "dare_linear": "dare_ties",
    "della_linear": "della",
    "passthrough": "linear",
}


@dataclass(frozen=True, slots=True)
class Work:
    """What one stage of a recipe does, as far as it takes time.

    `cold_nbytes` of what the merge reads are not in the page cache. `learn_nbytes` are read before,
    `learn_cold_nbytes` of them cold. `plan_inputs` are (tensor, expert) pairs that a budget has to
    choose blocks of, 0 without a budget. `has_first_pass`: the experts are read once before they
    are merged, as a random drop does that keeps norms. Of the experts' elements, `exact_elems` and
    `near_elems` are decoded from packs.
    """

    method: str
    cold_nbytes: int
    out_elems: int
    expert_elems: int
    plan_inputs: int
    learn_nbytes: int
    learn_cold_nbytes: int
    output_nbytes: int
    has_first_pass: bool
    exact_elems: int = 0
    near_elems: int = 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Predicted wall seconds of `merge`, by what they are spent on."""

    start_s: float
    analysis_s: float
    planning_s: float
    reading_s: float
    computing_s: float
    writing_s: float
    merging_s: float

    @property
    def total_s(self) -> float:
        """All of it; `merging_s` stands for reading, computing and writing."""
        return self.start_s + self.analysis_s + self.planning_s + self.merging_s

    def to_json(self) -> dict[str, float]:
        """All figures, to the millisecond."""
        return {"total_s": round(self.total_s, 3)} | {
            name: round(s, 3) for name, s in asdict(self).items()
        }


def seconds(work: Work, profile: MachineProfile) -> Seconds:
    """What `work` takes, on a machine whose engine was measured.

    Raises KeyError for a method that was not.
    """
    engine = profile.engine
    assert engine is not None
    pace = engine.methods[measured_as(work.method)]
    elems = OUTPUT_WEIGHT * work.out_elems + work.expert_elems
    reading_s = work.cold_nbytes / engine.read_bytes_per_s
    decoding_s = work.exact_elems * DECODE_EXACT_ELEM_S + work.near_elems * DECODE_NEAR_ELEM_S
    computing_s = (elems * pace.merge_elem_s + decoding_s) / engine.cores
    writing_s = work.output_nbytes / profile.write_bytes_per_s
    first_pass_s = reading_s if work.has_first_pass else 0.0  # what follows reads from memory
    return Seconds(
        start_s=engine.start_s,
        analysis_s=_analysis_s(work, engine),
        planning_s=work.plan_inputs * engine.plan_input_s,
        reading_s=reading_s,
        computing_s=computing_s,
        writing_s=writing_s,
        merging_s=max(reading_s, first_pass_s + computing_s, writing_s),
    )


def measured_as(method: str) -> str:
    """The method whose figures are this one's, too."""
    return SAME_KERNELS.get(method, method)


def total(stages: Sequence[Seconds]) -> Seconds:
    """The stages of a recipe one after the other, in one process."""
    sums = {f.name: sum(getattr(s, f.name) for s in stages) for f in fields(Seconds)}
    return Seconds(**{**sums, "start_s": max(s.start_s for s in stages)})


def _analysis_s(work: Work, engine: EnginePace) -> float:
    learn_byte_s = engine.methods[measured_as(work.method)].learn_byte_s
    reading_s = work.learn_cold_nbytes / engine.read_bytes_per_s
    return max(reading_s, work.learn_nbytes * learn_byte_s / engine.cores)
