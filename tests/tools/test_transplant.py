"""`transplant-tokenizer`: rows as mergekit-tokensurgeon makes them, and tokens found by bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from mergepipe_pipeline.tools.approximation import combine
from mergepipe_pipeline.verbs.tools import transplant_tokenizer
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.tools.mixtures import read
from tests.tools.record import RECORD
from tests.tools.vocabularies import BYTE_LEVEL, METHODS, SIDES, K, new_tokens, pair, words, write


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_are_mergekits_and_all_else_is_as_it_was(
    home: Warehouse, tmp_path: Path, method: str, tied: bool
) -> None:
    recipient, donor = pair(tmp_path, tied=tied)
    made = transplant_tokenizer(home, str(recipient), str(donor), method=method, k=K)
    found, own = read(made.path), read(recipient)
    expected = json.loads(RECORD.read_text())["transplant-tokenizer"][method][str(tied)]
    new = new_tokens(recipient, donor)
    assert len(new) == made.details["embed"]["approximated"] == 9
    assert found.keys() == own.keys()
    for name, value in found.items():
        if name not in SIDES:
            assert torch.equal(value, own[name])
            continue
        rows = torch.tensor(expected[name])
        torch.testing.assert_close(value[list(new.values())], rows, atol=2e-6, rtol=0)
        assert all(torch.equal(value[51 - n], own[name][3 + n]) for n in range(9, 40))
        assert torch.equal(value[2], own[name][2])  # both end a text


def test_the_result_is_verified_loads_and_writes_texts_with_the_donors_tokens(
    home: Warehouse, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipient, donor = pair(tmp_path, tied=True)
    made = transplant_tokenizer(home, str(recipient), str(donor))
    assert verify(home, made.snapshot_id).nbytes > made.nbytes
    one, other = (AutoTokenizer.from_pretrained(f) for f in (donor, made.path))
    ids = other("w47 w12", return_tensors="pt").input_ids
    assert ids.tolist() == [one("w47 w12").input_ids]
    loaded: Any = AutoModelForCausalLM.from_pretrained(made.path, output_loading_info=True)
    model, told = loaded
    assert not any(told[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    assert model(ids).logits.shape[-1] == len(other) == model.config.vocab_size == 43
    assert other.eos_token == "<|end|>"
    assert model.config.eos_token_id == other.eos_token_id
    assert model.generation_config.eos_token_id == other.eos_token_id


def test_tokens_are_matched_by_their_bytes_and_stand_ins_are_taken_where_asked(
    home: Warehouse, tmp_path: Path
) -> None:
    ours = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁hello",
        "hello",
        "▁é",
        "é",
        "wor",
    ]
    theirs = ["<|end|>", "Ġhello", "hello", "ĠÃ©", "Ã©", "Ċ", "é", "world", "Ġhello!", "zz"]
    recipient = write(
        tmp_path / "r",
        {t: i for i, t in enumerate(ours)},
        {"unk_token": "<unk>"},
        hidden=8,
        tied=True,
        seed=0,
        step={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
    )
    donor = write(
        tmp_path / "d",
        {t: i for i, t in enumerate(theirs)},
        {"eos_token": "<|end|>"},
        hidden=4,
        tied=True,
        seed=1,
        step=BYTE_LEVEL,
    )
    own = read(recipient)[SIDES[0]]

    def copied(**asked: Any) -> dict[str, str]:
        made = transplant_tokenizer(home, str(recipient), str(donor), k=2, **asked)
        rows = read(made.path)[SIDES[0]]
        equal = (rows[:, None] == own[None]).all(dim=2).nonzero().tolist()
        return {theirs[i]: ours[j] for i, j in equal}

    same = {"Ġhello": "▁hello", "hello": "hello", "ĠÃ©": "▁é", "Ã©": "é"}
    bytes_ = {"Ċ": "<0x0A>", "é": "<0xE9>"}
    prefixes = {"world": "wor", "Ġhello!": "▁hello"}
    assert copied() == same
    assert copied(bytes_="yes") == {**same, **bytes_}
    assert copied(prefixes="embed", bytes_="embed") == {**same, **bytes_, **prefixes}
    assert copied(prefixes="lm_head", bytes_="lm_head") == same


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 12))
def test_a_sum_of_few_shared_tokens_is_found_again_and_a_shared_token_is_itself(
    seed: int, n_used: int, k: int
) -> None:
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.standard_normal((40, 40)))[0][:20].astype(np.float32)
    used = rng.choice(20, n_used, replace=False)
    token = (rng.uniform(0.5, 2, n_used) @ shared[used])[None].astype(np.float32)
    found = combine(token, shared, "omp", k, lambda n: None)
    assert found.residual[0] < 1e-5 or k < n_used
    assert set(found.places[0][: min(k, n_used)]) <= set(used)
    again = combine(shared[:3], shared, "nearest", k, lambda n: None)
    np.testing.assert_array_equal(again.of(shared), shared[:3].astype(np.float64))


def test_the_bits_are_the_same_with_any_number_of_threads(
    home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient, donor = pair(tmp_path, tied=False)
    made = [transplant_tokenizer(home, str(recipient), str(donor), k=K)]
    monkeypatch.setattr(threads, "cores", lambda: 3)
    made.append(transplant_tokenizer(home, str(recipient), str(donor), k=K))
    assert made[0].snapshot_id == made[1].snapshot_id


def test_vocabularies_without_a_common_token_and_models_without_one_are_refused(
    home: Warehouse, tmp_path: Path
) -> None:
    recipient, donor = pair(tmp_path, tied=True)
    other = write(tmp_path / "o", words(["?"], range(90, 99)), {}, hidden=4, tied=True, seed=0)
    with pytest.raises(IncompatibleCheckpointsError, match="share no token"):
        transplant_tokenizer(home, str(recipient), str(other), tmp_path / "out")
    (donor / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        transplant_tokenizer(home, str(recipient), str(donor), tmp_path / "out")
    assert not (tmp_path / "out").exists()
