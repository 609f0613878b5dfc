"""The code of ``mosaic_prefill``'s thread blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_items import ALIGNED, ROWS, WARPGROUPS, Item, ceil_div
from pallas_kernels.mosaic_softmax import Softmax, hide, multiply, multiply_and_weigh, weigh

Array = jax.Array
Ref = Any

WARPS = 4
"""Of a warpgroup."""
COMPUTING_REGISTERS, LOADING_REGISTERS = 240, 24
"""Of a thread. All three warpgroups begin with 168, as many as a multiprocessor has for them in eights; who asks for
more than the others have given back waits for ever."""


@dataclass(frozen=True)
class Tuning:
    block_kv: int = 128
    """Keys a step."""
    stages: int = 2
    """Steps of keys and values in shared memory."""
    thread_blocks: int = 132
    """Multiprocessors of an H100 or H200; with fewer, the rest of the blocks only start later."""


@dataclass(frozen=True)
class Kernel:
    """What is static about a call, and the code of a thread block."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    num_blocks: int
    table_width: int
    dtype: Any
    scale: float
    window: int | None
    tuning: Tuning
    stretch: int = field(init=False)
    """Keys that lie together in the cache and are copied together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stretch", min(self.block_size, self.tuning.block_kv))

    def scratch(self) -> dict[str, Any]:
        stages, keys = self.tuning.stages, self.tuning.block_kv
        queries = plgpu.SMEM((WARPGROUPS, ROWS, self.dim), self.dtype)
        kv = plgpu.SMEM((stages, keys, self.dim), self.dtype)
        copied = plgpu.Barrier(num_arrivals=keys // self.stretch, num_barriers=stages)
        used = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        return {
            "q_smem": queries,
            "k_smem": kv,
            "v_smem": kv,
            "out_smem": queries,
            "part_smem": plgpu.SMEM((WARPGROUPS, ROWS, self.dim), self.dtype),
            "q_copied": plgpu.Barrier(num_barriers=WARPGROUPS),
            "q_used": plgpu.Barrier(num_barriers=WARPGROUPS),
            "k_copied": copied,
            "v_copied": copied,
            "k_used": used,
            "v_used": used,
            "turn": plgpu.Barrier(num_barriers=WARPGROUPS),
        }

    def __call__(self, q: Ref, k: Ref, v: Ref, tables: Ref, items: Ref, count: Ref, out: Ref, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        refs = _Refs(q, k, v, tables, out, **scratch)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
            # The first warpgroup begins.
            pl.when(warpgroup == 1)(refs.end_turn)
            self._for_items(items, count, lambda item, head, done: self._attend(refs, item, head, done))
            pl.when(warpgroup == 0)(refs.await_turn)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                steps = self._for_items(items, count, lambda item, head, done: self._load(refs, warp, item, head, done))
                self._drain(refs, warp, steps)

    def _for_items(self, items: Ref, count: Ref, work: Callable[[Item, Array, Array], None]) -> Array:
        """Calls ``work`` with each item of this thread block, the head, and how many steps were done before; gives how
        many were done in all."""
        me, blocks = lax.axis_index("block"), self.tuning.thread_blocks
        total = count[0] * self.heads

        def one(turn: Array, done: Array) -> Array:
            index = turn * blocks + jnp.where(turn % 2 == 0, me, blocks - 1 - me)
            exists = index < total
            at = jnp.where(exists, index // self.heads, 0)
            item = Item(*(items[at, i] for i in range(len(Item._fields))))
            item = item._replace(
                token=lax.div(item.token, jnp.int32(ALIGNED)) * ALIGNED,  # known to be a multiple
                end=jnp.where(exists, item.end, 0),
                steps=jnp.where(exists, item.steps, 0),
            )
            work(item, index % self.heads, done)
            return done + item.steps

        return lax.fori_loop(0, ceil_div(total, blocks), one, jnp.int32(0))

    def _slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.tuning.stages))

    def _load(self, refs: _Refs, warp: Array, item: Item, head: Array, done: Array) -> None:
        """A loading warp's part of an item."""

        def load_queries() -> None:
            for warpgroup in range(WARPGROUPS):

                @pl.when(warp == warpgroup)
                def _(warpgroup: int = warpgroup) -> None:
                    pl.when(done > 0)(lambda: plgpu.barrier_wait(refs.q_used.at[warpgroup]))
                    source = refs.q.at[pl.ds(item.token + warpgroup * ROWS, ROWS), head]
                    plgpu.copy_gmem_to_smem(source, refs.q_smem.at[warpgroup], refs.q_copied.at[warpgroup])

        def load_keys(step: Array) -> None:
            self._load_step(refs, warp, item, lax.div(head, jnp.int32(self.heads // self.kv_heads)), step, done + step)

        @pl.when(item.steps > 0)
        def _() -> None:
            # Keys first: their places are free before the last item's queries have been used.
            load_keys(jnp.int32(0))
            load_queries()

        @pl.loop(jnp.int32(1), jnp.maximum(item.steps, 1))
        def _(step: Array) -> None:
            load_keys(step)

    def _load_step(self, refs: _Refs, warp: Array, item: Item, kv_head: Array, step: Array, use: Array) -> None:
        """Each warp copies its share of a step's stretches: one alone would be the bottleneck."""
        slot = self._slot(use)
        stretches = self.tuning.block_kv // self.stretch
        share = ceil_div(stretches, WARPS)
        first_key = (item.first_step + step) * self.tuning.block_kv + warp * share * self.stretch
        rows = [self._cache_row(refs, item, first_key + index * self.stretch) for index in range(share)]
        for source, target, copied, used in (
            (refs.k, refs.k_smem, refs.k_copied, refs.k_used),
            (refs.v, refs.v_smem, refs.v_copied, refs.v_used),
        ):

            @pl.when(use >= self.tuning.stages)
            def _(used: Ref = used) -> None:
                plgpu.barrier_wait(used.at[slot])

            for index, row in enumerate(rows):
                at = warp * share + index
                stretch = source.at[pl.ds(row, self.stretch), kv_head]
                place = target.at[slot, pl.ds(at * self.stretch, self.stretch)]
                pl.when(at < stretches)(partial(plgpu.copy_gmem_to_smem, stretch, place, copied.at[slot]))

    def _cache_row(self, refs: _Refs, item: Item, key: Array) -> Array:
        """Where the stretch of keys that begins with ``key`` lies in the cache; out of range if nobody needs it, which
        is read as zeros, so that strange blocks bring no NaN."""
        size = jnp.int32(self.block_size // ALIGNED)
        group = lax.div(key, jnp.int32(ALIGNED))
        block = jnp.minimum(lax.div(group, size), self.table_width - 1)
        needed = key < item.length
        if self.window is not None:
            needed &= key + self.stretch > item.position + item.begin - self.window + 1
        group = refs.tables[item.seq, block] * size + lax.rem(group, size)
        return jnp.where(needed, group, self.num_blocks * size) * ALIGNED

    def _drain(self, refs: _Refs, warp: Array, steps: Array) -> None:
        """Waits until all that was loaded has been used, so that no barrier is left in a phase that nobody saw."""

        @pl.loop(jnp.maximum(steps - self.tuning.stages, 0), steps)
        def _(use: Array) -> None:
            plgpu.barrier_wait(refs.k_used.at[self._slot(use)])
            plgpu.barrier_wait(refs.v_used.at[self._slot(use)])

        for warpgroup in range(WARPGROUPS):

            @pl.when((steps > 0) & (warp == warpgroup))
            def _(warpgroup: int = warpgroup) -> None:
                plgpu.barrier_wait(refs.q_used.at[warpgroup])

    def _attend(self, refs: _Refs, item: Item, head: Array, done: Array) -> None:
        """A computing warpgroup's part of an item."""
        warpgroup = lax.axis_index("warpgroup")
        keys = self.tuning.block_kv
        rows = (jnp.where(warpgroup == 0, item.begin, 0), jnp.clip(item.end - warpgroup * ROWS, 0, ROWS))
        position = item.position + warpgroup * ROWS
        end = jnp.where(rows[1] > 0, ceil_div(position + rows[1], keys) - item.first_step, 0)
        end = jnp.clip(end, 0, item.steps)  # the positions of nobody's tokens are negative

        @pl.when(item.steps > 0)
        def _() -> None:
            plgpu.barrier_wait(refs.q_copied.at[warpgroup])

        def step(masked: bool) -> Callable[[Array, Softmax], Softmax]:
            return lambda at, state: self._step(refs, item, position, state, at, done + at, masked)

        # Steps from ``whole_to`` on have keys after the first query, those before ``whole_from`` keys outside a window.
        one = jnp.minimum(end, 1)
        whole_to = jnp.clip(lax.div(position + rows[0] + 1, jnp.int32(keys)) - item.first_step, one, end)
        whole_from = one
        state = lax.fori_loop(0, one, lambda *_: self._first_step(refs, item, position, done), self._nothing())
        if self.window is not None:
            hidden = jnp.maximum(position + ROWS - self.window, 0)
            whole_from = jnp.clip(ceil_div(hidden, keys) - item.first_step, one, whole_to)
            state = lax.fori_loop(one, whole_from, step(masked=True), state)
        state = lax.fori_loop(whole_from, whole_to, step(masked=False), state)
        state = lax.fori_loop(whole_to, end, step(masked=True), state)

        @pl.when(item.steps > 0)
        def _() -> None:
            plgpu.barrier_arrive(refs.q_used.at[warpgroup])

        last = end - 1
        state = lax.fori_loop(0, one, lambda _, state: self._last_values(refs, item, state, last, done + last), state)

        @pl.loop(end, jnp.maximum(item.steps, end))
        def _(at: Array) -> None:
            self._skip(refs, done + at)

        pl.when((item.steps > 0) & (end == 0))(refs.skip_turn)

        self._store(refs, state.result().astype(self.dtype), item.token + warpgroup * ROWS, rows, head)

    def _first_step(self, refs: _Refs, item: Item, position: Array, use: Array) -> Softmax:
        """An item's first step of keys. ``position`` is that of this warpgroup's first query."""
        slot, first_key = self._slot(use), item.first_step * self.tuning.block_kv
        plgpu.barrier_wait(refs.k_copied.at[slot])
        refs.await_turn()

        def scores_of(product: Ref) -> Array:
            self._begin_scores(refs, slot, product)
            refs.end_turn()
            return product[...]

        scores = pl.run_scoped(scores_of, plgpu.ACC((ROWS, self.tuning.block_kv), jnp.float32))
        plgpu.barrier_arrive(refs.k_used.at[slot])
        state = self._nothing()
        peak, total, _, weights = self._weigh(scores, state, first_key, position, masked=True)
        return Softmax(state.accumulator, peak, total, weights.astype(self.dtype))

    def _step(
        self, refs: _Refs, item: Item, position: Array, state: Softmax, step: Array, use: Array, masked: bool
    ) -> Softmax:
        """A later step; while its weights are computed, those of the step before are multiplied by their values."""
        slot, last_slot = self._slot(use), self._slot(use - 1)
        first_key = (item.first_step + step) * self.tuning.block_kv
        plgpu.barrier_wait(refs.k_copied.at[slot])
        plgpu.barrier_wait(refs.v_copied.at[last_slot])
        refs.await_turn()

        def weigh(scores: Array) -> tuple[Array, Array, Array, Array]:
            plgpu.barrier_arrive(refs.k_used.at[slot])
            return self._weigh(scores, state, first_key, position, masked)

        begin = partial(self._begin_scores, refs, slot)
        state, keep = multiply_and_weigh(state, refs.v_smem.at[last_slot], begin, refs.end_turn, weigh)
        plgpu.barrier_arrive(refs.v_used.at[last_slot])
        return state.scaled(keep)

    def _last_values(self, refs: _Refs, item: Item, state: Softmax, step: Array, use: Array) -> Softmax:
        """The weights of an item's last step times its values."""
        slot, first_key = self._slot(use), (item.first_step + step) * self.tuning.block_kv
        plgpu.barrier_wait(refs.v_copied.at[slot])
        pl.when(first_key + self.tuning.block_kv > item.length)(
            lambda: self._clear_values(refs, slot, item.length - first_key)
        )
        refs.await_turn()
        state = multiply(state, refs.v_smem.at[slot], refs.end_turn)
        plgpu.barrier_arrive(refs.v_used.at[slot])
        return state

    def _nothing(self) -> Softmax:
        return Softmax.start(self.dim, self.tuning.block_kv, self.dtype)

    def _weigh(
        self, scores: Array, state: Softmax, first_key: Array, position: Array, masked: bool
    ) -> tuple[Array, Array, Array, Array]:
        if masked:
            scores = hide(scores, first_key, position, self.window)
        return weigh(scores, state, self.scale, some_hidden=masked and self.window is not None)

    def _begin_scores(self, refs: _Refs, slot: Array, product: Ref) -> None:
        keys = refs.k_smem.at[slot].transpose((1, 0))
        plgpu.wgmma(product, refs.q_smem.at[lax.axis_index("warpgroup")], keys)

    def _clear_values(self, refs: _Refs, slot: Array, known: Array) -> None:
        """Values beyond a sequence's end may be NaN, and zero times NaN is NaN. Both warpgroups write the same."""
        for at in range(0, self.tuning.block_kv, ROWS):
            part = refs.v_smem.at[slot, pl.ds(at, ROWS)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA) + at
            part[...] = jnp.where(row < known, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def _skip(self, refs: _Refs, use: Array) -> None:
        """A step that only the other warpgroup needs."""
        slot = self._slot(use)
        plgpu.barrier_wait(refs.k_copied.at[slot])
        plgpu.barrier_arrive(refs.k_used.at[slot])
        plgpu.barrier_wait(refs.v_copied.at[slot])
        plgpu.barrier_arrive(refs.v_used.at[slot])
        refs.skip_turn()

    def _store(self, refs: _Refs, result: Array, token: Array, rows: tuple[Array, Array], head: Array) -> None:
        """Stores the rows from ``rows[0]`` to ``rows[1]``. A copy's size is fixed when it is compiled, and the rows
        around those are other sequences': what is not whole is stored in copies of powers of two."""
        warpgroup = lax.axis_index("warpgroup")
        begin, end = rows
        whole = (begin == 0) & (end == ROWS)

        @pl.when(whole)
        def _() -> None:
            staged = refs.out_smem.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, refs.out.at[pl.ds(token, ROWS), head])

        @pl.when((end > begin) & jnp.logical_not(whole))
        def _() -> None:
            staged = refs.part_smem.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = result
            plgpu.commit_smem()
            for size in (32, 16, 8, 4, 2, 1):
                start = begin + ((end - begin) & ~(2 * size - 1))

                @pl.when((end - begin) & size != 0)
                def _(start: Array = start, size: int = size) -> None:
                    plgpu.copy_smem_to_gmem(
                        staged.at[pl.ds(start, size)], refs.out.at[pl.ds(token + start, size), head]
                    )


@dataclass(frozen=True)
class _Refs:
    q: Ref
    k: Ref
    v: Ref
    tables: Ref
    out: Ref
    q_smem: Ref
    k_smem: Ref
    v_smem: Ref
    out_smem: Ref
    part_smem: Ref
    q_copied: Ref
    q_used: Ref
    k_copied: Ref
    v_copied: Ref
    k_used: Ref
    v_used: Ref
    turn: Ref

    def await_turn(self) -> None:
        plgpu.barrier_wait(self.turn.at[lax.axis_index("warpgroup")])

    def end_turn(self) -> None:
        plgpu.barrier_arrive(self.turn.at[1 - lax.axis_index("warpgroup")])

    def skip_turn(self) -> None:
        self.await_turn()
        self.end_turn()
