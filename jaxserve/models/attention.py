"""Between model and kernels: writes the new keys and values, then attends. The sole caller of pallas_kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import jax
import jax.numpy as jnp
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
    """Where the T = S + P tokens of a step stand. The first S are single tokens of decoding sequences, the others
    are the ragged chunks of R prefilling sequences; either part may be empty (S or P is 0)."""

    positions: Array  # [T] within the sequence
    slot_mapping: Array  # [T] place in the cache, block * block_size + offset; padding points into block 0
    decode_block_tables: Array  # [S, M]
    decode_seq_lens: Array  # [S], this token included; 0 for padding
    prefill_block_tables: Array  # [R, M]
    prefill_seq_lens: Array  # [R], this chunk included
    query_start_loc: Array  # [R + 1], counted from the first prefill token


class _Options(TypedDict):
    scale: float
    window: int | None
    backend: str


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed for a whole program."""

    mesh: Mesh
    backend: str
    scale: float


def attend(
    spec: AttentionSpec,
    q: Array,
    k: Array,
    v: Array,
    cache: tuple[Array, Array],
    inputs: AttentionInputs,
    window: int | None,
) -> tuple[Array, tuple[Array, Array]]:
    """``q[T, H, D]``, ``k`` and ``v[T, K, D]`` of this step -> attention ``[T, H, D]`` and the new cache."""

    def local(
        q: Array, k: Array, v: Array, cache: tuple[Array, Array], at: AttentionInputs
    ) -> tuple[Array, tuple[Array, Array]]:
        cache = pallas_kernels.write_kv(*cache, k, v, at.slot_mapping)
        split = at.decode_seq_lens.shape[0]
        options = _Options(scale=spec.scale, window=window, backend=spec.backend)
        parts = []
        if split:
            parts.append(
                pallas_kernels.decode_attention(
                    q[:split], *cache, at.decode_block_tables, at.decode_seq_lens, **options
                )
            )
        if q.shape[0] > split:
            parts.append(
                pallas_kernels.prefill_attention(
                    q[split:],
                    *cache,
                    at.prefill_block_tables,
                    at.prefill_seq_lens,
                    at.query_start_loc,
                    **options,
                )
            )
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0], cache

    heads = P(None, "tp", None)
    both = (CACHE_SPEC, CACHE_SPEC)
    run = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(heads, heads, heads, both, P()),
        out_specs=(heads, both),
        check_vma=False,
    )
    return run(q, k, v, cache, inputs)
