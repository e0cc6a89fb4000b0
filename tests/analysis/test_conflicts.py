"""Conflict reports: exact where they claim to be, and as uncertain as they say elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from mergepipe_pipeline.analysis.agreement import Agreement
from mergepipe_pipeline.analysis.conflict_report import ConflictReport, conflicts
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import ExpertStats
from tests.analysis.pairs import analyze_one, on_disk, pairs_of
from tests.support.stored import encode

Floats = npt.NDArray[np.float64]
Deltas = dict[str, Floats]


def stats_of(deltas: Deltas) -> ExpertStats:
    zero = {name: encode(np.zeros(len(d)), "F32") for name, d in deltas.items()}
    with on_disk({n: encode(d, "F32") for n, d in deltas.items()}, zero) as (e, b):
        return analyze_one(e, b, pairs_of(e, b), BlockGrid(4096))


def report(*experts: Deltas) -> ConflictReport:
    """Of experts a, b, c, …; their files are gone by now, so nothing can be read."""
    return conflicts("abcdefgh"[: len(experts)], [stats_of(e) for e in experts])


def noise(seed: int, n: int = 3000) -> Floats:
    return np.random.default_rng(seed).standard_normal(n)


def test_equal_deltas_have_cosine_one_and_opposite_ones_minus_one() -> None:
    found = report({"w": noise(0)}, {"w": noise(0)}, {"w": -noise(0)}).whole
    np.testing.assert_allclose(found.cosine, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]], rtol=1e-12)
    np.testing.assert_array_equal(
        found.sign_agreement[~np.isnan(found.sign_agreement)].reshape(3, 3),
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]],
    )
    assert found.cosine_error.max() < 0.05  # of 64 samples


# Families of three deltas of one tensor, from what two generators draw: `z` for each, `c` shared.
FAMILIES: dict[str, Callable[[int, Floats, Floats], Floats]] = {
    "independent": lambda k, c, z: z,
    "half shared": lambda k, c, z: c + z,
    "nearly equal": lambda k, c, z: c + 0.1 * z,
    "opposed": lambda k, c, z: (-1) ** k * c + z,
    "of heavy tails": lambda k, c, z: np.exp(1.5 * np.abs(z)) * z + np.exp(1.5 * c) * np.sign(c),
    "a tenth changed": lambda k, c, z: (c + z) * (np.abs(z) > 1.645),
    "large columns": lambda k, c, z: (c + z) * np.where(np.arange(len(c)) % 64 < 2, 20, 1),
    "blocks that differ": lambda k, c, z: np.where(np.arange(len(c)) // 4096 % 2, (k + 1) * z, c),
    "low rank": lambda k, c, z: np.outer((c + z)[: len(c) // 60], (c - z)[:60]).ravel(),
}
LAYERS, PER_LAYER = 10, 4


def family(make: Callable[[int, Floats, Floats], Floats]) -> list[Deltas]:
    """Three experts; a layer's tensors have 1 to 4 blocks."""
    rng = np.random.default_rng(7)
    experts: list[Deltas] = [{}, {}, {}]
    for tensor in range(LAYERS * PER_LAYER):
        n = 3000 * (1 + tensor % PER_LAYER)
        shared = rng.standard_normal(n)
        for k, expert in enumerate(experts):
            name = f"layers.{tensor // PER_LAYER}.w{tensor % PER_LAYER}"
            delta = make(k, shared, rng.standard_normal(n))
            expert[name] = delta.astype(np.float32).astype(np.float64)
    return experts


def exact(deltas: Sequence[Floats]) -> tuple[Floats, Floats, Floats, float]:
    """Cosines, overlap, sign agreement and interference, by their definitions."""
    table = np.stack(deltas)
    gram = table @ table.T
    sizes = np.sqrt(np.diagonal(gram))
    both = np.array([[np.mean((a != 0) & (b != 0)) for b in table] for a in table])
    same = np.array([[np.mean(a * b > 0) for b in table] for a in table])
    lost = 1 - np.square(table.sum(axis=0)).sum() / np.square(table).sum()
    return gram / np.outer(sizes, sizes), both, same / both, float(lost)


def deviations(found: Agreement, deltas: Sequence[Floats]) -> Iterator[tuple[str, Floats]]:
    """How many of its standard errors each figure is off, pair by pair; without what is unknown."""
    cosine, overlap, sign, interference = exact(deltas)
    pairs = np.triu_indices(len(deltas), 1)
    yield "cosine", (found.cosine - cosine)[pairs] / found.cosine_error[pairs]
    yield "overlap", (found.overlap - overlap)[pairs] / found.overlap_error[pairs]
    signs = (found.sign_agreement - sign)[pairs] / found.sign_error[pairs]
    yield "sign", signs[~np.isnan(signs)]
    off = (found.interference - interference) / found.interference_error
    yield "interference", np.array([off])


@pytest.mark.parametrize("kind", FAMILIES)
def test_three_standard_errors_hold_the_truth_for_tensors_layers_and_all(kind: str) -> None:
    experts = family(FAMILIES[kind])
    found = report(*experts)
    off: dict[str, list[float]] = {}
    for tensor, agreement in found.tensors.items():
        for figure, errors in deviations(agreement, [e[tensor] for e in experts]):
            off.setdefault(figure, []).extend(errors)
    for i, agreement in enumerate(found.layers.values()):
        names = [n for n in experts[0] if n.startswith(f"layers.{i}.")]
        for _, errors in deviations(
            agreement, [np.concatenate([e[n] for n in names]) for e in experts]
        ):
            assert np.abs(errors).max(initial=0) < 4
    for _, errors in deviations(found.whole, [np.concatenate(list(e.values())) for e in experts]):
        assert np.abs(errors).max() < 3.5
    for figure, errors_of in off.items():
        within = np.abs(errors_of) <= 3
        assert within.mean() >= 0.97, figure
    assert np.std(off["cosine"]) < 1.3
    if kind in ("independent", "half shared", "opposed", "blocks that differ", "low rank"):
        assert np.std(off["cosine"]) > 0.6  # nor are they idle


def test_errors_fall_as_blocks_add_up() -> None:
    found = report({"w": noise(0, 64 * 4096)}, {"w": noise(1, 64 * 4096)})
    one = report({"w": noise(0, 4096)}, {"w": noise(1, 4096)})
    assert one.whole.cosine_error[0, 1] == pytest.approx(1 / 8, rel=0.3)
    assert found.whole.cosine_error[0, 1] == pytest.approx(1 / 64, rel=0.05)
    assert found.whole.sign_error[0, 1] == pytest.approx(0.5 / 64, rel=0.05)
    assert one.whole.sign_error[0, 1] == pytest.approx(0.5 / 8, rel=0.1)


def test_norms_are_exact_and_layers_are_in_order() -> None:
    deltas: Deltas = {
        "lm_head.weight": noise(1),
        "model.layers.10.a": noise(2),
        "model.layers.2.a": noise(3),
        "model.layers.2.b": noise(4),
        "model.embed_tokens.weight": noise(5),
    }
    found = report(deltas, {name: 3 * d for name, d in deltas.items()})
    assert list(found.layers) == ["embed", "layer.02", "layer.10", "head"]
    assert next(iter(found.tensors)) == "model.embed_tokens.weight"
    both = np.concatenate([noise(3), noise(4)]).astype(np.float32).astype(np.float64)
    norms = found.layers["layer.02"].norms
    np.testing.assert_allclose(norms, np.linalg.norm(both) * np.array([1, 3]), rtol=1e-6)
    assert norms[0] == pytest.approx(np.linalg.norm(both), rel=1e-12)


def test_the_tensors_of_a_layer_count_by_their_norms() -> None:
    agreed, opposed = noise(2), 0.5 * noise(3)
    found = report(
        {"layers.0.a": agreed, "layers.0.b": opposed},
        {"layers.0.a": agreed, "layers.0.b": -opposed},
    )
    energies = [np.square(d).sum() for d in (agreed, opposed)]
    expected = (energies[0] - energies[1]) / sum(energies)
    assert found.layers["layer.00"].cosine[0, 1] == pytest.approx(expected, abs=1e-5)
    assert found.whole.cosine[0, 1] == found.layers["layer.00"].cosine[0, 1]


def test_redundant_pairs_are_named_most_alike_first() -> None:
    near = noise(0) + 0.1 * noise(1)
    found = report({"w": noise(0)}, {"w": noise(9)}, {"w": near}, {"w": noise(0)}).redundant("all")
    assert (found[0].first, found[0].second) == ("a", "d")
    assert {(p.first, p.second) for p in found} == {("a", "c"), ("a", "d"), ("c", "d")}
    assert found[0].cosine == pytest.approx(1.0)


def test_conflicting_pairs_are_those_that_certainly_cancel_and_costly_ones_come_first() -> None:
    large, small, third = noise(0), 0.3 * noise(1), noise(2)
    found = report(
        {"layers.0.w": large, "layers.1.w": small, "layers.2.w": third},
        {"layers.0.w": -large, "layers.1.w": -small, "layers.2.w": noise(3)},
    )
    pairs = found.conflicting("layer")
    assert [p.place for p in pairs] == ["layer.00", "layer.01"]
    energy = float(np.square(found.whole.norms).sum())
    assert pairs[0].lost == pytest.approx(2 * np.square(large).sum() / energy, rel=1e-4)


def test_pairs_lose_together_what_the_sum_loses() -> None:
    experts = family(FAMILIES["opposed"])
    found = report(*experts)
    assert sum(p.lost for p in found.pairs("all")) == pytest.approx(found.whole.interference)
    assert sum(p.lost for p in found.pairs("tensor")) == pytest.approx(found.whole.interference)


def test_unrelated_experts_conflict_nowhere() -> None:
    experts = family(FAMILIES["independent"])
    found = report(*experts)
    assert found.conflicting("tensor") == found.conflicting("all") == found.redundant("all") == []


@pytest.mark.parametrize(
    ("signs", "expected"), [([1, 1], -1.0), ([1, -1], 1.0), ([1, 1, 1], -2.0), ([1], 0.0)]
)
def test_interference_is_above_zero_where_deltas_cancel_and_below_where_they_agree(
    signs: list[int], expected: float
) -> None:
    found = report(*({"w": sign * noise(0)} for sign in signs)).whole
    assert found.interference == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert found.interference_error < 0.05  # of 64 samples


def test_a_zero_delta_agrees_with_nothing_and_warns_of_nothing() -> None:
    found = report({"w": noise(0)}, {"w": np.zeros(3000)}).whole
    np.testing.assert_array_equal(np.round(found.cosine, 12), [[1, 0], [0, 0]])
    assert found.overlap[0, 1] == 0
    assert np.isnan(found.sign_agreement[0, 1])
    nothing = report({"w": np.zeros(10)}, {"w": np.zeros(10)})
    assert nothing.whole.interference == 0.0
    assert nothing.conflicting("tensor") == []


def test_a_tensor_one_expert_lacks_counts_as_unchanged_there() -> None:
    found = report({"layers.0.w": noise(0), "layers.1.w": noise(1)}, {"layers.0.w": noise(0)})
    assert found.layers["layer.01"].norms[1] == 0.0
    assert found.layers["layer.00"].cosine[0, 1] == pytest.approx(1.0)
    assert found.layers["layer.01"].cosine[0, 1] == 0.0
    assert 0.5 < found.whole.cosine[0, 1] < 0.9
    assert found.whole.overlap[0, 1] == pytest.approx(0.5)


def test_a_block_with_a_number_that_is_none_counts_as_unchanged() -> None:
    broken = noise(0, 8192)
    broken[5000] = np.nan
    found = report({"w": broken}, {"w": noise(0, 8192)}).whole
    assert found.norms[0] == pytest.approx(np.linalg.norm(broken[:4096]), rel=1e-6)
    assert np.isfinite(found.cosine).all()


def test_the_digest_follows_the_contents_compared() -> None:
    one, same, other = ({"w": noise(s)} for s in (0, 0, 1))
    assert report(one, other).digest == report(same, other).digest
    assert report(one, other).digest != report(other, one).digest
