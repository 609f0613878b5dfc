"""What reusing KV blocks saves: prefix caching, and swapping to host memory instead of computing again.

    python bench/memory.py                  # the demo model
    python bench/memory.py --model 8B       # on a GPU: the shape of Llama-3.1-8B, random weights, bf16

- Requests with one system prompt, all at once: time to first token with and without the prefix cache.
- A sequence to host memory and back, beside computing it again, by length.
- Steps of sequences that decode while others are swapped out and in all the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from bench.offline import GREEDY, Lengths, machine, model_directory, report, run
from jaxserve import collector
from jaxserve.config import EngineConfig
from jaxserve.engine.admission import make_requests
from jaxserve.engine.core import EngineCore
from jaxserve.request import SamplingParams
from jaxserve.runner import backend

OWN_TOKENS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, 8B (random weights), or a model directory")
    parser.add_argument("--requests", type=int, default=64, help="that share a system prompt")
    parser.add_argument("--system-prompt", type=int, help="tokens that all requests begin with [1024; 8B: 2048]")
    parser.add_argument("--lengths", help="tokens of sequences to swap [128,512,1024; 8B: 512,2048,8192]")
    parser.add_argument("--decoding", type=int, help="sequences that decode meanwhile [4; 8B: 64]")
    parser.add_argument("--swap-space", type=float, help="GiB of host memory [0.2; 8B: 8]")
    arguments = parser.parse_args()
    large = arguments.model == "8B"
    lengths = [int(n) for n in (arguments.lengths or ("512,2048,8192" if large else "128,512,1024")).split(",")]
    options = dict(max_num_seqs=64, max_model_len=max(4096, *lengths) + 1024, row_buckets=(1, 64)) if large else {}
    with model_directory(arguments.model) as directory:
        config = EngineConfig(
            model=arguments.model,
            load_format="dummy" if large else "safetensors",
            swap_space=arguments.swap_space or (8 if large else 0.2),
            **options,
        )
        backend.configure(config)
        engine = EngineCore.load(config, directory, report)
        collector.freeze()  # as the server's engine process does
        print(f"{machine()}\n{' '.join(sys.argv)}")
        show_shared_prompt(engine, arguments.requests, arguments.system_prompt or (2048 if large else 1024))
        show_swap(engine, lengths)
        show_decoding_meanwhile(engine, arguments.decoding or (64 if large else 4), lengths[-1])


def show_shared_prompt(engine: EngineCore, requests: int, system_prompt: int) -> None:
    print(f"\n{requests} requests of {system_prompt} shared and {OWN_TOKENS} own tokens, at once: ms to first tokens")
    print(f"{'':>24} {'p50':>8} {'p90':>8} {'last':>8} {'tokens computed':>16}")
    for name, caching in (("without a prefix cache", False), ("cold prefix cache", True), ("warm prefix cache", True)):
        engine.scheduler.kv.prefix_caching = caching
        if name != "warm prefix cache":
            engine.reset_prefix_cache()
        waits, computed = _first_tokens(engine, requests, system_prompt)
        p50, p90 = np.percentile(waits, (50, 90))
        print(f"{name:>24} {p50:>8.0f} {p90:>8.0f} {max(waits):>8.0f} {computed:>16,}")
    engine.scheduler.kv.prefix_caching = True


def _first_tokens(engine: EngineCore, requests: int, system_prompt: int) -> tuple[list[float], int]:
    """Milliseconds to each request's token, and the prompt tokens that were computed."""
    rng = np.random.default_rng(0)
    shared = rng.integers(10, engine.info.vocab_size // 2, system_prompt).tolist()
    engine.events.clear()
    start = time.monotonic()
    for index in range(requests):
        own = rng.integers(10, engine.info.vocab_size // 2, OWN_TOKENS).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for request in make_requests(f"shared-{time.monotonic_ns()}-{index}", shared + own, params, engine.info):
            engine.add_request(request)
    waits = []
    while engine.has_work():
        waits += [(time.monotonic() - start) * 1000] * len(engine.step())
    return waits, sum(sum(event.prefill_tokens) for event in engine.events)


def show_swap(engine: EngineCore, lengths: list[int]) -> None:
    print("\na sequence to host memory and back, ms, beside computing its tokens again")
    print(f"{'tokens':>8} {'out':>8} {'in':>8} {'computing':>10}")
    runner, block_size = engine.runner, engine.runner.plan.block_size
    swapper = runner.swapper
    assert swapper is not None
    for length in lengths:
        blocks = list(range(1, 1 + -(-length // block_size)))
        assert len(blocks) <= swapper.num_blocks, "--swap-space is too small"

        def swap_out(blocks: list[int] = blocks) -> list[jax.Array]:
            handle = runner.swap_out(blocks)
            swapper.settle()
            return handle

        out = _median(swap_out)
        handle = swap_out()

        def swap_in(handle: list[jax.Array] = handle, blocks: list[int] = blocks) -> None:
            runner.swap_in(handle, blocks)
            jax.block_until_ready(runner._cache)

        back = _median(swap_in)
        computing = _median(lambda length=length: run(engine, [Lengths(length, 1)], GREEDY))
        print(f"{length:>8} {out:>8.1f} {back:>8.1f} {computing:>10.1f}", flush=True)


def show_decoding_meanwhile(engine: EngineCore, decoding: int, length: int) -> None:
    """Swaps a sequence out, fetches it, and swaps it in when it is there; over and over."""
    runner = engine.runner
    assert runner.swapper is not None
    count = min(-(-length // runner.plan.block_size), runner.swapper.num_blocks)
    blocks = list(range(engine.scheduler.kv.pool.num_usable - count + 1, engine.scheduler.kv.pool.num_usable + 1))
    print(f"\nsteps of {decoding} decoding sequences, ms, alone and while {count} blocks go out and in")
    print(f"{'':>16} {'p50':>8} {'p99':>8} {'worst':>8}")
    for name, swapping in (("alone", False), ("swapping", True)):
        params = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True)
        for index in range(decoding):
            for request in make_requests(f"{name}-{index}", [10 + index] * 200, params, engine.info):
                engine.add_request(request)
        engine.events.clear()
        handle: list[jax.Array] = []
        arriving: list[jax.Array] = []
        while engine.has_work():
            if swapping and not handle:
                handle, arriving = runner.swap_out(blocks), []
            elif swapping and _on_host(handle) and runner.swapper.fetch(handle, arriving):
                runner.swap_in(handle, blocks, arriving)
                handle = []
            engine.step()
        ends = [e.collected for e in engine.events if len(e.decode_requests) == decoding and not e.prefill_requests]
        gaps = np.diff(ends) * 1000
        p50, p99 = np.percentile(gaps, (50, 99))
        print(f"{name:>16} {p50:>8.2f} {p99:>8.2f} {gaps.max():>8.2f}", flush=True)


def _on_host(handle: list[jax.Array]) -> bool:
    return all(array.sharding.memory_kind == "pinned_host" for array in handle)


def _median(work: Callable[[], object], times: int = 5) -> float:
    """Milliseconds."""
    taken = []
    for _ in range(times):
        start = time.monotonic()
        work()
        taken.append((time.monotonic() - start) * 1000)
    return float(np.median(taken[1:]))


if __name__ == "__main__":
    main()
