"""The demo model served on a GPU in bfloat16: many streams at once, each equal to its lone run as far as bf16 owes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.demo]

STREAMS = 64
TIE = 0.1
"""Below this gap between the two likeliest tokens, bf16 may choose either."""


@dataclass
class Answer:
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "jaxserve", "--model", "demo", "--port", str(port), "--max-num-seqs", "64"]
    command += ["--row-buckets", "1,16,64", "--token-buckets", "512,2048", "--max-num-batched-tokens", "2048"]
    server = subprocess.Popen(command, env=os.environ)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=120, limits=httpx.Limits(max_connections=128)
        ) as http:
            for _ in range(600):
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert server.poll() is None
                time.sleep(0.5)
            yield http
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def complete(client: httpx.Client, number: int) -> Answer:
    body = {
        "prompt": f"{number} plus {number} is",
        "max_tokens": 20 + number,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": True,
    }
    answer = Answer()
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        [choice] = json.loads(line)["choices"]
        answer.finish_reason = choice["finish_reason"]
        logprobs = choice["logprobs"] or {"tokens": [], "top_logprobs": []}
        answer.tokens += logprobs["tokens"]
        for top in logprobs["top_logprobs"]:
            values = sorted(top.values(), reverse=True)
            answer.gaps.append(values[0] - values[1] if len(values) > 1 else 0.0)
    return answer


def test_many_streams_equal_their_lone_runs(client: httpx.Client):
    alone = [complete(client, number) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(pool.map(lambda number: complete(client, number), range(STREAMS)))
    compared = 0
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert len(other.tokens) == 20 + number and other.finish_reason == "length"
        owed = next((i for i, gap in enumerate(one.gaps) if gap < TIE), len(one.gaps))
        assert other.tokens[:owed] == one.tokens[:owed], f"stream {number}"
        compared += owed
    assert compared > 10 * STREAMS, "too little was owed to show anything"
    metrics = client.get("/metrics").text
    assert 'jaxserve:compiles_total{model_name="demo",phase="serving"} 0.0' in metrics
