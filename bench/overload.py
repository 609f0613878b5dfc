"""Sends a running server ten times what it can sustain, and judges how it bears that.

    jaxserve --model demo --max-num-queued-reqs 4 &
    python bench/overload.py --wait 300 --input-len 64 --output-len 32 --vocab-size 49000

The sustainable rate is the highest one of an open loop at which the p99 TTFT stays under 2 s, where a refused request
counts as one that waits for ever; bisection finds it. Then come ten times as many for a minute, and it must hold that

- goodput, the answers a second whose first token came within 2 s, is at least 90 % of that at the sustainable rate,
- all others are refused with 429 and Retry-After, 99 % of them within 50 ms, as the client sees it,
- memory stays flat: of no process of the server is the median RSS of the run's last third more than 5 % or 8 MiB,
  whichever is more, above that of the first third.

The server must run on this machine and listen on a port, so that its processes are found. How long its queue may be is
the server's business: what it lets wait must be through within 2 s.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil

from bench.serving import add_server_and_workload, get_json, load, machine, plan
from bench.serving_client import Record, Task
from bench.serving_report import summarise

Figures = dict[str, Any]

TTFT_LIMIT = 2.0
IN_TIME = 0.99
"""Share of the requests that must get their first token by then, for a rate to be sustainable."""
GOODPUT_KEPT = 0.9
REFUSED_WITHIN = 0.05
GROWTH_SHARE = 0.05
GROWTH_BYTES = 8 * 2**20
SAMPLE_SECONDS = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    url = arguments.url.rstrip("/").removesuffix("/v1")
    model = arguments.model or get_json(f"{url}/v1/models", arguments.api_key, arguments.wait)["data"][0]["id"]
    processes = server_processes(urlsplit(url).port or 80)
    runs = 0

    def run(requests: int, rate: float | None = None) -> list[Record]:
        nonlocal runs
        runs += 1
        # New prompts in each run, or it would find those of the run before in the prefix cache.
        plans = plan(arguments, requests, rate, seed=arguments.seed + runs)
        task = Task(url=url, model=model, api_key=arguments.api_key, plans=plans, concurrency=arguments.concurrency)
        return load(task, 1)[0].records

    def measure(rate: float, seconds: float) -> Figures:
        return {"rate": rate, **judge(run(max(round(rate * seconds), 10), rate))}

    run(arguments.concurrency)
    busy = judge(run(4 * arguments.concurrency))
    if busy["failed"]:
        raise SystemExit(f"{arguments.concurrency} requests at once, to find the bound: {busy['first_error']}")
    base = sustainable(lambda rate: measure(rate, arguments.search_seconds), busy["requests_s"], arguments.rounds)
    with watched_memory(processes) as memory:
        over = measure(arguments.factor * base["rate"], arguments.seconds)
    verdicts = {**verdicts_on(base, over), **{f"memory of {role} flat": is_flat(rss) for role, rss in memory.items()}}
    print(", ".join(f"{key} {value}" for key, value in machine().items() if value))
    print(shlex.join([Path(sys.executable).name, *sys.argv]), table(base, over), memory_table(memory), sep="\n\n")
    print(*(f"{'ok    ' if kept else 'FAILED'} {what}" for what, kept in verdicts.items()), sep="\n")
    if arguments.json:
        figures = {"sustainable": base, "overload": over, "rss": memory, "verdicts": verdicts}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return int(not all(verdicts.values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_server_and_workload(parser)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once that keep the server busy [8]")
    parser.add_argument("--rounds", type=int, default=6, help="of the search for the sustainable rate [6]")
    parser.add_argument("--search-seconds", type=float, default=30.0, help="of each [30]")
    parser.add_argument("--factor", type=float, default=10.0, help="how much more than sustainable [10]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of that [60]")
    return parser.parse_args(argv)


def judge(records: list[Record]) -> Figures:
    """The figures of a run, refusals apart from what failed otherwise."""
    refused = [record for record in records if record.status == 429]
    figures = summarise([record for record in records if record.status != 429], {"ttft": TTFT_LIMIT})
    figures |= {"refused": len(refused), "unexplained": sum(record.retry_after is None for record in refused)}
    in_time = round(figures.get("goodput_s", 0.0) * figures.get("seconds", 0.0))
    figures["in_time"] = in_time / len(records)
    if refused:
        took = [record.ended - record.sent for record in refused]
        figures["refusal"] = {f"p{p}": float(np.percentile(took, p)) for p in (50, 99, 100)}
        figures["retry_after"] = sorted({record.retry_after for record in refused if record.retry_after}, key=int)
    return figures


def sustainable(measure: Callable[[float], Figures], ceiling: float, rounds: int) -> Figures:
    """The figures at the highest rate up to ``ceiling`` that was kept up, by bisection."""
    low, high, best = 0.0, ceiling, None
    for _ in range(rounds):
        figures = measure((low + high) / 2)
        if figures["in_time"] >= IN_TIME:
            low, best = figures["rate"], figures
        else:
            high = figures["rate"]
    if best is None:
        raise SystemExit(f"the server keeps up no rate that was tried, down to {high:.3g} requests/s")
    return best


def verdicts_on(base: Figures, over: Figures) -> dict[str, bool]:
    """Whether what must hold does, in words."""
    kept = over.get("goodput_s", 0.0) / base["goodput_s"]
    refusal = over.get("refusal", {}).get("p99", float("inf"))
    return {
        f"goodput kept: {kept:.0%}": kept >= GOODPUT_KEPT,
        f"p99 of {over['refused']} refusals: {refusal * 1000:.1f} ms": refusal < REFUSED_WITHIN,
        f"refusals without Retry-After: {over['unexplained']}": not over["unexplained"],
        f"other failures: {over['failed']} {over.get('first_error', '')}".rstrip(): not over["failed"],
    }


def table(*runs: Figures) -> str:
    """Markdown, a line a run."""
    head = ["requests/s", "sent", "answered", "refused", "goodput/s", "TTFT p50, p99 ms", "refusal p50, p99, max ms"]
    lines = [[*head, "Retry-After"], ["---"] * (len(head) + 1)]
    for run in runs:
        refusal, waits = run.get("refusal", {}), run.get("retry_after", [])
        lines.append(
            [
                f"{run['rate']:.2f}",
                str(run["requests"] + run["refused"]),
                str(run["requests"] - run["failed"]),
                str(run["refused"]),
                f"{run.get('goodput_s', 0):.2f}",
                ", ".join(f"{run['ttft'][name] * 1000:.0f}" for name in ("p50", "p99") if "ttft" in run),
                ", ".join(f"{value * 1000:.1f}" for value in refusal.values()),
                " to ".join(dict.fromkeys((waits[0], waits[-1]))) if waits else "",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------- memory


def server_processes(port: int) -> dict[str, psutil.Process]:
    """The process that listens on this port, or the eldest of several, and all below it, by what they do."""
    listening = [process for process in psutil.process_iter() if _listens(process, port)]
    if not listening:
        raise SystemExit(f"no process of this machine listens on port {port}")
    parent = min(listening, key=psutil.Process.create_time)
    named = {"parent": parent}
    for process in parent.children(recursive=True):
        module = next((part for part in process.cmdline() if part.startswith("jaxserve.")), process.name())
        named[f"{module} ({process.pid})"] = process
    return named


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        sockets = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)


@contextmanager
def watched_memory(processes: dict[str, psutil.Process]) -> Iterator[dict[str, list[int]]]:
    """The RSS of each process, in bytes, over the time of the block."""
    rss: dict[str, list[int]] = {role: [] for role in processes}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            for role, process in processes.items():
                with suppress(psutil.NoSuchProcess):  # then requests have failed, which is told
                    rss[role].append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield rss
    finally:
        done.set()
        thread.join()


def is_flat(rss: Sequence[int]) -> bool:
    first, last = _ends(rss)
    return last - first <= max(GROWTH_SHARE * first, GROWTH_BYTES)


def memory_table(memory: dict[str, list[int]]) -> str:
    lines = [["process", "RSS, MiB: first third", "last third", "most"], ["---"] * 4]
    for role, rss in memory.items():
        lines.append([role, *(f"{value / 2**20:.1f}" for value in (*_ends(rss), max(rss)))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ends(rss: Sequence[int]) -> tuple[float, float]:
    """The medians of the first third and of the last."""
    third = -(-len(rss) // 3)
    return statistics.median(rss[:third]), statistics.median(rss[-third:])


if __name__ == "__main__":
    sys.exit(main())
