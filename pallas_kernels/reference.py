"""Plain jnp implementations: what a CPU runs, and the oracle for every kernel.

Both walk the keys in chunks of at least ``CHUNK`` positions with an online softmax (Milakov and Gimelshein,
arXiv:1805.02867), from a bound known at run time only, so that a step costs what its longest sequence needs and
not what the model could hold. A chunk beyond a row's own length multiplies by exactly one and adds exactly
zero, so within one program a row's result does not depend on its neighbours or on padding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_plan import DecodePlan

CHUNK = 128
QUERY_TILE = 32
Array = jax.Array


class _Softmax(NamedTuple):
    """Running state of an online softmax over chunks of keys."""

    accumulator: Array  # [..., D], sum of exp(score - peak) * value
    peak: Array  # [...]
    total: Array  # [...], sum of exp(score - peak)

    @classmethod
    def start(cls, shape: tuple[int, ...], head_dim: int) -> _Softmax:
        return cls(jnp.zeros((*shape, head_dim)), jnp.full(shape, -jnp.inf), jnp.zeros(shape))

    def add(self, scores: Array, values: Array, equation: str) -> _Softmax:
        """Scores ``[..., C]``, -inf where masked; ``equation`` contracts them with the values."""
        peak = jnp.maximum(self.peak, scores.max(-1))
        base = jnp.where(peak == -jnp.inf, 0.0, peak)  # a row that saw nothing yet must not give inf - inf
        weights = jnp.exp(scores - base[..., None])
        keep = jnp.exp(self.peak - base)
        new = jnp.einsum(equation, weights, values, preferred_element_type=jnp.float32)
        return _Softmax(self.accumulator * keep[..., None] + new, peak, self.total * keep + weights.sum(-1))

    def result(self) -> Array:
        return self.accumulator / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def sum_parts(parts: Array, dtype: jnp.dtype) -> Array:
    """The sum over the first axis, in its order, rounded to ``dtype`` once."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.astype(dtype)


def add_rms_norm(x: Array, delta: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    total = x + sum_parts(delta, x.dtype)
    return total, rms_norm(total, weight, eps)


def suits_linear(kind: str, rows: int, depth: int, columns: int, dtype: jnp.dtype) -> bool:
    """The products of XLA are better than these, which are for comparison."""
    return False


def linear_parts(x: Array, w: Array) -> Array:
    return (x @ w)[None]


def linear(x: Array, w: Array, *, dtype: jnp.dtype) -> Array:
    return jnp.matmul(x, w, preferred_element_type=dtype)


def gated_linear(x: Array, w: Array) -> Array:
    return swiglu(jnp.tensordot(x, w, axes=1))


def swiglu(gate_up: Array) -> Array:
    return jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of ``x[T, heads, D]``, element i paired with i + D / 2 (Su et al., arXiv:2104.09864)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def rope_and_write(
    qkv: Array, cos: Array, sin: Array, k_cache: Array, v_cache: Array, slots: Array, *, dtype: jnp.dtype
) -> tuple[Array, Array, Array]:
    qkv = sum_parts(qkv, dtype)
    tokens, kv_heads, lanes, head_dim = qkv.shape
    groups = lanes - 2
    q = rotate(qkv[:, :, :groups].reshape(tokens, kv_heads * groups, head_dim), cos, sin)
    k = rotate(qkv[:, :, groups], cos, sin)
    return q, *write_kv(k_cache, v_cache, k, qkv[:, :, groups + 1], slots)


def write_kv(k_cache: Array, v_cache: Array, k: Array, v: Array, slots: Array) -> tuple[Array, Array]:
    def put(cache: Array, rows: Array) -> Array:
        flat = cache.reshape(-1, *cache.shape[2:])
        return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)

    return put(k_cache, k), put(v_cache, v)


def plan_decode(
    seq_lens: Array, *, kv_heads: int, max_seq_len: int, window: int | None, split_size: int | None
) -> DecodePlan:
    """Nothing to plan; a row's order of summation depends on its own length alone, whatever the split size."""
    del seq_lens, kv_heads, max_seq_len
    return DecodePlan((), window, split_size)


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    plan: DecodePlan,
    *,
    scale: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    into: Array | None = None,
) -> tuple[Array, DecodePlan]:
    window = plan.window
    num_seqs, (_, num_heads, head_dim) = seq_lens.shape[0], q.shape
    q = q[:num_seqs]
    block_size, kv_heads = k_cache.shape[1:3]
    blocks, chunk = _chunking(block_size)
    tables = _pad_tables(block_tables, blocks)
    queries = q.reshape(num_seqs, kv_heads, num_heads // kv_heads, head_dim)

    def step(index: Array, state: _Softmax) -> _Softmax:
        ids = lax.dynamic_slice_in_dim(tables, index * blocks, blocks, axis=1)
        keys, values = (c[ids].reshape(num_seqs, chunk, kv_heads, head_dim) for c in (k_cache, v_cache))
        if k_scale is not None and v_scale is not None:
            keys, values = keys * k_scale[:, None], values * v_scale[:, None]
        scores = jnp.einsum("skgd,sckd->skgc", queries, keys, preferred_element_type=jnp.float32) * scale
        positions = index * chunk + jnp.arange(chunk)
        seen = positions[None] < seq_lens[:, None]
        if window is not None:
            seen &= positions[None] >= seq_lens[:, None] - window
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        # What stands beyond a sequence may be anything, a broken request's NaN too, and zero times NaN is NaN.
        values = jnp.where(seen[:, :, None, None], values, 0)
        return state.add(scores, values, "skgc,sckd->skgd")

    first = jnp.array(0) if window is None else _first_chunk(seq_lens, window, chunk)
    state = _Softmax.start(queries.shape[:3], head_dim)
    state = lax.fori_loop(first, (seq_lens.max() + chunk - 1) // chunk, step, state)
    out = state.result().reshape(q.shape).astype(q.dtype)
    if into is not None:
        out = into.at[:num_seqs].set(jnp.where(seq_lens[:, None, None] > 0, out, into[:num_seqs]))
    return out, plan


def prefill_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float,
    window: int | None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    blocks, chunk = _chunking(block_size)
    tables = _pad_tables(block_tables, blocks)
    groups = num_heads // kv_heads
    queries = q.reshape(num_tokens, kv_heads, groups, head_dim)
    queries = jnp.pad(queries, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    tiles_end = jnp.cumsum((query_lens + QUERY_TILE - 1) // QUERY_TILE)

    def tile(index: Array, out: Array) -> Array:
        seq = jnp.searchsorted(tiles_end, index, side="right")
        offset = (index - jnp.where(seq > 0, tiles_end[seq - 1], 0)) * QUERY_TILE  # within the sequence's queries
        start = query_start_loc[seq] + offset
        rows = lax.dynamic_slice_in_dim(queries, start, QUERY_TILE)
        position = seq_lens[seq] - query_lens[seq] + offset + jnp.arange(QUERY_TILE)
        last = jnp.minimum(position[-1], seq_lens[seq] - 1)

        def step(at: Array, state: _Softmax) -> _Softmax:
            ids = lax.dynamic_slice(tables, (seq, at * blocks), (1, blocks))[0]
            keys, values = (c[ids].reshape(chunk, kv_heads, head_dim) for c in (k_cache, v_cache))
            if k_scale is not None and v_scale is not None:
                keys, values = keys * k_scale[:, None], values * v_scale[:, None]
            scores = jnp.einsum("tkgd,ckd->ktgc", rows, keys, preferred_element_type=jnp.float32) * scale
            key_position = at * chunk + jnp.arange(chunk)
            seen = key_position[None] <= position[:, None]
            used = key_position <= last
            if window is not None:
                seen &= key_position[None] > position[:, None] - window
                used &= key_position > position[0] - window
            scores = jnp.where(seen[None, :, None], scores, -jnp.inf)
            values = jnp.where(used[:, None, None], values, 0)  # as in decode_attention
            return state.add(scores, values, "ktgc,ckd->ktgd")

        first = jnp.array(0) if window is None else jnp.maximum(position[0] - window + 1, 0) // chunk
        state = _Softmax.start((kv_heads, QUERY_TILE, groups), head_dim)
        state = lax.fori_loop(first, last // chunk + 1, step, state)
        result = state.result().transpose(1, 0, 2, 3)
        # Rows past the sequence's end are the next sequence's: keep what is there.
        mine = (offset + jnp.arange(QUERY_TILE) < query_lens[seq])[:, None, None, None]
        old = lax.dynamic_slice_in_dim(out, start, QUERY_TILE)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, result, old), start, axis=0)

    out = lax.fori_loop(0, tiles_end[-1], tile, jnp.zeros(queries.shape, jnp.float32))
    return out[:num_tokens].reshape(q.shape).astype(q.dtype)


def _chunking(block_size: int) -> tuple[int, int]:
    """Blocks and positions a chunk."""
    blocks = max(1, CHUNK // block_size)
    return blocks, blocks * block_size


def _pad_tables(block_tables: Array, blocks: int) -> Array:
    """To whole chunks, with block 0: a slice that ran over the edge would be moved back and misread."""
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks)))


def _first_chunk(seq_lens: Array, window: int, chunk: int) -> Array:
    """The first chunk that any row of a batch sees through its window."""
    starts = jnp.where(seq_lens > 0, jnp.maximum(seq_lens - window, 0), jnp.iinfo(jnp.int32).max)
    return starts.min() // chunk
