"""The closed list of programs of an engine, compiled from shapes before the first request."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from jaxserve.models.attention import AttentionSpec
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache, cache_shapes
from jaxserve.models.registry import model_module
from jaxserve.runner import batch, options, prompt_rows
from jaxserve.runner.batch import BatchState
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.options import OptionsState
from jaxserve.runner.plan import Plan
from jaxserve.runner.sampler import VARIANTS, Kind, SamplerVariant, choose_tokens, choose_with_options

Array = jax.Array
Progress = Callable[[str], None]

TUNED = {"xla_gpu_enable_triton_gemm": False}
"""XLA's own products by Triton never win by much here, and lose when a timing misleads the tuner."""
UNTUNED = {"xla_gpu_autotune_level": 0, **TUNED}
TUNED_FROM = 8192
"""Tokens of a bucket from which on autotuning pays: 6 % at 8,192 tokens; at 256 to 4,096 what it finds is no faster, or
slower, than what cuBLAS proposes (H200)."""
TUNED_ROWS = 128
"""Up to so many rows, an untuned float32 LM head can be 1 ms slower."""


@dataclass(frozen=True)
class Programs:
    """Compiled programs. A step is ``forward[bucket]``, then ``sample[rows of the bucket, variant]``."""

    forward: dict[Bucket, Any]
    """(params, cache, state, packed) -> (cache, state, logits, rows); cache and state are donated."""
    finish: dict[Bucket, Any]
    """(params, cache, state, packed) -> (cache, state), both donated: the last layer for all tokens of a mixed step,
    after its ``forward``, before ``score`` and ``pool``."""
    sample: dict[tuple[int, SamplerVariant], Any]
    """(state, logits, rows) -> (state, result); the state is donated. The full ones: (state, options, logits, rows,
    mask) -> (state, options, result); state and options are donated."""
    new_options: Any
    """() -> options"""
    load_row: Any
    """(options, packed row) -> options, which are donated."""
    score: Any
    """(params, state, rows and targets) -> result, see ``prompt_rows.score``"""
    pool: Any
    """(params, state, spans) -> sums, see ``prompt_rows.pool``"""


@dataclass(frozen=True)
class Lowered:
    """A program that is traced and lowered, which is Python's work; compiling it is XLA's."""

    name: str
    module: jax.stages.Lowered
    options: dict[str, Any] | None = None
    in_place: Any = ()
    """Shapes of what the program must reuse."""

    def compile(self) -> Any:
        compiled = self.module.compile(self.options)
        check_aliased(compiled, self.in_place, self.name)
        return compiled


class ProgramBuilder:
    """Lowers the programs of one model on one mesh, and compiles them."""

    def __init__(self, model: ModelConfig, plan: Plan, params: Any, mesh: Mesh, num_blocks: int) -> None:
        self._model = model
        self._plan = plan
        self._module = model_module(model.architecture)
        self._on_gpu = mesh.devices.flat[0].platform != "cpu"
        self._replicated = NamedSharding(mesh, P())
        self._spec = AttentionSpec(
            mesh,
            plan.attention_backend,
            plan.decode_backend,
            plan.prefill_backend,
            plan.linear_backend,
            model.head_dim**-0.5,
        )
        self._params = jax.tree.map(lambda a: self._shape(a.shape, a.dtype, a.sharding), params)
        self.cache: KVCache = cache_shapes(model, num_blocks, plan.block_size, plan.dtype, mesh)
        self.state: BatchState = jax.tree.map(
            lambda a: self._shape(a.shape, a.dtype),
            batch.state_shapes(plan.max_num_seqs, plan.table_width, prompt_rows.hidden_shape(plan, model)),
        )
        self.options: OptionsState = jax.tree.map(
            lambda a: self._shape(a.shape, a.dtype), options.options_shapes(plan.max_num_seqs, model.vocab_size)
        )

    def _shape(self, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or self._replicated)

    def _packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        return self._shape((batch.packed_size(bucket, self._plan.block_size),), np.int32)

    def forward(self, bucket: Bucket, *, autotune: bool = True) -> Lowered:
        """The forward program of a bucket. Without ``autotune`` a GPU's GEMMs are what cuBLAS proposes; with it, what
        is fastest in timings."""

        spec = self._spec_of(bucket)

        def forward(
            params: Any, cache: KVCache, state: BatchState, packed: Array
        ) -> tuple[KVCache, BatchState, Array, Array]:
            inputs, state = batch.unpack(packed, state, bucket, self._plan.block_size)
            hidden, last_input, cache = self._module.forward(
                params, cache, inputs.token_ids, inputs.attention, config=self._model, spec=spec
            )
            if last_input is not None:
                state = _with_hidden(state, last_input)
            logits = self._module.logits(params, hidden, config=self._model, spec=spec)
            return cache, state, logits, inputs.rows

        return self._of_step(f"forward {bucket}", forward, bucket, autotune)

    def finish(self, bucket: Bucket) -> Lowered:
        """The program that computes what the forward program of a mixed bucket leaves out."""
        spec = self._spec_of(bucket)

        def finish(params: Any, cache: KVCache, state: BatchState, packed: Array) -> tuple[KVCache, BatchState]:
            inputs, state = batch.unpack(packed, state, bucket, self._plan.block_size)
            hidden, cache = self._module.finish(
                params, cache, state.hidden[: bucket.tokens], inputs.attention, config=self._model, spec=spec
            )
            return cache, _with_hidden(state, hidden)

        return self._of_step(f"last layer of {bucket}", finish, bucket, autotune=False)

    def _of_step(self, name: str, run: Callable[..., Any], bucket: Bucket, autotune: bool) -> Lowered:
        """A program that changes cache and state in place, by a step's vector."""
        jitted = jax.jit(run, donate_argnums=(1, 2))
        lowered = jitted.lower(self._params, self.cache, self.state, self._packed(bucket))
        return Lowered(name, lowered, self._compiler_options(autotune), (self.cache, self.state))

    def _spec_of(self, bucket: Bucket) -> AttentionSpec:
        decodes_only = bucket.prefill_rows == 0
        chained = decodes_only and self._module.can_be_chained(self._model, bucket.rows, self._plan.dtype, self._spec)
        return replace(self._spec, prefill_backend=self._plan.prefill_backend_of(bucket), chained=chained)

    def sample(self, rows: int, variant: SamplerVariant) -> Lowered:
        """The sampling program for a number of rows."""
        plan, vocab = self._plan, self._model.vocab_size
        how: dict[str, Any] = dict(
            variant=variant,
            backend=plan.attention_backend,
            max_logprobs=plan.max_logprobs,
            as_chain=plan.chains_sampling and self._spec.mesh.size == 1,
        )
        logits, row_data = self._shape((rows, vocab), jnp.float32), self._shape((3, rows), np.int32)
        name = f"sample {rows} rows, {variant}"
        if variant.kind is not Kind.FULL:
            jitted = jax.jit(partial(choose_tokens, **how), donate_argnums=0)
            return Lowered(name, jitted.lower(self.state, logits, row_data))
        jitted = jax.jit(partial(choose_with_options, **how), donate_argnums=(0, 1))
        mask = self._shape((rows, options.mask_words(vocab)), np.int32)
        lowered = jitted.lower(self.state, self.options, logits, row_data, mask)
        return Lowered(name, lowered, in_place=(self.state, self.options))

    def _compiled(self, variant: SamplerVariant) -> SamplerVariant:
        """The variant whose program does this one's work. A CPU compiles one with the likeliest tokens in the time of
        one without, and finds them in next to none."""
        always_top = variant.kind is not Kind.GREEDY and self._plan.attention_backend == "reference"
        return replace(variant, top_logprobs=True) if always_top else variant

    def new_options(self) -> Lowered:
        """The program that makes empty optional state."""

        def new_options() -> OptionsState:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.options)

        return Lowered("empty options", jax.jit(new_options, out_shardings=self._replicated).lower())

    def load_row(self) -> Lowered:
        """The program that writes a slot's row of the optional state."""
        packed = self._shape((options.ROW_WORDS,), np.int32)
        lowered = jax.jit(options.load_row, donate_argnums=0).lower(self.options, packed)
        return Lowered("a row's options", lowered, in_place=self.options)

    def _compiler_options(self, autotune: bool) -> dict[str, Any] | None:
        if not self._on_gpu:
            return None
        return TUNED if autotune else UNTUNED

    def score(self) -> Lowered:
        """The program that gives log-probabilities of prompt tokens."""
        logits = partial(self._module.logits, config=self._model, spec=self._spec)
        jitted = jax.jit(partial(prompt_rows.score, logits=logits, max_logprobs=self._plan.max_logprobs))
        rows = self._shape((2, prompt_rows.rows_at_once(self._plan)), np.int32)
        lowered = jitted.lower(self._params, self.state, rows)
        return Lowered("scores of prompt tokens", lowered, self._compiler_options(False))

    def pool(self) -> Lowered:
        """The program that adds hidden states up."""
        jitted = jax.jit(partial(prompt_rows.pool, norm=partial(self._module.final_norm, config=self._model)))
        spans = self._shape((2, self._plan.ladder.max_prefill_rows), np.int32)
        lowered = jitted.lower(self._params, self.state, spans)
        return Lowered("pooled hidden states", lowered, self._compiler_options(False))

    def all(self, progress: Progress, loading: Future[Any]) -> Programs:
        """Compile everything, with a progress line a program, unless ``loading`` of the parameters fails, which is then
        raised.

        Lowering is Python's work and happens here, one program after the other: those first that take XLA longest for
        the time that they take Python. On a GPU all cores compile meanwhile. Some programs are autotuned, one at a time
        and with the parameters in place, since whatever else the GPU does disturbs timings; for the others cuBLAS's
        proposal measured as fast, and tuning takes longer than compiling. On a CPU one program is compiled after the
        other: XLA spreads each over the cores anyway, and reading a program from the cache while another is compiled
        has crashed.
        """
        buckets = self._plan.ladder.all()
        row_sizes = sorted({b.rows for b in buckets})
        samplers = [(rows, v) for rows in row_sizes for v in VARIANTS if v == self._compiled(v)]
        tuned = [bucket for bucket in reversed(buckets) if self._on_gpu and self._worth_tuning(bucket)]
        mixed = [bucket for bucket in buckets if bucket.prefill_rows]
        total = len(buckets) + len(mixed) + len(samplers) + 4
        counter = itertools.count(1)

        def compiled(program: Lowered, alone: bool) -> Any:
            if alone or loading.done():
                loading.result()  # there is no point in going on if it raises
            start = time.monotonic()
            result = program.compile()
            progress(f"compiled {next(counter)}/{total}: {program.name} ({time.monotonic() - start:.1f} s)")
            return result

        with ThreadPoolExecutor(os.cpu_count() if self._on_gpu else 1) as pool, ThreadPoolExecutor(1) as one:

            def start(program: Lowered, alone: bool = False) -> Future[Any]:
                if loading.done():
                    loading.result()
                return (one if alone else pool).submit(compiled, program, alone)

            try:
                forward = {bucket: start(self.forward(bucket), alone=True) for bucket in tuned}
                sample = {(r, v): start(self.sample(r, v)) for r, v in samplers}
                forward |= {b: start(self.forward(b, autotune=False)) for b in reversed(buckets) if b not in tuned}
                finish = {b: start(self.finish(b)) for b in mixed}
                others = [start(lower()) for lower in (self.new_options, self.load_row, self.score, self.pool)]
                return Programs(
                    {bucket: forward[bucket].result() for bucket in buckets},
                    {bucket: program.result() for bucket, program in finish.items()},
                    {(r, v): sample[r, self._compiled(v)].result() for r in row_sizes for v in VARIANTS},
                    *(program.result() for program in others),
                )
            except BaseException:
                for executor in (pool, one):
                    executor.shutdown(wait=False, cancel_futures=True)
                raise

    def _worth_tuning(self, bucket: Bucket) -> bool:
        """The largest, and decode steps of few rows whose float32 LM head is XLA's."""
        model, plan = self._model, self._plan
        own_head = not model.tie_word_embeddings and pallas_kernels.suits_linear(
            "whole", bucket.rows, model.hidden_size, model.vocab_size, plan.dtype, backend=plan.linear_backend
        )
        few = bucket.prefill_rows == 0 and bucket.rows <= TUNED_ROWS
        return bucket.tokens >= TUNED_FROM or (few and not own_head)


def _with_hidden(state: BatchState, hidden: Array) -> BatchState:
    return state._replace(hidden=lax.dynamic_update_slice(state.hidden, hidden, (0, 0)))


def nbytes(arrays: Any) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def check_aliased(compiled: Any, donated: Any, what: str) -> None:
    """A donation that does not take would copy the whole cache every step, without a word."""
    expected = nbytes(donated)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    if aliased < expected:
        raise RuntimeError(f"{what} reuses {aliased} bytes of the KV cache and state in place, expected {expected}")
