"""Compiled programs: the cache is updated in place, and nothing is compiled once requests are served."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import pallas_kernels
from bench.shapes import LLAMA_8B
from jaxserve.config import EngineConfig
from jaxserve.models.dummy import param_structs
from jaxserve.request import SamplingParams
from jaxserve.runner import compiles
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.plan import make_plan
from jaxserve.runner.programs import ProgramBuilder
from jaxserve.runner.runner import ModelRunner
from jaxserve.runner.sampler import Kind, SamplerVariant
from pallas_kernels.sampling import SamplingRows

NAME = "tiny-llama-3.1"


def in_place_bytes(runner: ModelRunner) -> int:
    """KV cache and batch state, from the configuration and not from any array."""
    model, plan = runner.model_config, runner.plan
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * plan.dtype.itemsize
    slot = 4 * (plan.table_width + 1 + 8)  # block table, last token, sampling words
    hidden = plan.max_num_batched_tokens * model.hidden_size * plan.dtype.itemsize
    return runner.num_blocks * plan.block_size * token + (plan.max_num_seqs + 1) * slot + hidden


def test_every_forward_program_reuses_cache_and_state_in_place(llm):
    runner = llm(NAME).engine.runner
    forward, finish = runner._programs.forward, runner._programs.finish
    assert list(forward) == runner.plan.ladder.all()
    assert list(finish) == [bucket for bucket in forward if bucket.prefill_rows]
    for bucket, program in [*forward.items(), *finish.items()]:
        assert program.memory_analysis().alias_size_in_bytes == in_place_bytes(runner), bucket


def test_of_most_prompt_tokens_the_last_layer_gives_keys_and_values_alone(llm):
    runner = llm(NAME).engine.runner
    builder = ProgramBuilder(runner.model_config, runner.plan, runner._params, runner._mesh, runner.num_blocks)
    bucket = runner.plan.ladder.all()[-1]
    assert bucket.tokens > bucket.rows
    text = builder.forward(bucket).module.as_text()
    layers = re.findall(r"call @(_layer\w*)", text)
    assert len(layers) == runner.model_config.num_layers

    def products(layer: str) -> list[int]:
        """The rows of a layer's products, in their order."""
        [body] = re.findall(rf"func private @{layer}\(.*?\n  }}\n", text, re.S)
        by_parameters = r"dot_general(?!.*batching).* %arg\d+, contracting_dims = .*-> tensor<(\d+)x"
        return [int(rows) for rows in re.findall(by_parameters, body)]

    assert products(layers[-2]) == [bucket.tokens] * 4
    assert products(layers[-1]) == [bucket.tokens] + [bucket.rows] * 3, "queries, keys and values are one"


@pytest.mark.parametrize("donated", [None, (1,), (2,)], ids=["none", "cache only", "state only"])
def test_a_forgotten_donation_stops_the_start(llm, monkeypatch, donated):
    """It would copy the whole cache each step, without a word."""
    runner = llm(NAME).engine.runner
    real_jit = jax.jit
    builder = ProgramBuilder(runner.model_config, runner.plan, runner._params, runner._mesh, runner.num_blocks)
    monkeypatch.setattr(jax, "jit", lambda function, **options: real_jit(function, donate_argnums=donated))
    expected = in_place_bytes(runner)
    with pytest.raises(RuntimeError, match=rf"decode of 1 reuses \d+ bytes .* expected {expected}$"):
        builder.forward(Bucket(1, 1, 0)).compile()


def test_a_step_leaves_no_copy_behind(llm):
    """The arrays given to a step are gone after it: their memory is the new ones'."""
    model = llm(NAME)
    runner = model.engine.runner
    before = jax.tree.leaves((runner._cache, runner._state))
    model.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))
    assert all(array.is_deleted() for array in before)


def test_nothing_is_compiled_while_serving(llm):
    """Every bucket, requests that join and leave, more of them than slots, chunked prompts."""
    model = llm(NAME)
    before, start = compiles.counts(), time.monotonic()
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(10, 500, length).tolist()

    for params in (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=5, logprobs=5, prompt_logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=9, seed=3, n=3, top_p=0.9, logprobs=0),
        SamplingParams(temperature=0.7, max_tokens=9, top_k=7, min_p=0.1, stop=("a", "e")),
    ):
        model.generate(prompt(1), params)
        model.generate(prompt(200), params)
        model.generate([prompt(length) for length in (1, 3, 17, 64, 65, 2, 130, 9)], params)
    model.embed([prompt(40), prompt(3)])
    used = {event.padded_tokens for event in model.engine.events if event.submitted > start}
    assert used == {bucket.tokens for bucket in model.engine.runner.plan.ladder.all()}
    assert compiles.counts() == before

    jax.jit(lambda x: x + 12345)(1)
    after = compiles.counts()
    assert sum(after.values()) == sum(before.values()) + 1, "the counter counts"


def test_decode_steps_with_an_lm_head_of_their_own_are_not_tuned():
    """Tuning takes longer than compiling; what it finds for the other steps is worth it."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    model = LLAMA_8B(1)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tp",))

    def tuned(linear_backend: str) -> list[str]:
        plan = make_plan(EngineConfig(model="8B", linear_backend=linear_backend), model, "gpu", "9.0")
        builder = ProgramBuilder(model, plan, param_structs(model, plan.dtype, mesh), mesh, num_blocks=2)
        return [str(bucket) for bucket in plan.ladder.all() if builder._worth_tuning(bucket)]

    assert tuned("triton") == ["8192 tokens"]
    assert tuned("reference") == [*(f"decode of {rows}" for rows in (1, 8, 16, 32, 64, 128)), "8192 tokens"]


@pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's front end, Python 3.13
@pytest.mark.parametrize(
    ("capability", "devices", "chains"), [("9.0", 1, True), ("9.0", 2, False), ("8.0", 1, False), ("10.0", 1, False)]
)
def test_sampling_kernels_are_chained_on_one_hopper_gpu(capability: str, devices: int, chains: bool):
    """Chains are compiled for Hopper, and for arrays that are whole on a device."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from pallas_kernels import triton_call, triton_launch

    model = LLAMA_8B(1)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("tp",))
    plan = make_plan(EngineConfig(model="8B"), model, "gpu", capability)
    builder = ProgramBuilder(model, plan, param_structs(model, plan.dtype, mesh), mesh, num_blocks=2)
    builder._spec = replace(builder._spec, mesh=AbstractMesh((devices,), ("tp",)))
    for kind, others in ((Kind.RANDOM, False), (Kind.FULL, True)):
        module = builder.sample(8, SamplerVariant(kind)).module.as_text()
        assert module.count(f"@{triton_launch.TARGET_NAME}(") == chains
        assert (f"@{triton_call.TARGET_NAME}(" in module) == (others or not chains)


def test_a_chain_of_what_is_no_kernel_is_refused():
    """An explicit choice never falls back."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    logits, positions = np.zeros((1, 8), np.float32), np.zeros(1, np.int32)
    rows = SamplingRows(*np.zeros((3, 1), np.float32), positions, np.zeros((1, 2), np.int32), positions)
    with pytest.raises(ValueError, match="a chain of kernels cannot have"):
        pallas_kernels.sample(logits, rows, positions, backend="reference", as_chain=True)
