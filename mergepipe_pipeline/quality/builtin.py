"""The evaluators that are built in, each a process of its own: `python -m … KIND OPTIONS SNAPSHOT`.

OPTIONS is a JSON object; metrics are printed as the last line.

- `python`: a function of the recipe's folder, given as MODULE:FUNCTION. What it prints is kept in
  the log.
- `perplexity`: of a text under a model, as transformers runs it. Documents are cut into windows of
  the model's context without overlap, and each token but a window's first counts once, so that a
  window gives the loss that transformers gives.
- `lm_eval`: tasks of EleutherAI's lm-evaluation-harness. A task's result `acc,none` is the metric
  `TASK.acc`; of another filter than `none` the name stays, as in `gsm8k.exact_match,strict-match`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

#: Tokens of a window, where the model's context allows so many.
_MOST_WINDOW = 2048
#: Nothing is downloaded, and no code of a model is run.
LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}


def main(kind: str, options: str, snapshot: str) -> None:
    """Print the metrics of a snapshot."""
    kinds: dict[str, Callable[..., Mapping[str, Any]]]
    kinds = {"python": _called, "perplexity": _perplexity, "lm_eval": _lm_eval}
    measured = kinds[kind](snapshot, **json.loads(options))
    print(f"\n{json.dumps(dict(measured), default=_plain)}", flush=True)


def _called(snapshot: str, entry: str) -> Mapping[str, Any]:
    """The mapping that a function returns for the snapshot's path."""
    module, _, name = entry.partition(":")
    function: Any = import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    metrics = function(snapshot)
    if not isinstance(metrics, Mapping):
        sys.exit(
            f"{entry} returns {type(metrics).__name__}; expected a mapping of names to numbers"
        )
    return metrics


def _plain(value: object) -> object:
    """A number of another library, as NumPy's or a tensor's, as Python's own."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def _perplexity(snapshot: str, text: str, field: str, max_tokens: int) -> Mapping[str, Any]:
    """Perplexity, mean loss in nats, and how many tokens were predicted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(snapshot, **LOCAL)
    return perplexity(snapshot, tokenizer, documents(Path(text), field), max_tokens)


def documents(file: Path, field: str) -> Iterator[str]:
    """The texts of a file: a line's field each if it is JSON Lines, else the file as one."""
    if file.suffix not in {".jsonl", ".ndjson"}:
        yield file.read_text(encoding="utf-8")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _text(json.loads(line), field)
            except ValueError as error:
                sys.exit(f"{file}, line {number}: {error}")


def _text(value: object, field: str) -> str:
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"expected an object with a text under {field!r}")
    return text


def perplexity(
    snapshot: str, tokenizer: Any, texts: Iterator[str], max_tokens: int
) -> dict[str, float]:
    """The metrics of a model over texts, of which at most `max_tokens` tokens are read."""
    import torch
    from transformers import AutoModelForCausalLM

    device = _device()
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(snapshot, dtype="auto", **LOCAL).to(device).eval()
    context = getattr(model.config, "max_position_embeddings", None) or _MOST_WINDOW
    total, predicted = 0.0, 0
    with torch.inference_mode():
        for window in _windows(tokenizer, texts, min(context, _MOST_WINDOW), max_tokens):
            ids = torch.tensor([window], device=device)
            logits = model(input_ids=ids).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            predicted += len(window) - 1
    if not predicted:
        sys.exit("the text has no two tokens in a row: nothing is predicted")
    loss = total / predicted
    return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss, "tokens": predicted}


def _windows(
    tokenizer: Any, texts: Iterator[str], window: int, max_tokens: int
) -> Iterator[list[int]]:
    """The tokens of each text in pieces of at most `window`, of at least two."""
    left = max_tokens
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"][:left]
        left -= len(ids)
        pieces = (ids[at : at + window] for at in range(0, len(ids), window))
        yield from (piece for piece in pieces if len(piece) > 1)
        if not left:
            return


def _lm_eval(snapshot: str, **chosen: Any) -> Mapping[str, Any]:
    """The metrics of a snapshot as the harness measures them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

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
    return metrics(results["results"] if results else {})


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


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main(*sys.argv[1:])
