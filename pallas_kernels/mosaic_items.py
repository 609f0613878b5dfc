"""What the thread blocks of ``mosaic_prefill`` work on: tiles of queries, each of one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

WARPGROUPS = 2
ROWS = 64
"""Queries of a warpgroup, the height of its matrix instructions."""
ITEM_ROWS = WARPGROUPS * ROWS
ALIGNED = 8
"""Shared memory of matrix operands is laid out eight rows at a time, and copies into it begin at such rows."""


class Item(NamedTuple):
    """ITEM_ROWS tokens, of which some are queries of one sequence. All scalars, or all arrays over items."""

    seq: Array
    token: Array
    """The first, a multiple of ALIGNED."""
    begin: Array
    """The first row that is a query of the sequence; less than ALIGNED."""
    end: Array
    """Behind the last row that is."""
    position: Array
    """Of the first row in the sequence, if it were a query of it."""
    length: Array
    """Of the sequence."""
    first_step: Array
    steps: Array
    """0 for padding tokens, which get zeros; -1 for an item that is not there."""


def plan_items(
    tokens: int, seq_lens: Array, query_start_loc: Array, window: int | None, block_kv: int
) -> tuple[Array, Array]:
    """Items, the longest first, as int32 ``[I, 8]`` with the fields of ``Item``, and how many there are, ``[1]``."""
    seqs = seq_lens.shape[0]
    # Before and behind the sequences comes one more, of tokens that are nobody's.
    starts, stops = jnp.insert(query_start_loc, 0, 0), jnp.append(query_start_loc, tokens)
    aligned = starts // ALIGNED * ALIGNED
    counts = jnp.where(stops > starts, ceil_div(stops - aligned, ITEM_ROWS), 0)
    ends = jnp.cumsum(counts)
    index = jnp.arange((tokens + (seqs + 2) * (ITEM_ROWS + ALIGNED)) // ITEM_ROWS, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(ends[None] <= index[:, None], axis=1), seqs + 1)
    token = aligned[owner] + (index - (ends - counts)[owner]) * ITEM_ROWS
    begin = jnp.maximum(starts[owner] - token, 0)
    end = jnp.minimum(stops[owner] - token, ITEM_ROWS)
    seq = jnp.clip(owner - 1, 0, seqs - 1)
    position = seq_lens[seq] - (stops[owner] - token)
    first_step = jnp.zeros_like(index)
    if window is not None:
        first_step = jnp.maximum(position + begin - window + 1, 0) // block_kv
    steps = jnp.where((owner > 0) & (owner <= seqs), ceil_div(position + end, block_kv) - first_step, 0)
    steps = jnp.where(index < ends[-1], steps, -1)
    fields = Item(seq, token, begin, end, position, seq_lens[seq], first_step, steps)
    # The place of each item by counting: a sort takes XLA longer to compile than all the rest of this.
    before = (steps[None] > steps[:, None]) | ((steps[None] == steps[:, None]) & (index[None] < index[:, None]))
    table = jnp.stack(fields, axis=1).astype(jnp.int32)
    return jnp.zeros_like(table).at[jnp.sum(before, axis=1)].set(table), ends[-1:].astype(jnp.int32)


def ceil_div(a: Any, b: int) -> Any:
    return (a + b - 1) // b
