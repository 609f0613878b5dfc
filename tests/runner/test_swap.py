"""Blocks that go to host memory come back as they were, into other blocks."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.models.kv_cache import cache_shapes
from jaxserve.runner import compiles, swap
from jaxserve.runner.swap import PIECE, SWAP_BLOCKS, Swapper, host_bytes

BLOCKS = 800


@pytest.fixture(scope="module")
def parts(llm):
    runner = llm("tiny-llama-3.1").engine.runner
    plan = runner.plan
    shapes = cache_shapes(runner.model_config, BLOCKS, plan.block_size, plan.dtype, runner._mesh)
    return shapes, runner._mesh


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("count", [1, SWAP_BLOCKS, SWAP_BLOCKS + 5, 256, 256 + SWAP_BLOCKS + 40])
def test_blocks_come_back_elsewhere_and_nothing_else_changes(parts, count, fetched):
    shapes, mesh = parts
    swapper = Swapper(shapes, mesh, host_bytes(shapes, 6 * SWAP_BLOCKS))
    assert swapper.num_blocks == 6 * SWAP_BLOCKS
    cache = filled(shapes, mesh)
    before = [np.array(array) for layer in cache for array in layer]
    rng = np.random.default_rng(count)
    source, target = rng.permutation(np.arange(1, BLOCKS))[: 2 * count].reshape(2, count).tolist()
    compiled = compiles.total()
    handle = swapper.swap_out(cache, source)
    assert len(handle) == -(-count // PIECE)
    while swapper._gathered or swapper._leaving:
        swapper.advance()
    assert all(part.sharding.memory_kind == "pinned_host" for part in handle)
    arriving = []
    while fetched and not swapper.fetch(handle, arriving):
        assert len(arriving) <= len(handle)
    cache = swapper.swap_in(cache, handle, target, arriving)
    assert compiles.total() == compiled
    for array, old in zip((a for layer in cache for a in layer), before, strict=True):
        expected = old.copy()
        expected[target] = old[source]
        np.testing.assert_array_equal(array, expected)


def filled(shapes, mesh):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jax.device_put(rng.standard_normal(s.shape).astype(s.dtype), s.sharding), shapes)


def test_swapping_in_updates_the_cache_in_place_and_warming_up_changes_nothing(parts):
    shapes, mesh = parts
    swapper = Swapper(shapes, mesh, host_bytes(shapes, 3 * SWAP_BLOCKS))
    cache = filled(shapes, mesh)
    before = [np.array(array) for layer in cache for array in layer]
    warm = swapper.warm_up(cache)
    assert all(array.is_deleted() for layer in cache for array in layer), "donated"
    for array, old in zip((a for layer in warm for a in layer), before, strict=True):
        np.testing.assert_array_equal(array, old)
    assert swapper.seconds_per_program > 0


@pytest.mark.parametrize("in_flight", [2, 4])
def test_more_blocks_than_may_be_on_their_way_come_back_too(parts, monkeypatch, in_flight):
    monkeypatch.setattr(swap, "IN_FLIGHT", in_flight)
    shapes, mesh = parts
    swapper = Swapper(shapes, mesh, host_bytes(shapes, 3 * SWAP_BLOCKS))
    cache = filled(shapes, mesh)
    before = [np.array(array) for layer in cache for array in layer]
    ids = list(range(1, 3 * SWAP_BLOCKS + 1))
    handle, arriving = swapper.swap_out(cache, ids), []
    assert sum(part.sharding.memory_kind != "pinned_host" for part in handle) <= in_flight
    swapper.settle()
    while not swapper.fetch(handle, arriving):
        pass
    assert len(handle) == 3 * SWAP_BLOCKS // PIECE and len(arriving) == in_flight
    cache = swapper.swap_in(cache, handle, ids[::-1], arriving)
    for array, old in zip((a for layer in cache for a in layer), before, strict=True):
        np.testing.assert_array_equal(np.asarray(array)[ids[::-1]], old[ids])


@pytest.mark.parametrize("fetched", [False, True])
def test_a_long_sequence_takes_no_more_memory_than_is_set_aside(parts, fetched):
    shapes, mesh = parts
    swapper = Swapper(shapes, mesh, host_bytes(shapes, 13 * SWAP_BLOCKS))
    cache = filled(shapes, mesh)
    # As many as fit into the largest program three times, and some: the pieces of the first are to be gone by then.
    ids = [1 + index % (BLOCKS - 1) for index in range(13 * SWAP_BLOCKS)]
    handle, arriving = swapper.swap_out(cache, ids), []
    swapper.settle()
    while fetched and not swapper.fetch(handle, arriving):
        pass
    most = 0

    def watched(program):
        def run(*arguments):
            nonlocal most
            on_device = [a for a in jax.live_arrays() if a.ndim == 6 and a.sharding.memory_kind != "pinned_host"]
            most = max(most, len(on_device))
            return program(*arguments)

        return run

    swapper._scatters = {size: watched(program) for size, program in swapper._scatters.items()}
    swapper.swap_in(cache, handle, ids, arriving)
    assert 0 < most <= swap.IN_FLIGHT and not arriving


def test_what_is_dropped_on_its_way_is_forgotten(parts):
    shapes, mesh = parts
    swapper = Swapper(shapes, mesh, host_bytes(shapes, 3 * SWAP_BLOCKS))
    cache = filled(shapes, mesh)
    dropped, kept = (swapper.swap_out(cache, [block]) for block in (1, 2))
    dropped.clear()
    swapper.settle()
    assert not dropped and kept[0].sharding.memory_kind == "pinned_host"


def test_too_little_space_holds_nothing(parts):
    shapes, mesh = parts
    assert Swapper(shapes, mesh, host_bytes(shapes, SWAP_BLOCKS) - 1).num_blocks == 0
