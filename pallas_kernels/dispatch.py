"""One function an operation; the caller names the implementation, and an explicit name never falls back."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.adjust import Allowed, Edits, Penalties
from pallas_kernels.decode_plan import DecodePlan
from pallas_kernels.sampling import SamplingRows

Array = jax.Array

# Operation -> implementation -> where it is; modules are imported when first asked for, since triton is large and
# not everywhere.
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "add_rms_norm": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_norm",
    },
    "swiglu": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_swiglu",
    },
    "suits_linear": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_linear",
    },
    "linear_parts": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_linear",
    },
    "linear": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_linear",
    },
    "gated_linear": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_linear",
    },
    "rope_and_write": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_rope",
    },
    "plan_decode": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_decode",
        "gluon": "pallas_kernels.gluon_decode",
    },
    "suits_decode": {
        "gluon": "pallas_kernels.gluon_decode",
    },
    "decode_attention": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_decode",
        "gluon": "pallas_kernels.gluon_decode",
    },
    "prefill_attention": {
        "reference": "pallas_kernels.reference",
        "triton": "pallas_kernels.triton_prefill",
        "mosaic_gpu": "pallas_kernels.mosaic_prefill",
    },
    "adjust_logits": {
        "reference": "pallas_kernels.adjust",
        "triton": "pallas_kernels.triton_adjust",
    },
    "sample": {
        "reference": "pallas_kernels.sampling",
        "triton": "pallas_kernels.triton_sampling",
    },
}


def backends(operation: str) -> tuple[str, ...]:
    """The implementations that exist of an operation."""
    return tuple(IMPLEMENTATIONS[operation])


def _implementation(operation: str, backend: str) -> Callable[..., Any]:
    try:
        module = IMPLEMENTATIONS[operation][backend]
    except KeyError:
        raise ValueError(
            f"{operation} has no {backend!r} implementation, only {', '.join(backends(operation))}"
        ) from None
    run: Callable[..., Any] = getattr(import_module(module), operation)
    return run


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may do nothing with arrays but give them to Triton kernels, change ``jax.Ref``s by these and
    reshape, with its kernels launched so that each begins before the one in front of it has ended (on a Hopper GPU):
    see ``triton_chain``. JAXSERVE_TRITON=xla in the environment leaves launching to XLA, to compare."""
    if not _may_launch():
        return function
    from pallas_kernels import triton_chain  # not everywhere

    return triton_chain.chained(function)


def _may_launch() -> bool:
    """Whether kernels may be launched by ourselves, not XLA, as those in Gluon must be."""
    return not os.environ.get("JAXSERVE_TRITON")


def add_rms_norm(x: Array, delta: Array, weight: Array, *, eps: float, backend: str) -> tuple[Array, Array]:
    """``x[T, D]`` plus the sum of the partial sums ``delta[P, T, D]``, and the root-mean-square norm of that times
    ``weight[D]``: computed in float32, each, and delta's sum, rounded to x's dtype."""
    result: tuple[Array, Array] = _implementation("add_rms_norm", backend)(x, delta, weight, eps=eps)
    return result


def swiglu(gate_up: Array, *, backend: str) -> Array:
    """``silu(gate_up[:, 0]) * gate_up[:, 1]`` of ``[T, 2, I]``: ``[T, I]`` (Shazeer, arXiv:2002.05202)."""
    result: Array = _implementation("swiglu", backend)(gate_up)
    return result


def suits_linear(kind: str, rows: int, depth: int, columns: int, dtype: jnp.dtype, *, backend: str) -> bool:
    """Whether an implementation takes a product of ``[rows, depth]`` and ``[depth, columns]`` of this kind, "parts"
    (``linear_parts``), "whole" (``linear``) or "gated" (``gated_linear``), and does better than XLA."""
    result: bool = _implementation("suits_linear", backend)(kind, rows, depth, columns, dtype)
    return result


def linear_parts(x: Array, w: Array, *, backend: str) -> Array:
    """``x[T, K] @ w[K, N]`` as partial sums ``[P, T, N]``, whose number depends on the shapes alone: float32, or x's
    dtype if there is but one."""
    result: Array = _implementation("linear_parts", backend)(x, w)
    return result


def linear(x: Array, w: Array, *, dtype: jnp.dtype, backend: str) -> Array:
    """``x[T, K] @ w[K, N]`` in ``dtype``, summed in float32: ``[T, N]``."""
    result: Array = _implementation("linear", backend)(x, w, dtype=dtype)
    return result


def gated_linear(x: Array, w: Array, *, backend: str) -> Array:
    """``silu(x @ w[:, 0]) * (x @ w[:, 1])`` of ``x[T, K]`` and ``w[K, 2, I]``: ``[T, I]``; both products are rounded to
    x's dtype."""
    result: Array = _implementation("gated_linear", backend)(x, w)
    return result


def rope_and_write(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    dtype: jnp.dtype,
    backend: str,
) -> tuple[Array, Array, Array]:
    """Turn queries and keys by their positions, and put keys and values into the cache.

    ``qkv[P, T, K, G + 2, D]``, P partial sums whose sum is rounded to ``dtype``, holds for each KV head its G query
    heads, the key and the value; ``cos`` and ``sin``, float32 ``[T, D / 2]``, turn element i with i + D / 2;
    ``slots[T]`` are places in the caches, block * B + offset.
    Gives ``q[T, K * G, D]`` in ``dtype`` and the caches, which are written in place.
    """
    return _implementation("rope_and_write", backend)(qkv, cos, sin, k_cache, v_cache, slots, dtype=dtype)


def plan_decode(
    seq_lens: Array,
    *,
    kv_heads: int,
    max_seq_len: int,
    window: int | None,
    backend: str,
    split_size: int | None = None,
) -> DecodePlan:
    """How ``decode_attention`` shares out the work of sequences of ``seq_lens[S]``, none above ``max_seq_len``.

    With a ``window``, only the last ``window`` positions of a sequence are seen. ``split_size`` (a multiple of 64)
    fixes how many keys are summed in one go, so that a row's order of summation depends on its own length alone.
    """
    run = _implementation("plan_decode", backend)
    options = {"kv_heads": kv_heads, "max_seq_len": max_seq_len, "window": window, "split_size": split_size}
    result: DecodePlan = run(seq_lens, **options)
    return result


def suits_decode(dtype: jnp.dtype, groups: int, dim: int, *, backend: str) -> bool:
    """Whether an implementation for Hopper takes queries, keys and values of this type, so many query heads a KV head,
    and heads of this size."""
    result: bool = _may_launch() and _implementation("suits_decode", backend)(dtype, groups, dim)
    return result


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    plan: DecodePlan,
    *,
    scale: float,
    backend: str,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    into: Array | None = None,
) -> tuple[Array, DecodePlan]:
    """Attention of one query a sequence, the last of its ``seq_lens[s]`` tokens, for which ``plan`` was made.

    ``q[S, H, D]``, ``block_tables[S, M]``, ``seq_lens[S]`` -> ``[S, H, D]`` in q's dtype, and the plan for the next
    layer, whose scratch memory is used in place. Query head h reads KV head h // (H / K). A row of length 0 is padding
    and gives zeros. ``k_scale`` and ``v_scale``, float32 ``[K]`` and given together, multiply the keys and values of
    each KV head.
    With ``into[T, H, D]``, whose first S rows are those of ``q[T, H, D]``, results are put there, in place, and rows
    of length 0 are left as they are.
    In a chain of kernels (``chained``) no other kernel may write keys or values that a sequence here has, its last
    token's apart: they are read before those in front are done.
    """
    run = _implementation("decode_attention", backend)
    options = {"scale": scale, "k_scale": k_scale, "v_scale": v_scale, "into": into}
    result: tuple[Array, DecodePlan] = run(q, k_cache, v_cache, block_tables, seq_lens, plan, **options)
    return result


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
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """Causal attention of ragged chunks: sequence s owns the queries ``query_start_loc[s]:query_start_loc[s + 1]``.

    They are the last of its ``seq_lens[s]`` tokens, all of which are in the cache already. ``q[T, H, D]``,
    ``block_tables[S, M]``, ``seq_lens[S]``, ``query_start_loc[S + 1]`` -> ``[T, H, D]``; rows before
    ``query_start_loc[0]`` and from ``query_start_loc[S]`` on are nobody's and give zeros. Scales as in
    ``decode_attention``.
    """
    run = _implementation("prefill_attention", backend)
    options = {"scale": scale, "window": window, "k_scale": k_scale, "v_scale": v_scale}
    return run(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, **options)


def adjust_logits(
    logits: Array,
    seen: Array,
    slots: Array,
    penalties: Penalties,
    allowed: Allowed,
    edits: Edits,
    rows: SamplingRows,
    *,
    backend: str,
) -> tuple[Array, tuple[Array, ...]]:
    """Float32 ``logits[R, V]`` less penalties, -inf where they are not allowed, plus edits; and the ``stats`` that
    ``sample`` of the result, for the same ``rows``, takes: what it need not find out again, and sums of exponentials
    before all this.

    ``seen[S, V]``, int16, says of each slot how often a token was generated, and by its sign whether the prompt has
    it; ``slots[R]`` are the rows' own. Repetition comes first and scales towards less likely: it divides a positive
    logit and multiplies a negative one.
    """
    run = _implementation("adjust_logits", backend)
    result: tuple[Array, tuple[Array, ...]] = run(logits, seen, slots, penalties, allowed, edits, rows)
    return result


def sample(
    logits: Array,
    rows: SamplingRows,
    positions: Array,
    *,
    backend: str,
    stats: tuple[Array, ...] = (),
    as_chain: bool = False,
) -> tuple[Array, Array]:
    """One token id a row, int32 ``[R]``, from float32 ``logits[R, V]``, and the logarithm of each row's sum of
    exponentials, float32 ``[R]``, NaN where a logit is not finite; ``positions[R]`` is where the token will stand.
    Every implementation draws the same bits (``philox``) and keeps the same tokens, but for rounding. With ``stats`` of
    ``adjust_logits`` the logarithms are of what that was given. ``as_chain``, for a Hopper GPU: a chain of kernels
    (``chained``), each of which is compiled once for all programs."""
    run = _implementation("sample", backend)
    result: tuple[Array, Array] = (chained(run) if as_chain else run)(logits, rows, positions, stats)
    return result
