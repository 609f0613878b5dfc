"""The real command from its start to every kind of end: what it says, what it exits with, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import jaxserve
from jaxserve.engine.client import SILENCE_LIMIT
from jaxserve.server.launch import INTERRUPT_DRAIN_SECONDS
from tests.checkpoints import (
    byte_tokens,
    edit_config,
    make_checkpoint,
    make_table_checkpoint,
    read_tensors,
    write_tensors,
)
from tests.server.running import MARK, Server, command, free_port, marked, serving, started, wait_until

SMALLEST: dict[str, Any] = {
    "max_num_seqs": 8,
    "row_buckets": (8,),
    "token_buckets": (16,),
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 2049,
}
A, B = byte_tokens(b"ab")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says a b a b … for up to 16,384 tokens, which take many seconds."""
    return make_table_checkpoint(tmp_path_factory.mktemp("endless"), {A: B, B: A}, max_position_embeddings=16384)


class Stream(threading.Thread):
    """A streamed completion, read by a thread; made, it has begun."""

    def __init__(self, server: Server, max_tokens: int, client: httpx.Client | None = None) -> None:
        super().__init__()
        self._stream = httpx.stream if client is None else client.stream
        self._url = f"{server.url}/v1/completions"
        self._body = body(max_tokens) | {"stream": True}
        self._begun = threading.Event()
        self.events: list[str] = []
        self.broken = False
        self.start()
        assert self._begun.wait(30) and not self.broken

    def run(self) -> None:
        try:
            with self._stream("POST", self._url, json=self._body, timeout=SILENCE_LIMIT + 60) as response:
                for line in response.iter_lines():
                    if line and not line.startswith(":"):  # a ping
                        self.events.append(line.removeprefix("data: "))
                        self._begun.set()
        except httpx.TransportError:
            self.broken = True
        self._begun.set()

    def text(self) -> str:
        """The text of a stream that came to its proper end."""
        self.join()
        assert self.events[-1] == "[DONE]" and not self.broken
        choices = [json.loads(event)["choices"][0] for event in self.events[:-1]]
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["text"] for choice in choices)

    def error(self) -> dict[str, Any]:
        """The error that ended the stream."""
        self.join()
        assert self.events[-1] == "[DONE]" and not self.broken
        return json.loads(self.events[-2])["error"]


def body(max_tokens: int) -> dict[str, Any]:
    return {"prompt": [A], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def post(server: Server, max_tokens: int) -> httpx.Response:
    return server.http.post("/v1/completions", json=body(max_tokens))


def assert_port_free(port: int) -> None:
    socket.create_server(("127.0.0.1", port)).close()


# ------------------------------------------------------------------ start


def test_op05_the_first_200_of_health_means_that_a_completion_works(endless: Path) -> None:
    with started(endless, **SMALLEST) as server:
        seen = set()
        models, health = server.status("/v1/models"), server.status()
        while health != 200:
            seen |= {models, health}
            time.sleep(0.02)
            models, health = server.status("/v1/models"), server.status()
        assert post(server, 3).json()["choices"][0]["text"] == "bab"
        assert 503 in seen <= {0, 503}, "it answers while it loads"


def test_version_and_help() -> None:
    script = Path(sysconfig.get_path("scripts"), "jaxserve")
    for line in ([script], [sys.executable, "-m", "jaxserve"]):
        done = subprocess.run([*line, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"jaxserve {jaxserve.__version__}\n"
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    for group in ("model:", "server:", "scheduling:", "memory and devices:"):
        assert f"\n{group}\n" in shown
    for flag in ("--model", "--port", "--max-model-len", "--num-gpu-blocks-override", "--shutdown-timeout"):
        assert f"\n  {flag} " in shown


def test_op14_nu06_two_servers_at_once_whose_unseeded_answers_all_differ(
    checkpoint: Callable[[str], Path],
) -> None:
    """What differs between two processes differs over a restart."""
    tiny = checkpoint("tiny-llama-bias")
    with started(tiny, **SMALLEST) as one, started(tiny, **SMALLEST) as other:
        texts = []
        for server in (one, other):
            server.wait_ready()
            for _ in range(5):
                sampled = {"prompt": [A], "temperature": 1, "max_tokens": 16, "ignore_eos": True}
                texts.append(server.http.post("/v1/completions", json=sampled).json()["choices"][0]["text"])
        assert len(set(texts)) == 10


# ------------------------------------------------------------------ faults at the start


def run_to_the_end(line: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command that cannot start; nothing of it may be left."""
    mark = os.urandom(8).hex()
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=os.environ | {MARK: mark})
    assert not marked(mark)
    assert not done.stdout and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def without_a_tensor(directory: Path) -> str:
    tensors = read_tensors(directory)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_tensors(directory, tensors)
    return "model.layers.1.mlp.up_proj.weight"


def unknown_architecture(directory: Path) -> str:
    edit_config(directory, architectures=["GrapefruitForCausalLM"], model_type="grapefruit")
    return "GrapefruitForCausalLM"


def without_a_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json"


@pytest.mark.parametrize("spoil", [without_a_tensor, unknown_architecture, without_a_tokenizer])
def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_1(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    named = spoil(make_checkpoint("tiny-llama-bias", tmp_path))
    code, stderr = run_to_the_end(command(tmp_path, port=free_port(), **SMALLEST))
    errors = [line for line in stderr.splitlines() if " INFO " not in line]
    assert code == 1 and len(errors) == 1 and named in errors[0]


@pytest.mark.parametrize("subcommand", [[], ["serve"]])
def test_a_missing_directory_is_one_line_and_exit_code_1(tmp_path: Path, subcommand: list[str]) -> None:
    missing = tmp_path / "nowhere"
    code, stderr = run_to_the_end([sys.executable, "-m", "jaxserve", *subcommand, "--model", str(missing)])
    assert code == 1 and stderr.count("\n") == 1 and str(missing) in stderr


def test_a_port_in_use_is_one_line_and_exit_code_1(endless: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, stderr = run_to_the_end(command(endless, port=port, **SMALLEST))
    assert code == 1 and stderr.count("\n") == 1 and f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "99999"),
        ("--port", "x"),
        ("--dtype", "int3"),
        ("--block-size", "7"),
        ("--api-server-count", "0"),
        ("--no-such-flag", "1"),
    ],
)
def test_a_bad_flag_is_named_and_exit_code_2(tmp_path: Path, flag: str, value: str) -> None:
    code, stderr = run_to_the_end([sys.executable, "-m", "jaxserve", "--model", str(tmp_path), flag, value])
    assert code == 2 and flag in stderr.splitlines()[-1]


# ------------------------------------------------------------------ SIGTERM


def test_op02_sigterm_lets_streams_finish_and_refuses_new_requests(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        streams = [Stream(server, 4000) for _ in range(2)]
        server.popen.terminate()
        wait_until(lambda: server.status() == 503)
        refused = post(server, 1)
        assert all(stream.is_alive() for stream in streams), "the test would show nothing"
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "shutting_down"
        assert [stream.text() for stream in streams] == ["ba" * 2000] * 2
        assert server.wait_exit(10) == 0, "it outlasts its streams"
        assert_port_free(server.port)


def test_sigterm_to_all_processes_lets_streams_finish(endless: Path) -> None:
    """What systemd (KillMode=control-group, its default) and coreutils' timeout send."""
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 4000)
        os.killpg(server.popen.pid, signal.SIGTERM)
        assert server.wait_exit(60) == 0
        assert stream.text() == "ba" * 2000


def test_sigterm_cuts_off_what_outlasts_the_shutdown_timeout(endless: Path) -> None:
    with serving(endless, shutdown_timeout=0.5, **SMALLEST) as server:
        stream = Stream(server, 16000)
        server.popen.terminate()
        assert server.wait_exit() == 0
        assert "shutting down" in stream.error()["message"]


def test_sigterm_while_starting(endless: Path) -> None:
    with started(endless, **SMALLEST) as server:
        wait_until(lambda: "compiled 1/" in server.log, 60)
        server.popen.terminate()
        assert server.wait_exit() == 0
        assert_port_free(server.port)


# ------------------------------------------------------------------ SIGINT


@pytest.mark.parametrize("moment", ["", "loaded 1/1 layers", "compiled 1/"], ids=["early", "loading", "compiling"])
def test_op15_ctrl_c_while_starting(endless: Path, moment: str) -> None:
    with started(endless, **SMALLEST) as server:
        # Its children show that the command's own imports are done.
        wait_until(lambda: moment in server.log and len(server.processes()) == 3, 60)
        server.interrupt()
        assert server.wait_exit() in (0, 130)
        assert_port_free(server.port)


def test_op15_ctrl_c_while_importing(endless: Path) -> None:
    code = """
import os, signal, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "jaxserve.server.launch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Watch())
from jaxserve.cli import main
sys.exit(main(sys.argv[1:]))
"""
    code_of_exit, stderr = run_to_the_end([sys.executable, "-c", code, *command(endless, **SMALLEST)[3:]])
    assert code_of_exit in (0, 130, -signal.SIGINT) and not stderr


def test_op15_ctrl_c_under_load(endless: Path) -> None:
    """Once is enough. Streams get a few seconds, and then are told."""
    with serving(endless, **SMALLEST) as server:
        streams = [Stream(server, 16000) for _ in range(2)]
        server.interrupt()
        assert server.wait_exit(10) in (0, 130)
        assert all("shutting down" in stream.error()["message"] for stream in streams)
        assert_port_free(server.port)


def test_op15_ctrl_c_twice_does_not_wait_for_streams(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 16000)
        server.interrupt()
        wait_until(lambda: server.status() == 503)
        server.interrupt()
        assert server.wait_exit(INTERRUPT_DRAIN_SECONDS - 0.5) in (0, 130)
        assert "shutting down" in stream.error()["message"]


def test_a_second_signal_that_comes_at_once_is_not_lost(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 16000)
        server.interrupt()
        server.popen.terminate()  # not the same signal: the kernel would make one of two
        assert server.wait_exit(INTERRUPT_DRAIN_SECONDS - 0.5) in (0, 130)
        assert "shutting down" in stream.error()["message"]


# ------------------------------------------------------------------ death


def test_the_engines_death_ends_streams_with_an_error_and_everything_else(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 16000)
        server.engine.kill()
        assert stream.error()["code"] == "engine_dead"
        assert server.status() == 503
        refused = post(server, 1)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert server.wait_exit() not in (0, None)
        assert "the engine process was killed by SIGKILL" in server.log
        assert_port_free(server.port)


def test_the_api_process_death_ends_everything(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 16000)
        server.api.kill()
        stream.join()
        assert stream.broken
        assert server.wait_exit() not in (0, None)
        assert "the API process was killed by SIGKILL" in server.log
        assert_port_free(server.port)


def test_the_parents_death_ends_everything(endless: Path) -> None:
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 16000)
        assert len(server.processes()) == 3
        server.popen.kill()
        server.popen.wait()
        wait_until(lambda: not server.processes(), 5)
        stream.join()
        assert stream.broken
        wait_until(lambda: server.status() == 0, 5)


@pytest.mark.parametrize("moment", ["loaded 1/1 layers", "compiled 1/"])
def test_the_parents_death_ends_a_start(endless: Path, moment: str) -> None:
    with started(endless, **SMALLEST) as server:
        wait_until(lambda: moment in server.log, 60)
        server.popen.kill()
        server.popen.wait()
        wait_until(lambda: not server.processes(), 5)


@pytest.mark.slow
def test_health_tells_of_an_engine_that_hangs(endless: Path) -> None:
    """With work and no sign of life. It is 200 again when the engine goes on."""
    with serving(endless, **SMALLEST) as server:
        stream = Stream(server, 1000)
        server.engine.suspend()
        begin = time.monotonic()
        wait_until(lambda: server.status() == 503, SILENCE_LIMIT + 10)
        assert time.monotonic() - begin > SILENCE_LIMIT / 2, "a long step is no fault"
        server.engine.resume()
        wait_until(lambda: server.status() == 200)
        assert stream.text() == "ba" * 500
