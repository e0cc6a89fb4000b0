"""A headless Chromium, driven over a pipe by its DevTools protocol: no port and no package."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
#: Seconds that one answer of the browser, and the words of one page, may take.
_ANSWER_S, _PAGE_S = 30, 60
_SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Page:
    """One tab: opens addresses, waits for words, clicks on them, and takes pictures."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), answers
        self._last, self._received, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._ask("Page.enable")

    def open(self, url: str, width: int, height: int) -> None:
        """Load an address in a window of so many pixels."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._ask("Page.navigate", url=url)

    def text(self) -> str:
        """The words that a person can see."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, *words: str, seconds: float = _PAGE_S) -> str:
        """The page's text once it has all words. Raises AssertionError with what it has."""
        until = time.monotonic() + seconds
        while missing := [w for w in words if w not in (text := self.text())]:
            assert time.monotonic() < until, f"{missing} are not on the page:\n{text}"
            time.sleep(0.2)
        return text

    def scroll_to(self, words: str) -> None:
        """Bring the first element with exactly these words into sight."""
        wanted = f"//*[normalize-space(text())={json.dumps(words)}]"
        self.evaluate(
            f"document.evaluate({json.dumps(wanted)}, document, null, 9, null)"
            ".singleNodeValue.scrollIntoView({block: 'start'})"
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """What the window shows, as PNG."""
        return b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser's side of the pipe, at which it exits."""
        self._commands.close()
        os.close(self._answers)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"Chromium does not answer to {method}.")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium ended."
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a Chromium whose profile lies in `folder`; the browser ends with the context."""
    assert CHROMIUM, "chromium is not installed"
    (theirs_in, ours_out), (ours_in, theirs_out) = map(_high, (os.pipe(), os.pipe()))
    # The browser reads commands from file 3 and answers to file 4.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *_SWITCHES, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(ours_out, ours_in)
        yield page
        page.close()
        process.wait(timeout=10)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def _high(ends: tuple[int, int]) -> list[int]:
    """The ends of a pipe at numbers that no redirection of the shell overwrites."""
    found = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return found
