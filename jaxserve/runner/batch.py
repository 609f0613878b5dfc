"""The batch on host and device, and the only padding in the tree.

A step's whole host input is one int32 vector, laid out by its bucket alone and uploaded once. What lives longer, block
tables, sampling parameters and last tokens, stays on the device in ``BatchState``, a row a slot; rows are rewritten by
``RowUpdates`` when a request takes a slot or its prompt gets more blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.attention import AttentionInputs
from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.schedule import RowSampling, ScheduledRequest
from pallas_kernels.sampling import SamplingRows

Array = jax.Array

SAMPLING_WORDS = 8
UPDATE_ROWS = 8
"""Rows that one call of the row update rewrites."""


class BatchState(NamedTuple):
    """Device-resident state of all slots; the last row is nobody's and serves padding (its block table is zero)."""

    block_tables: Array  # int32 [1, slots + 1, M]; the first axis is the KV cache group
    last_tokens: Array  # int32 [slots + 1], sampled by each slot's latest step
    sampling: Array  # int32 [slots + 1, SAMPLING_WORDS], floats by their bits

    @classmethod
    def zeros(cls, slots: int, table_width: int) -> BatchState:
        """Host arrays of the initial state."""
        return cls(
            np.zeros((1, slots + 1, table_width), np.int32),  # type: ignore[arg-type]
            np.zeros(slots + 1, np.int32),  # type: ignore[arg-type]
            np.zeros((slots + 1, SAMPLING_WORDS), np.int32),  # type: ignore[arg-type]
        )

    def sampling_rows(self, slots: Array) -> SamplingRows:
        words = self.sampling[slots]
        floats = lax.bitcast_convert_type(words[:, :3], jnp.float32)
        return SamplingRows(
            floats[:, 0], floats[:, 1], floats[:, 2], words[:, 3], seeds=words[:, 4:6], choices=words[:, 6]
        )


class _Layout(NamedTuple):
    """Where each part of a bucket's vector begins and ends."""

    slots: slice
    seq_lens: slice
    new_blocks: slice
    query_start_loc: slice
    token_ids: slice

    @classmethod
    def of(cls, bucket: Bucket) -> _Layout:
        sizes = (bucket.rows, bucket.rows, bucket.decode_rows, bucket.prefill_rows + 1, bucket.tokens)
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        return cls(*(slice(a, b) for a, b in zip(starts, ends, strict=True)))


def packed_size(bucket: Bucket) -> int:
    """int32 words of a bucket's vector."""
    return _Layout.of(bucket).token_ids.stop


def pack(
    decode: Sequence[ScheduledRequest], prefill: Sequence[ScheduledRequest], bucket: Bucket, null_slot: int
) -> np.ndarray:
    """The step's input vector. Padding rows have the null slot and length 0, padding tokens id 0."""
    layout = _Layout.of(bucket)
    packed = np.zeros(layout.token_ids.stop, np.int32)
    slots, seq_lens, new_blocks, starts, tokens = (packed[part] for part in layout)
    slots.fill(null_slot)
    new_blocks.fill(-1)
    for row, item in enumerate(decode):
        slots[row], seq_lens[row], tokens[row] = item.slot, item.seq_len, item.token_ids[0]
        if item.new_block is not None:
            new_blocks[row] = item.new_block
    start = 0
    for row, item in enumerate(prefill):
        place = bucket.decode_rows + row
        slots[place], seq_lens[place] = item.slot, item.seq_len
        end = start + len(item.token_ids)
        tokens[bucket.decode_rows + start : bucket.decode_rows + end] = item.token_ids
        starts[row + 1] = start = end
    starts[len(prefill) + 1 :] = start
    return packed


class StepInputs(NamedTuple):
    """A step as the model sees it."""

    token_ids: Array  # [T]
    attention: AttentionInputs
    wanted: Array  # [R] the last token of each row, whose logits are computed
    rows: Array  # [2, R] slots and sequence lengths, for the sampler


def unpack(packed: Array, state: BatchState, bucket: Bucket, block_size: int) -> tuple[StepInputs, BatchState]:
    """Inside a program: the inputs of a step, and the state with the appended blocks. Positions, cache places and
    lengths are derived here, so that nothing but the packed vector crosses from the host."""
    slots, seq_lens, new_blocks, starts, tokens = (packed[part] for part in _Layout.of(bucket))
    split = bucket.decode_rows
    tables = _append_blocks(state.block_tables, slots[:split], seq_lens[:split], new_blocks, block_size)
    rows = tables[0][slots]
    known = tokens[:split]
    token_ids = jnp.concatenate([jnp.where(known < 0, state.last_tokens[slots[:split]], known), tokens[split:]])

    index = jnp.arange(bucket.prefill_tokens)
    # Beyond the last row for padding. compare_all, since the default is a loop, which no CUDA graph takes in.
    owner = jnp.searchsorted(starts[1:], index, side="right", method="compare_all")
    owner = jnp.minimum(owner, max(bucket.prefill_rows - 1, 0))
    valid = index < starts[-1]
    prefill_lens = seq_lens[split:]
    first = prefill_lens - (starts[1:] - starts[:-1])
    prefill_positions = jnp.where(valid, first[owner] + index - starts[owner], 0) if bucket.prefill_rows else index
    positions = jnp.concatenate([jnp.maximum(seq_lens[:split] - 1, 0), prefill_positions])
    row_of_token = jnp.concatenate([jnp.arange(split), split + owner])
    blocks = rows[row_of_token, positions // block_size]
    real = jnp.concatenate([seq_lens[:split] > 0, valid])
    slot_mapping = jnp.where(real, blocks * block_size, 0) + positions % block_size
    attention = AttentionInputs(
        positions, slot_mapping, rows[:split], seq_lens[:split], rows[split:], prefill_lens, starts
    )
    wanted = jnp.concatenate([jnp.arange(split), split + jnp.maximum(starts[1:] - 1, 0)])[: bucket.rows]
    inputs = StepInputs(token_ids, attention, wanted, jnp.stack([slots, seq_lens]))
    return inputs, state._replace(block_tables=tables)


def _append_blocks(tables: Array, slots: Array, seq_lens: Array, new_blocks: Array, block_size: int) -> Array:
    column = (seq_lens - 1) // block_size
    # Out of range where there is nothing to append: negative indices would wrap, also with mode="drop".
    column = jnp.where(new_blocks < 0, tables.shape[2], column)
    return tables.at[0, slots, column].set(new_blocks, mode="drop")


def pack_row_updates(items: Sequence[ScheduledRequest], table_width: int, unused_slot: int) -> np.ndarray:
    """Argument of ``apply_row_updates`` for at most UPDATE_ROWS items, int32 ``[UPDATE_ROWS, 2 + SAMPLING_WORDS + M]``:
    slot, whether sampling words are given, those, the block table."""
    rows = np.zeros((UPDATE_ROWS, 2 + SAMPLING_WORDS + table_width), np.int32)
    rows[:, 0] = unused_slot
    for row, item in zip(rows, items, strict=False):
        assert item.block_ids is not None
        row[0] = item.slot
        if item.sampling is not None:
            row[1] = 1
            row[2 : 2 + SAMPLING_WORDS] = _sampling_words(item.sampling)
        table = row[2 + SAMPLING_WORDS :]
        table[: len(item.block_ids)] = item.block_ids
    return rows


def _sampling_words(row: RowSampling) -> np.ndarray:
    words = np.zeros(SAMPLING_WORDS, np.int32)
    params = row.params
    words[:3] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    words[3] = params.top_k
    words[4:6] = np.array([row.seed], np.int64).view(np.int32)  # little endian: low word first
    words[6] = row.choice_index
    return words


@partial(jax.jit, donate_argnums=0)
def apply_row_updates(state: BatchState, rows: Array) -> BatchState:
    """Rewrite whole rows of the state; rows with a slot out of range are dropped."""
    slots = rows[:, 0]
    out_of_range = state.sampling.shape[0]
    sampling_slots = jnp.where(rows[:, 1] == 1, slots, out_of_range)
    return BatchState(
        state.block_tables.at[0, slots].set(rows[:, 2 + SAMPLING_WORDS :], mode="drop"),
        state.last_tokens,
        state.sampling.at[sampling_slots].set(rows[:, 2 : 2 + SAMPLING_WORDS], mode="drop"),
    )
