"""Where a step's time goes on a GPU: the forward programs of the 8B shape, random weights, by kernel, from a trace.

    python bench/step.py [--rows 1,8,32,128,256] [--tokens 8192] [--untuned] [--options JSON]

Decode steps of so many sequences at 576 tokens each, and a step of 512-token prompts that fills so many tokens, without
sampling, on a warm card and with random keys and values: where power is the limit, zeros are faster. "wall" is the time
a step of many in a row. Kernels overlap: what one adds is the time from the end of the one in front to its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["XLA_FLAGS"] = f"--xla_enable_command_buffers_during_profiling=true {os.environ.get('XLA_FLAGS', '')}"

import jax
import numpy as np
from jax.sharding import Mesh

from bench.kernels import KernelRun, kernel_runs
from bench.offline import machine
from bench.shapes import LLAMA_8B
from jaxserve.config import EngineConfig
from jaxserve.models.dummy import random_params
from jaxserve.models.kv_cache import zeros
from jaxserve.runner import batch
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.plan import make_plan
from jaxserve.runner.programs import ProgramBuilder
from jaxserve.scheduling.schedule import DEVICE_TOKEN, ScheduledRequest, SchedulerOutput

SEQUENCE, PROMPT, BLOCKS = 576, 512, 16384
RUNS, WARM_SECONDS = 12, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,8,32,128,256", help="sequences of decode steps")
    parser.add_argument("--tokens", default="8192", help="tokens of steps of prompts")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--top", type=int, default=10, help="kernels to list")
    parser.add_argument(
        "--untuned", action="store_true", help="products as cuBLAS proposes them, without timing others"
    )
    parser.add_argument("--options", default="{}", help="more EngineConfig fields, as JSON")
    arguments = parser.parse_args()
    rows, tokens = ([int(n) for n in text.split(",") if n] for text in (arguments.rows, arguments.tokens))
    bench = StepBench(arguments.layers, sorted({*rows, 256}), json.loads(arguments.options), not arguments.untuned)
    print(f"{machine()}\n{' '.join(sys.argv)}")
    for schedule in (*map(bench.decode, rows), *map(bench.prompts, tokens)):
        bench.show(schedule, arguments.top)


class StepBench:
    """A model on a device, without an engine."""

    def __init__(self, layers: int, row_buckets: list[int], options: dict[str, Any], autotune: bool = True) -> None:
        device, model = jax.devices()[0], LLAMA_8B(layers)
        config = EngineConfig(model="8B", max_model_len=2048, row_buckets=tuple(row_buckets), **options)
        self._plan = make_plan(config, model, device.platform, getattr(device, "compute_capability", ""))
        mesh = Mesh(np.array([device]), ("tp",))
        self._params = random_params(model, self._plan.dtype, mesh)
        self._builder = ProgramBuilder(model, self._plan, self._params, mesh, BLOCKS)
        shapes, tree = jax.tree.flatten(self._builder.cache)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, shapes, strict=True)]
        self._cache = jax.tree.unflatten(tree, arrays)
        self._state = zeros(self._builder.state)
        self._autotune = autotune
        self._deal_blocks()

    def _deal_blocks(self) -> None:
        """To every slot, in random order."""
        slots = self._plan.max_num_seqs
        count = -(-SEQUENCE // self._plan.block_size)
        tables = np.zeros(self._state.block_tables.shape, np.int32)
        blocks = np.random.default_rng(0).permutation(np.arange(1, BLOCKS))[: slots * count]
        tables[0, :slots, :count] = blocks.reshape(slots, count)
        self._state = self._state._replace(block_tables=jax.device_put(tables, self._state.block_tables.sharding))

    def decode(self, rows: int) -> SchedulerOutput:
        return SchedulerOutput(decode=[_request(slot, [DEVICE_TOKEN], SEQUENCE) for slot in range(rows)])

    def prompts(self, tokens: int) -> SchedulerOutput:
        ids = np.random.default_rng(1).integers(10, 128000, PROMPT).tolist()
        return SchedulerOutput(prefill=[_request(slot, ids, PROMPT) for slot in range(max(1, tokens // PROMPT))])

    def show(self, schedule: SchedulerOutput, top: int) -> None:
        bucket = self._plan.ladder.choose(len(schedule.decode), schedule.num_prefill_tokens, len(schedule.prefill))
        step = self._step(schedule, bucket)
        start = time.monotonic()
        while time.monotonic() < start + WARM_SECONDS:
            _seconds(step)
        wall = min(_seconds(step) for _ in range(3)) / RUNS
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                _seconds(step)
            added = added_seconds(kernel_runs(Path(directory)))
        print(f"\n{bucket}: wall {wall * 1e3:.3f} ms", flush=True)
        for name, each in sorted(added.items(), key=lambda item: -sum(item[1]))[:top]:
            total, count = sum(each) / RUNS * 1e3, len(each) / RUNS
            print(f"{total:>10.3f} ms = {count:>5.1f} x {total / count * 1e3:>6.1f} us  {name[:110]}", flush=True)

    def _step(self, schedule: SchedulerOutput, bucket: Bucket) -> Callable[[], jax.Array]:
        program = self._builder.forward(bucket, autotune=self._autotune).compile()
        packed = batch.pack(schedule, bucket, self._plan.block_size, null_slot=self._plan.max_num_seqs)

        def step() -> jax.Array:
            self._cache, self._state, logits, _ = program(self._params, self._cache, self._state, packed)
            return logits

        for _ in range(4):  # the first runs record the graph
            jax.block_until_ready(step())
        return step


def added_seconds(runs: list[KernelRun]) -> dict[str, list[float]]:
    """Seconds that each run of a kernel added, by kernel, grid and the kernel in front."""
    added: dict[str, list[float]] = defaultdict(list)
    for before, run in itertools.pairwise(runs):
        added[f"{run.name[:60]} {run.grid} after {before.name[:30]}"].append(run.end - before.end)
    return added


def _request(slot: int, token_ids: list[int], seq_len: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=str(slot), slot=slot, token_ids=token_ids, seq_len=seq_len, samples=True, new_blocks=[],
        wants_logprobs=False, sampling=None,
    )  # fmt: skip


def _seconds(step: Callable[[], jax.Array]) -> float:
    start = time.monotonic()
    for _ in range(RUNS):
        logits = step()
    jax.block_until_ready(logits)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
