"""The engine's benchmark: a real one is run, and is repeatable where it is no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.timing import engine_benchmark
from mergepipe_pipeline.timing.engine_benchmark import METHODS, measure_engine
from mergepipe_pipeline.timing.time_model import SAME_KERNELS


def test_a_real_benchmark_measures_every_method_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TENSORS": 4, "_ROWS": 8, "_COLUMNS": 512}.items():
        monkeypatch.setattr(engine_benchmark, name, value)
    found = measure_engine(tmp_path, ("linear", "slerp"))
    assert set(found.methods) == {"linear", "slerp"}
    assert all(0 < pace.merge_elem_s < 1 for pace in found.methods.values())
    assert all(0 <= pace.learn_byte_s < 1 for pace in found.methods.values())
    assert 0 < found.start_s < 100
    assert 0 <= found.plan_input_s < 1


def test_methods_that_stand_for_others_are_measured_and_all_are_methods() -> None:
    assert set(SAME_KERNELS.values()) <= set(METHODS)
    assert not set(SAME_KERNELS) & set(METHODS)
    assert set(SAME_KERNELS) | set(METHODS) <= set(OPERATORS)
