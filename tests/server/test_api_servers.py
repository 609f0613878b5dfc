"""Several API processes on one port and one engine: who answers, who dies, and what of it others notice."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.checkpoints import byte_tokens, make_table_checkpoint
from tests.exposition import samples
from tests.server.running import Server, command, serving, wait_until
from tests.server.test_lifecycle import SMALLEST, Stream, run_to_the_end

A, B = byte_tokens(b"ab")
RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_table_checkpoint(tmp_path_factory.mktemp("endless"), {A: B, B: A}, max_position_embeddings=16384)


@contextmanager
def two(model: Path) -> Iterator[Server]:
    with serving(model, api_server_count=2, **SMALLEST) as server:
        wait_until(lambda: len(server.apis) == 2)
        yield server


@pytest.fixture
def server(endless: Path) -> Iterator[Server]:
    with two(endless) as server:
        yield server


@pytest.fixture(scope="module")
def lasting(endless: Path) -> Iterator[Server]:
    """For tests that leave it as it was."""
    with two(endless) as server:
        yield server


def connections(server: Server, process: psutil.Process) -> set[int]:
    """Ports of the clients that a process talks to."""
    found = process.net_connections("tcp")
    return {c.raddr.port for c in found if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == server.port}


@contextmanager
def streams_of_each(server: Server, max_tokens: int) -> Iterator[dict[int, Stream]]:
    """A stream on every process, by its pid."""
    found: dict[int, Stream] = {}
    apis = server.apis
    with ExitStack() as stack:
        while len(found) < len(apis):
            client = stack.enter_context(httpx.Client())
            before = {api.pid: connections(server, api) for api in apis}
            client.get(f"{server.url}/version", timeout=30)  # on a connection that the stream will use, too
            [pid] = [api.pid for api in apis if connections(server, api) - before[api.pid]]
            if pid not in found:
                found[pid] = Stream(server, max_tokens, client)
        yield found


def ask_all(server: Server, path: str) -> list[httpx.Response]:
    """The answers to so many connections that every process gives some."""
    return [httpx.get(f"{server.url}{path}", timeout=30) for _ in range(12)]


def running(server: Server) -> list[float]:
    """How many requests run, as every process has it."""
    return [
        sum(value for name, value in samples(answer.text).items() if name.startswith(RUNNING))
        for answer in ask_all(server, "/metrics")
    ]


def test_all_serve_and_know_the_same(lasting: Server) -> None:
    with streams_of_each(lasting, 4000) as streams:
        assert running(lasting) == [2] * 12
        assert [answer.json() for answer in ask_all(lasting, "/load")] == [{"server_load": 2}] * 12
        assert [answer.status_code for answer in ask_all(lasting, "/health")] == [200] * 12
        assert [stream.text() for stream in streams.values()] == ["ba" * 2000] * 2


def test_another_server_does_not_join_in_on_the_port(lasting: Server, endless: Path) -> None:
    """Though the port is shared among processes of one server."""
    for count in (1, 2):
        code, stderr = run_to_the_end(command(endless, port=lasting.port, api_server_count=count, **SMALLEST))
        assert code == 1 and stderr.count("\n") == 1 and f"127.0.0.1:{lasting.port}: Address already in use" in stderr


def test_a_dead_one_takes_its_requests_along_and_is_replaced(server: Server) -> None:
    with streams_of_each(server, 6000) as streams:
        victim, survivor = server.apis
        victim.kill()
        streams[victim.pid].join()
        assert streams[victim.pid].broken
        # Its successor's connections wait for it, and never hear that the model is loading.
        assert [answer.status_code for answer in ask_all(server, "/health")] == [200] * 12
        assert running(server) == [1] * 12
        assert streams[survivor.pid].text() == "ba" * 3000
    assert len(server.apis) == 2 and victim.pid not in {api.pid for api in server.apis}
    assert "was killed by SIGKILL, perhaps for lack of memory, and its requests with it" in server.log


def test_two_deaths_in_a_row_end_the_server(server: Server) -> None:
    for _ in range(2):
        for api in server.apis:
            api.kill()
    assert server.wait_exit() == 1
    assert server.log.count("starting another") == 1


def test_sigterm_lets_the_streams_of_all_finish(server: Server) -> None:
    with streams_of_each(server, 3000) as streams:
        server.popen.terminate()
        wait_until(lambda: server.status() == 503)
        assert [stream.text() for stream in streams.values()] == ["ba" * 1500] * 2
        assert server.wait_exit(10) == 0, "it waits for nobody"
    socket.create_server(("127.0.0.1", server.port)).close()


def test_a_second_signal_cuts_off_the_streams_of_all(server: Server) -> None:
    with streams_of_each(server, 16000) as streams:
        server.popen.terminate()
        wait_until(lambda: server.status() == 503)
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_exit(10) == 0
        assert all("shutting down" in stream.error()["message"] for stream in streams.values())
