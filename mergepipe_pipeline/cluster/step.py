"""A step in a process of its own on a worker of dask: `python -m mergepipe_pipeline.cluster.step`.

A worker lives for weeks, and the recipes change: a new process loads definitions as they are, and
gives its memory back when the step ends. It ends with its worker, however that ends, so that a step
that another worker takes over is not done twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

#: What Dagster's command reads which step of which run it is to execute from.
_VARIABLE = "DAGSTER_COMPRESSED_EXECUTE_STEP_ARGS"


def run_step(step: str, stop: str) -> None:
    """Execute a step as Dagster packed it; end it early when dask's event `stop` is set.

    Raises RuntimeError if its process crashes. That of a failed step ends well, and tells Dagster.
    """
    from distributed import Event

    stopped, is_logged = Event(stop), False
    with subprocess.Popen(
        [sys.executable, "-m", __name__], env={**os.environ, _VARIABLE: step}, stdin=subprocess.PIPE
    ) as process:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            if not is_logged and stopped.is_set():
                process.send_signal(signal.SIGINT)
                is_logged = True
    if process.returncode:
        raise RuntimeError(f"the process of the step ended with code {process.returncode}")


def _end_with_worker() -> None:
    """The worker has the other end of standard input, and the system closes it when it ends."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Execute the step that the environment names."""
    threading.Thread(target=_end_with_worker, daemon=True).start()
    from dagster._cli import cli  # takes seconds

    cli(["api", "execute_step"])


if __name__ == "__main__":
    main()
