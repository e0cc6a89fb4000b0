"""No verb shows or keeps a password, a signature or a token of an address."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.remote.clients import hub_session
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.servers import HubServer

SECRET = "pa55word"
ADDRESSES = (
    f"https://ann:{SECRET}@127.0.0.1:9/model",
    f"https://{SECRET}@127.0.0.1:9/model/model.safetensors",
    f"http://127.0.0.1:9/model?X-Amz-Signature=a+{SECRET}&X-Amz-Date=1",
    f"s3://key:{SECRET}@bucket/model",
    f"az://box/model?sig={SECRET}%3D",
    f"hf://ann:{SECRET}@org/model",
    f"hf://org/model?token={SECRET}",
    f"https://127.0.0.1:9/model#token={SECRET}",
)
VERBS: tuple[tuple[str, ...], ...] = (
    ("register", "ADDRESS", "--name", "x"),
    ("land", "ADDRESS", "--name", "x"),
    ("analyze", "x", "--base", "ADDRESS"),
    ("push", "live", "ADDRESS"),
    ("push", "--pack", "x", "ADDRESS"),
    ("pull", "live", "--from", "ADDRESS"),
    ("pull-pack", "ADDRESS"),
    ("check", "RECIPE"),
    ("plan", "RECIPE"),
    ("merge", "RECIPE", "--publish"),
    ("verify", "ADDRESS"),
    ("explain", "ADDRESS"),
    ("diff", "ADDRESS", "ADDRESS"),
    ("ls", "ADDRESS"),
    ("pack", "ADDRESS"),
    ("extract-lora", "ADDRESS", "ADDRESS", "--out", "out"),
    # Where a path is expected: of an address it keeps one slash of two.
    ("check", "ADDRESS"),
    ("merge", "ADDRESS"),
    ("convert", "ADDRESS", "--out", "out"),
    ("merge", "RECIPE", "--out", "ADDRESS"),
)
RECIPES = (
    "merge_method: linear\nmodels:\n  - {{model: {0!r}, parameters: {{weight: 1}}}}\n",
    "merge_method: ties\nbase_model: {0}\nmodels:\n"
    "  - {{model: x+{0}, parameters: {{weight: 1, density: 1}}}}\n",
    "merge_method: linear\nmodels:\n"
    "  - {{model: {{model: {{path: {0!r}}}}}, parameters: {{weight: 1}}}}\n",
)


def run(home: Warehouse, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--home", str(home.root)])


def holds_nothing(result: Result, *folders: Path) -> None:
    """Refused in order, and the secret is in no word and no file."""
    assert result.exit_code not in (0, 1, 70), result.output
    assert SECRET not in result.output + result.stderr + repr(result.exception)
    for path in itertools.chain.from_iterable(f.rglob("*") for f in folders):
        assert SECRET not in path.name
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_verb_shows_or_keeps_the_secret_of_an_address(
    home: Warehouse, fresh_downloads: Path, tmp_path: Path, address: str
) -> None:
    recipe = tmp_path / "recipe.yml"
    for number, words in enumerate(VERBS):
        recipe.write_text(RECIPES[number % len(RECIPES)].format(address))
        given = {"ADDRESS": address, "RECIPE": str(recipe)}
        result = run(home, *(given.get(w, w) for w in words), *["--json"] * (number % 2))
        holds_nothing(result, home.root, fresh_downloads)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("HF_ENDPOINT", ("land", "hf://org/model")),
        ("HF_ENDPOINT", ("pull-pack", "hf://org/model")),
        ("AWS_ENDPOINT_URL", ("register", "s3://bucket/model")),
        ("MERGEPIPE_BUCKET", ("pull", "live")),
    ],
)
def test_nor_that_of_an_endpoint(
    home: Warehouse,
    fresh_downloads: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    words: tuple[str, ...],
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("MERGEPIPE_TRACEBACK", "1")
    monkeypatch.setenv(variable, f"http://ann:{SECRET}@127.0.0.1:9/x?sig={SECRET}")
    holds_nothing(run(home, *words), home.root, fresh_downloads)


def test_nor_that_of_a_signed_link_which_the_hub_gives(
    hub: HubServer,
    home: Warehouse,
    fresh_downloads: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.signature = SECRET
    monkeypatch.setenv("MERGEPIPE_TRACEBACK", "1")
    hub.fault = lambda method, path, number: 404 if path.startswith("/cdn/") else None
    with caplog.at_level(logging.INFO):
        result = run(home, "land", "hf://org/base")
    assert hub.seen.of(SECRET)
    holds_nothing(result, home.root, fresh_downloads)
    assert SECRET not in caplog.text


def test_nor_does_the_log_of_the_hubs_client(caplog: pytest.LogCaptureFixture) -> None:
    hub_session()
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.warning("HTTP Error 503 thrown while requesting PUT %s", ADDRESSES[2])
    assert "PUT http://127.0.0.1:9/model?" in caplog.text
    assert SECRET not in caplog.text
