"""Several API processes on one port and one engine: who answers, who dies, and what of it others notice."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    with serving(model, api_server_count=2, **SMALLEST | {"max_num_seqs": 8, "row_buckets": (8,)}) as server:
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


def streams_of_each(server: Server, max_tokens: int) -> dict[int, list[Stream]]:
    """Streams by the process that they run on, at least one on each."""
    found: dict[int, list[Stream]] = {api.pid: [] for api in server.apis}
    for _ in range(8):
        if all(found.values()):
            return found
        before = {api.pid: connections(server, api) for api in server.apis}
        stream = Stream(server, max_tokens)
        [pid] = [api.pid for api in server.apis if connections(server, api) - before[api.pid]]
        found[pid].append(stream)
    raise AssertionError("all connections go to the same process")


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
    streams = [stream for several in streams_of_each(lasting, 3000).values() for stream in several]
    assert running(lasting) == [len(streams)] * 12
    assert [answer.json() for answer in ask_all(lasting, "/load")] == [{"server_load": len(streams)}] * 12
    assert [answer.status_code for answer in ask_all(lasting, "/health")] == [200] * 12
    assert [stream.text() for stream in streams] == ["ba" * 1500] * len(streams)


def test_another_server_does_not_join_in_on_the_port(lasting: Server, endless: Path) -> None:
    """Though the port is shared among processes of one server."""
    for count in (1, 2):
        code, stderr = run_to_the_end(command(endless, port=lasting.port, api_server_count=count, **SMALLEST))
        assert code == 1 and stderr.count("\n") == 1 and f"127.0.0.1:{lasting.port}: Address already in use" in stderr


def test_a_dead_one_takes_its_requests_along_and_is_replaced(server: Server) -> None:
    streams = streams_of_each(server, 6000)
    victim, survivor = server.apis
    victim.kill()
    for stream in streams[victim.pid]:
        stream.join()
        assert stream.broken
    wait_until(lambda: set(running(server)) == {len(streams[survivor.pid])}, 5)
    assert "was killed by SIGKILL, perhaps for lack of memory, and its requests with it" in server.log
    wait_until(lambda: len(server.apis) == 2 and victim.pid not in {api.pid for api in server.apis})
    # The new one's connections have waited for it; it never says that the model is loading.
    assert [answer.status_code for answer in ask_all(server, "/health")] == [200] * 12
    assert [stream.text() for stream in streams[survivor.pid]] == ["ba" * 3000] * len(streams[survivor.pid])


def test_two_deaths_in_a_row_end_the_server(server: Server) -> None:
    for _ in range(2):
        for api in server.apis:
            api.kill()
    assert server.wait_exit() == 1
    assert server.log.count("starting another") == 1


def test_sigterm_lets_the_streams_of_all_finish(server: Server) -> None:
    streams = [stream for several in streams_of_each(server, 3000).values() for stream in several]
    begin = time.monotonic()
    server.popen.terminate()
    wait_until(lambda: server.status() in (0, 503))
    assert server.wait_exit(60) == 0
    assert [stream.text() for stream in streams] == ["ba" * 1500] * len(streams)
    assert time.monotonic() - begin < 25, "it did not wait for nobody"
    socket.create_server(("127.0.0.1", server.port)).close()


def test_a_second_signal_cuts_off_the_streams_of_all(server: Server) -> None:
    streams = [stream for several in streams_of_each(server, 16000).values() for stream in several]
    server.popen.terminate()
    wait_until(lambda: server.status() in (0, 503))
    server.popen.send_signal(signal.SIGTERM)
    assert server.wait_exit(10) == 0
    assert all("shutting down" in stream.error()["message"] for stream in streams)
