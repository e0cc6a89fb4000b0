"""A PostgreSQL server of the operating system's package, in a folder of its own, for one test."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dagster_layer.daemon import free_port

_USER = "postgres"


def programs() -> Path | None:
    """The folder with the newest server's programs; None if none is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda p: int(p.parts[4]))
    other = shutil.which("pg_ctl")
    return found[-1].parent if found else (Path(other).parent if other else None)


@contextmanager
def running_server() -> Iterator[dict[str, str]]:
    """The variables by which docs/platform/dagster-postgres.yaml finds a new, empty database.

    The server does not run as root: where this process does, it is the package's own user.
    """
    place = programs()
    assert place is not None
    folder, port = Path(tempfile.mkdtemp(prefix="postgres-")), free_port()
    user = _USER if os.geteuid() == 0 else None
    if user:
        account = pwd.getpwnam(user)
        os.chown(folder, account.pw_uid, account.pw_gid)

    def call(program: str, *arguments: str) -> None:
        command = [str(place / program), "-D", str(folder / "data"), *arguments]
        done = subprocess.run(
            command, user=user, cwd=folder, stdin=subprocess.DEVNULL, timeout=180,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    try:
        call("initdb", "-U", "dagster", "-A", "trust", "--no-sync", "--no-locale", "-E", "UTF8")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        call("pg_ctl", "-w", "-t", "30", "-l", str(folder / "log"), "-o", options, "start")
        yield {
            "DAGSTER_PG_HOST": "127.0.0.1",
            "DAGSTER_PG_PORT": str(port),
            "DAGSTER_PG_DB": "postgres",
            "DAGSTER_PG_USERNAME": "dagster",
            "DAGSTER_PG_PASSWORD": "any",
            "DAGSTER_LOGS": str(folder / "logs"),
        }
    finally:
        if (folder / "data" / "postmaster.pid").exists():
            call("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
