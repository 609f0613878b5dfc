"""Times the attention kernels on a GPU, beside what memory and arithmetic allow.

    python bench/kernels.py [--kind prefill] [--backend triton] [--json FILE]

bf16, 32 query heads, 8 KV heads, head size 128, blocks dealt in random order. A jitted function calls the kernel as a
model's layers do, each call fed by the one before and reading another of several caches, so that the L2 cache does not
flatter the figure; the time is that of the kernels on the device, from a trace, a call. TB/s counts keys and values
once, TFLOP/s the causal half of the scores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from bench.offline import FLOPS, READ_BYTES_S, machine

OPERATIONS = {"decode": "decode_attention", "prefill": "prefill_attention"}
HEADS, KV_HEADS, DIM = 32, 8, 128
CALLS, RUNS = 32, 5
CACHE_BYTES = 512 << 20
"""Together, several times a GPU's L2 cache."""


Caches = list[list[jax.Array]]
Chain = Callable[[jax.Array, Caches], jax.Array]


@dataclass(frozen=True)
class Case:
    batch: int
    length: int
    peer: float | None = None
    """FlashInfer 0.6.14's TB/s in decode, FlashAttention 3's TFLOP/s in prefill, on the same card."""
    max_length: int | None = None
    """What a block table has room for, if more than the length."""

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


DECODE = (
    Case(1, 32768, 3.27),
    Case(8, 1024, 2.39),
    Case(8, 8192, 3.83),
    Case(32, 2048, 3.99),
    Case(128, 512, 3.50),
    Case(256, 2048, 4.38),
    *(Case(batch, 540, max_length=131072) for batch in (1, 8, 32, 64, 128, 256)),
)
PREFILL = (Case(1, 1024, 281), Case(1, 4096, 571), Case(1, 16384, 600), Case(4, 2048, 478), Case(16, 512, 269))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = sorted({b for operation in OPERATIONS.values() for b in pallas_kernels.backends(operation)})
    parser.add_argument("--backend", choices=known, help="only this one [all kernels for GPUs]")
    parser.add_argument("--kind", choices=OPERATIONS, help="only these [both]")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block of the cache [16]")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(machine())
    rows = []
    for kind, operation in OPERATIONS.items():
        if arguments.kind in (None, kind):
            for backend in pallas_kernels.backends(operation):
                if backend == arguments.backend or (arguments.backend is None and backend != "reference"):
                    rows += table(kind, backend, arguments.block_size)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def table(kind: str, backend: str, block_size: int) -> list[dict[str, Any]]:
    """Measures and prints all cases of a kind."""
    cases, unit, ceiling = (DECODE, "TB/s", READ_BYTES_S) if kind == "decode" else (PREFILL, "TFLOP/s", FLOPS)
    print(f"{backend} {kind}: {'us':>9} {unit:>8} {'ceiling':>8} {'peer':>7}")
    rows = []
    for case in cases:
        seconds = measure(kind, case, backend, block_size)
        rate = (kv_bytes(case) if kind == "decode" else causal_flops(case)) / seconds / 1e12
        figures = {"seconds": seconds, unit: rate, "peer": case.peer}
        rows.append({"kind": kind, "backend": backend, "case": str(case), **figures})
        label = f"{case!s:>{len(backend) + len(kind) + 2}}"
        print(f"{label} {seconds * 1e6:>9.1f} {rate:>8.2f} {ceiling / 1e12:>8.2f} {case.peer or '':>7}", flush=True)
    return rows


def kv_bytes(case: Case) -> int:
    return 2 * case.batch * case.length * KV_HEADS * DIM * 2


def causal_flops(case: Case) -> int:
    return 4 * case.batch * HEADS * DIM * case.length * (case.length + 1) // 2


def measure(kind: str, case: Case, backend: str, block_size: int) -> float:
    """Seconds a call."""
    rng = np.random.default_rng(0)
    width = -(-case.length // block_size)
    blocks = case.batch * width + 1
    copies = max(1, min(CALLS, CACHE_BYTES // kv_bytes(case)))
    caches = [
        [random_array((blocks, block_size, KV_HEADS, DIM), seed) for seed in (2 * i, 2 * i + 1)] for i in range(copies)
    ]
    max_length = case.max_length or case.length
    tables = np.zeros((case.batch, -(-max_length // block_size)), np.int32)
    tables[:, :width] = rng.permutation(np.arange(1, blocks)).reshape(case.batch, width)
    lens = jnp.full(case.batch, case.length, jnp.int32)
    if kind == "decode":
        sizes = {"kv_heads": KV_HEADS, "max_seq_len": max_length, "window": None}
        chain = decode_chain(jnp.asarray(tables), lens, backend, sizes)
        return time_chain(chain, random_array((case.batch, HEADS, DIM), 99), caches)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * case.length
    chain = prefill_chain(jnp.asarray(tables), lens, starts, backend)
    return time_chain(chain, random_array((case.batch * case.length, HEADS, DIM), 99), caches)


def decode_chain(tables: jax.Array, lens: jax.Array, backend: str, sizes: dict[str, Any], calls: int = CALLS) -> Chain:
    """One plan, as in a step, and the layers that go by it."""

    def chain(q: jax.Array, caches: Caches) -> jax.Array:
        plan = pallas_kernels.plan_decode(lens, backend=backend, **sizes)
        for index in range(calls):
            cache = caches[index % len(caches)]
            q, plan = pallas_kernels.decode_attention(q, *cache, tables, lens, plan, scale=DIM**-0.5, backend=backend)
        return q

    return chain


def prefill_chain(tables: jax.Array, lens: jax.Array, starts: jax.Array, backend: str) -> Chain:
    def chain(q: jax.Array, caches: Caches) -> jax.Array:
        for index in range(CALLS):
            cache = caches[index % len(caches)]
            q = pallas_kernels.prefill_attention(
                q, *cache, tables, lens, starts, scale=DIM**-0.5, window=None, backend=backend
            )
        return q

    return chain


def random_array(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def time_chain(chain: Chain, q: jax.Array, caches: Caches) -> float:
    chain = jax.jit(chain)
    for _ in range(3):
        chain(q, caches).block_until_ready()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(RUNS):
                chain(q, caches).block_until_ready()
        return sum(kernel_seconds(Path(directory)).values()) / (RUNS * CALLS)


@dataclass(frozen=True)
class KernelRun:
    """A kernel in a trace: when it ran, in seconds, and its grid, such as "32,4,1"."""

    start: float
    end: float
    name: str
    grid: str


def kernel_runs(directory: Path) -> list[KernelRun]:
    """The kernels of a trace, by when they ended."""
    [path] = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    runs = []
    for e in events:
        if e.get("ph") == "X" and "GPU" in processes[e["pid"]] and "Stream" in threads.get((e["pid"], e["tid"]), ""):
            grid = re.search(r"grid:([\d,]+)", str(e.get("args", "")))
            start = e["ts"] / 1e6
            runs.append(KernelRun(start, start + e["dur"] / 1e6, e["name"], grid[1] if grid else ""))
    return sorted(runs, key=lambda run: run.end)


def kernel_seconds(directory: Path) -> dict[str, float]:
    """How long the kernels of a trace kept the device busy, by name. Of kernels that overlap each counts for what it
    adds to those that ended before, so that the sum is the time in which any ran."""
    seconds: dict[str, float] = defaultdict(float)
    busy: list[tuple[float, float]] = []  # from when to when, in order
    for run in kernel_runs(directory):
        start, added = run.start, run.end - run.start
        while busy and busy[-1][1] > start:
            since, until = busy.pop()
            added -= until - max(since, start)
            start = min(since, start)
        busy.append((start, run.end))
        seconds[run.name] += added
    return seconds


if __name__ == "__main__":
    main()
