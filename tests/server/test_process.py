"""An API process as its parent sees it: loading, draining, and every way to die."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trustme

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.messages import Abort, Add, ModelInfo
from jaxserve.lifeline import CUT_SIGNAL, DRAIN_SIGNAL
from jaxserve.server import launch
from tests.fake_engine import FakeEngine
from tests.server.conftest import MODEL, wait_until
from tests.server.test_tools import TEMPLATE

BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    engine: FakeEngine
    http: httpx.Client
    engine_end: int
    parent_end: int

    def status(self, path: str = "/health") -> int:
        return self.http.get(path).status_code

    def in_background(self, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        """Asks for a chat from a thread; the list holds the response once there is one."""
        responses: list[httpx.Response] = []

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):  # no response, where the process is killed
                responses.append(httpx.post(f"{self.http.base_url}/v1/chat/completions", json=BODY | fields))

        thread = threading.Thread(target=ask)
        thread.start()
        self.engine.wait_for(Add)
        return thread, responses


@contextlib.contextmanager
def started(
    directory: Path, *, number: int = 0, ready: bool = True, verify: ssl.SSLContext | bool = True, **settings: Any
) -> Iterator[Process]:
    """The process with its three pipes, ended with the block at the latest."""
    info = ModelInfo(vocab_size=520, max_model_len=256, max_kv_tokens=256, max_logprobs=20, hidden_size=4, version="0")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine(lambda _: itertools.repeat(5), info, step=0.01))
        if not ready:
            engine.loaded.clear()
        (engine_fd, engine_end), (parent_fd, parent_end) = os.pipe(), os.pipe()
        engine_config = EngineConfig(model=str(directory))
        config = ServerConfig(engine=engine_config, served_model_name=(MODEL,), port=0, **settings)
        [listener] = launch.listen(config)
        stack.enter_context(listener)
        startup = {
            "config": msgspec.to_builtins(config),
            "listen_fd": listener.fileno(),
            "engine_address": engine.address,
            "engine_fd": engine_fd,
            "parent_fd": parent_fd,
            "model_directory": str(directory),
            "number": number,
        }
        popen = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "jaxserve.server.process"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(listener.fileno(), engine_fd, parent_fd),
            )
        )
        stack.callback(popen.kill)
        os.close(engine_fd)
        os.close(parent_fd)
        assert popen.stdin is not None
        popen.stdin.write(json.dumps(startup).encode())
        popen.stdin.close()
        url = "http://uds" if config.uds else f"http://127.0.0.1:{listener.getsockname()[1]}"
        transport = httpx.HTTPTransport(uds=config.uds, verify=verify)
        scheme = "https" if config.ssl_certfile else "http"
        http = stack.enter_context(
            httpx.Client(base_url=url.replace("http", scheme, 1), timeout=20, transport=transport)
        )
        process = Process(popen, engine, http, engine_end, parent_end)
        try:
            if ready:
                wait_until(lambda: process.status() == 200)
            yield process
        finally:
            for fd in (process.engine_end, process.parent_end):
                with contextlib.suppress(OSError):
                    os.close(fd)


@pytest.fixture(scope="module")
def directory(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["tiny-llama-3.1"]


def test_api_processes_never_import_jax() -> None:
    code = "import sys, jaxserve.server.process; print([m for m in ('jax', 'jaxlib', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_op05_503_until_a_completion_works(directory: Path) -> None:
    with started(directory, ready=False) as process:
        for path in ("/health", "/v1/models", "/metrics", "/load"):
            assert process.status(path) == 503
        response = process.http.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json()["error"]["code"] == "loading"
        assert process.status("/version") == 200
        process.engine.loaded.set()
        wait_until(lambda: process.status() == 200)
        assert process.http.post("/v1/chat/completions", json=BODY).status_code == 200


def test_a_drain_when_idle(directory: Path) -> None:
    with started(directory) as process:
        process.popen.send_signal(signal.SIGINT)  # the parent's business
        assert process.status() == 200
        process.popen.send_signal(DRAIN_SIGNAL)
        assert process.popen.wait(5) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_lets_running_requests_finish(directory: Path, stream: bool) -> None:
    with started(directory) as process:
        thread, responses = process.in_background(stream=stream)
        process.popen.send_signal(DRAIN_SIGNAL)
        wait_until(lambda: process.status() == 503)
        refused = process.http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        thread.join()
        assert responses[0].status_code == 200
        assert '"finish_reason":"length"' in responses[0].text
        assert process.popen.wait(5) == 0
        assert not process.engine.of_kind(Abort)


def test_a_drain_cuts_off_what_takes_too_long(directory: Path) -> None:
    with started(directory, shutdown_timeout=0.3) as process:
        process.engine.hold.set()
        thread, streamed = process.in_background(stream=True)
        process.engine.received.clear()
        other, plain = process.in_background()
        process.popen.send_signal(DRAIN_SIGNAL)
        thread.join()
        other.join()
        assert process.popen.wait(5) == 0
        *_, event, done = streamed[0].text.strip().split("\n\n")
        assert "shutting down" in json.loads(event.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert plain[0].status_code == 503
        wait_until(lambda: process.engine.num_running == 0)


def test_the_parent_can_cut_the_wait_short(directory: Path) -> None:
    with started(directory, shutdown_timeout=60) as process:
        process.engine.hold.set()
        thread, streamed = process.in_background(stream=True)
        process.popen.send_signal(DRAIN_SIGNAL)
        wait_until(lambda: process.status() == 503)
        process.popen.send_signal(CUT_SIGNAL)
        thread.join()
        assert process.popen.wait(5) == 0
        assert "shutting down" in streamed[0].text


def test_the_engines_death_is_told(directory: Path) -> None:
    with started(directory) as process:
        process.engine.hold.set()
        thread, streamed = process.in_background(stream=True)
        process.engine.received.clear()
        other, plain = process.in_background()
        os.close(process.engine_end)
        thread.join()
        other.join()
        *_, event, done = streamed[0].text.strip().split("\n\n")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert done == "data: [DONE]"
        assert plain[0].status_code == 503 and plain[0].json()["error"]["code"] == "engine_dead"
        for path in ("/health", "/metrics", "/v1/models"):
            assert process.status(path) == 503
        assert process.http.post("/v1/chat/completions", json=BODY).status_code == 503
        process.popen.send_signal(DRAIN_SIGNAL)
        assert process.popen.wait(5) == 0


def test_it_dies_with_its_parent(directory: Path) -> None:
    with started(directory) as process:
        process.engine.hold.set()
        thread, _ = process.in_background(stream=True)
        os.close(process.parent_end)
        assert process.popen.wait(5) == 1
        thread.join()


def test_a_model_without_a_tokenizer_ends_it(tmp_path: Path) -> None:
    with started(tmp_path, ready=False) as process:
        assert process.popen.wait(20) == 1
        assert process.popen.stderr is not None
        lines = process.popen.stderr.read().decode().splitlines()
        assert len(lines) == 1 and "tokenizer.json does not exist" in lines[0]


@pytest.mark.parametrize(("number", "template", "warnings"), [(0, None, 1), (1, None, 0), (0, TEMPLATE, 0)])
def test_one_process_warns_of_a_template_without_tools(
    directory: Path, tmp_path: Path, number: int, template: str | None, warnings: int
) -> None:
    settings: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    if template is not None:
        path = tmp_path / "tools.jinja"
        path.write_text(template)
        settings["chat_template"] = str(path)
    with started(directory, number=number, **settings) as process:
        process.popen.send_signal(DRAIN_SIGNAL)
        process.popen.wait(5)
        assert process.popen.stderr is not None
        log = process.popen.stderr.read().decode()
    assert log.count("the chat template shows no tools") == warnings


def test_the_access_log_is_quiet_for_machines(directory: Path) -> None:
    with started(directory) as process:
        process.status("/health")
        process.status("/metrics")
        process.status("/version")
        process.http.post("/v1/chat/completions", json=BODY | {"max_tokens": 1})
        process.popen.send_signal(DRAIN_SIGNAL)
        process.popen.wait(5)
        assert process.popen.stderr is not None
        log = process.popen.stderr.read().decode()
    assert "/health" not in log and "/metrics" not in log
    assert log.count("/version") == log.count("POST '/v1/chat/completions' 200") == 1


def test_the_access_log_says_what_went_wrong_but_no_secret(directory: Path) -> None:
    with started(directory, api_key=("sk-secret",)) as process:
        process.http.post("/v1/completions?api_key=sk-secret", json={"prompt": "private"})
        headers = {"Authorization": "Bearer sk-secret"}
        process.http.post("/v1/completions", json={"prompt": "private", "top_p": 2}, headers=headers)
        with process.http.stream(
            "POST", "/v1/chat/completions", json=BODY | {"stream": True}, headers=headers
        ) as stream:
            next(stream.iter_bytes())
        process.engine.wait_for(Abort)
        process.popen.send_signal(DRAIN_SIGNAL)
        process.popen.wait(5)
        assert process.popen.stderr is not None
        log = process.popen.stderr.read().decode()
    assert "401" in log and "(invalid_api_key)" in log
    assert "400" in log and "(invalid_request top_p)" in log
    assert "(the client left)" in log
    assert "secret" not in log and "private" not in log


def test_a_unix_socket(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with started(directory, uds=str(path)) as process:
        assert process.http.post("/v1/chat/completions", json=BODY | {"max_tokens": 1}).status_code == 200
        with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"):
            launch.listen(ServerConfig(engine=EngineConfig(model="x"), uds=str(path)))
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="cannot listen on"):
        launch.listen(ServerConfig(engine=EngineConfig(model="x"), uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"


def test_tls(directory: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    for part in certificate.cert_chain_pems:
        part.write_to_path(chain, append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with started(directory, verify=trusting, ssl_keyfile=str(key), ssl_certfile=str(chain)) as process:
        assert str(process.http.base_url).startswith("https://") and process.status() == 200
    launch.check_tls(ServerConfig(engine=EngineConfig(model="x"), ssl_keyfile=str(key), ssl_certfile=str(chain)))
    for files in ({"ssl_certfile": str(key)}, {"ssl_certfile": "/nowhere"}):
        with pytest.raises(ValueError, match="--ssl-certfile"):
            launch.check_tls(ServerConfig(engine=EngineConfig(model="x"), **files))
