"""The built-in evaluator: perplexity of a text under a model, as transformers runs it.

A process of its own: `python -m … FILE FIELD MAX_TOKENS SNAPSHOT` prints metrics. Documents are
cut into windows of the model's context without overlap, and each token but a window's first counts
once, so that a window gives the loss that transformers gives.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Tokens of a window, where the model's context allows so many.
_MOST_WINDOW = 2048
#: Nothing is downloaded, and no code of a model is run.
LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}


def main(file: str, field: str, max_tokens: str, snapshot: str) -> None:
    """Print perplexity, mean loss in nats, and how many tokens were predicted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(snapshot, **LOCAL)
    print(
        json.dumps(perplexity(snapshot, tokenizer, documents(Path(file), field), int(max_tokens)))
    )


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

    device = "cuda" if torch.cuda.is_available() else "cpu"
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


if __name__ == "__main__":
    main(*sys.argv[1:])
