"""Times the sampler on a GPU, kernel by kernel, and checks its tokens against the reference.

    python bench/sampler.py [--rows 1 32 256] [--vocab 128256] [--backend triton] [--json FILE]

Microseconds on the device, from a trace, of all kernels of a step's sampling program; of kernels that overlap each
counts for what it adds. "normal" logits are those of random weights, of which top-p keeps tens of thousands; "peaked"
ones have few likely tokens, as a trained model's; "bf16" ones are normal and many of them equal. One pass over the
logits of 256 rows takes 29 us at 4.5 TB/s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from bench.kernels import kernel_seconds
from bench.offline import machine
from jaxserve.request import SamplingParams
from jaxserve.runner.batch import BatchState, sampling_words
from jaxserve.runner.options import OptionsState, load_row, mask_words, options_shapes, pack_row
from jaxserve.runner.plan import can_chain_sampling
from jaxserve.runner.sampler import Kind, SamplerVariant, choose_tokens, choose_with_options
from jaxserve.scheduling.schedule import RowOptions, RowSampling

RUNS = 10


GREEDY, RANDOM, FULL = (SamplerVariant(kind) for kind in (Kind.GREEDY, Kind.RANDOM, Kind.FULL))


@dataclass(frozen=True)
class Case:
    name: str
    variant: SamplerVariant = RANDOM
    sampling: dict[str, Any] = field(default_factory=dict)


def random(name: str, **sampling: Any) -> Case:
    return Case(name, RANDOM, sampling)


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}}
CASES = (
    Case("greedy", GREEDY),
    random("greedy + logprob", temperature=0.0),
    random("temperature"),
    random("top-k 50, top-p 0.95", top_k=50, top_p=0.95),
    random("top-k 1000", top_k=1000),
    random("top-p 0.95", top_p=0.95),
    random("T 0.8, top-p 0.9", temperature=0.8, top_p=0.9),
    random("top-p 0.5", top_p=0.5),
    random("min-p 0.05", min_p=0.05),
    random("min-p 0.05, top-p 0.9", min_p=0.05, top_p=0.9),
    Case("penalties, top-k, top-p", FULL, {"top_k": 50, "top_p": 0.95, **PENALTIES}),
    Case("penalties, top-p", FULL, {"top_p": 0.95, **PENALTIES}),
)


def make_state(count: int, vocab: int, case: Case) -> tuple[BatchState, OptionsState]:
    """Every slot with the case's parameters, after a prompt of 1,000 tokens and an answer of 100."""
    sampling = SamplingParams(**case.sampling)
    ids = np.random.default_rng(0).integers(0, vocab, 1100).tolist()
    options = RowOptions(ids, 1000, frozenset())
    words = [sampling_words(RowSampling(sampling, seed, 0)) for seed in range(count + 1)]
    tables, last_tokens = jnp.zeros((1, count + 1, 1), jnp.int32), jnp.zeros(count + 1, jnp.int32)
    state = BatchState(tables, last_tokens, jnp.asarray(words), jnp.zeros((1, 1)))
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), options_shapes(count, vocab))
    [packed] = pack_row(0, sampling, options)
    one = jax.jit(load_row)(empty, packed)
    return state, jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape) + jnp.zeros_like(a), one)


def make_logits(kind: str, rows: int, vocab: int) -> jax.Array:
    normal = jax.random.normal(jax.random.key(rows), (rows, vocab))
    if kind == "peaked":
        return 1.5 * jax.random.exponential(jax.random.key(rows), (rows, vocab))
    return normal.astype(jnp.bfloat16).astype(jnp.float32) if kind == "bf16" else normal


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="triton", choices=pallas_kernels.backends("sample"))
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    print(machine())
    capability = getattr(jax.devices()[0], "compute_capability", "")
    how = dict(backend=arguments.backend, as_chain=can_chain_sampling(arguments.backend, capability))
    results = []
    for count in arguments.rows:
        logits = {kind: make_logits(kind, count, arguments.vocab) for kind in ("normal", "peaked", "bf16")}
        for case in CASES:
            state, options = make_state(count, arguments.vocab, case)
            for kind, values in logits.items():
                operands = (state, options, values)
                expected = step(*operands, variant=case.variant, backend="reference")
                got = step(*operands, variant=case.variant, **how)
                times = measure(partial(step, *operands, variant=case.variant, **how))
                total = sum(times.values())
                parts = ", ".join(f"{name.removesuffix('_kernel')} {us:.0f}" for name, us in times.most_common(6))
                line = f"{count:>4} {kind:>7} {case.name:<24}{total:>7.1f} us  {compare(got, expected)}  {parts}"
                print(line, flush=True)
                results.append({"rows": count, "logits": kind, "case": case.name, "us": total})
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": results}, indent=1) + "\n", "utf-8")


@partial(jax.jit, static_argnames=("variant", "backend", "as_chain"))
def step(
    state: BatchState,
    options: OptionsState,
    logits: jax.Array,
    *,
    variant: SamplerVariant,
    backend: str,
    as_chain: bool = False,
) -> jax.Array:
    """What the runner's sampling program computes."""
    count, vocab = logits.shape
    slots = jnp.arange(count, dtype=jnp.int32)
    rows = jnp.stack([slots, slots + 1100, jnp.ones_like(slots)])
    how: dict[str, Any] = dict(variant=variant, backend=backend, as_chain=as_chain, max_logprobs=20)
    if variant.kind is Kind.FULL:
        mask = jnp.full((count, mask_words(vocab)), -1, jnp.int32)
        return choose_with_options(state, options, logits, rows, mask, **how)[-1]
    return choose_tokens(state, logits, rows, **how)[-1]


def compare(got: jax.Array, expected: jax.Array) -> str:
    """How many tokens differ, and by how much the log-probabilities of the others."""
    same = np.asarray(got[:, 0] == expected[:, 0])
    logprobs, expected_logprobs = (np.asarray(result)[same, 1:2].view(np.float32) for result in (got, expected))
    error = np.abs(logprobs - expected_logprobs).max(initial=0.0)
    return f"{(~same).sum()} differ, {error:.0e}"


def measure(call: Callable[[], Any]) -> Counter[str]:
    """Microseconds that each kernel adds to a call."""
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
