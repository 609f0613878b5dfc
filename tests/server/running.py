"""The real command as a child process: started on a free port, looked into, and proved gone at the end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from tests.conftest import SMALL
from tests.exposition import samples

MARK = "JAXSERVE_TEST_MARK"
"""Environment variable that every process of a server inherits: none escapes, whoever its parent is by then."""
START_SECONDS = 300
"""Without a compilation cache, on a busy machine."""


@dataclass
class Server:
    """A running command. ``http`` waits for answers as long as a start may take."""

    popen: subprocess.Popen[bytes]
    port: int
    log_path: Path
    mark: str
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def status(self, path: str = "/health") -> int:
        """The status of a GET; 0 where nobody answers."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def metrics(self) -> dict[str, float]:
        response = self.http.get("/metrics").raise_for_status()
        return samples(response.text)

    def processes(self) -> list[psutil.Process]:
        """What is alive of the command and of all that it started."""
        return marked(self.mark)

    def process(self, module: str) -> psutil.Process:
        """The process that runs this module."""
        [found] = self._running(module)
        return found

    def _running(self, module: str) -> list[psutil.Process]:
        def runs(process: psutil.Process) -> bool:
            try:
                return module in process.cmdline()
            except psutil.NoSuchProcess:  # it has died since it was listed
                return False

        return list(filter(runs, self.processes()))

    @property
    def apis(self) -> list[psutil.Process]:
        return self._running("jaxserve.server.process")

    @property
    def engine(self) -> psutil.Process:
        return self.process("jaxserve.engine.process")

    @property
    def api(self) -> psutil.Process:
        return self.process("jaxserve.server.process")

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to all processes of a command."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def wait_ready(self) -> None:
        """Until /health says 200; before that it is refused or 503, and nothing else (OP05)."""
        deadline = time.monotonic() + START_SECONDS
        while (status := self.status()) != 200:
            assert status in (0, 503)
            assert self.popen.poll() is None, "it ended instead of serving"
            assert time.monotonic() < deadline, "it does not get ready"
            time.sleep(0.02)

    def wait_exit(self, seconds: float = 10.0) -> int:
        """The exit code of the command, which leaves no process behind and no traceback in the log."""
        code = self.popen.wait(seconds)
        assert not self.processes(), "the command has ended before its children"
        assert "Traceback" not in self.log
        return code

    def official(self) -> openai.OpenAI:
        """OpenAI's own client, which refuses answers that are not as documented."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        )


@contextmanager
def started(model: Path | str, *flags: str, **options: Any) -> Iterator[Server]:
    """The command with these flags, and ``SMALL`` options with changes. It is stopped with the block, if it still runs
    then; either way everything of it must be gone."""
    port = free_port()
    mark = secrets.token_hex(16)
    # A server that was killed leaves its scratch directory, in here.
    with tempfile.TemporaryDirectory(prefix="js-") as temp:
        log_path = Path(temp, "log")
        scratch = Path(temp, "tmp")
        scratch.mkdir()
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                command(model, *flags, port=port, **options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: mark, "TMPDIR": str(scratch)},
                start_new_session=True,
            )
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_SECONDS) as http:
            server = Server(popen, port, log_path, mark, http)
            try:
                yield server
                if popen.poll() is None:
                    popen.terminate()
                    assert popen.wait(10) == 0
                wait_until(lambda: not server.processes(), 5)
                assert popen.returncode == -signal.SIGKILL or not list(scratch.iterdir())
            finally:
                print(server.log)  # pytest shows it with a failure
                for process in server.processes():
                    process.kill()
                popen.wait()


@contextmanager
def serving(model: Path | str, *flags: str, **options: Any) -> Iterator[Server]:
    """Like ``started``, ready for requests."""
    with started(model, *flags, **options) as server:
        server.wait_ready()
        yield server


def command(model: Path | str, *flags: str, **options: Any) -> list[str]:
    """The command line; options are named as in ``EngineConfig`` and ``ServerConfig``."""
    line = [sys.executable, "-m", "jaxserve", "--model", str(model), *flags]
    for name, value in {**SMALL, **options}.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        line += [f"--{name.replace('_', '-')}", text]
    return line


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def marked(mark: str) -> list[psutil.Process]:
    """Processes with this mark in their environment; zombies, which only await their parent, have none."""
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == mark]


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(0.01)
