"""Checks the Mosaic prefill attention against the reference on a GPU, and times its tunings beside the Triton kernel.

    python bench/prefill_attention.py [--quick]

TFLOP/s count the causal half of the scores, as in ``bench/kernels.py``; the error is the largest difference from the
reference in float32 (checks) or from Triton (timings).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import DIM, HEADS, KV_HEADS, PREFILL, Case, causal_flops, random_array, time_chain
from bench.offline import machine
from pallas_kernels import mosaic_prefill, reference, triton_prefill
from pallas_kernels.mosaic_prefill import Tuning

Array = jax.Array
TUNINGS = (Tuning(128, 2), Tuning(64, 4))
CHECKS = {
    # (query and sequence lengths), heads, KV heads, head size, block size, window, padding tokens
    "one": (((1, 1),), 2, 1, 64, 16, None, 0),
    "whole": (((200, 200),), 8, 2, 128, 16, None, 0),
    "ragged": (((1, 1), (31, 31), (130, 300), (64, 128), (0, 0), (7, 7)), 8, 2, 128, 16, None, 19),
    "many": (tuple((n, 3 * n) for n in range(1, 64)), 32, 8, 128, 16, None, 3),
    "long": (((700, 5000), (1000, 1000), (33, 9000)), 32, 8, 128, 16, None, 0),
    "window": (((70, 70), (3, 17), (140, 300)), 2, 1, 64, 16, 16, 5),
    "window-130": (((40, 300), (150, 450)), 4, 2, 128, 8, 130, 0),
    "window-4096": (((1000, 9000), (500, 500)), 32, 8, 128, 16, 4096, 24),
    "block-128": (((9, 9), (40, 136), (500, 1300)), 8, 2, 128, 128, None, 0),
    "padding": (((0, 0), (0, 0)), 2, 1, 64, 16, None, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the checks")
    arguments = parser.parse_args()
    print(machine())
    for name, check in CHECKS.items():
        for tuning in TUNINGS if name == "long" else TUNINGS[:1]:
            start = time.monotonic()
            error = check_error(*check, tuning)
            verdict = "ok  " if error < 0.02 else "FAIL"
            print(f"{verdict} {name} {tuning}: max error {error:.4f}, {time.monotonic() - start:.1f} s", flush=True)
    if not arguments.quick:
        compare()


def check_error(
    chunks: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    padding: int,
    tuning: Tuning,
) -> float:
    """Largest difference from the reference. What nobody may read is NaN."""
    rng = np.random.default_rng(0)
    query_lens, seq_lens = (np.array(lens, np.int32) for lens in zip(*chunks, strict=True))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    fills = -(-seq_lens // block_size)
    blocks = int(fills.sum()) + 2
    k, v = (rng.standard_normal((blocks, block_size, kv_heads, dim), np.float32) for _ in range(2))
    tables = np.zeros((len(chunks), int(fills.max()) + 1), np.int32)
    free = list(rng.permutation(np.arange(1, blocks)))
    for seq, fill in enumerate(fills):
        tables[seq, :fill] = [free.pop() for _ in range(fill)]
        if rest := seq_lens[seq] % block_size:
            for cache in (k, v):
                cache[tables[seq, fill - 1], rest:] = np.nan
    k[0] = v[0] = np.nan
    q = rng.standard_normal((int(starts[-1]) + padding, heads, dim), np.float32)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    operands = (tables, seq_lens, starts)
    options = {"scale": dim**-0.5, "window": window}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(reference.prefill_attention, **options))(
            *(a.astype(jnp.float32) for a in (q, k, v)), *operands
        )
    got = jax.jit(partial(mosaic_prefill.prefill_attention, **options, tuning=tuning))(q, k, v, *operands)
    return float(np.nan_to_num(np.abs(np.asarray(got, np.float32) - np.asarray(expected)), nan=np.inf).max())


def compare() -> None:
    columns = {"triton": (triton_prefill.prefill_attention, 16)}
    for tuning in TUNINGS:
        run = partial(mosaic_prefill.prefill_attention, tuning=tuning)
        columns[f"{tuning.block_kv}x{tuning.stages}"] = (run, 16)
    columns["128x2, block 128"] = (partial(mosaic_prefill.prefill_attention, tuning=Tuning(128, 2)), 128)
    print(f"{'':>10} " + " ".join(f"{name:>17}" for name in (*columns, "FA3", "max error")))
    for case in PREFILL:
        print(f"{case!s:>10} ", end="")
        outputs = []
        for run, block_size in columns.values():
            seconds, out = measure(run, case, block_size)
            outputs.append(out)
            print(f"{causal_flops(case) / seconds / 1e12:>17.0f} ", end="", flush=True)
        error = max(float(jnp.abs(out - outputs[0]).max()) for out in outputs[1:3])
        print(f"{case.peer:>17.0f} {error:>17.4f}", flush=True)


def measure(run: Callable[..., Array], case: Case, block_size: int) -> tuple[float, Array]:
    """Seconds a call, and the output in float32."""
    width = -(-case.length // block_size)
    blocks = case.batch * width + 1
    rng = np.random.default_rng(0)
    tables = jnp.asarray(rng.permutation(np.arange(1, blocks)).reshape(case.batch, width).astype(np.int32))
    lens = jnp.full(case.batch, case.length, jnp.int32)
    starts = jnp.arange(case.batch + 1, dtype=jnp.int32) * case.length
    caches = [
        [random_array((blocks, block_size, KV_HEADS, DIM), seed) for seed in (2 * i, 2 * i + 1)] for i in range(2)
    ]
    q = random_array((case.batch * case.length, HEADS, DIM), 99)
    call = jax.jit(lambda q, k, v: run(q, k, v, tables, lens, starts, scale=DIM**-0.5, window=None))
    return time_chain(call, q, caches), call(q, *caches[0]).astype(jnp.float32)


if __name__ == "__main__":
    main()
