"""Times the sampler on a GPU, kernel by kernel, and checks its tokens against the reference.

    python bench/sampler.py [--backend triton] [--vocab 128256] [--json FILE]

Microseconds on the device, from a trace, of all kernels of a call. "normal" logits are those of random weights, of
which top-p keeps tens of thousands; "peaked" ones have few likely tokens, as a trained model's; "bf16" ones are normal
and many of them equal. One pass over the logits of 256 rows takes 29 us at 4.5 TB/s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

import pallas_kernels
from bench.kernels import kernel_seconds
from bench.offline import machine
from pallas_kernels.sampling import SamplingRows

ROWS = (1, 32, 256)
RUNS = 10


@dataclass(frozen=True)
class Case:
    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def rows(self, count: int) -> SamplingRows:
        def column(value: float, dtype: Any) -> jax.Array:
            return jnp.full(count, value, dtype)

        seeds = jnp.stack([jnp.arange(count, dtype=jnp.int32), column(7, jnp.int32)], 1)
        floats = (column(value, jnp.float32) for value in (self.temperature, self.top_p, self.min_p))
        return SamplingRows(*floats, column(self.top_k, jnp.int32), seeds, column(0, jnp.int32))


CASES = (
    Case("greedy rows", temperature=0.0),
    Case("temperature"),
    Case("top-k 50, top-p 0.95", top_k=50, top_p=0.95),
    Case("top-k 1000", top_k=1000),
    Case("top-p 0.95", top_p=0.95),
    Case("top-p 0.9, 0.8 hot", top_p=0.9, temperature=0.8),
    Case("top-p 0.5", top_p=0.5),
    Case("min-p 0.05", min_p=0.05),
    Case("min-p 0.05, top-p 0.9", min_p=0.05, top_p=0.9),
)


def make_logits(kind: str, rows: int, vocab: int) -> jax.Array:
    normal = jax.random.normal(jax.random.key(rows), (rows, vocab))
    if kind == "peaked":
        return 1.5 * jax.random.exponential(jax.random.key(rows), (rows, vocab))
    return normal.astype(jnp.bfloat16).astype(jnp.float32) if kind == "bf16" else normal


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton", choices=pallas_kernels.backends("sample"))
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(machine())
    results = []
    sample = jax.jit(pallas_kernels.sample, static_argnames="backend")
    for count in ROWS:
        for kind in ("normal", "peaked", "bf16"):
            logits = make_logits(kind, count, arguments.vocab)
            positions = jnp.arange(count, dtype=jnp.int32) + 100
            for case in CASES:
                rows = case.rows(count)
                tokens, normalizers = sample(logits, rows, positions, backend="reference")
                times = measure(lambda: sample(logits, rows, positions, backend=arguments.backend))  # noqa: B023
                got, got_normalizers = sample(logits, rows, positions, backend=arguments.backend)
                wrong = int((got != tokens).sum())
                error = float(jnp.abs(got_normalizers - normalizers).max())
                parts = ", ".join(f"{name.removesuffix('_kernel')} {us:.0f}" for name, us in times.most_common(5))
                total = sum(times.values())
                print(
                    f"{count:>4} {kind:>7} {case.name:<22} {total:>7.1f} us  wrong {wrong}, {error:.0e}  ({parts})",
                    flush=True,
                )
                results.append({"rows": count, "kind": kind, "case": case.name, "us": total, "wrong": wrong})
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": results}, indent=1) + "\n", "utf-8")


def measure(call: Callable[[], Any]) -> Counter[str]:
    """Microseconds that each kernel takes in a call."""
    for _ in range(3):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(RUNS):
                jax.block_until_ready(call())
        seconds = kernel_seconds(Path(directory))
    return Counter({name: value / RUNS * 1e6 for name, value in seconds.items()})


if __name__ == "__main__":
    main()
