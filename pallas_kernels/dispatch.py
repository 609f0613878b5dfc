"""One function an operation; the caller names the implementation, and an explicit name never falls back."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels import reference

Array = jax.Array

IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Array]]] = {
    "decode_attention": {"reference": reference.decode_attention},
    "prefill_attention": {"reference": reference.prefill_attention},
}


def backends(operation: str) -> tuple[str, ...]:
    """The implementations that exist of an operation."""
    return tuple(IMPLEMENTATIONS[operation])


def _implementation(operation: str, backend: str) -> Callable[..., Array]:
    try:
        return IMPLEMENTATIONS[operation][backend]
    except KeyError:
        raise ValueError(
            f"{operation} has no {backend!r} implementation, only {', '.join(backends(operation))}"
        ) from None


def write_kv(k_cache: Array, v_cache: Array, k: Array, v: Array, slots: Array) -> tuple[Array, Array]:
    """Put the keys and values ``[T, K, D]`` of T tokens at ``slots[T]`` (block * B + offset) of the caches."""
    return reference.write_kv(k_cache, v_cache, k, v, slots)


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
    window: int | None,
    backend: str,
) -> Array:
    """Attention of one query a sequence, the last of its ``seq_lens[s]`` tokens.

    ``q[S, H, D]``, ``block_tables[S, M]``, ``seq_lens[S]`` -> ``[S, H, D]`` in q's dtype. Query head h reads
    KV head h // (H / K). With a ``window``, only the last ``window`` positions are seen. A row of length 0 is
    padding and gives zeros.
    """
    run = _implementation("decode_attention", backend)
    return run(q, k_cache, v_cache, block_tables, seq_lens, scale=scale, window=window)


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
    backend: str,
) -> Array:
    """Causal attention of ragged chunks: sequence s owns the queries ``query_start_loc[s]:query_start_loc[s + 1]``.

    They are the last of its ``seq_lens[s]`` tokens, all of which are in the cache already. ``q[T, H, D]``,
    ``block_tables[S, M]``, ``seq_lens[S]``, ``query_start_loc[S + 1]`` -> ``[T, H, D]``; rows past
    ``query_start_loc[S]`` are padding and give zeros.
    """
    run = _implementation("prefill_attention", backend)
    return run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale=scale, window=window)
