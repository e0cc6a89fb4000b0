"""What Dagster makes of `docs/platform/values.yaml`: its instance, and the jobs of runs and steps.

No cluster and no chart is here. The chart copies these values into `dagster.yaml` and into the
container context of the code location; the fields named here are those that its templates read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._config import process_config, resolve_to_config_type
from dagster._core.instance.config import dagster_instance_config

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.instance import SETTINGS as USUAL
from mergepipe_pipeline.deploy.recipe_files import RecipeFile
from mergepipe_pipeline.settings import EXECUTOR, SETTINGS, SHARDS
from mergepipe_pipeline.storage.roots import ENVIRONMENT
from mergepipe_pipeline.warehouse import Warehouse

pytest.importorskip("dagster_k8s", reason="needs the extra k8s")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

ROOT = Path(__file__).parents[2]
PLATFORM = ROOT / "docs" / "platform"
VALUES: dict[str, Any] = yaml.safe_load((PLATFORM / "values.yaml").read_text())
(DEPLOYMENT,) = VALUES["dagster-user-deployments"]["deployments"]
IMAGE = f"{DEPLOYMENT['image']['repository']}:{DEPLOYMENT['image']['tag']}"
#: The sections of the chart that the file sets something of, and what else its schema asks for.
SECTIONS = {
    "dagster-user-deployments", "runLauncher", "postgresql", "computeLogManager", "dagsterDaemon",
    "generatePostgresqlPasswordSecret", "dagsterWebserver", "retention", "telemetry",
    "additionalInstanceConfig", "scheduler",
}  # fmt: skip


def snake(value: Any) -> Any:
    """Keys as Dagster has them, where the chart has camelCase."""
    if isinstance(value, Mapping):
        return {re.sub("([A-Z])", r"_\1", k).lower(): snake(v) for k, v in value.items()}
    return [snake(v) for v in value] if isinstance(value, list) else value


def context() -> dict[str, Any]:
    """The container context that the chart gives the code location."""
    return {
        "image_pull_policy": DEPLOYMENT["image"]["pullPolicy"],
        "env": DEPLOYMENT["env"],
        "volumes": DEPLOYMENT["volumes"],
        "volume_mounts": DEPLOYMENT["volumeMounts"],
        "resources": DEPLOYMENT["resources"],
        "namespace": "dagster",
        "service_account_name": "dagster-user-deployments",
    }


def launcher() -> dict[str, Any]:
    """The configuration of the run launcher that the chart writes into dagster.yaml."""
    said = VALUES["runLauncher"]["config"]["k8sRunLauncher"]
    return {
        "load_incluster_config": said["loadInclusterConfig"],
        "image_pull_policy": said["imagePullPolicy"],
        "fail_pod_on_run_failure": said["failPodOnRunFailure"],
        "run_k8s_config": {
            re.sub("([A-Z])", r"_\1", k).lower(): v for k, v in said["runK8sConfig"].items()
        },
        "job_namespace": "dagster",
        "service_account_name": "dagster",
        "dagster_home": "/opt/dagster/dagster_home",
        "instance_config_map": "dagster-instance",
        "postgres_password_secret": "dagster-postgresql-secret",
    }


def instance() -> dict[str, Any]:
    """The dagster.yaml that the chart makes of the values, without the secret of the database."""
    daemon = VALUES["dagsterDaemon"]
    logs = VALUES["computeLogManager"]["config"]["customComputeLogManager"]
    where = {key: VALUES["postgresql"][f"postgresql{key}"] for key in ("Host", "Username")}
    database = {
        "hostname": where["Host"],
        "username": where["Username"],
        "password": {"env": "DAGSTER_PG_PASSWORD"},
        "db_name": VALUES["postgresql"]["postgresqlDatabase"],
        "scheme": VALUES["postgresql"]["postgresqlScheme"],
        "port": 5432,
    }
    return {
        "storage": {"postgres": {"postgres_db": database}},
        "run_launcher": {"module": "dagster_k8s", "class": "K8sRunLauncher", "config": launcher()},
        "compute_logs": logs,
        "run_monitoring": snake(daemon["runMonitoring"]),
        "run_retries": snake(daemon["runRetries"]),
        "sensors": snake(daemon["sensors"]),
        "schedules": snake(daemon["schedules"]),
        "scheduler": {
            "module": "dagster._core.scheduler",
            "class": VALUES["scheduler"]["type"],
            "config": snake(VALUES["scheduler"]["config"]["daemonScheduler"]),
        },
        "retention": snake({k: v for k, v in VALUES["retention"].items() if k != "enabled"}),
        "telemetry": VALUES["telemetry"],
        **VALUES["additionalInstanceConfig"],
    }


def test_the_instance_is_the_repositorys_but_for_where_it_keeps_and_runs_things(
    tmp_path: Path,
) -> None:
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(instance()))
    found, _ = dagster_instance_config(str(tmp_path))
    usual = yaml.safe_load(USUAL.read_text())
    assert not VALUES["dagsterDaemon"]["runCoordinator"]["enabled"]
    for section in (
        "run_queue",
        "concurrency",
        "sensors",
        "schedules",
        "scheduler",
        "telemetry",
        "nux",
    ):
        assert found[section] == usual[section]
    kept = found["retention"]
    usual_days = usual["retention"]["sensor"]["purge_after_days"]
    assert kept["sensor"]["purge_after_days"].items() >= usual_days.items()
    assert kept["schedule"] == usual["retention"]["schedule"]


def test_sections_and_variables_are_ones_that_chart_and_pipeline_know() -> None:
    assert VALUES.keys() == SECTIONS
    known = {s.variable for s in SETTINGS} | {"MERGEPIPE_HOME", ENVIRONMENT, "DAGSTER_LOGS"}
    told = {v["name"]: v["value"] for v in DEPLOYMENT["env"]}
    assert told.keys() <= known
    for setting in SETTINGS:
        if setting.variable in told:
            setting.read(told[setting.variable], setting.variable)
    mounted = {m["mountPath"] for m in DEPLOYMENT["volumeMounts"]}
    assert {told["MERGEPIPE_HOME"], told[ENVIRONMENT].partition("=")[2]} == mounted
    assert {v["name"] for v in DEPLOYMENT["volumes"]} == {
        m["name"] for m in DEPLOYMENT["volumeMounts"]
    }


def test_the_job_of_a_run_has_the_image_the_volumes_the_roots_and_its_share_of_memory() -> None:
    from dagster_k8s import K8sRunLauncher, construct_dagster_k8s_job
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import DagsterK8sJobConfig

    found = process_config(resolve_to_config_type(K8sRunLauncher.config_type()), launcher())
    assert found.success, found.errors
    own = K8sContainerContext.create_from_config({"k8s": context()})
    shared = K8sContainerContext.create_from_config(
        {"k8s": {"run_k8s_config": launcher()["run_k8s_config"]}}
    )
    merged = shared.merge(own)
    job = construct_dagster_k8s_job(
        DagsterK8sJobConfig(IMAGE, "/opt/dagster/dagster_home"),
        args=["dagster", "api", "execute_run"],
        job_name="dagster-run-1",
        user_defined_k8s_config=merged.run_k8s_config,
    ).to_dict()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    assert {v["name"]: v["value"] for v in container["env"]}.items() >= {
        v["name"]: v["value"] for v in DEPLOYMENT["env"]
    }.items()
    mounts = {m["mount_path"]: m["read_only"] for m in container["volume_mounts"]}
    assert mounts["/mnt/warehouse"] is None
    assert mounts["/mnt/models"] is True
    claims = {v["persistent_volume_claim"]["claim_name"] for v in pod["volumes"]}
    assert claims == {"mergepipe-warehouse", "mergepipe-models"}
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "4Gi"}
    assert pod["security_context"]["fs_group"] == 10001
    assert job["spec"]["ttl_seconds_after_finished"] == 86400
    json.dumps(job, default=str)


def test_a_run_may_say_what_the_jobs_of_its_steps_get(
    home: Warehouse, recipe_file: RecipeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {v["name"]: v["value"] for v in DEPLOYMENT["env"]}
    monkeypatch.setenv(EXECUTOR.variable, told[EXECUTOR.variable])
    job = build_definitions(home, shards=SHARDS.read(told[SHARDS.variable], "")).resolve_job_def(
        "merge_n"
    )
    more = {"container_config": {"resources": {"limits": {"memory": "8Gi"}}}}
    own = {"max_concurrent": 4, "step_k8s_config": more}
    dg.validate_run_config(job, {"execution": {"config": {"k8s": own}}})
    with pytest.raises(dg.DagsterInvalidConfigError, match="at_most"):
        dg.validate_run_config(job, {"execution": {"config": {"k8s": {"at_most": 4}}}})


def test_the_engine_fits_into_what_a_step_is_given() -> None:
    told = {v["name"]: v["value"] for v in DEPLOYMENT["env"]}
    limits = DEPLOYMENT["resources"]["limits"]
    assert int(told["MERGEPIPE_THREADS"]) <= int(limits["cpu"])
    program_mib = 512  # with torch, Dagster and a plan
    assert int(told["MERGEPIPE_MEMORY_MIB"]) + program_mib <= 1024 * int(limits["memory"][:-2])


def test_the_image_has_what_the_package_is_made_of() -> None:
    lines = re.sub(r"\\\n", " ", (PLATFORM / "Dockerfile").read_text()).splitlines()
    said = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {word for word, _ in said} <= {
        "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "CMD",
    }  # fmt: skip
    copied = [place for word, rest in said if word == "COPY" for place in rest.split()[:-1]]
    assert all((ROOT / place).exists() for place in copied)
    assert {"assets", "sensors", "mergepipe_pipeline", "constraints.txt"} <= set(copied)
    (command,) = (json.loads(rest) for word, rest in said if word == "CMD")
    assert command[-2:] == DEPLOYMENT["codeServerArgs"]
    assert str(DEPLOYMENT["port"]) in command
    (user,) = (rest for word, rest in said if word == "USER")
    context = DEPLOYMENT["podSecurityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    (added,) = (rest for word, rest in said if word == "RUN" and "useradd" in rest)
    assert f"--uid {context['runAsUser']} " in added
