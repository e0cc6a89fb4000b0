"""Conflict reports: exact where they claim to be, and as uncertain as they say elsewhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mergepipe_pipeline.analysis.conflicts import ConflictReport, conflicts
from mergepipe_pipeline.analysis.statistics import analyze_expert
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.stats import ExpertStats
from tests.analysis.pairs import on_disk, pairs_of
from tests.stored import encode

Deltas = dict[str, npt.NDArray[np.float64]]


def stats_of(deltas: Deltas) -> ExpertStats:
    zero = {name: encode(np.zeros(len(d)), "F32") for name, d in deltas.items()}
    with on_disk({n: encode(d, "F32") for n, d in deltas.items()}, zero) as (e, b):
        return analyze_expert(e, b, pairs_of(e, b), BlockGrid(4096))


def report(*experts: Deltas) -> ConflictReport:
    """Of experts a, b, c, …; their files are gone by now, so nothing can be read."""
    return conflicts("abcdefgh"[: len(experts)], [stats_of(e) for e in experts])


def noise(seed: int, n: int = 3000) -> npt.NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(n)


def test_equal_deltas_have_cosine_one_and_opposite_ones_minus_one() -> None:
    found = report({"w": noise(0)}, {"w": noise(0)}, {"w": -noise(0)})
    np.testing.assert_allclose(found.cosine, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]], rtol=1e-12)


@pytest.mark.parametrize("cosine", [0.0, 0.5, -0.8, 0.99])
def test_cosines_err_no_more_than_the_stated_standard_error(cosine: float) -> None:
    layers = 200
    first: Deltas = {f"layers.{i}.w": noise(i, 700) for i in range(layers)}
    second: Deltas = {
        name: cosine * d + np.sqrt(1 - cosine**2) * noise(1000 + i, 700)
        for i, (name, d) in enumerate(first.items())
    }
    found = report(first, second)
    errors = []
    for i, (name, d) in enumerate(first.items()):
        other = second[name]
        true = d @ other / np.sqrt((d @ d) * (other @ other))
        errors.append(found.layer_cosine[f"layer.{i:03d}"][0, 1] - true)
    spread = float(np.std(errors))
    # The estimator's own error falls as (1 − cos²)/sqrt(width); 200 draws know it to about 5 %.
    assert spread == pytest.approx((1 - cosine**2) * found.standard_error, rel=0.25)
    assert abs(np.mean(errors)) < 4 * found.standard_error / np.sqrt(layers)
    assert found.standard_error == 1 / 16


def test_norms_are_exact_and_layers_are_in_order() -> None:
    deltas: Deltas = {
        "lm_head.weight": noise(1),
        "model.layers.10.a": noise(2),
        "model.layers.2.a": noise(3),
        "model.layers.2.b": noise(4),
        "model.embed_tokens.weight": noise(5),
    }
    found = report(deltas, {name: 3 * d for name, d in deltas.items()})
    assert list(found.layer_norms) == ["embed", "layer.02", "layer.10", "head"]
    assert list(found.layer_cosine) == list(found.layer_norms)
    both = np.concatenate([noise(3), noise(4)]).astype(np.float32).astype(np.float64)
    assert found.layer_norms["layer.02"][0] == pytest.approx(np.linalg.norm(both), rel=1e-12)
    assert found.layer_norms["head"][1] == pytest.approx(3 * found.layer_norms["head"][0], rel=1e-6)


def test_the_tensors_of_a_layer_count_by_their_norms() -> None:
    agreed, opposed = noise(2), 0.5 * noise(3)
    found = report(
        {"layers.0.a": agreed, "layers.0.b": opposed},
        {"layers.0.a": agreed, "layers.0.b": -opposed},
    )
    assert found.layer_cosine["layer.00"][0, 1] == pytest.approx(0.6, abs=0.1)
    assert found.cosine[0, 1] == found.layer_cosine["layer.00"][0, 1]


def test_redundant_pairs_are_named_most_alike_first() -> None:
    near = noise(0) + 0.1 * noise(1)
    found = report({"w": noise(0)}, {"w": noise(9)}, {"w": near}, {"w": noise(0)})
    assert found.redundant_pairs[0][:2] == ("a", "d")
    assert {pair[:2] for pair in found.redundant_pairs} == {("a", "c"), ("a", "d"), ("c", "d")}
    assert found.redundant_pairs[0][2] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("signs", "expected"), [([1, 1], -1.0), ([1, -1], 1.0), ([1, 1, 1], -2.0), ([1], 0.0)]
)
def test_interference_is_above_zero_where_deltas_cancel_and_below_where_they_agree(
    signs: list[int], expected: float
) -> None:
    found = report(*({"w": sign * noise(0)} for sign in signs))
    assert found.interference == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_orthogonal_deltas_interfere_within_the_standard_error() -> None:
    found = report({"w": noise(0, 20000)}, {"w": noise(1, 20000)})
    assert abs(found.interference) < 5 * found.standard_error


def test_a_zero_delta_has_cosine_zero_and_no_warning() -> None:
    found = report({"w": noise(0)}, {"w": np.zeros(3000)})
    np.testing.assert_array_equal(np.round(found.cosine, 12), [[1, 0], [0, 0]])
    assert report({"w": np.zeros(10)}, {"w": np.zeros(10)}).interference == 0.0


def test_a_tensor_one_expert_lacks_counts_as_unchanged_there() -> None:
    found = report({"layers.0.w": noise(0), "layers.1.w": noise(1)}, {"layers.0.w": noise(0)})
    assert found.layer_norms["layer.01"][1] == 0.0
    assert found.layer_cosine["layer.00"][0, 1] == pytest.approx(1.0)
    assert found.layer_cosine["layer.01"][0, 1] == 0.0
    assert 0.5 < found.cosine[0, 1] < 0.9


def test_rows_are_ready_for_a_table() -> None:
    found = report({"w": noise(0)}, {"w": -noise(0)})
    assert found.cosine_rows() == [("a", "+1.000", "-1.000"), ("b", "-1.000", "+1.000")]
    assert [row[0] for row in found.norm_rows()] == ["embed"]


def test_the_digest_follows_the_contents_compared() -> None:
    one, same, other = ({"w": noise(s)} for s in (0, 0, 1))
    assert report(one, other).digest == report(same, other).digest
    assert report(one, other).digest != report(other, one).digest
