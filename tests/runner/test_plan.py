"""Which kernels a configuration comes to on which device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from bench.shapes import LLAMA_8B
from jaxserve.config import EngineConfig
from jaxserve.runner.plan import BLOCKS_ROUNDED_TO, make_plan, num_blocks

CPU, AMPERE, HOPPER = ("cpu", ""), ("gpu", "8.0"), ("gpu", "9.0")


def backends(device, head_dim=128, num_heads=32, **options):
    if device == HOPPER:
        pytest.importorskip("triton", reason="Triton is for Linux only")
    model = replace(LLAMA_8B(1), head_dim=head_dim, num_heads=num_heads)
    plan = make_plan(EngineConfig(model="8B", **options), model, *device)
    return plan.attention_backend, plan.decode_backend, plan.prefill_backend


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        (CPU, {}, ("reference", "reference", "reference")),
        (AMPERE, {}, ("triton", "triton", "triton")),
        (HOPPER, {}, ("triton", "gluon", "mosaic_gpu")),
        (HOPPER, {"head_dim": 80}, ("triton", "triton", "triton")),
        (HOPPER, {"num_heads": 256}, ("triton", "triton", "mosaic_gpu")),
        (HOPPER, {"dtype": "float32"}, ("triton", "triton", "triton")),
        (HOPPER, {"attention_backend": "triton"}, ("triton", "triton", "triton")),
        (HOPPER, {"attention_backend": "mosaic_gpu"}, ("triton", "gluon", "mosaic_gpu")),
        (HOPPER, {"attention_backend": "reference"}, ("reference", "reference", "reference")),
    ],
)
def test_a_choice_is_kept(device, options, expected):
    assert backends(device, **options) == expected


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        (CPU, {}, "needs an NVIDIA GPU"),
        (AMPERE, {}, r"needs a Hopper GPU \(compute capability 9.0\), this one has 8.0"),
        (HOPPER, {"head_dim": 80}, "head size 80"),
        (HOPPER, {"dtype": "float32"}, "float32"),
    ],
)
def test_an_impossible_choice_is_refused(device, options, reason):
    with pytest.raises(ValueError, match=f"--attention-backend mosaic_gpu.*{reason}"):
        backends(device, attention_backend="mosaic_gpu", **options)


@pytest.mark.parametrize(
    ("device", "choice", "expected"),
    [
        (HOPPER, "auto", "triton"),
        (HOPPER, "triton", "triton"),
        (HOPPER, "reference", "reference"),
        (AMPERE, "auto", "reference"),
        (CPU, "auto", "reference"),
    ],
)
def test_products_of_few_rows(device, choice, expected):
    plan = make_plan(EngineConfig(model="8B", linear_backend=choice), LLAMA_8B(1), *device)
    assert plan.linear_backend == expected


@pytest.mark.parametrize("device", [CPU, AMPERE])
def test_products_that_only_hopper_has_are_refused(device):
    with pytest.raises(ValueError, match="--linear-backend triton needs a Hopper GPU"):
        make_plan(EngineConfig(model="8B", linear_backend="triton"), LLAMA_8B(1), *device)


@pytest.mark.parametrize(
    ("device", "max_num_seqs", "sizes"),
    [
        (HOPPER, 256, (1, 8, 16, 32, 64, 128, 192, 256)),
        (HOPPER, 512, (1, 8, 16, 32, 64, 128, 192, 256, 384, 512)),
        (HOPPER, 200, (1, 8, 16, 32, 64, 128, 200)),
        (HOPPER, 240, (1, 8, 16, 32, 64, 128, 192, 240)),
        (HOPPER, 128, (1, 8, 16, 32, 64, 128)),
        (HOPPER, 4, (1, 4)),
        (CPU, 16, (1, 4, 16)),
    ],
)
def test_sizes_of_decode_steps(device, max_num_seqs, sizes):
    plan = make_plan(EngineConfig(model="8B", max_num_seqs=max_num_seqs), LLAMA_8B(1), *device)
    assert plan.ladder.row_sizes == sizes


@pytest.mark.parametrize(
    ("device", "options", "sizes", "chunk"),
    [
        (HOPPER, {}, (128, 256, 512, 768, 1024, 2048, 4096, 8192), (384, 1792)),
        (HOPPER, {"max_num_batched_tokens": 512}, (128, 256, 512), (384, 1792)),
        (CPU, {}, (), (384, 1792)),
        (HOPPER, {"max_num_batched_tokens": 256, "prefill_chunk_tokens": "all"}, (128, 256), (256, 256)),
        (CPU, {"prefill_chunk_tokens": "all"}, (), (512, 512)),
        (CPU, {"prefill_chunk_tokens": (64, 128)}, (32, 128, 512), (64, 128)),
    ],
)
def test_sizes_of_steps_with_prompts(device, options, sizes, chunk):
    plan = make_plan(EngineConfig(model="8B", **options), LLAMA_8B(1), *device)
    assert (plan.step_sizes, plan.chunk_tokens) == (sizes, chunk)


@pytest.mark.parametrize("chunk", [(512, 256), (0, 5), (64,)])
def test_chunks_that_cannot_be_are_refused(chunk):
    with pytest.raises(ValueError, match="--prefill-chunk-tokens must be two sizes"):
        EngineConfig(model="8B", prefill_chunk_tokens=chunk)


def test_a_step_has_a_token_for_every_sequence():
    assert make_plan(EngineConfig(model="8B", max_num_batched_tokens=128), LLAMA_8B(1), *HOPPER).max_num_seqs == 128
    with pytest.raises(ValueError, match=r"--max-num-batched-tokens \(128\) must be at least --max-num-seqs \(200\)"):
        make_plan(EngineConfig(model="8B", max_num_batched_tokens=128, max_num_seqs=200), LLAMA_8B(1), *HOPPER)


def test_small_steps_spare_the_start_mosaic_gpu():
    plan = make_plan(EngineConfig(model="8B"), LLAMA_8B(1), *HOPPER)
    backends = {bucket.tokens: plan.prefill_backend_of(bucket) for bucket in plan.ladder.all() if bucket.prefill_rows}
    assert backends[128] == backends[256] == "triton" and backends[512] == backends[8192] == "mosaic_gpu"


@dataclass
class Device:
    """A GPU of which this process may have ``limit`` bytes, and has ``used``."""

    limit: int
    used: int
    platform: str = "gpu"

    def memory_stats(self):
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def test_op16_the_pool_takes_what_others_leave_or_says_what_there_is():
    """What is in use already, parameters and programs come first. The pool is never less than nothing."""
    model = LLAMA_8B(1)
    options = {"model": "8B", "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    plan = make_plan(EngineConfig(**options), model, *HOPPER)
    per_block = 2 * model.num_kv_heads * model.head_dim * plan.block_size * plan.dtype.itemsize
    params = 2 * 2**30

    def blocks(limit, used, **more):
        return num_blocks(EngineConfig(**options, **more), plan, model, Device(limit, used), params)

    alone, beside = blocks(8 * 2**30, 0), blocks(8 * 2**30, 3 * 2**30)
    assert 0 < alone * per_block < 6 * 2**30
    assert abs((alone - beside) * per_block - 3 * 2**30) <= BLOCKS_ROUNDED_TO * per_block
    for used in (6 * 2**30, 9 * 2**30):
        with pytest.raises(
            ValueError, match=f"{8 * 2**30} bytes of device memory less {used} in use, {params} for param"
        ):
            blocks(8 * 2**30, used)
    assert blocks(8 * 2**30, 9 * 2**30, kv_cache_memory=1000 * per_block) == 1000 - 1000 % BLOCKS_ROUNDED_TO


def test_more_than_the_slots_need_keeps_prefixes():
    """Only where there are some to keep, or where it was asked for."""
    model = LLAMA_8B(1)
    options = {"model": "8B", "max_num_seqs": 2, "max_num_batched_tokens": 128, "max_model_len": 160}
    plan = make_plan(EngineConfig(**options), model, *HOPPER)
    per_block = 2 * model.num_kv_heads * model.head_dim * plan.block_size * plan.dtype.itemsize
    slots = 2 * 10 + 1

    def blocks(platform="gpu", **more):
        return num_blocks(EngineConfig(**options, **more), plan, model, Device(16 * 2**30, 0, platform), 0)

    assert blocks() * per_block > 8 * 2**30
    assert blocks(enable_prefix_caching=False) == blocks("cpu") == slots
    assert blocks("cpu", kv_cache_memory=100 * per_block) == 100


def test_a_window_serves_requests_longer_than_the_pool(caplog):
    model = replace(LLAMA_8B(1), windows=(64,))
    options = {"model": "8B", "max_num_batched_tokens": 128, "max_model_len": 4096, "num_gpu_blocks_override": 15}
    plan = make_plan(EngineConfig(**options), model, *HOPPER)
    assert plan.longest_request(14, 64) == 4096 and plan.longest_request(13, 64) == 13 * 16
    caplog.clear()
    num_blocks(EngineConfig(**options), plan, model, Device(0, 0), 0)
    assert not caplog.records
    num_blocks(EngineConfig(**options), plan, LLAMA_8B(1), Device(0, 0), 0)
    assert "224 tokens, fewer than the model's 4096" in caplog.text
