"""Loads a server that speaks OpenAI's API and measures what its clients see.

    python bench/serving.py --concurrency 1,32,256 --requests 12,64,512     # closed loops, one after another
    python bench/serving.py --rate 8 --requests 200 --slo ttft=2,tpot=0.05  # open loop, Poisson arrivals

The server, jaxserve or another, runs already at --url. Requests are streamed completions of random token ids, greedy,
EOS ignored. Their lengths are log-normal by --seed, or fixed by --input-len and --output-len. The load comes from
processes of its own (--clients); a client whose CPU share nears 100 % measures itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import numpy as np

from bench.serving_client import Plan, Record, Report, Task
from bench.serving_report import LATENCIES, summarise, table

ROOT = Path(__file__).parent.parent
LEAD_SECONDS = 0.2
"""Between the word to start and the start, for all clients to hear it."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    url = arguments.url.rstrip("/").removesuffix("/v1")
    models = get_json(f"{url}/v1/models", arguments.api_key, arguments.wait)
    model = arguments.model or models["data"][0]["id"]
    result: dict[str, Any] = {
        "machine": machine(),
        "server": {"url": url, "model": model, "version": version(url)},
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "loads": [],
    }

    def run(plans: list[Plan], concurrency: int, clients: int) -> list[Report]:
        task = Task(url=url, model=model, api_key=arguments.api_key, plans=plans, concurrency=concurrency)
        return load(task, clients)

    if arguments.warmup:
        run(plan(arguments, arguments.warmup), arguments.warmup, 1)
    for value, requests in arguments.loads:
        plans = plan(arguments, requests, value if arguments.rate else None)
        concurrency = requests if arguments.rate else min(int(value), requests)
        reports = run(plans, concurrency, min(arguments.clients, concurrency))
        records: list[Record] = [record for report in reports for record in report.records]
        figures = {
            "load": f"{'rate' if arguments.rate else 'concurrency'} {value:g}",
            **summarise(records, arguments.slo),
        }
        figures["client_cpu"] = [report.cpu_seconds / report.seconds for report in reports]
        result["loads"].append(figures)
    about = ", ".join(f"{key} {value}" for key, value in (result["machine"] | result["server"]).items() if value)
    print(about, result["command"], table(result["loads"]), sep="\n\n")
    for figures in result["loads"]:
        if figures["failed"]:
            print(f"{figures['load']}: {figures['failed']} failed, the first with: {figures['first_error']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(figures["failed"] for figures in result["loads"]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_server_and_workload(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--concurrency", type=numbers, default=[1.0], help="requests at once, in turn e.g. 1,32,256 [1]")
    how.add_argument("--rate", type=numbers, help="instead: requests a second, Poisson arrivals")
    parser.add_argument("--requests", type=numbers, default=[512.0], help="how many; a list goes with the loads [512]")
    parser.add_argument("--warmup", type=int, default=1, help="requests that do not count, before the first load [1]")
    parser.add_argument("--clients", type=int, default=1, help="processes that make the load [1]")
    parser.add_argument("--slo", type=bounds, help="for goodput: seconds, e.g. ttft=2,tpot=0.05")
    arguments = parser.parse_args(argv)
    loads = arguments.rate or arguments.concurrency
    requests = arguments.requests * len(loads) if len(arguments.requests) == 1 else arguments.requests
    if len(requests) != len(loads):
        parser.error("--requests must be one number, or one for each load")
    if min(loads) <= 0 or min(requests) < 1 or arguments.clients < 1:
        parser.error("loads, --requests and --clients must be positive")
    arguments.loads = list(zip(loads, map(int, requests), strict=True))
    return arguments


def add_server_and_workload(parser: argparse.ArgumentParser) -> None:
    """The flags that say whom to ask for what."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--model", help="[the first of /v1/models]")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="[$OPENAI_API_KEY]")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for the server to be ready [0]")
    parser.add_argument("--input-len", type=int, help="tokens of every prompt [log-normal, 16 to 1024]")
    parser.add_argument("--output-len", type=int, help="tokens of every answer [log-normal, 8 to 512]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=128_000, help="prompts have token ids from 10 up to this")
    parser.add_argument("--json", type=Path, help="also write the figures here")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def bounds(text: str) -> dict[str, float]:
    pairs = dict(part.split("=", 1) for part in text.split(","))
    allowed = [name for name in LATENCIES if name != "itl"]
    if unknown := set(pairs) - set(allowed):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(allowed)}")
    return {name: float(value) for name, value in pairs.items()}


def plan(
    arguments: argparse.Namespace, requests: int, rate: float | None = None, seed: int | None = None
) -> list[Plan]:
    """Lengths first, so that they are those of other servers' published figures; then token ids and arrivals."""
    rng = np.random.default_rng(arguments.seed if seed is None else seed)
    inputs = np.clip(np.exp(rng.normal(5.2, 0.9, requests)), 16, 1024).astype(int)
    outputs = np.clip(np.exp(rng.normal(5.1, 0.8, requests)), 8, 512).astype(int)
    if arguments.input_len:
        inputs[:] = arguments.input_len
    if arguments.output_len:
        outputs[:] = arguments.output_len
    prompts = [rng.integers(10, arguments.vocab_size, length).tolist() for length in inputs]
    arrivals = [None] * requests if rate is None else np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    return [Plan(*fields) for fields in zip(prompts, outputs.tolist(), arrivals, strict=True)]


def load(task: Task, clients: int) -> list[Report]:
    """Have client processes do the task, each its share; they start together."""
    processes = [_Process(task, index, clients) for index in range(clients)]
    for process in processes:
        process.wait_ready()
    start = time.monotonic() + LEAD_SECONDS
    for process in processes:
        process.start(start)
    return [process.report() for process in processes]


class _Process:
    """One client process."""

    def __init__(self, task: Task, index: int, clients: int) -> None:
        concurrency = task.concurrency // clients + (index < task.concurrency % clients)
        share = msgspec.structs.replace(task, plans=task.plans[index::clients], concurrency=concurrency)
        body = msgspec.json.encode(share)
        command = [sys.executable, "-m", "bench.serving_client"]
        self._popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._say(b"%d\n%b" % (len(body), body))

    def wait_ready(self) -> None:
        assert self._popen.stdout is not None
        if self._popen.stdout.readline() != b"ready\n":
            raise SystemExit("a client process could not start")

    def start(self, at: float) -> None:
        self._say(b"%r\n" % at)

    def report(self) -> Report:
        """Waits for the end."""
        answer, _ = self._popen.communicate()
        if self._popen.returncode:
            raise SystemExit("a client process failed")
        return msgspec.json.decode(answer, type=Report)

    def _say(self, word: bytes) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(word)
        self._popen.stdin.flush()


def get_json(url: str, api_key: str | None = None, wait: float = 0.0) -> Any:
    """Asked again for so many seconds, while the server is not there or not ready."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    deadline = time.monotonic() + wait
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)
        except (OSError, ValueError) as error:
            if time.monotonic() >= deadline:
                raise SystemExit(f"{url}: {error}") from None
        time.sleep(0.5)


def version(url: str) -> str:
    """Of the server, where it has the route that vLLM and jaxserve have; else empty."""
    try:
        return str(get_json(f"{url}/version")["version"])
    except (SystemExit, KeyError, TypeError):
        return ""


def machine() -> dict[str, str]:
    """Of the clients; the server's too where it runs on the same one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        cards = sorted(set(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()))
    except (OSError, subprocess.CalledProcessError):
        cards = []
    return {
        "card": "; ".join(cards),
        "cores": f"{os.cpu_count()} ({platform.machine()})",
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
