"""The eight methods on task vectors, as a table of sparsifier × consensus × mix.

All are B + λ · mix of the weighted deltas δᵢ = Tᵢ − B, and take their steps in mergekit's order, in
float32: sparsify, rescale, weight, vote, mix, normalise, λ, base. Per tensor, like mergekit; the
papers of TIES and Breadcrumbs look at the whole model.

With `variant: paper` a method follows its paper where mergekit differs. TIES counts every model
once, where mergekit's weights enter the sign vote. DARE and DELLA divide each kept element by its
probability, which is known here; mergekit scales the rest back to the delta's L1 norm, a fact of
the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from mergepipe_pipeline.domain.operator import Fact, OperatorSchema, Parameter, Response
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.steps import fused, mix
from mergepipe_pipeline.operators.steps.fused import FusedMerge
from mergepipe_pipeline.operators.steps.mix import Normalize, Rescale
from mergepipe_pipeline.operators.steps.registry import (
    ONE_EACH,
    AtLeast,
    Density,
    Hooks,
    Int8Mask,
    Lambda,
    Operator,
    PerModel,
    Variant,
    Weight,
    Window,
    parameter,
    register,
)
from mergepipe_pipeline.operators.steps.sparsify import check_drop, check_ranked, thin

if TYPE_CHECKING:
    from torch import Tensor

Gamma = Annotated[PerModel, "share of the delta's largest elements to drop as outliers", AtLeast(0)]
Epsilon = Annotated[PerModel, "how far below and above the density the probabilities reach"]

_DENSITY = parameter("density", Density, ONE_EACH)
_GAMMA = parameter("gamma", Gamma, PerModel((0.01,)))
_EPSILON = parameter("epsilon", Epsilon, PerModel((0.15,)))
_ABSENT: Final = PerModel()


@dataclass(frozen=True, slots=True)
class Sparsifier:
    """A column of the table: what thins each delta, with the parameters that are its own.

    `paper` says what `variant: paper` changes: it leaves out the weights, or divides each kept
    element by its probability instead of restoring the norm. None: there is no such parameter.
    """

    fact: Fact
    parameters: tuple[Parameter, ...] = ()
    paper: Literal["no weights", "inverse probability"] | None = None


NONE: Final = Sparsifier("none")
MAGNITUDE: Final = Sparsifier("trim", (_DENSITY,), "no weights")
MAGNITUDE_OUTLIERS: Final = Sparsifier("band", (_DENSITY, _GAMMA))
BERNOULLI: Final = Sparsifier("drop", (_DENSITY,), "inverse probability")
RANKED_BERNOULLI: Final = Sparsifier("ranked", (_DENSITY, _EPSILON), "inverse probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Parameters of one tensor's merge; those that a method lacks have values that do nothing."""

    weight: PerModel
    normalize: bool
    lambda_: float
    int8_mask: bool
    density: PerModel = _ABSENT
    gamma: PerModel = _ABSENT
    epsilon: PerModel = _ABSENT
    rescale: bool = False
    variant: str = "mergekit"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVectorMethod:
    """A row of the table. `normalize` and `rescale` are defaults of the recipe's parameters.

    Consensus "sign": experts elect a sign per element, and only what has it is mixed.
    """

    name: str
    sparsifier: Sparsifier
    consensus: Literal["sign"] | None
    normalize: bool
    rescale: bool = False
    formula: str
    reference: str

    def schema(self) -> OperatorSchema:
        """The method's declaration."""
        is_ranked = self.sparsifier.fact == "ranked"
        summed: Response = "vote" if self.consensus else "additive"
        return OperatorSchema(
            self.name,
            self._parameters(),
            self.formula,
            self.reference,
            fact=self.sparsifier.fact,
            scope="row" if is_ranked else "element",
            response="unbounded" if is_ranked else summed,
        )

    def hooks(self) -> Hooks:
        """Return its hooks; for ranks within rows there is no fused kernel."""
        is_fused = self.sparsifier.fact != "ranked"
        return Hooks(
            coefficients=self.coefficients,
            check=self.check,
            fused=self.fused if is_fused else None,
        )

    def merge(self, window: Window, **values: Any) -> Tensor:
        """The merged values of a window, [n] float32, in the memory of its experts."""
        s = _Settings(**values)
        weight, inverse = self._weight(s), self._divides_by_probability(s)
        for k, share in enumerate(s.density):
            epsilon = s.epsilon[k] if s.epsilon else 0.0
            thin(window, k, self.sparsifier.fact, share, epsilon, inverse=inverse)  # δᵢ [K, n]
        if s.rescale and not inverse:
            mix.rescale_to_norm(window, s.density)
        mix.weigh(window, weight)  # d̃ᵢ = wᵢδᵢ [K, n]
        add_up = mix.elected_sum if self.consensus else mix.linear_sum
        mixed = add_up(window, weight, s.normalize)  # [n]
        return mix.add_base(window, mixed, s.lambda_)

    def fused(self, task: TensorTask, **values: Any) -> FusedMerge:
        """`merge` for the compiled kernel."""
        s = _Settings(**values)
        weight = self._weight(s)
        vote = fused.voting(s.normalize, s.lambda_)
        return fused.sparsified(
            task,
            weight,
            s.density or PerModel([1.0] * len(weight)),
            self.sparsifier.fact,
            vote if self.consensus else fused.summing(weight, s.normalize, s.lambda_),
            rescale=s.rescale,
            inverse=self._divides_by_probability(s),
        )

    def coefficients(self, **values: Any) -> tuple[float, ...]:
        """The cᵢ of δᵢ, as if nothing were dropped; divided by the density where the merge is."""
        s = _Settings(**values)
        plain = mix.coefficients(self._weight(s), s.normalize, s.lambda_)
        if self.sparsifier.fact != "drop" or not self._divides_by_probability(s):
            return plain
        return tuple(c / d if 0 < d < 1 else c for c, d in zip(plain, s.density, strict=True))

    def check(self, tensor: str, shape: tuple[int, ...], **values: Any) -> None:
        """Raise OperatorError for parameters that the method cannot use."""
        s = _Settings(**values)
        if self.sparsifier.fact == "drop":
            check_drop(tensor, s.density)
        elif self.sparsifier.fact == "ranked":
            check_ranked(tensor, s.density, s.epsilon)
        elif self._leaves_out_weights(s) and len(set(s.weight)) > 1:
            raise OperatorError(
                "TIES of the paper has no weights",
                where=f"tensor {tensor}",
                expected="the same weight for every model",
                found=f"weights {list(s.weight)}",
                next_step="give equal weights, or set variant: mergekit",
            )

    def _parameters(self) -> tuple[Parameter, ...]:
        thins, has_variant = self.sparsifier is not NONE, self.sparsifier.paper is not None
        return (
            parameter("weight", Weight),
            *self.sparsifier.parameters,
            parameter("normalize", Normalize, self.normalize),
            *([parameter("rescale", Rescale, self.rescale)] if thins else []),
            parameter("lambda_", Lambda, 1.0),
            parameter("int8_mask", Int8Mask, False),
            *([parameter("variant", Variant, "mergekit")] if has_variant else []),
        )

    def _weight(self, s: _Settings) -> PerModel:
        return PerModel([1.0] * len(s.weight)) if self._leaves_out_weights(s) else s.weight

    def _leaves_out_weights(self, s: _Settings) -> bool:
        return s.variant == "paper" and self.sparsifier.paper == "no weights"

    def _divides_by_probability(self, s: _Settings) -> bool:
        is_paper = s.variant == "paper" and self.sparsifier.paper == "inverse probability"
        return s.rescale and is_paper


TABLE: Final = (
    TaskVectorMethod(
        name="task_arithmetic",
        sparsifier=NONE,
        consensus=None,
        normalize=False,
        formula="B + λ Σ wᵢδᵢ, the sum divided by Σ wᵢ if normalize",
        reference="https://arxiv.org/abs/2212.04089",
    ),
    TaskVectorMethod(
        name="ties",
        sparsifier=MAGNITUDE,
        consensus="sign",
        normalize=True,
        rescale=False,
        formula="d̃ᵢ = wᵢ·trim(δᵢ), without the wᵢ if variant is paper; s = sign Σ d̃ᵢ (0 is +); "
        "B + λ Σ d̃ᵢ[sign d̃ᵢ = s], the sum divided by Σ wᵢ[sign d̃ᵢ = s] if normalize",
        reference="https://arxiv.org/abs/2306.01708",
    ),
    TaskVectorMethod(
        name="breadcrumbs",
        sparsifier=MAGNITUDE_OUTLIERS,
        consensus=None,
        normalize=False,
        rescale=False,
        formula="B + λ Σ wᵢ·band(δᵢ), the sum divided by Σ wᵢ if normalize; band drops the share γ "
        "of the largest magnitudes, then the smallest down to the density",
        reference="https://arxiv.org/abs/2312.06795",
    ),
    TaskVectorMethod(
        name="breadcrumbs_ties",
        sparsifier=MAGNITUDE_OUTLIERS,
        consensus="sign",
        normalize=False,
        rescale=False,
        formula="d̃ᵢ = wᵢ·band(δᵢ) as in breadcrumbs; then as ties",
        reference="https://arxiv.org/abs/2312.06795",
    ),
    TaskVectorMethod(
        name="dare_linear",
        sparsifier=BERNOULLI,
        consensus=None,
        normalize=False,
        rescale=True,
        formula="B + λ Σ wᵢ·cᵢ·drop(δᵢ), the sum divided by Σ wᵢ if normalize; cᵢ = 1 unless "
        "rescale, else ‖δᵢ‖₁/‖drop(δᵢ)‖₁, or 1/density if variant is paper",
        reference="https://arxiv.org/abs/2311.03099",
    ),
    TaskVectorMethod(
        name="dare_ties",
        sparsifier=BERNOULLI,
        consensus="sign",
        normalize=False,
        rescale=True,
        formula="d̃ᵢ = wᵢ·cᵢ·drop(δᵢ) as in dare_linear; then as ties",
        reference="https://arxiv.org/abs/2311.03099",
    ),
    TaskVectorMethod(
        name="della",
        sparsifier=RANKED_BERNOULLI,
        consensus="sign",
        normalize=True,
        rescale=True,
        formula="d̃ᵢ = wᵢ·cᵢ·drop(δᵢ) as in della_linear; then as ties",
        reference="https://arxiv.org/abs/2406.11617",
    ),
    TaskVectorMethod(
        name="della_linear",
        sparsifier=RANKED_BERNOULLI,
        consensus=None,
        normalize=False,
        rescale=True,
        formula="B + λ Σ wᵢ·cᵢ·drop(δᵢ), the sum divided by Σ wᵢ if normalize; drop keeps with "
        "p = density − ε + 2ε·rank(|δ|)/(n − 1) in rows of n; cᵢ = 1 unless rescale, else "
        "‖δᵢ‖₁/‖drop(δᵢ)‖₁, or each element's 1/p if variant is paper",
        reference="https://arxiv.org/abs/2406.11617",
    ),
)

for _method in TABLE:
    register(Operator(_method.schema(), _method.merge, _method.hooks()))
