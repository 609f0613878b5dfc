"""Between model and kernels: writes the new keys and values, then attends. Kernels run inside shard_map here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels
from jaxserve.models.kv_cache import CACHE_SPEC
from pallas_kernels import DecodePlan

Array = jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "slot_mapping",
        "last",
        "block_tables",
        "seq_lens",
        "decode_seq_lens",
        "prefill_block_tables",
        "prefill_seq_lens",
        "query_start_loc",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class AttentionInputs:
    """Where the T tokens of a step's S rows stand. First come single tokens of decoding sequences, as many as
    ``query_start_loc[0]`` says and S at most; then the ragged chunks of R prefilling sequences at most (R may be 0)."""

    positions: Array  # [T] within the sequence
    slot_mapping: Array  # [T] place in the cache, block * block_size + offset; padding points into block 0
    last: Array  # [S] each row's last token, among the T
    block_tables: Array  # [S, M]
    seq_lens: Array  # [S], this step's tokens included; 0 for rows that are nobody's
    decode_seq_lens: Array  # [S], of rows that decode; 0 for all others
    prefill_block_tables: Array  # [R, M]
    prefill_seq_lens: Array  # [R], this chunk included
    query_start_loc: Array  # [R + 1], among the T tokens


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed for a whole program."""

    mesh: Mesh
    backend: str
    """Of all kernels but those below."""
    decode_backend: str
    prefill_backend: str
    linear_backend: str
    """Of matrix products of few rows; ``reference``: all products are XLA's."""
    scale: float
    chained: bool = False
    """Whether the layers' kernels are launched as a chain: see ``pallas_kernels.chained``."""


def plan_decode(
    spec: AttentionSpec, cache: tuple[Array, Array], seq_lens: Array, table_width: int, window: int | None
) -> DecodePlan:
    """The plan of sequences of ``seq_lens[S]`` for all layers of a window; of ``cache``, any layer's, only the shape
    matters."""
    _, block_size, kv_heads, _ = cache[0].shape
    plan = partial(
        pallas_kernels.plan_decode,
        kv_heads=kv_heads // spec.mesh.shape["tp"],
        max_seq_len=table_width * block_size,
        window=window,
        backend=spec.decode_backend,
    )
    run = jax.shard_map(plan, mesh=spec.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return run(seq_lens)


def attend(
    spec: AttentionSpec,
    qkv: Array,
    rope: tuple[Array, Array],
    cache: tuple[Array, Array],
    inputs: AttentionInputs,
    plan: DecodePlan,
    *,
    last_only: bool = False,
) -> tuple[Array, tuple[Array, Array], DecodePlan]:
    """``qkv[P, T, K, G + 2, D]``, partial sums of this step, and the rotary ``cos`` and ``sin[T, D / 2]`` -> attention
    ``[T, K, G, D]``, the cache with this step's keys and values in it, and the plan for the next layer of the same
    window.

    With ``last_only``, attention ``[S, K, G, D]`` of each row's last token alone, for which ``plan`` is made then."""

    def local(
        qkv: Array, cache: tuple[Array, Array], rope: tuple[Array, Array], at: AttentionInputs, plan: DecodePlan
    ) -> tuple[Array, tuple[Array, Array], DecodePlan]:
        q, keys, values = pallas_kernels.rope_and_write(
            qkv, *rope, *cache, at.slot_mapping, dtype=cache[0].dtype, backend=spec.backend
        )
        prefill, seq_lens = None, at.decode_seq_lens
        if last_only:
            q, seq_lens = q[at.last], at.seq_lens
        elif at.prefill_seq_lens.shape[0]:
            prefill = pallas_kernels.prefill_attention(
                q, keys, values, at.prefill_block_tables, at.prefill_seq_lens, at.query_start_loc,
                scale=spec.scale, window=plan.window, backend=spec.prefill_backend,
            )  # fmt: skip
        attended, plan = pallas_kernels.decode_attention(
            q, keys, values, at.block_tables, seq_lens, plan,
            scale=spec.scale, into=prefill, backend=spec.decode_backend,
        )  # fmt: skip
        _, _, kv_heads, lanes, dim = qkv.shape
        return attended.reshape(-1, kv_heads, lanes - 2, dim), (keys, values), plan

    by_head = P(None, "tp")
    both = (CACHE_SPEC, CACHE_SPEC)
    run = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(P(None, None, "tp"), both, P(), P(), P()),
        out_specs=(by_head, both, P()),
        check_vma=False,
    )
    return run(qkv, cache, rope, inputs, plan)
