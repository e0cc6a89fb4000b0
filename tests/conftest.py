"""Fixtures and Hypothesis profiles that all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from tempfile import TemporaryDirectory

# Workers of pytest share the cores: threads that wait for each other busily take four times as much
# of them as the work. Libraries read this when they are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import make_family

#: A text like `org/model` is a name of the hub, which no test may ask.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=25, **_COMMON)
settings.register_profile("quick", max_examples=5, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Commands that tests start are ended by signals, which `nohup` and shells' background jobs ignore.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

_FSYNC = os.fsync
_MEMORY = Path("/dev/shm")
_HAS_MEMORY = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30


#: What `make test` leaves to `make test-all`: comparisons with other programs by random recipes,
#: real daemons, browsers, long campaigns, and whatever takes seconds a test. Of each kind of fault
#: something stays: kills, a full disk, flipped bits, lying servers, hostile files, runs of Dagster.
LONG = (
    "analysis/test_scales.py",
    "checkpoints/test_dcp.py",
    "cli/test_ending.py",
    "cli/test_ls.py",
    "dagster_layer/test_attempts.py",
    "dagster_layer/test_celery.py",
    "dagster_layer/test_commands.py",
    "dagster_layer/test_components.py",
    "dagster_layer/test_conditions.py",
    "dagster_layer/test_copies.py",
    "dagster_layer/test_daemon.py",
    "dagster_layer/test_deleted.py",
    "dagster_layer/test_existing_project.py",
    "dagster_layer/test_experts.py",
    "dagster_layer/test_gate.py",
    "dagster_layer/test_isolation.py",
    "dagster_layer/test_landings.py",
    "dagster_layer/test_layers.py",
    "dagster_layer/test_linked.py",
    "dagster_layer/test_look.py",
    "dagster_layer/test_nightly.py",
    "dagster_layer/test_outages.py",
    "dagster_layer/test_outside.py",
    "dagster_layer/test_packing.py",
    "dagster_layer/test_pipes.py",
    "dagster_layer/test_postgres.py",
    "dagster_layer/test_ray.py",
    "dagster_layer/test_recipe_kinds.py",
    "dagster_layer/test_recovery.py",
    "dagster_layer/test_release.py",
    "dagster_layer/test_reload.py",
    "dagster_layer/test_retention.py",
    "dagster_layer/test_runs.py",
    "dagster_layer/test_searches.py",
    "dagster_layer/test_selectors.py",
    "dagster_layer/test_testing.py",
    "dagster_layer/test_trained_project.py",
    "dagster_layer/test_turns.py",
    "deploy/test_arrivals.py",
    "docs/test_examples.py",
    "drawn",
    "execution/test_card_facts.py",
    "execution/test_decoded.py",
    "execution/test_four_forms.py",
    "execution/test_fp8_output.py",
    "execution/test_huge_deltas.py",
    "execution/test_operators.py",
    "execution/test_sums.py",
    "facts/test_measured_before.py",
    "facts/test_places.py",
    "foreign",
    "house/test_wheel.py",
    "integrity/test_corpus.py",
    "integrity/test_read_only.py",
    "lab",
    "packs/test_below_adapter.py",
    "packs/test_elements.py",
    "packs/test_leftovers.py",
    "packs/test_offline.py",
    "packs/test_replace_races.py",
    "parity",
    "peer",
    "planner/test_level_promises.py",
    "planner/test_predict.py",
    "planner/test_promises.py",
    "published",
    "quality/test_bisect.py",
    "quality/test_changes.py",
    "quality/test_harness.py",
    "quality/test_pipeline.py",
    "recipe/test_mergekit_plan.py",
    "remote/test_egress.py",
    "remote/test_merge.py",
    "remote/test_training_runs.py",
    "remote/writing/test_forged_packs.py",
    "remote/writing/test_mirror.py",
    "remote/writing/test_packs.py",
    "remote/writing/test_push_hub.py",
    "resolution/test_deltas.py",
    "resolution/test_dtypes.py",
    "resolution/test_layer_kinds.py",
    "resolution/test_token_rows.py",
    "resolution/test_versions.py",
    "resolution/test_vocabulary.py",
    "search/test_bayes.py",
    "search/test_front_picture.py",
    "search/test_interruptions.py",
    "search/test_search.py",
    "test_jit.py",
    "tokenizer/test_mergekit.py",
    "tools/test_convert.py",
    "tools/test_gguf.py",
    "tools/test_gguf_faults.py",
    "ui",
    "verbs/test_compare.py",
    "verbs/test_curve.py",
    "verbs/test_keep_versions.py",
    "verbs/test_replay.py",
    "warehouse/test_backup.py",
    "warehouse/test_group.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the modules of the tier that is not asked for, before they are imported."""
    tier = config.getoption("markexpr")
    if collection_path.suffix != ".py" or tier not in ("long", "not long"):
        return None
    return _is_long(collection_path) != (tier == "long") or None


@cache
def _is_long(path: Path) -> bool:
    return any(path.is_relative_to(Path(__file__).parent / name) for name in LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long, and give tests that wait to one worker, which begins with them."""
    here = Path(__file__).parent
    if gone := [name for name in LONG if not (here / name).exists()]:
        raise pytest.UsageError(f"LONG names what does not exist: {', '.join(gone)}")
    for item in items:
        if _is_long(item.path):
            item.add_marker("long")
    items.sort(key=lambda item: "waits" not in item.keywords)
    # As the program does itself. Looking for cycles among the suite takes a twelfth of its time.
    gc.set_threshold(100_000)
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_write_waits_for_the_disk() -> Iterator[None]:
    """What tests write need not survive a power loss, and a merge waits for the disk a hundred
    times. That the program does so is proven by `tests/lab/torture`, in processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="module")
def durable_writes() -> Iterator[None]:
    """Files lie on a disk and writes wait for it: only then are they ever out of the page cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _FSYNC)
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder of the test's own: in memory, but for tests that ask for `durable_writes`.

    Processes that tests start, Dagster's databases first, wait for the disk after each write.
    """
    if "durable_writes" in request.fixturenames or not _HAS_MEMORY:
        yield tmp_path
        return
    # Drawn names may begin or end with an underscore, which Markdown takes for a mark there.
    with TemporaryDirectory("x", f"{tmp_path.name}-x", _MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and four experts; read-only."""
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture
def home(tmp_path: Path) -> Warehouse:
    """An empty warehouse."""
    return Warehouse.at(tmp_path / "warehouse").ensure()


@pytest.fixture(scope="module")
def baselines() -> Iterator[None]:
    """Plans may follow the strategies that the benchmarks compare with."""
    from tests.lab.bench import baselines as benchmarks

    with benchmarks.baselines():
        yield


@pytest.fixture(autouse=True)
def no_crash_hook_is_left_behind() -> Iterator[None]:
    """Tests that crash on purpose do not reach into the next one."""
    yield
    atomic.crash_hook = None


@pytest.fixture
def recipe_text(family: Path) -> Callable[..., str]:
    """Builds recipe YAML over the family; keyword `extra` is appended."""

    def build(
        method: str = "ties",
        parameters: str = "{density: 0.3}",
        experts: int = 4,
        extra: str = "",
        base: bool = True,
    ) -> str:
        weights = [1.0, 0.5, 0.25, 0.75]
        lines = [f"merge_method: {method}"]
        lines += [f"base_model: {family / 'base'}"] if base else []
        lines += ["models:"]
        for i in range(experts):
            lines += [
                f"  - model: {family / f'expert_{i:02d}'}",
                f"    parameters: {{weight: {weights[i]}}}",
            ]
        lines += [f"parameters: {parameters}"] if parameters else []
        return "\n".join([*lines, extra, ""])

    return build
