"""Merges to another tokenizer, end to end: rows by token as mergekit (run live) has them, files."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.errors import CorruptionError, IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.open_models import open_models
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.resolution.token_rows import _RowReader
from mergepipe_pipeline.warehouse import Warehouse
from tests.catalog.flips import flipped
from tests.execution.test_run import run, tensors
from tests.support.family import tensors_of, write_model
from tests.tokenizer.test_mergekit import piece_family, word_family

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HIDDEN = 8
RULES = """
    w1: {source: {kind: zero}, force: true}
    w6: {source: B, force: true}
    w3: {source: {kind: model_token, model: C, token: w5}, force: true}
    w4: {source: {kind: model_token, model: B, token_id: 3}}
    b1: {source: B}
    only in c: {source: C, force: true}
    all new: {source: {kind: zero}}
    new of w7: {source: {kind: model_token, model: A, token: w7}}
"""


@dataclass(frozen=True)
class Wish:
    """A recipe over three models A, B and C of a family; `tokens` is the tokenizer's part of it."""

    method: str
    tokens: str = "tokenizer_source: union"
    family: str = "words"
    models: str = "ABC"
    base: str | None = "A"
    extra: str = ""
    per_model: str = "weight: 0.5"


WISHES = {
    "linear, union": Wish("linear", base=None),
    "linear, union, untied": Wish("linear", family="untied", base=None),
    "task arithmetic, union": Wish("task_arithmetic", models="BC"),
    "task arithmetic, union, untied": Wish("task_arithmetic", family="untied", models="BC"),
    "task arithmetic, union with gaps": Wish("task_arithmetic", family="gaps", models="BC"),
    "ties, base": Wish("ties", "tokenizer_source: base", models="BC"),
    "ties, another model, trimmed": Wish(
        "ties", "tokenizer_source: B", models="BC", per_model="weight: 0.5, density: 0.5"
    ),
    "ties, base, one tied": Wish("ties", "tokenizer_source: base", family="one tied", models="BC"),
    "linear, union, one tied": Wish("linear", family="one tied"),
    "slerp, union, base tied": Wish(
        "slerp", family="base tied", models="B", extra="parameters: {t: 0.4}", per_model=""
    ),
    "slerp, union": Wish("slerp", models="B", extra="parameters: {t: 0.4}", per_model=""),
    "model stock, union": Wish("model_stock", models="BC", per_model=""),
    "passthrough of one with another's tokenizer": Wish(
        "passthrough", "tokenizer_source: C", models="B", base=None, per_model=""
    ),
    "padded union": Wish(
        "task_arithmetic", "tokenizer: {source: union, pad_to_multiple_of: 32}", models="BC"
    ),
    "rules": Wish("task_arithmetic", f"tokenizer:\n  source: union\n  tokens:{RULES}", models="BC"),
    "rules, untied, padded": Wish(
        "linear",
        f"tokenizer:\n  source: union\n  pad_to_multiple_of: 8\n  tokens:{RULES}",
        family="untied",
    ),
    "pieces, union": Wish("task_arithmetic", family="pieces", models="BC"),
}
Folders = dict[str, dict[str, Path]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Family name to model letter to folder, float32 models of one layer."""
    members = {
        "words": word_family(gaps=False),
        "untied": word_family(gaps=False),
        "one tied": word_family(gaps=False),
        "base tied": word_family(gaps=False),
        "gaps": word_family(gaps=True),
        "pieces": piece_family(),
    }
    untied = {"untied": "ABC", "one tied": "AC", "base tied": "BC"}
    out: Folders = {}
    for name, models in members.items():
        top = tmp_path_factory.mktemp(name)
        for i, (files, rows) in enumerate(models):
            folder = out.setdefault(name, {})["ABC"[i]] = top / "ABC"[i]
            write(folder, 7 + i, rows, files, untied="ABC"[i] in untied.get(name, ""))
    return out


def write(
    folder: Path,
    seed: int,
    rows: int,
    files: Mapping[str, bytes],
    *,
    untied: bool = False,
    layers: int = 1,
) -> Path:
    sizes = {"layers": layers, "hidden": HIDDEN, "vocab": rows}
    values = tensors_of(seed, None, dtype=torch.float32, **sizes)
    if untied:
        torch.manual_seed(seed)
        values[HEAD] = 0.02 * torch.randn(rows, HIDDEN)
    write_model(folder, values, **sizes)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = not untied
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def text_of(wish: Wish, families: Folders) -> str:
    """The recipe, with paths for letters."""
    lines = [f"merge_method: {wish.method}"]
    lines += [f"base_model: {wish.base}"] if wish.base else []
    lines += ["models:"]
    for letter in wish.models:
        lines += [f"- model: {letter}"]
        lines += [f"  parameters: {{{wish.per_model}}}"] if wish.per_model else []
    if wish.base and wish.base not in wish.models and wish.method == "linear":
        lines += [f"- model: {wish.base}", f"  parameters: {{{wish.per_model}}}"]
    text = "\n".join([*lines, wish.extra, wish.tokens, ""])
    for letter, folder in families[wish.family].items():
        for key in ("model", "base_model", "source", "tokenizer_source"):
            text = text.replace(f"{key}: {letter}\n", f"{key}: {folder}\n")
            text = text.replace(f"{key}: {letter},", f"{key}: {folder},")
            text = text.replace(f"{key}: {letter}}}", f"{key}: {folder}}}")
    return text


def load(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def config_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


@pytest.mark.peer
@pytest.mark.skipif(
    importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
)
@pytest.mark.parametrize("name", WISHES)
def test_every_token_and_every_other_tensor_is_what_mergekit_makes_of_it(
    home: Warehouse, families: Folders, tmp_path: Path, name: str
) -> None:
    from tests.parity.peer import run_mergekit

    text = text_of(WISHES[name], families)
    path = run(home, text).snapshot.path
    ours, theirs = tensors(path), run_mergekit(text, tmp_path / "theirs")
    vocab, their_vocab = load(path).get_vocab(), load(tmp_path / "theirs").get_vocab()
    assert vocab.keys() == their_vocab.keys()
    assert ours.keys() == theirs.keys()
    mine, other = (torch.tensor([v[t] for t in vocab]) for v in (vocab, their_vocab))
    for tensor, value in ours.items():
        expected = theirs[tensor]
        assert value.shape == expected.shape, tensor
        if tensor in (EMBEDDING, HEAD):
            padding = len(vocab)
            torch.testing.assert_close(value[padding:], expected[padding:], rtol=0, atol=2e-6)
            value, expected = value[mine], expected[other]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6, msg=tensor)


@pytest.mark.parametrize("name", WISHES)
def test_the_result_says_its_size_and_its_tokenizer_loads_and_encodes(
    home: Warehouse, families: Folders, name: str
) -> None:
    path = run(home, text_of(WISHES[name], families)).snapshot.path
    tokenizer, rows = load(path), len(tensors(path)[EMBEDDING])
    assert config_of(path)["vocab_size"] == rows
    assert rows >= len(tokenizer)
    vocab = tokenizer.get_vocab()
    text = "a b c" if WISHES[name].family == "pieces" else "w3 w5"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids
    assert all(vocab[t] == i < rows for t, i in zip(tokenizer.tokenize(text), ids, strict=True))


def test_a_model_with_the_union_loads_and_computes(home: Warehouse, families: Folders) -> None:
    from transformers import AutoModelForCausalLM

    path = run(home, text_of(WISHES["rules, untied, padded"], families)).snapshot.path
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([load(path).encode("w3 w5 b1")])
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, 3, config_of(path)["vocab_size"])
    assert logits.isfinite().all()


def test_equal_tokenizers_leave_embeddings_and_ids_as_they_are(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    text = f"""\
merge_method: task_arithmetic
base_model: {family / "base"}
models:
- {{model: {family / "expert_00"}, parameters: {{weight: 0.5}}}}
- {{model: {family / "expert_01"}, parameters: {{weight: 0.5}}}}
"""
    plain = tensors(run(home, text).snapshot.path)
    union = run(home, text + "tokenizer_source: union\n")
    assert not home.token_rows.exists()
    for name, value in tensors(union.snapshot.path).items():
        assert torch.equal(value, plain[name]), name
    kept = (Path(union.snapshot.path) / "tokenizer.json").read_bytes()
    assert load(union.snapshot.path).get_vocab() == load(family / "base").get_vocab()
    assert kept


def test_check_tells_the_cost_of_a_union_and_writes_nothing(
    home: Warehouse, families: Folders
) -> None:
    text = text_of(WISHES["task arithmetic, union"], families)
    checked = resolve(home, parse(text, name="t", where="t"))
    assert not [p for p in home.root.rglob("*") if p.is_file()]
    outcome = run(home, text)
    assert outcome.plan.estimates.expert_bytes_total == checked.cost.expert_bytes_total
    written = sum(v.numel() * 4 for v in tensors(outcome.snapshot.path).values())
    assert checked.cost.output_bytes == written


def test_a_second_run_makes_no_row_again_and_merges_nothing(
    home: Warehouse, families: Folders
) -> None:
    text = text_of(WISHES["rules"], families)
    first = run(home, text)
    made = {p: p.stat().st_mtime_ns for p in home.token_rows.rglob("*") if p.is_file()}
    again = run(home, text)
    assert made
    assert made == {p: p.stat().st_mtime_ns for p in home.token_rows.rglob("*") if p.is_file()}
    assert again.snapshot.snapshot_id == first.snapshot.snapshot_id
    assert again.summary()["layers_executed"] == 0


def test_a_flipped_bit_in_made_rows_is_said_and_they_are_made_again(
    home: Warehouse, families: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    text = text_of(WISHES["task arithmetic, union"], families)
    wanted = run(home, text).plan
    paths = sorted(p for p in home.token_rows.rglob("*") if p.is_file())
    for path in paths:
        data = path.read_bytes()
        path.write_bytes(flipped(data, 8 * len(data) - 1))
    again = run(home, text)
    assert [sum(str(p) in m for m in caplog.messages) for p in paths] == [1] * len(paths)
    assert [again.plan.plan_id, again.plan.roles] == [wanted.plan_id, wanted.roles]
    assert [s.name for s in again.plan.sources] == [s.name for s in wanted.sources]


def test_ids_are_the_same_in_every_warehouse_and_for_every_window(
    tmp_path: Path, families: Folders
) -> None:
    from mergepipe_pipeline.engine.options import EngineOptions

    ids = set()
    text = text_of(WISHES["rules"], families)
    for i, options in enumerate(
        (
            EngineOptions(),
            EngineOptions(threads=1, window_elems=5),
            EngineOptions(threads=3, window_elems=64),
        )
    ):
        home = Warehouse.at(tmp_path / str(i)).ensure()
        outcome = run(home, text, options=options)
        ids.add((outcome.plan.plan_id, outcome.snapshot.snapshot_id))
    assert len(ids) == 1


@pytest.mark.parametrize("budget", ["0", "30%", "100%"])
def test_budgets_hold_for_unions(home: Warehouse, families: Folders, budget: str) -> None:
    text = text_of(WISHES["task arithmetic, union"], families)
    s = run(home, text, budget=budget).summary()
    assert s["expert_bytes_read"] == s["expert_bytes_planned"] <= s["budget_bytes"]


def test_the_registered_names_do_not_include_made_rows(home: Warehouse, families: Folders) -> None:

    run(home, text_of(WISHES["task arithmetic, union"], families))
    assert set(home.catalog.names()) == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("w1: {source: {kind: model_token, model: B, token: w1}}", "lacks the token"),
        ("w1: {source: {kind: model_token, model: B, token_id: 99}}", "outside the embedding"),
        ("nowhere: {source: B}", "lacks the token"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_told_by_check(
    home: Warehouse, families: Folders, rule: str, message: str
) -> None:
    tokens = f"tokenizer:\n  source: union\n  tokens:\n    {rule}\n"
    text = text_of(Wish("task_arithmetic", tokens, models="BC"), families)
    with pytest.raises(MergePipeError, match=message):
        resolve(home, parse(text, name="t", where="t"))
    assert not [p for p in home.root.rglob("*") if p.is_file()]


@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
def test_an_adapter_that_leaves_embeddings_alone_merges_with_a_union(
    home: Warehouse, families: Folders, tmp_path: Path, method: str
) -> None:
    adapter = write_adapter(tmp_path / "lora", "model.layers.0.self_attn.q_proj")
    text = text_of(Wish(method, models="BC"), families).replace(
        "models:\n", f"models:\n- {{model: {adapter}, parameters: {{weight: 0.5}}}}\n"
    )
    without = text_of(Wish(method, models="BC"), families)
    if method == "linear":  # where the adapter changes nothing, it counts as the base
        line = f"- model: {families['words']['A']}\n  parameters: {{weight: "
        assert line + "0.5}" in without
        without = without.replace(line + "0.5}", line + "1.0}")
    ours, theirs = (tensors(run(home, t).snapshot.path) for t in (text, without))
    for name, value in ours.items():
        if "q_proj" in name:
            assert not torch.equal(value, theirs[name])
        else:
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
@pytest.mark.parametrize(
    "tokens",
    [
        "tokenizer_source: union",
        "tokenizer_source: B",
        "tokenizer: {source: union, pad_to_multiple_of: 32}",
    ],
)
def test_a_delta_checkpoint_merges_with_another_tokenizer_like_its_expert(
    home: Warehouse, families: Folders, tmp_path: Path, method: str, tokens: str
) -> None:
    from safetensors.torch import save_file

    base = families["words"]["A"]
    values = tensors(base)
    torch.manual_seed(1)
    delta = {n: (0.01 * torch.randn(v.shape)).bfloat16().float() for n, v in values.items()}
    files = {n: (base / n).read_bytes() for n in ("tokenizer.json", "tokenizer_config.json")}
    full = write(tmp_path / "full", 0, len(values[EMBEDDING]), files)
    save_file({n: v + delta[n] for n, v in values.items()}, full / "model.safetensors")
    (tmp_path / "delta").mkdir()
    save_file(delta, tmp_path / "delta" / "model.safetensors", metadata={"mergepipe": "delta"})
    found = []
    for expert in (full, tmp_path / "delta"):
        text = text_of(Wish(method, tokens, models="BC"), families).replace(
            "models:\n", f"models:\n- {{model: {expert}, parameters: {{weight: 0.5}}}}\n"
        )
        found.append(tensors(run(home, text).snapshot.path))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_tokens_row_cannot_come_from_an_adapter_that_has_none(
    home: Warehouse, families: Folders, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", "model.layers.0.self_attn.q_proj")
    rule = f"w1: {{source: {adapter}, force: true}}"
    tokens = f"tokenizer:\n  source: union\n  tokens:\n    {rule}\n"
    text = text_of(Wish("linear", tokens, models="BC"), families).replace(
        "models:\n", f"models:\n- {{model: {adapter}, parameters: {{weight: 0.5}}}}\n"
    )
    with pytest.raises(IncompatibleCheckpointsError, match="to come from an adapter"):
        resolve(home, parse(text, name="t", where="t"))


@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
def test_a_union_takes_rows_from_embeddings_that_an_adapter_brings(
    home: Warehouse, families: Folders, tmp_path: Path, method: str
) -> None:
    from safetensors.torch import load_file, save_file

    b = families["words"]["B"]
    values, files = load_file(b / "model.safetensors"), {}
    values[EMBEDDING] = values[EMBEDDING] + 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = (b / name).read_bytes()
    whole = write(tmp_path / "whole", 0, len(values[EMBEDDING]), files)
    save_file(values, whole / "model.safetensors")
    adapter = write_adapter(tmp_path / "lora", "model.layers.0.self_attn.q_proj", zero=True)
    brought = load_file(adapter / "adapter_model.safetensors")
    brought[f"base_model.model.{EMBEDDING}"] = values[EMBEDDING]
    save_file(brought, adapter / "adapter_model.safetensors")
    base = None if method == "linear" else "A"
    found = []
    for model in (whole, f"{b}+{adapter}"):
        text = text_of(Wish(method, models="C", base=base), families).replace(
            "models:\n", f"models:\n- {{model: {model}, parameters: {{weight: 0.5}}}}\n"
        )
        found.append(tensors(run(home, text).snapshot.path))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_an_adapter_on_embeddings_is_refused_with_a_union(
    home: Warehouse, families: Folders, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", "model.embed_tokens", rows=15)
    text = text_of(Wish("task_arithmetic", models="B"), families).replace(
        "models:\n", f"models:\n- {{model: {adapter}, parameters: {{weight: 0.5}}}}\n"
    )
    with pytest.raises(IncompatibleCheckpointsError, match="cannot be re-indexed"):
        make_plan(home, parse(text, name="t", where="t"))
    assert not [p for p in home.root.rglob("*") if p.is_file()]


def write_adapter(folder: Path, module: str, rows: int = HIDDEN, *, zero: bool = False) -> Path:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    folder.mkdir()
    a, b = torch.randn(2, HIDDEN), torch.randn(rows, 2) * (not zero)
    if "embed" in module:
        pair = {"lora_embedding_A": b.t().contiguous(), "lora_embedding_B": a.t().contiguous()}
    else:
        pair = {"lora_A.weight": a, "lora_B.weight": b}
    values = {f"base_model.model.{module}.{k}": v for k, v in pair.items()}
    save_file(values, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


JINJA = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("chatml", "<|im_start|>"),
        ("auto", "second template"),
        (f'"{JINJA}"', "<user>hello"),
    ],
)
def test_the_chat_template_is_the_one_asked_for(
    home: Warehouse, families: Folders, tmp_path: Path, wish: str, expected: str
) -> None:
    folders = {}
    for letter, source in families["words"].items():
        target = folders[letter] = tmp_path / letter
        target.mkdir()
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        config = json.loads((target / "tokenizer_config.json").read_text())
        config["chat_template"] = "first template {{ 1 }}"
        if letter != "A":
            config["chat_template"] = "second template {{ 2 }}"
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    for tokens in ("", "tokenizer_source: union"):
        text = text_of(Wish("task_arithmetic", tokens, models="BC"), {"words": folders})
        path = run(home, f"{text}chat_template: {wish}\n").snapshot.path
        messages = [{"role": "user", "content": "hello"}]
        assert expected in load(path).apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    "tokens",
    [
        "tokenizer_source: base",
        "tokenizer_source: union",
        "tokenizer: {source: base, tokens: {b1: {source: united, force: true}}}",
    ],
)
def test_a_stage_with_a_tokenizer_of_its_own_hands_it_to_the_next(
    home: Warehouse, families: Folders, tmp_path: Path, tokens: str
) -> None:
    first = text_of(WISHES["task arithmetic, union"], families)
    second = f"""\
merge_method: task_arithmetic
base_model: united
models:
- {{model: {families["words"]["C"]}, parameters: {{weight: 0.5}}}}
{tokens}
"""
    outcome = run(home, f"name: united\n{first}---\n{second}")
    other = Warehouse.at(tmp_path / "other").ensure()
    united = run(other, first).snapshot.path
    by_hand = run(other, second.replace("united", str(united)))
    ours, theirs = tensors(outcome.snapshot.path), tensors(by_hand.snapshot.path)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    for file in ("tokenizer.json", "config.json"):
        made, expected = (Path(o.snapshot.path) / file for o in (outcome, by_hand))
        assert made.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("method", ["model_stock", "nuslerp", "ties", "karcher"])
@pytest.mark.parametrize("dtypes", ["bbb", "bff", "fbh"])
def test_rows_that_no_stored_type_can_hold_are_exact(
    home: Warehouse, families: Folders, tmp_path: Path, method: str, dtypes: str
) -> None:
    """The base lacks `shared`: it has the mean of the others', from which they differ oppositely.

    Rounded, the sum of these differences is rounding alone, which model_stock made 30 times as
    large as the rows. A model has a row that it lacks as float32, as if all were stored so.
    """
    stored = {"b": torch.bfloat16, "f": torch.float32, "h": torch.float16}
    folders: dict[str, dict[str, Path]] = {"narrow": {}, "wide": {}}
    for letter, code in zip("ABC", dtypes, strict=True):
        values = load_file(families["words"][letter] / "model.safetensors")
        for name, into in folders.items():
            into[letter] = Path(
                shutil.copytree(families["words"][letter], tmp_path / name / letter)
            )
            rounded = {n: t.to(stored[code]) for n, t in values.items()}
            wide = {n: t.float() for n, t in rounded.items()}
            file = into[letter] / "model.safetensors"
            save_file(wide if name == "wide" else rounded, file, metadata={"format": "pt"})
    extra = "parameters: {filter_wise: true}\n" if method == "model_stock" else ""
    extra = "parameters: {nuslerp_flatten: false}\n" if method == "nuslerp" else extra
    wish = Wish(
        method,
        "tokenizer: {source: union, pad_to_multiple_of: 32}\ndtype: float32",
        "words",
        models="BC",
        extra=extra,
        per_model="weight: 0.5" if method in {"ties", "nuslerp"} else "",
    )
    results = []
    for into in folders.values():
        path = run(home, text_of(wish, {"words": into})).snapshot.path
        results.append(tensors(path)[EMBEDDING])
    assert torch.equal(*results)
    token = load(path).get_vocab()["shared"]
    rows = [
        tensors(folders["wide"][m])[EMBEDDING][load(folders["wide"][m]).get_vocab()["shared"]]
        for m in "BC"
    ]
    if method == "model_stock":
        mean = sum(r.double() for r in rows) / 2
        torch.testing.assert_close(results[0][token].double(), mean, rtol=1e-6, atol=1e-9)


def test_rows_of_a_model_under_another_number_are_not_taken_for_those_of_its_neighbour(
    home: Warehouse, tmp_path: Path
) -> None:
    files, rows = next(iter(word_family(gaps=False)))
    models = {
        name: write(tmp_path / name, seed, rows, files, untied=True, layers=2)
        for seed, name in enumerate("WXYZ")
    }
    token = list(json.loads(files["tokenizer.json"])["model"]["vocab"])[5]

    def sliced(slices: list[tuple[str, int, int]], source: str) -> str:
        """Slices of these models, a token's row of all from `source`."""
        parts = [
            "- sources:\n"
            + "".join(
                f"  - {{model: {models[m]}, layer_range: [{a}, {b}], "
                f"parameters: {{weight: {weight}}}}}\n"
                for weight, m in enumerate(letters, 1)
            )
            for letters, a, b in slices
        ]
        rule = f"{{source: {models[source]}, force: true}}"
        tokens = f"tokenizer: {{source: union, tokens: {{{json.dumps(token)}: {rule}}}}}\n"
        return "merge_method: linear\nslices:\n" + "".join(parts) + tokens

    # The head is made of the last slice's models: X, Y and Z, under other numbers in the second.
    run(home, sliced([("XYZ", 0, 2)], "Y"))
    text = sliced([("WXYZ", 0, 1), ("XYZ", 1, 2)], "X")
    alone = run(Warehouse.at(tmp_path / "alone").ensure(), text)
    assert run(home, text).snapshot.snapshot_id == alone.snapshot.snapshot_id


@pytest.mark.parametrize("width", [512, 300])
def test_rows_from_all_over_a_matrix_are_verified_and_take_little_memory(
    home: Warehouse, tmp_path: Path, width: int
) -> None:
    matrix = torch.randn(1 << 14, width, dtype=torch.bfloat16)
    root = write_model(tmp_path / "wide", {EMBEDDING: matrix})
    models = open_models(Places(home), [ModelRef(str(root), str(root))], None, [])
    view = models[0].views[EMBEDDING]
    with _RowReader(home, models) as reader:
        reader.row(view, 0, 0)
        tracemalloc.start()
        try:
            for at in range(len(matrix) - 1, 0, -100):
                assert torch.equal(reader.row(view, 0, at), matrix[at].float())
            _, peak_nbytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_nbytes < 4 << 20  # of 10 MiB and more
    file = root / "model.safetensors"
    data, was = file.read_bytes(), file.stat()
    file.write_bytes(flipped(data, 8 * len(data) - 2))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    with _RowReader(home, models) as reader, pytest.raises(CorruptionError, match="elements"):
        reader.row(view, 0, len(matrix) - 1)
