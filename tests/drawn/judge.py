"""Merges a drawn model with itself, with its sibling and in slices, and says whether torch agrees.

What is right is made in torch alone: the model's own logits, a model whose tensors are the mean of
both models', and the source's own layers in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.drawn.draw import Drawn, draw, write
from tests.drawn.expected import KNOWN

#: Where float32 tensors differ in their last bits, logits differ by so much of their largest.
_NEAR = 1e-4
#: Of equal tensors: torch adds up in an order that depends on where a tensor lies in memory.
_ROUNDED = 1e-6
Right = Callable[[Any, list[str]], str]


@dataclass(frozen=True)
class Verdict:
    """What became of one case: `kind` is right, refused or wrong; `why` is empty where right."""

    name: str
    seed: int
    case: str
    kind: str
    why: str

    @property
    def is_expected(self) -> bool:
        """Right, or refused for a reason that is listed."""
        known = (self.name, self.case.split()[0]) in KNOWN
        return self.kind == "right" or (self.kind == "refused" and known)

    def __str__(self) -> str:
        line = f"{self.name:16} {self.seed:4} {self.case:24} {self.kind:8} {self.why}"
        return line.rstrip().replace("\n", " ")


def judged(name: str, seed: int, folder: Path) -> Iterator[Verdict]:
    """Draw a model into the folder, merge it in a warehouse of its own, and judge each case."""
    drawn = draw(name, seed, folder)
    model, sibling = drawn.load(drawn.model)[0], drawn.load(drawn.sibling)[0]
    home = Warehouse.at(drawn.folder / "warehouse").ensure()
    here, there = str(drawn.model), str(drawn.sibling)
    own, mean = _equal_to(drawn, model), _mean_of(drawn, model, sibling)
    from_base = _mean_of(drawn, model, sibling, of_deltas=True)
    cases: list[tuple[str, dict[str, Any], Right]] = [
        ("self linear", _linear(here, here), own),
        ("self task_arithmetic", _task(here, here), own),
        ("sibling linear", _linear(here, there), mean),
        ("sibling first", _linear(there, here), mean),
        ("sibling task_arithmetic", _task(here, there), from_base),
    ]
    if drawn.sibling_elsewhere.exists():
        other = str(drawn.sibling_elsewhere)
        cases += [
            ("renamed self", _task(here, _renamed_self(drawn, model)), own),
            ("renamed sibling", _linear(here, other), mean),
            ("renamed sibling first", _linear(other, here), mean),
        ]
    for order in drawn.orders:
        right = _equal_to(drawn, reordered(model, order))
        cases.append((f"slices {''.join(map(str, order))}", _slices(here, order), right))
    for case, recipe, right in cases:
        yield Verdict(drawn.name, drawn.seed, case, *_judged(drawn, home, recipe, right))


def reordered(model: Any, order: Sequence[int]) -> Any:
    """The model's own layers in another order, each as it is in the model, whatever a config says.

    A layer keeps the number and the config that it was built with; only lists of kinds that the
    model's own loop reads follow the order.
    """
    n = model.config.num_hidden_layers
    out = copy.deepcopy(model)
    (above, name, layers), *_ = [
        (module, name, child)
        for module in out.modules()
        for name, child in module.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == n
    ]
    setattr(above, name, torch.nn.ModuleList([copy.deepcopy(layers[i]) for i in order]))
    _reorder_tables(out, n, order)
    for config in {id(m.config): m.config for m in (out, above) if hasattr(m, "config")}.values():
        kinds = {
            key: [value[i] for i in order]
            for key in ("layer_types", "layers_block_type")
            if isinstance(value := getattr(config, key, None), list) and len(value) == n
        }
        config.__class__ = type(config.__class__.__name__, (config.__class__,), kinds)
        for key in ("num_hidden_layers", *kinds):
            vars(config).pop(key, None)
        vars(config).update(kinds, num_hidden_layers=len(order))
    return out


def _reorder_tables(model: Any, n: int, order: Sequence[int]) -> None:
    """Gemma 3n keeps an input for each layer in one matrix of all: of these the blocks follow."""
    for name, axis in (("embed_tokens_per_layer", 1), ("per_layer_model_projection", 0)):
        for module in (m for key, m in model.named_modules() if key.endswith(name)):
            blocks = module.weight.data.chunk(n, axis)
            module.weight.data = torch.cat([blocks[i] for i in order], axis)


def _linear(first: str, second: str) -> dict[str, Any]:
    models = [{"model": m, "parameters": {"weight": 0.5}} for m in (first, second)]
    return {"merge_method": "linear", "models": models}


def _task(base: str, expert: str) -> dict[str, Any]:
    models = [{"model": expert, "parameters": {"weight": 0.5}}]
    return {"merge_method": "task_arithmetic", "base_model": base, "models": models}


def _slices(model: str, order: Sequence[int]) -> dict[str, Any]:
    """Ranges of consecutive layers."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(order), 1) if b != a + 1), len(order)]
    ranges = [[order[a], order[b - 1] + 1] for a, b in pairwise(cuts)]
    slices = [{"sources": [{"model": model, "layer_range": r}]} for r in ranges]
    return {"merge_method": "passthrough", "slices": slices}


def _judged(drawn: Drawn, home: Warehouse, recipe: dict[str, Any], right: Right) -> tuple[str, str]:
    """The kind of verdict, and why."""
    text = yaml.safe_dump(recipe)
    try:
        result = Path(merge(home, parse(text, name="r", where="r")).outcome.snapshot.path)
    except MergePipeError as error:
        if not error.next_step:
            return "wrong", f"refused without a next step: {error}"
        return "refused", str(error).replace(f"{drawn.folder}/", "")
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    try:
        model, odd = drawn.load(result)
    except Exception as error:
        return "wrong", f"transformers does not load it: {type(error).__name__}: {error}"[:300]
    try:
        why = right(model, odd)
    except Exception as error:
        return "wrong", f"transformers does not run it: {type(error).__name__}: {error}"[:300]
    return ("wrong", why) if why else ("right", "")


def _equal_to(drawn: Drawn, want: Any) -> Right:
    """Tensors and logits are the model's, bit for bit."""
    logits, state = drawn.logits(want), want.state_dict()

    def right(got: Any, odd: list[str]) -> str:
        found = got.state_dict()
        other = [k for k in state if k not in found or not torch.equal(state[k], found[k])]
        near = _ROUNDED * float(logits.abs().max())
        return _said(odd, other, len(state), drawn.logits(got), logits, near)

    return right


def _mean_of(drawn: Drawn, model: Any, sibling: Any, of_deltas: bool = False) -> Right:
    """Tensors are the mean of both models' within an ulp, and logits are those of a torch model.

    `of_deltas`: within an ulp of the difference, too, which is rounded before it is halved.
    """
    want = copy.deepcopy(model if model.config.tie_word_embeddings is False else sibling)
    pairs = {k: (v, sibling.state_dict()[k]) for k, v in model.state_dict().items()}
    state = {k: (0.5 * (a.double() + b.double())).to(a.dtype) for k, (a, b) in pairs.items()}
    slack = {
        k: torch.finfo(a.dtype if a.is_floating_point() else torch.float64).eps
        * (state[k].double().abs() + of_deltas * (a.double() - b.double()).abs())
        for k, (a, b) in pairs.items()
    }
    want.load_state_dict(state)
    logits = drawn.logits(want)

    def right(got: Any, odd: list[str]) -> str:
        found = got.state_dict()
        other = [k for k, v in state.items() if not _near(found.get(k), v, slack[k])]
        equal = not other and all(torch.equal(found[k], v) for k, v in state.items())
        near = (_ROUNDED if equal else _NEAR) * float(logits.abs().max())
        return _said(odd, other, len(state), drawn.logits(got), logits, near)

    return right


def _near(a: torch.Tensor | None, b: torch.Tensor, slack: torch.Tensor) -> bool:
    if a is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a.double() - b.double()).abs() <= slack).all())


def _said(
    odd: list[str],
    other: list[str],
    n: int,
    got: torch.Tensor,
    want: torch.Tensor,
    near: float,
) -> str:
    """What is wrong, empty if nothing is."""
    said = [f"its files do not fit: {'; '.join(odd)}"] if odd else []
    if other:
        said.append(f"{len(other)} of {n} tensors differ, as {other[0]}")
    off = float((got - want).abs().max()) if got.shape == want.shape else float("nan")
    if not off <= near:
        said.append(f"logits off by {off:.3g} of {float(want.abs().max()):.3g}")
    return ", ".join(said)


def _renamed_self(drawn: Drawn, model: Any) -> str:
    """The model itself in the sibling's other spelling."""
    folder = drawn.folder / "model_elsewhere"
    write(drawn, folder, model, drawn.elsewhere)
    return str(folder)
