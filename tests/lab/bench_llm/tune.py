"""Experts: a base tuned for one task, all but the embedding or by LoRA; goes on after a stop.

The loss is of the answers alone, in bfloat16 over weights in float32. The order of the items comes
from the seed and the step, so that a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergepipe_pipeline.demo.skills import quiet
from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree
from tests.lab.bench_llm.encoded import DEVICE, Batch, encoder
from tests.lab.bench_llm.tasks import Item, Task


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast a kind of expert learns; a run ends where its loss is flat."""

    steps: int
    rate: float
    is_adapter: bool = False

    def rates(self) -> list[float]:
        """The rate of each step: up within the first, then down as a cosine to a tenth."""
        shares = (0.45 * (1 + math.cos(math.pi * n / self.steps)) for n in range(self.steps))
        return [
            self.rate * ((n + 1) / WARM_UP if n < WARM_UP else 0.1 + share)
            for n, share in enumerate(shares)
        ]


SHORT, MIDDLE, LONG = Schedule(60, 5e-5), Schedule(600, 5e-5), Schedule(1500, 5e-5)
LORA = Schedule(400, 5e-4, is_adapter=True)
BATCH, WARM_UP = 16, 10
#: A loss is flat if the mean of so many steps is not this much below that of as many before.
_WINDOW, _LEAST = 150, 0.01
_KEEP_S = 120.0


def tuned(
    base: Path,
    task: Task,
    schedule: Schedule,
    seed: int,
    folder: Path,
    until: float = math.inf,
) -> Path:
    """The expert's folder, made if it is not there.

    Args:
        base: The folder of the base.
        task: What the expert learns.
        schedule: How long it learns, and what of the base.
        seed: Of the items, and of an adapter's first numbers.
        folder: Where the expert will be.
        until: When to stop by the monotonic clock; raises TimeoutError, the state is kept.
    """
    if folder.exists():
        return folder
    state = folder.with_name(f"{folder.name}.state")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        run = Run(base, schedule, state)
        run.learn(task.items("train", seed), until)
        run.publish(folder)
    remove_tree(state)
    return folder


class Run:
    """A model on its way, its optimiser, and the losses so far."""

    def __init__(self, base: Path, schedule: Schedule, state: Path) -> None:
        self._schedule, self._state, self.encoder = schedule, state, encoder(base)
        self.model = _loaded(base, schedule).to(DEVICE)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A graph of a GPU's work reads the rate from the GPU.
        self._rate = torch.tensor(schedule.rate, device=DEVICE)
        self._solver = torch.optim.AdamW(
            self._parameters,
            self._rate,
            weight_decay=0.0,
            fused=True,
            capturable=DEVICE.type == "cuda",
        )
        self._losses: list[float] = []
        if (kept := state / "state.pt").exists():
            found = torch.load(kept, weights_only=True)
            self._solver.load_state_dict(found["solver"])
            self._losses = found["losses"]
            for parameter, value in zip(self._parameters, found["parameters"], strict=True):
                parameter.data.copy_(value)
        self._solver.param_groups[0]["lr"] = self._rate

    def learn(self, items: Sequence[Item], until: float) -> None:
        """Take the steps that are left; keeps the state every two minutes, and at the end."""
        kept, rates = time.monotonic(), self._schedule.rates()
        while len(self._losses) < len(rates) and not is_flat(self._losses):
            step = len(self._losses)
            batch = [items[(step * BATCH + i) % len(items)] for i in range(BATCH)]
            loss = self.step(self.encoder.batch(batch), torch.tensor(rates[step]))
            self._losses.append(float(loss))
            if time.monotonic() - kept > _KEEP_S:
                self._keep()
                kept = time.monotonic()
            if time.monotonic() > until:
                self._keep()
                raise TimeoutError(f"stopped after {step + 1} steps of {self._state.stem}")

    def step(self, batch: Batch, rate: Tensor) -> Tensor:
        """Learn from a batch; the mean loss of its answers' tokens."""
        self._rate.copy_(rate)
        self._solver.zero_grad()
        # A graph would keep weights in 16 bits from step to step.
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
            inner = self.model.base_model.model if self._schedule.is_adapter else self.model
            hidden = inner.model(
                input_ids=batch.ids, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
            # The head is applied where it counts: [answer tokens, words].
            logits = inner.lm_head(hidden[batch.rows, batch.places])
        loss = cross_entropy(logits.float(), batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._solver.step()
        return loss.detach()

    def publish(self, folder: Path, losses: Sequence[float] = ()) -> None:
        """Write the expert in bfloat16, an adapter added to its base, with the losses beside it."""
        whole = self.model.merge_and_unload() if self._schedule.is_adapter else self.model
        staged = folder.with_name(f".{folder.name}")
        try:
            whole.to(torch.bfloat16).save_pretrained(staged)
            self.encoder.save(staged)
            with (staged / "losses.csv").open("w", newline="") as file:
                csv.writer(file).writerows(enumerate(losses or self._losses))
            publish_dir(staged, folder)
        finally:
            remove_tree(staged)

    def _keep(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        staged = self._state / "state.new"
        parameters = [p.data for p in self._parameters]
        held = {"solver": self._solver.state_dict(), "losses": self._losses}
        torch.save({**held, "parameters": parameters}, staged)
        staged.replace(self._state / "state.pt")


def _loaded(base: Path, schedule: Schedule) -> Any:
    from transformers import AutoModelForCausalLM

    # Of short rows plain attention has the faster backward pass on a CPU: half the time of a step.
    attention = "eager" if DEVICE.type == "cpu" else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation=attention
    )
    model.model.embed_tokens.weight.requires_grad_(False)
    if not schedule.is_adapter:
        return model
    from peft import LoraConfig, get_peft_model

    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=every))


def is_flat(losses: Sequence[float]) -> bool:
    """Whether the last losses are hardly below those before."""
    last, before = losses[-_WINDOW:], losses[-2 * _WINDOW : -_WINDOW]
    return len(before) == _WINDOW and mean(last) > (1 - _LEAST) * mean(before)
