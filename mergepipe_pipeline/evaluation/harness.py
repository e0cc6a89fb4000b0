"""The built-in evaluator `lm_eval`: tasks of EleutherAI's lm-evaluation-harness.

A process of its own: `python -m … OPTIONS SNAPSHOT`, where OPTIONS are those of `LmEval` as JSON,
prints metrics. A task's result `acc,none` is the metric `TASK.acc`; of another filter than `none`
the name stays, as in `gsm8k.exact_match,strict-match`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def main(options: str, snapshot: str) -> None:
    """Print the metrics of a snapshot as the harness measures them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    chosen = json.loads(options)
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": snapshot, "trust_remote_code": False},
        tasks=chosen["tasks"],
        limit=chosen["limit"],
        num_fewshot=chosen["num_fewshot"],
        apply_chat_template=chosen["apply_chat_template"],
        batch_size=chosen["batch_size"],
        device=chosen["device"] or _device(),
        task_manager=TaskManager(include_path=chosen["include_path"]),
        log_samples=False,
    )
    print(json.dumps(metrics(results["results"] if results else {})))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of each task and group, by name; a text, as where there is no error, is none."""
    found = {}
    for task, numbers in results.items():
        for key, number in numbers.items():
            name, _, filtered = key.partition(",")
            # What has no filter, as the count of samples, measures nothing.
            if filtered and isinstance(number, int | float):
                suffix = "" if filtered == "none" else f",{filtered}"
                found[f"{task}.{name}{suffix}"] = float(number)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
