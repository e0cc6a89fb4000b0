"""A run that failed is told in one sentence: cause first, then what to do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.definitions import build_definitions
from mergepipe_pipeline.deploy.retry import Fault
from mergepipe_pipeline.sensors import failures
from mergepipe_pipeline.sensors.failures import failure_of, post, run_failure
from mergepipe_pipeline.text import in_one_line, markdown, plain_of_markdown
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.test_release import TENSOR, with_nan

__all__ = ["with_nan"]
pytestmark = pytest.mark.filterwarnings("ignore::Warning")
FAILURE = run_failure(
    "Recipe a", "a", "0123456789", "It broke. Next: mend it.", fault=Fault.LASTING
)


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server that answers with a status, and what was posted there."""
    posted: list[dict[str, Any]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_failed_check_is_told_with_its_tensor_and_what_to_do(
    with_nan: Warehouse, instance: dg.DagsterInstance
) -> None:
    (run,) = instance.get_runs(dg.RunsFilter(job_name="merge_n"))
    told = failure_of(instance, run)
    assert told.recipe == "n"
    assert told.run_id == run.run_id
    assert TENSOR in told.cause
    assert told.text.startswith("Recipe n failed: n/snapshot: all_finite: ")
    assert told.next_step.startswith("mend the expert")


def test_an_index_whose_process_is_gone_is_told_by_its_expert(
    home: Warehouse, instance: dg.DagsterInstance
) -> None:
    job = build_definitions(home).resolve_job_def("index_experts")
    run = instance.create_run_for_job(job, tags={"dagster/partition": "math"})
    instance.report_run_failed(run, "its process is gone")
    told = failure_of(instance, run)
    assert told.text.startswith(
        "Landing, indexing or packing of math failed: its process is gone. Next: wait: "
    )


def test_the_next_step_of_an_error_is_told_apart_from_its_cause() -> None:
    assert (FAILURE.cause, FAILURE.next_step) == ("It broke", "mend it")
    assert FAILURE.text == "Recipe a failed: It broke. Next: mend it. Run 01234567."
    crash = run_failure("Recipe a", "a", "0", "a defect", fault=Fault.UNKNOWN)
    assert crash.next_step == "wait: it is tried 3 times in all, by itself"
    killed = run_failure("Recipe a", "a", "0", "its process is gone", fault=Fault.SURROUNDINGS)
    assert killed.next_step.startswith("wait: it is tried again by itself until it works")


def test_a_webhook_gets_json() -> None:
    with webhook() as (url, posted):
        assert post(url, FAILURE) is None
    assert posted == [
        {
            "text": FAILURE.text,
            "recipe": "a",
            "run_id": "0123456789",
            "cause": "It broke",
            "next_step": "mend it",
        }
    ]


def test_a_webhook_that_fails_harms_nothing_and_its_address_is_not_told() -> None:
    with webhook(500) as (url, _):
        assert post(url, FAILURE) == "the webhook answered 500"
    for wrong in (url, "file:///etc/passwd", "http://[", "http://127.0.0.1:99999/secret"):
        problem = post(wrong, FAILURE)
        assert problem
        assert wrong not in problem


def test_a_webhook_that_answers_bit_by_bit_is_given_up_after_its_time_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_TIMEOUT_S", 0.5)
    is_enough = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_drip, args=(server, is_enough), daemon=True)
        thread.start()
        assert post(f"http://127.0.0.1:{server.getsockname()[1]}/", FAILURE) == (
            "no answer: TimeoutError"
        )
        assert thread.is_alive(), "the answer had not ended"
        is_enough.set()
        thread.join()


def test_a_webhook_that_is_no_web_server_is_told_so_and_not_that_it_is_slow() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_greet, args=(server,), daemon=True)
        thread.start()
        told = post(f"http://127.0.0.1:{server.getsockname()[1]}/", FAILURE)
        thread.join()
    assert told == "no answer: BadStatusLine"
    assert post("http://127.0.0.1/a secret", FAILURE) == "no answer: InvalidURL"


def _greet(server: socket.socket) -> None:
    """Answer one who connects as a server of another protocol does."""
    with server.accept()[0] as connection:
        connection.recv(1 << 16)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def _drip(server: socket.socket, is_enough: threading.Event) -> None:
    """Answer one who connects with a byte at a time, for a minute: never later than a timeout
    allows.
    """
    with server.accept()[0] as connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(600):
            connection.sendall(b"x")
            if is_enough.wait(0.1):
                return


@given(st.text())
def test_text_comes_back_from_markdown(text: str) -> None:
    assert plain_of_markdown(markdown(text)) == in_one_line(text)
