"""`python -m tests.lab.bench.bench_schedules`: what windows of a run are worth, beside a decay.

The demo's toy model is trained at a constant rate and saved every few steps; its last checkpoints
are merged by each schedule. Beside them stand the last checkpoint alone, and the same run whose
rate decays to zero over the steps of the window. Losses are of the same held-out examples.
"""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import LlamaForCausalLM

from mergepipe_pipeline.demo.family import Settings, _base_loss, _config, reproducible, save
from mergepipe_pipeline.demo.skills import quiet
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.selected import Registered
from mergepipe_pipeline.verbs.runs import register_run
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench import FOLDER

SCHEDULES = ("uniform", "minus_sqrt", "exponential, decay: 0.8")
N_BATCHES = 20


def main() -> None:
    """Train, merge and print losses, a line for each way, with its deviation over the seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bench.bench_schedules")
    parser.add_argument("--home", type=Path, default=FOLDER / "schedules", help="for what is made")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--last", type=int, default=8, help="checkpoints of the window")
    parser.add_argument("--every", type=int, default=20, help="steps between two of them")
    chosen = parser.parse_args()
    found: dict[str, list[float]] = {}
    for seed in range(chosen.seeds):
        folder = chosen.home / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        with quiet(), reproducible(seed):
            for name, loss in _losses(folder, seed, chosen.last, chosen.every).items():
                found.setdefault(name, []).append(loss)
    for name, losses in found.items():
        spread = stdev(losses) if len(losses) > 1 else 0.0
        print(f"{name}: loss {mean(losses):.4f} ± {spread:.4f}")


def _losses(folder: Path, seed: int, last: int, every: int) -> dict[str, float]:
    settings = Settings(seed=seed)
    model = LlamaForCausalLM(_config(settings))
    loss_of = _base_loss(settings)
    trained = _Run(model, loss_of, settings)
    before = settings.base_steps - last * every
    trained.go(before, lambda _: 1.0)
    decayed = trained.copy()
    for number in range(1, last + 1):
        trained.go(every, lambda _: 1.0)
        save(trained.model, folder / "run" / f"step-{before + number * every}")
    decayed.go(last * every, lambda at: 1 - at / (last * every))
    save(decayed.model, folder / "decayed")
    found = {
        "last checkpoint": _loss(folder / "run" / f"step-{settings.base_steps}", loss_of),
        "rate decayed to zero": _loss(folder / "decayed", loss_of),
    }
    home = Warehouse.at(folder / "home").ensure()
    register_run(home, folder / "run")
    for schedule in SCHEDULES:
        text = (
            "merge_method: linear\nmodels: [{run: run, last: "
            f"{last}, weights: {{schedule: {schedule}}}}}]\ndtype: bfloat16\n"
        )
        plan = plan_in_stages(home, parse(text, name="t", where="t", choose=Registered(home)))
        found[f"window by {schedule}"] = _loss(run_plan(home, plan).snapshot.path, loss_of)
    return found


class _Run:
    """A training run that may be gone on with, also from a copy."""

    def __init__(self, model: LlamaForCausalLM, loss_of: Callable[..., torch.Tensor], s: Settings):
        self.model, self._loss_of, self._settings = model, loss_of, s
        self._generator = torch.Generator().manual_seed(s.seed + 1)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), s.base_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._steps = 0

    def copy(self) -> _Run:
        made = _Run(copy.deepcopy(self.model), self._loss_of, self._settings)
        made._optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
        made._generator.set_state(self._generator.get_state())
        made._steps = self._steps
        return made

    def go(self, steps: int, share_of: Callable[[int], float]) -> None:
        """Train; `share_of` gives the share of the rate at each step."""
        self.model.train()
        for at in range(steps):
            self._steps += 1
            rate = self._settings.base_rate * min(1.0, self._steps / 20) * share_of(at)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            loss = self._loss_of(self.model, self._generator)
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()


def _loss(folder: str | Path, loss_of: Callable[..., torch.Tensor]) -> float:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(10_000)
    with torch.no_grad():
        return mean(float(loss_of(model, generator)) for _ in range(N_BATCHES))


if __name__ == "__main__":
    main()
