"""Between model and kernels: writes the new keys and values, then attends. Kernels run inside shard_map here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels
from jaxserve.models.kv_cache import CACHE_SPEC

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "slot_mapping",
        "decode_block_tables",
        "decode_seq_lens",
        "prefill_block_tables",
        "prefill_seq_lens",
        "query_start_loc",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class AttentionInputs:
    """Where the T tokens of a step stand. First come single tokens of decoding sequences, as many as
    ``query_start_loc[0]`` says and S at most; then the ragged chunks of R prefilling sequences at most (R may be 0)."""

    positions: Array  # [T] within the sequence
    slot_mapping: Array  # [T] place in the cache, block * block_size + offset; padding points into block 0
    decode_block_tables: Array  # [S, M]
    decode_seq_lens: Array  # [S], this token included; 0 for rows that do not decode
    prefill_block_tables: Array  # [R, M]
    prefill_seq_lens: Array  # [R], this chunk included
    query_start_loc: Array  # [R + 1], among the T tokens


class _Options(TypedDict):
    scale: float
    window: int | None
    backend: str


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed for a whole program."""

    mesh: Mesh
    backend: str
    linear_backend: str
    """Of matrix products of few rows; ``reference``: all products are XLA's."""
    scale: float


def attend(
    spec: AttentionSpec,
    qkv: Array,
    rope: tuple[Array, Array],
    cache: tuple[Array, Array],
    inputs: AttentionInputs,
    window: int | None,
) -> tuple[Array, tuple[Array, Array]]:
    """``qkv[P, T, K, G + 2, D]``, partial sums of this step, and the rotary ``cos`` and ``sin[T, D / 2]`` -> attention
    ``[T, K, G, D]``, and the cache with this step's keys and values in it."""

    def local(
        qkv: Array, cache: tuple[Array, Array], rope: tuple[Array, Array], at: AttentionInputs
    ) -> tuple[Array, tuple[Array, Array]]:
        q, keys, values = pallas_kernels.rope_and_write(
            qkv, *rope, *cache, at.slot_mapping, dtype=cache[0].dtype, backend=spec.backend
        )
        decode_rows = at.decode_seq_lens.shape[0]
        options = _Options(scale=spec.scale, window=window, backend=spec.backend)
        attended = pallas_kernels.decode_attention(
            q[:decode_rows], keys, values, at.decode_block_tables, at.decode_seq_lens, **options
        )
        if at.prefill_seq_lens.shape[0]:
            prefill = pallas_kernels.prefill_attention(
                q, keys, values, at.prefill_block_tables, at.prefill_seq_lens, at.query_start_loc, **options
            )
            attended = prefill.at[:decode_rows].add(attended)  # each is zero where the other is not
        _, tokens, kv_heads, lanes, dim = qkv.shape
        return attended.reshape(tokens, kv_heads, lanes - 2, dim), (keys, values)

    by_head = P(None, "tp")
    both = (CACHE_SPEC, CACHE_SPEC)
    run = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(P(None, None, "tp"), both, P(), P()),
        out_specs=(by_head, both),
        check_vma=False,
    )
    return run(qkv, cache, rope, inputs)
