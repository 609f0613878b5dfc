"""What a configuration comes to on this device with this model: every "chosen by the device" decided in one place."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

import pallas_kernels
from jaxserve.config import EngineConfig
from jaxserve.models.config import CheckpointError, ModelConfig, resolve_max_model_len
from jaxserve.models.kv_cache import bytes_per_block
from jaxserve.runner.buckets import Bucket, Ladder, doubling
from jaxserve.runner.options import options_shapes

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30
BLOCKS_ROUNDED_TO = 256
MAX_BLOCKS = 1 << 20
"""The scheduler's lists of them should not take gigabytes, as they would for a tiny model on a large GPU."""
SCORED_AT_ONCE = 256
"""Prompt tokens whose logits exist at a time, however many are asked for."""
WORKSPACE_BYTES = 512 << 20
"""Left on a GPU for libraries' workspaces, recorded graphs and fragmentation."""
GPU_CHUNK_TOKENS = (384, 1792)
"""Of an 8B model, steps of 12 to 22 ms, the longer the more decode, and of 45 ms on an H200."""
MOSAIC_FROM = 512
"""Tokens of a step from which on prefill attention is Mosaic GPU's: each program of it takes a second to lower."""
NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Plan:
    """Resolved settings of an engine; only the number of blocks is learned later."""

    dtype: np.dtype
    max_model_len: int
    fit_model_len: bool
    """Lower the stated length to what the KV pool can hold."""
    max_num_seqs: int
    max_num_batched_tokens: int
    step_sizes: tuple[int, ...]
    chunk_tokens: tuple[int, int]
    """See ``SchedulerLimits``."""
    block_size: int
    ladder: Ladder
    attention_backend: str
    """Of all kernels but those below."""
    decode_backend: str
    prefill_backend: str
    linear_backend: str
    """Of matrix products of few rows."""
    chains_sampling: bool
    """Whether one device's sampling kernels are launched as chains."""
    async_depth: int
    max_logprobs: int

    def prefill_backend_of(self, bucket: Bucket) -> str:
        small = bucket.tokens < MOSAIC_FROM and self.prefill_backend == "mosaic_gpu"
        return self.attention_backend if small else self.prefill_backend

    @property
    def labels(self) -> dict[str, str]:
        """What metrics say of it."""
        return {
            "block_size": str(self.block_size),
            "cache_dtype": str(self.dtype),
            "attention_backend": self.attention_backend,
            "decode_backend": self.decode_backend,
            "prefill_backend": self.prefill_backend,
        }

    @property
    def table_width(self) -> int:
        """Blocks of a sequence of the greatest length."""
        return -(-self.max_model_len // self.block_size)

    def longest_request(self, num_blocks: int, window: int | None) -> int:
        """Tokens of the longest request that so many blocks can serve: with a sliding ``window`` it never holds more
        than that, what a step computes and two blocks of which it needs a part."""
        tokens = num_blocks * self.block_size
        endless = window is not None and tokens >= window + self.max_num_batched_tokens + 2 * self.block_size
        return max(tokens, self.max_model_len) if endless else tokens


def make_plan(config: EngineConfig, model: ModelConfig, platform: str, compute_capability: str = "") -> Plan:
    """Decide what the configuration leaves open; raises ``ValueError`` for what cannot be. ``compute_capability`` is an
    NVIDIA GPU's, such as "9.0"."""
    on_gpu = platform == "gpu"
    budget = config.max_num_batched_tokens or (8192 if on_gpu else 512)
    max_num_seqs = config.max_num_seqs or min(budget, 256 if on_gpu else 16)
    if budget < max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens ({budget}) must be at least --max-num-seqs ({max_num_seqs}): each sequence that"
            " runs takes a token of a step"
        )
    max_model_len = resolve_max_model_len(config.max_model_len, model)
    rows = config.row_buckets or _row_sizes(max_num_seqs, on_gpu)
    tokens = config.token_buckets or _token_sizes(budget, on_gpu)
    ladder = Ladder(rows, tokens)
    if ladder.max_rows != max_num_seqs:
        raise ValueError(f"--row-buckets must end with --max-num-seqs ({max_num_seqs}), got {rows}")
    if ladder.token_sizes[-1] != budget:
        raise ValueError(f"--token-buckets must end with --max-num-batched-tokens ({budget}), got {tokens}")
    dtype = _dtype(config, model, on_gpu)
    chunk = config.prefill_chunk_tokens
    backend, prefill_backend = _backends(config, model, dtype, on_gpu, compute_capability)
    return Plan(
        dtype=dtype,
        max_model_len=max_model_len,
        fit_model_len=config.max_model_len == "auto",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=config.block_size,
        ladder=ladder,
        attention_backend=backend,
        decode_backend=_decode_backend(config, model, dtype, on_gpu, compute_capability),
        linear_backend=_linear_backend(config, on_gpu, compute_capability),
        prefill_backend=prefill_backend,
        chains_sampling=can_chain_sampling(backend, compute_capability),
        # Not on a CPU, unless asked for: it has few sizes, far apart, and no time to lose on reading weights twice.
        step_sizes=ladder.token_sizes if on_gpu or isinstance(chunk, tuple) else (),
        chunk_tokens=(budget, budget) if chunk == "all" else chunk or GPU_CHUNK_TOKENS,
        async_depth=config.async_depth or (2 if on_gpu else 1),
        max_logprobs=min(config.max_logprobs, model.vocab_size),
    )


def _row_sizes(max_num_seqs: int, on_gpu: bool) -> tuple[int, ...]:
    """On a GPU, steps of up to eight sequences cost nearly the same: all of them read the weights once. Beyond 128 each
    sequence costs, and sizes are closer."""
    if not on_gpu or max_num_seqs <= 8:
        return doubling(1, max_num_seqs, 4)
    sizes = doubling(8, max_num_seqs)
    # One that saves less than an eighth of the next is not worth its programs.
    between = {3 * size // 2 for size in sizes if size >= 128 and 12 * size <= 7 * min(2 * size, max_num_seqs)}
    return (1, *sorted({*sizes, *between}))


def _token_sizes(budget: int, on_gpu: bool) -> tuple[int, ...]:
    """On a GPU sizes that keep its tensor cores busy: a token of Llama-3.1-8B's shape takes an H200 21 us in steps of
    1,024, 2,048, 4,096 and 8,192 tokens, 23 us in those of 1,536 and 3,072."""
    if not on_gpu:
        return doubling(min(budget, 32), budget, 4)
    sizes = doubling(min(budget, 128), budget)
    return tuple(sorted({*sizes, 768})) if budget > 768 else sizes


def _backends(
    config: EngineConfig, model: ModelConfig, dtype: np.dtype, on_gpu: bool, compute_capability: str
) -> tuple[str, str]:
    """Of all kernels, and of prefill attention. An explicit choice never falls back; auto is Triton on a GPU, and
    Mosaic GPU for prefill attention where that can be."""
    choice = config.attention_backend
    if choice in ("triton", "mosaic_gpu") and not on_gpu:
        raise ValueError(f"--attention-backend {choice} needs an NVIDIA GPU; a CPU has reference")
    if choice == "reference" or not on_gpu:
        return "reference", "reference"
    if choice == "triton":
        return "triton", "triton"
    refusal = _mosaic_refusal(model, dtype, config.block_size, compute_capability)
    if refusal and choice == "mosaic_gpu":
        raise ValueError(f"--attention-backend mosaic_gpu: {refusal}")
    return "triton", "triton" if refusal else "mosaic_gpu"


def _decode_backend(
    config: EngineConfig, model: ModelConfig, dtype: np.dtype, on_gpu: bool, compute_capability: str
) -> str:
    """Of decode attention: Gluon's on Hopper, where it can be, unless the choice is another."""
    if config.attention_backend == "reference" or not on_gpu:
        return "reference"
    if config.attention_backend == "triton" or not is_hopper(compute_capability):
        return "triton"
    groups = model.num_heads // model.num_kv_heads
    return "gluon" if pallas_kernels.suits_decode(dtype, groups, model.head_dim, backend="gluon") else "triton"


def _linear_backend(config: EngineConfig, on_gpu: bool, compute_capability: str) -> str:
    """Of matrix products of few rows: Triton's on Hopper, whose tiles are made for it, or XLA's (reference)."""
    choice = config.linear_backend
    hopper = on_gpu and is_hopper(compute_capability)
    if choice == "triton" and not hopper:
        raise ValueError("--linear-backend triton needs a Hopper GPU (compute capability 9.0)")
    if choice == "auto":
        return "triton" if hopper else "reference"
    return choice


def can_chain_sampling(backend: str, compute_capability: str) -> bool:
    """Whether a ``backend``'s sampling kernels can be launched as chains (``pallas_kernels.chained``), which are
    compiled for Hopper alone."""
    return backend == "triton" and is_hopper(compute_capability)


def is_hopper(compute_capability: str) -> bool:
    return compute_capability.startswith("9.")


def _mosaic_refusal(model: ModelConfig, dtype: np.dtype, block_size: int, compute_capability: str) -> str | None:
    """Why prefill attention cannot run on Mosaic GPU."""
    if not is_hopper(compute_capability):
        return f"needs a Hopper GPU (compute capability 9.0), this one has {compute_capability or 'none'}"
    from pallas_kernels import mosaic_prefill  # here, since no other device needs its imports

    reason = mosaic_prefill.refusal(dtype, dtype, model.head_dim, block_size)
    return f"does not do {reason}" if reason else None


def _dtype(config: EngineConfig, model: ModelConfig, on_gpu: bool) -> np.dtype:
    """auto: float32 on a CPU; on a GPU what the checkpoint has, with bfloat16 in float32's place."""
    name = config.dtype
    if name == "auto":
        if model.checkpoint_dtype not in NUMPY_DTYPES:
            raise CheckpointError(f"config.json: dtype {model.checkpoint_dtype!r} is not supported")
        name = "float32"
        if on_gpu:
            name = "float16" if model.checkpoint_dtype == "float16" else "bfloat16"
    logger.info("computing in %s (the checkpoint says %s)", name, model.checkpoint_dtype)
    return NUMPY_DTYPES[name]


def num_blocks(config: EngineConfig, plan: Plan, model: ModelConfig, device: jax.Device, param_bytes: int) -> int:
    """Blocks of the KV pool, block 0 included, beside ``param_bytes`` of parameters a device. Raises ``ValueError``
    with the numbers if there is not even one usable block."""
    per_block = bytes_per_block(model, plan.block_size, plan.dtype)
    if config.num_gpu_blocks_override:
        blocks = config.num_gpu_blocks_override
        source = "--num-gpu-blocks-override"
    else:
        available, source = _kv_bytes(config, device, param_bytes, _program_bytes(plan, model))
        blocks = min(available // per_block, MAX_BLOCKS)
        if not config.kv_cache_memory and (device.platform == "cpu" or not config.enable_prefix_caching):
            # Every slot at its greatest length; more would only keep prefixes.
            blocks = min(blocks, plan.max_num_seqs * plan.table_width + 1)
        if device.platform != "cpu" and blocks > BLOCKS_ROUNDED_TO:
            # The number is part of every program's shape: free memory that differs by a little must not miss the cache.
            blocks -= blocks % BLOCKS_ROUNDED_TO
    if blocks < 2:
        raise ValueError(
            f"{source} leaves room for {max(blocks, 0)} KV blocks of {per_block} bytes, at least 2 are needed;"
            " raise --kv-cache-memory-bytes, --gpu-memory-utilization or --num-gpu-blocks-override"
        )
    longest = plan.longest_request(blocks - 1, model.widest_window)
    if longest < plan.max_model_len and not plan.fit_model_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than the model's %d: longer requests will be refused"
            " (--kv-cache-memory-bytes makes it larger, --max-model-len auto states what fits)",
            longest,
            plan.max_model_len,
        )
    return int(blocks)


def _kv_bytes(config: EngineConfig, device: jax.Device, param_bytes: int, program_bytes: int) -> tuple[int, str]:
    if config.kv_cache_memory:
        return config.kv_cache_memory, f"--kv-cache-memory-bytes {config.kv_cache_memory}"
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(CPU_KV_BYTES, memory // 8), "this machine's memory"
    stats = device.memory_stats() or {}
    limit, used = stats["bytes_limit"], stats["bytes_in_use"]
    taken = f"{used} in use, {param_bytes} for parameters and {program_bytes} for programs"
    return limit - used - param_bytes - program_bytes, f"{limit} bytes of device memory less {taken}"


def _program_bytes(plan: Plan, model: ModelConfig) -> int:
    """Device memory that steps take beside parameters and cache, at most: what a layer makes of the largest bucket's
    tokens, their last hidden states, the logits of the steps in flight and a sampler's copies of them (or those of
    prompt tokens, a slice at a time), optional sampling state, and what libraries keep."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widths = 3 * model.intermediate_size + 5 * model.hidden_size + 2 * qkv
    bucket = plan.ladder.all()[-1]
    logits = 4 * max(bucket.rows, SCORED_AT_ONCE) * model.vocab_size
    activations = bucket.tokens * widths * plan.dtype.itemsize
    optional = sum(a.size * a.dtype.itemsize for a in options_shapes(plan.max_num_seqs, model.vocab_size))
    return activations + (plan.async_depth + 4) * logits + optional + WORKSPACE_BYTES
