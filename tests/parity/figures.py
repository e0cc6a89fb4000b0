"""How equal results are to mergekit's on bf16 models: `python -m tests.parity.figures`.

Makes a llama of 20 million elements and three experts, and merges it in float32 on both sides, each
result rounded to bfloat16 once. Methods whose sort cuts equal magnitudes arbitrarily in mergekit
are merged a second time with a stable sort.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import read_model, run_mergekit
from tests.support.architectures import Tensors
from tests.support.family import Size, tensors_of, write_model

_SIZES: Size = {"layers": 6, "hidden": 512, "vocab": 8192}
#: Method to parameters of every model, and of the recipe.
METHODS = {
    "ties": ("weight: 0.5, density: 0.3", ""),
    "breadcrumbs": ("weight: 0.5, density: 0.7, gamma: 0.01", ""),
    "breadcrumbs_ties": ("weight: 0.5, density: 0.7, gamma: 0.01", ""),
    "task_arithmetic": ("weight: 0.5", ""),
    "multislerp": ("weight: 0.5", ""),
    "sce": ("", "select_topk: 0.4"),
}
_SORTED = ("ties", "breadcrumbs", "breadcrumbs_ties")


@contextmanager
def stable_sorts() -> Iterator[None]:
    """Every sort of torch takes the first of equal elements for the larger one, as we do."""
    sort = torch.sort

    def ascending(values: torch.Tensor, descending: bool = False) -> Any:
        found = sort(values, descending=True, stable=True)
        order = found if descending else [part.flip(0) for part in found]
        return SimpleNamespace(values=order[0], indices=order[1])

    with (
        mock.patch.object(torch, "argsort", partial(torch.argsort, stable=True)),
        mock.patch.object(torch, "sort", ascending),
    ):
        yield


def figures(ours: Tensors, theirs: Tensors, base: Tensors) -> tuple[float, float]:
    """The share of equal elements, and the L2 norm of the difference over that of the update."""
    equal = total = 0
    wrong = update = 0.0
    for name, value in ours.items():
        other = theirs[name]
        equal, total = equal + int((value == other).sum()), total + value.numel()
        wrong += float((value.double() - other.double()).square().sum())
        update += float((other.double() - base[name].double()).square().sum())
    return equal / total, (wrong / update) ** 0.5


def main() -> None:
    """Print one line per method and sort."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for expert in (None, 0, 1, 2):
            tensors = tensors_of(3, expert, **_SIZES)
            write_model(place / str(expert), tensors, **_SIZES)
        base = read_model(place / "None")
        print(f"{sum(t.numel() for t in base.values()):,} elements, bfloat16")
        for method, (per_model, parameters) in METHODS.items():
            text = f"merge_method: {method}\nbase_model: {place}/None\nmodels:\n"
            for expert in range(3):
                text += f"- {{model: {place}/{expert}, parameters: {{{per_model}}}}}\n"
            text += f"parameters: {{{parameters}}}\ndtype: float32\nout_dtype: bfloat16\n"
            home = Warehouse.at(place / method).ensure()
            ours = read_model(Path(run(home, text).snapshot.path))
            for sort in ("", "stable sort")[: 1 + (method in _SORTED)]:
                with stable_sorts() if sort else nullcontext():
                    theirs = run_mergekit(text)
                share, l2 = figures(ours, theirs, base)
                line = f"{100 * share:9.4f} % equal, difference {100 * l2:.4f} % of the update"
                print(f"{method:18} {sort:12} {line}", flush=True)


if __name__ == "__main__":
    main()
