"""Measures what one API process spends on streaming, in front of a scripted engine: events per second of its CPU time.

    python bench/streaming.py                       # 256 streams, a token each every 20 ms
    python bench/streaming.py --step-ms 0 --clients 2   # as fast as it goes

It needs no GPU and no model: the engine of the tests answers with plain words.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import psutil

from bench.serving import get_json, load
from bench.serving_client import Plan, Record, Task
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.messages import ModelInfo
from jaxserve.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.fake_engine import FakeEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100, help="of every stream [100]")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time between two tokens of a stream [20]")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5, help="runs, of which the best counts [5]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = make_checkpoint("tiny-llama-3.1", Path(name) / "model")
        with api_process(directory, arguments.step_ms / 1000) as (url, process):
            get_json(f"{url}/v1/models", wait=30)
            plans = [Plan([1] * 16, arguments.tokens)] * arguments.streams
            task = Task(url=url, model="tiny", api_key=None, plans=plans, concurrency=arguments.streams)
            load(task, 1)  # what runs first may be slow
            figures = [measure(task, process, arguments.clients) for _ in range(arguments.repeat)]
    print(min(figures, key=lambda line: line[0])[1])


def measure(task: Task, process: psutil.Process, clients: int) -> tuple[float, str]:
    """Seconds of CPU an event, and a line about the run."""
    before, begin = process.cpu_times(), time.monotonic()
    reports = load(task, clients)
    after, seconds = process.cpu_times(), time.monotonic() - begin
    records: list[Record] = [record for report in reports for record in report.records]
    cpu = after.user + after.system - before.user - before.system
    events = sum(len(record.times) for record in records)
    failed = sum(record.error is not None for record in records)
    line = f"{events} events in {seconds:.2f} s, {cpu:.2f} s of CPU: {events / cpu:,.0f} events/s a core,"
    return cpu / events, f"{line} {cpu / events * 1e6:.1f} µs each; {failed} requests failed"


@contextlib.contextmanager
def api_process(directory: Path, step: float) -> Iterator[tuple[str, psutil.Process]]:
    """An API process of this tree, and its address."""
    tokenizer = Tokenizer.load(directory)
    words = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isalpha()]
    info = ModelInfo(
        vocab_size=tokenizer.vocab_size,
        max_model_len=4096,
        max_kv_tokens=1 << 24,
        max_logprobs=20,
        hidden_size=64,
        version="0",
    )
    config = ServerConfig(engine=EngineConfig(model=str(directory)), served_model_name=("tiny",), log_level="warning")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine(lambda _: itertools.cycle(words), info, step=step))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        (engine_fd, engine_end), (parent_fd, parent_end) = os.pipe(), os.pipe()
        startup = {
            "config": config,
            "listen_fd": listener.fileno(),
            "engine_address": engine.address,
            "engine_fd": engine_fd,
            "parent_fd": parent_fd,
            "model_directory": str(directory),
        }
        popen = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.server.process"],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(), engine_fd, parent_fd),
        )
        assert popen.stdin is not None
        with popen.stdin as pipe:
            pipe.write(msgspec.json.encode(startup))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", psutil.Process(popen.pid)
        finally:
            popen.kill()
            popen.wait()
            for fd in (engine_fd, engine_end, parent_fd, parent_end):
                os.close(fd)


if __name__ == "__main__":
    main()
