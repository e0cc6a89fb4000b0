"""Metrics are read from the last line of an output, and nothing else passes for them."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.quality.measure import NoMetricsError, metrics_of

METRICS = st.dictionaries(
    st.sampled_from(["accuracy", "acc,none", "mmlu/5-shot", "perplexity"]),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9),
    min_size=1,
)


@given(METRICS, st.binary())
def test_the_last_line_counts_whatever_is_before_it(
    metrics: dict[str, float], before: bytes
) -> None:
    assert metrics_of(before + b"\n" + json.dumps(metrics).encode() + b"\n \n") == metrics


@given(st.binary())
def test_any_other_output_is_refused_and_raises_nothing_else(output: bytes) -> None:
    with suppress(NoMetricsError):
        metrics_of(output)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "it prints nothing"),
        ("accuracy: 0.5", "no JSON: accuracy: 0.5"),
        ("[0.5]", "no JSON object"),
        ("{}", "no JSON object"),
        ('{"a": NaN}', "'a' is no finite number: nan"),
        ('{"a": 1e999}', "no finite number"),
        ('{"a": true}', "no finite number: True"),
        ('{"a": "0.5"}', "no finite number"),
        ('{"a": {"b": 1}}', "no finite number"),
        ('{"a": 1' + 400 * "0" + "}", "no finite number"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"\\u202e": 1}', "the name of a metric"),
        (json.dumps({str(i): i for i in range(257)}), "257 metrics"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_wrong_is_said(line: str, why: str) -> None:
    with pytest.raises(NoMetricsError) as caught:
        metrics_of(line.encode())
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300
