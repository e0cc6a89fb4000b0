"""Perplexity is what transformers' own loss gives, window by window."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.evaluation import Evaluator, Perplexity
from mergepipe_pipeline.quality import builtin
from mergepipe_pipeline.quality.evaluators import command_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: Longer than the model's context of 128 tokens, shorter, and of one token.
TEXTS = (" ".join(f"w{3 + 7 * i % 500}" for i in range(300)), "w5 w6 w7 w8", "w9")


def measured(
    evaluator: Evaluator, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, float]:
    """What the child would print: its arguments are those that the parent gives."""
    kind, options = command_of(evaluator, folder)[3:]
    builtin.main(kind, options, str(model))
    found: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def loss_of(model: Path, windows: list[list[int]]) -> tuple[float, int]:
    """The mean of transformers' losses, weighted by the tokens that each predicts."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    total, n = 0.0, 0
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            total += float(loaded(input_ids=ids, labels=ids).loss) * (len(window) - 1)
            n += len(window) - 1
    return total / n, n


def test_perplexity_is_the_exponential_of_transformers_loss(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = family / "expert_00"
    lines = [json.dumps({"body": text}) for text in TEXTS]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n\n")
    words = [[int(word[1:]) for word in text.split()] for text in TEXTS]
    windows = [words[0][:128], words[0][128:256], words[0][256:], words[1]]
    loss, n = loss_of(model, windows)
    evaluator = Evaluator(perplexity=Perplexity("notes.jsonl", "body"))
    found = measured(evaluator, tmp_path, model, capsys)
    assert found == pytest.approx({"perplexity": math.exp(loss), "loss": loss, "tokens": n})
    (tmp_path / "notes.txt").write_text(TEXTS[0])
    evaluator = Evaluator(perplexity=Perplexity("notes.txt", max_tokens=200))
    found = measured(evaluator, tmp_path, model, capsys)
    loss, n = loss_of(model, [words[0][:128], words[0][128:200]])
    assert found == pytest.approx({"perplexity": math.exp(loss), "loss": loss, "tokens": n})


@pytest.mark.parametrize(
    ("line", "why"), [('{"txt": "a"}', "line 1: expected an object"), ("{", "line 1: Expecting")]
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "n.jsonl").write_text(line)
    with pytest.raises(SystemExit, match=why):
        list(builtin.documents(tmp_path / "n.jsonl", "text"))
