"""How far apart two models' hidden states are over prompts, layer by layer, as transformers has it.

A process of its own: `python -m … PROMPTS FOLDER FOLDER …` prints a JSON list with one number per
layer: 1 − cosine of the last token's states after the layer, the mean over prompts and over all
models but the last against the last.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mergepipe_pipeline.quality.builtin import LOCAL

_MOST_TOKENS, _MOST_PROMPTS = 256, 64


def main(prompts: str, *folders: str) -> None:
    """Print the differences of the models in all folders from the last."""
    texts = _texts(Path(prompts))
    import torch
    from torch.nn.functional import cosine_similarity

    *states, last = (_states(folder, texts) for folder in folders)
    apart = [1 - cosine_similarity(of_one, last, dim=-1).mean(dim=0) for of_one in states]
    print(json.dumps([float(x) for x in torch.stack(apart).mean(dim=0)]))


def _texts(file: Path) -> list[str]:
    """One prompt per line that is not blank; of JSON Lines the key `text`, or the line's text."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if file.suffix in {".jsonl", ".ndjson"}:
        rows = [json.loads(line) for line in lines]
        lines = [str(x["text"]) if isinstance(x, dict) else str(x) for x in rows]
    if not lines:
        sys.exit(f"{file} has no prompt")
    return lines[:_MOST_PROMPTS]


def _states(folder: str, texts: list[str]) -> Any:
    """The last token's hidden state after each layer, [prompts, layers, hidden], in float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        sys.exit("activations need transformers: pip install 'mergepipe-pipeline[demo]'")
    import torch

    tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **LOCAL)
    rows = []
    with torch.inference_mode():
        for text in texts:
            given = tokenizer(text, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt")
            states = model(input_ids=given["input_ids"], output_hidden_states=True).hidden_states
            rows.append(torch.stack([layer[0, -1].float() for layer in states[1:]]))
    return torch.stack(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
