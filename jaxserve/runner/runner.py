"""Runs steps on the devices: the only holder of parameters, KV cache and batch state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig, load_model_config
from jaxserve.models.dummy import param_structs, random_params
from jaxserve.models.kv_cache import bytes_per_block, zeros
from jaxserve.models.registry import model_module
from jaxserve.models.weights import Checkpoint
from jaxserve.runner import batch, compiles, options, prompt_rows
from jaxserve.runner.batch import BatchState
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.options import OptionsState
from jaxserve.runner.plan import make_plan, num_blocks
from jaxserve.runner.programs import ProgramBuilder, Programs
from jaxserve.runner.prompt_rows import PendingPrompts, PromptResult
from jaxserve.runner.sampler import FAULTS, NON_FINITE, VARIANTS, Kind, SamplerVariant, split_result
from jaxserve.runner.swap import SwapHandle, Swapper, reserved_bytes
from jaxserve.scheduling.schedule import SchedulerOutput

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


class RowOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one of its rows. A Struct, since hundreds are made every step."""

    token_ids: list[int]
    """Sampled tokens, one now; empty if the row does not sample or there is a fault."""
    fault: str | None = None
    """Why the row, which should sample, cannot."""
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    prompt: PromptResult | None = None
    """Where the row has prompt work."""
    finite: bool = True
    """False if there is a fault because of what the model gave: then the row's KV may be broken too."""


NO_TOKEN = RowOutput([])


class StepOutput(msgspec.Struct, frozen=True):
    """Results in the order of ``SchedulerOutput.rows``."""

    rows: list[RowOutput]


class PendingStep:
    """A step that was submitted and may not have run yet."""

    def __init__(
        self,
        schedule: SchedulerOutput,
        bucket: Bucket,
        dispatch: Callable[[np.ndarray | None], jax.Array],
        max_logprobs: int,
        prompts: PendingPrompts | None = None,
    ) -> None:
        self.schedule = schedule
        self.bucket = bucket
        self._dispatch: Callable[[np.ndarray | None], jax.Array] | None = dispatch
        self._result: jax.Array | None = None
        self._max_logprobs = max_logprobs
        self._prompts = prompts

    @property
    def is_sampled(self) -> bool:
        return self._result is not None

    def sample(self, mask: np.ndarray | None = None) -> None:
        """Dispatch the step's second half, before any later step is submitted. ``mask``, int32 ``[len(schedule.rows),
        ceil(V / 32)]``, has a bit for each token that a row may choose, id i in bit i % 32 of word i // 32."""
        assert self._dispatch is not None, "a step is sampled once"
        self._result = self._dispatch(mask)
        self._dispatch = None  # it holds the logits
        self._result.copy_to_host_async()

    def result(self) -> StepOutput:
        """Wait for the step and read it."""
        assert self._result is not None, "a step is sampled before it is read"
        tokens, logprobs, top_ids, top_logprobs = split_result(np.asarray(self._result), self._max_logprobs)
        rows = []
        for place, (token, item) in enumerate(zip(tokens.tolist(), self.schedule.rows, strict=False)):
            if token == NON_FINITE or (item.samples and token in FAULTS):
                rows.append(RowOutput([], FAULTS[token], finite=token != NON_FINITE))
            elif not item.samples:
                rows.append(NO_TOKEN)
            elif item.wants_logprobs:
                top = tuple(top_ids[place].tolist()), tuple(top_logprobs[place].tolist())
                rows.append(RowOutput([token], None, float(logprobs[place]), *top))
            else:
                rows.append(RowOutput([token]))
        if self._prompts is not None:
            for place, found in self._prompts.results(self.schedule, self._max_logprobs):
                if found is None:
                    rows[place] = RowOutput([], FAULTS[NON_FINITE], finite=False)
                else:
                    rows[place] = msgspec.structs.replace(rows[place], prompt=found)
        return StepOutput(rows)


class ModelRunner:
    """Loads a model, compiles its programs, allocates the KV pool, and then only submits steps.

    Raises ``CheckpointError`` or ``ValueError``, one line each, for what the user can mend.
    """

    def __init__(self, config: EngineConfig, directory: Path, progress: Progress) -> None:
        self.startup_seconds: dict[str, float] = {}
        self.model_config: ModelConfig = load_model_config(directory)
        devices = jax.devices()[: config.tensor_parallel_size]
        self._on_cpu = devices[0].platform == "cpu"
        capability = getattr(devices[0], "compute_capability", "")  # only GPUs have it
        self.plan = make_plan(config, self.model_config, devices[0].platform, capability)
        self._mesh = Mesh(np.array(devices), ("tp",))
        if self.plan.dtype == np.float32:
            jax.config.update("jax_default_matmul_precision", "highest")  # else a GPU would use TF32
        structs = param_structs(self.model_config, self.plan.dtype, self._mesh)
        reserved = _device_bytes(structs)
        swap_bytes = int(config.swap_space * 2**30)
        if swap_bytes:
            reserved += reserved_bytes(bytes_per_block(self.model_config, self.plan.block_size, self.plan.dtype))
        self.num_blocks = num_blocks(config, self.plan, self.model_config, devices[0], reserved)
        builder = ProgramBuilder(self.model_config, self.plan, structs, self._mesh, self.num_blocks)
        with ThreadPoolExecutor(1) as loader:  # a GPU's programs are compiled from shapes, meanwhile
            loading = loader.submit(self._load, directory, config.load_format, structs, progress)
            if self._on_cpu:
                loading.result()
            self._programs = self._compile(builder, progress, loading)
            self.swapper = Swapper(builder.cache, self._mesh, swap_bytes) if swap_bytes else None
            self._params = loading.result()
        with self._phase("allocate"):
            self._cache = zeros(builder.cache)
            self._state: BatchState = zeros(builder.state)
            self._options: OptionsState | None = None
            self._no_masks: dict[int, jax.Array] = {}
        with self._phase("warm_up"):
            self._warm_up()
            if self.swapper is not None:
                self._cache = self.swapper.warm_up(self._cache)
        compiles.freeze()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.startup_seconds[name] = time.monotonic() - start
        logger.info("start-up phase %s took %.1f s", name, self.startup_seconds[name])

    def _load(self, directory: Path, load_format: str, structs: Any, progress: Progress) -> Any:
        with self._phase("load"):
            if load_format == "dummy":
                return jax.block_until_ready(random_params(self.model_config, self.plan.dtype, self._mesh))
            return self._read(directory, structs, progress)

    def _read(self, directory: Path, structs: Any, progress: Progress) -> Any:
        checkpoint = Checkpoint(directory, self.plan.dtype)
        into = zeros(structs)
        layers = self.model_config.num_layers

        def layer_done(done: int) -> None:
            if done == layers or done % max(1, layers // 4) == 0:
                progress(f"loaded {done}/{layers} layers")

        module = model_module(self.model_config.architecture)
        return jax.block_until_ready(module.load_params(checkpoint, self.model_config, into, layer_done))

    def _compile(self, builder: ProgramBuilder, progress: Progress, loading: Future[Any]) -> Programs:
        with self._phase("compile"):
            return builder.all(progress, loading)

    def _warm_up(self) -> None:
        """Run every program three times on padding: a GPU records its graphs on the first two. A CPU has none."""
        padding = SchedulerOutput()
        for _ in range(0 if self._on_cpu else 3):
            for bucket in self._programs.forward:
                packed = self._packed(padding, bucket)
                logits, rows = self._forward(packed, bucket)
                if bucket in self._programs.finish:
                    self._finish(packed, bucket)
                for variant in VARIANTS:
                    self._sample(logits, rows, variant)
            for program, width in (
                (self._programs.score, prompt_rows.rows_at_once(self.plan)),
                (self._programs.pool, self.plan.ladder.max_prefill_rows),
            ):
                program(self._params, self._state, np.zeros((2, width), np.int32))
        jax.block_until_ready(self._state)
        self._options, self._no_masks = None, {}  # most servers never need them

    def submit(self, schedule: SchedulerOutput, *, masked: bool = False) -> PendingStep:
        """Dispatch one step; returns before it has run. One that is ``masked`` waits for its ``sample``."""
        bucket = self._bucket(schedule)
        packed = self._packed(schedule, bucket)
        logits, rows = self._forward(packed, bucket)
        prompts = self._look_at_prompts(schedule, packed, bucket)
        self._load_options(schedule)
        variant = SamplerVariant.of(schedule, masked)

        def dispatch(mask: np.ndarray | None) -> jax.Array:
            return self._sample(logits, rows, variant, None if mask is None else self._placed_mask(mask, bucket))

        step = PendingStep(schedule, bucket, dispatch, self.plan.max_logprobs, prompts)
        if not masked:
            step.sample()
        return step

    def _bucket(self, schedule: SchedulerOutput) -> Bucket:
        return self.plan.ladder.choose(len(schedule.decode), schedule.num_prefill_tokens, len(schedule.prefill))

    def _packed(self, schedule: SchedulerOutput, bucket: Bucket) -> np.ndarray:
        return batch.pack(schedule, bucket, self.plan.block_size, null_slot=self.plan.max_num_seqs)

    def _forward(self, packed: np.ndarray, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
        self._cache, self._state, logits, rows = self._programs.forward[bucket](
            self._params, self._cache, self._state, packed
        )
        return logits, rows

    def _finish(self, packed: np.ndarray, bucket: Bucket) -> None:
        self._cache, self._state = self._programs.finish[bucket](self._params, self._cache, self._state, packed)

    def _sample(
        self, logits: jax.Array, rows: jax.Array, variant: SamplerVariant, mask: jax.Array | np.ndarray | None = None
    ) -> jax.Array:
        program = self._programs.sample[logits.shape[0], variant]
        if variant.kind is Kind.FULL:
            mask = self._no_mask(logits.shape[0]) if mask is None else mask
            self._state, self._options, result = program(self._state, self._some_options(), logits, rows, mask)
        else:
            self._state, result = program(self._state, logits, rows)
        return result

    def _look_at_prompts(self, schedule: SchedulerOutput, packed: np.ndarray, bucket: Bucket) -> PendingPrompts | None:
        """Dispatch what the step's prompt work needs; None if it has none."""
        if not any(item.prompt_work for item in schedule.prefill):
            return None
        self._finish(packed, bucket)
        parts = prompt_rows.pack_scores(schedule, prompt_rows.rows_at_once(self.plan))
        scores = [self._programs.score(self._params, self._state, rows) for rows in parts]
        spans = prompt_rows.pack_spans(schedule, self.plan.ladder.max_prefill_rows)
        sums = None if spans is None else self._programs.pool(self._params, self._state, spans)
        return PendingPrompts(scores, sums)

    def _some_options(self) -> OptionsState:
        """Made when they are first needed."""
        if self._options is None:
            self._options = self._programs.new_options()
        return self._options

    def _load_options(self, schedule: SchedulerOutput) -> None:
        for item in schedule.prefill:
            if item.sampling is not None and item.sampling.options is not None:
                for packed in options.pack_row(item.slot, item.sampling.params, item.sampling.options):
                    self._options = self._programs.load_row(self._some_options(), packed)

    def _no_mask(self, rows: int) -> jax.Array:
        if rows not in self._no_masks:
            words = options.mask_words(self.model_config.vocab_size)
            self._no_masks[rows] = jax.device_put(np.full((rows, words), -1, np.int32), NamedSharding(self._mesh, P()))
        return self._no_masks[rows]

    def _placed_mask(self, mask: np.ndarray, bucket: Bucket) -> np.ndarray:
        placed = np.full((bucket.rows, options.mask_words(self.model_config.vocab_size)), -1, np.int32)
        placed[: len(mask)] = mask
        return placed

    def swap_out(self, block_ids: Sequence[int]) -> SwapHandle:
        """Copy blocks to host memory, as the steps submitted so far leave them; returns before it has happened."""
        assert self.swapper is not None
        return self.swapper.swap_out(self._cache, block_ids)

    def swap_in(self, handle: SwapHandle, block_ids: Sequence[int], arriving: list[jax.Array] | None = None) -> None:
        """Put them into blocks of these numbers, before any step submitted later; ``arriving`` were fetched, and are
        gone then."""
        assert self.swapper is not None
        self._cache = self.swapper.swap_in(self._cache, handle, block_ids, arriving)

    def logits(self, schedule: SchedulerOutput) -> np.ndarray:
        """Run a step without sampling: float32 logits ``[rows, V]`` of each row, for tests and notebooks."""
        bucket = self._bucket(schedule)
        return np.asarray(self._forward(self._packed(schedule, bucket), bucket)[0])[: len(schedule.rows)]

    def block_tables(self) -> np.ndarray:
        """The device's block tables ``[slots, M]``, copied; for looking at, not for the step path."""
        return np.asarray(self._state.block_tables)[0, :-1]


def _device_bytes(structs: Any) -> int:
    """What one device holds of arrays of these shapes and shardings."""
    return sum(int(np.prod(s.sharding.shard_shape(s.shape))) * s.dtype.itemsize for s in jax.tree.leaves(structs))
