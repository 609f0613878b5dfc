"""The engine: a plain synchronous object. A server process and a notebook drive the same ``step()``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.engine import admission
from jaxserve.engine.constraints import Constraints
from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.events import StepEvent, step_event
from jaxserve.engine.messages import DEADLINE, ModelInfo, TokenOutput
from jaxserve.engine.replies import ending, new_tokens
from jaxserve.engine.swapping import SwappingRunner, Swaps
from jaxserve.engine.throughput import Throughput
from jaxserve.engine.traffic import Traffic
from jaxserve.metrics import Metrics
from jaxserve.models.config import load_model_config
from jaxserve.request import EngineRequest, FinishReason, Request, RequestError, Status
from jaxserve.runner import compiles
from jaxserve.runner.plan import Plan
from jaxserve.runner.runner import ModelRunner, PendingStep, RowOutput
from jaxserve.scheduling.draft import SchedulerLimits
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import SchedulerOutput
from jaxserve.scheduling.scheduler import Scheduler, SchedulingPolicy
from jaxserve.structured import Grammars
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1024


class Runner(SwappingRunner, Protocol):
    """What the engine needs of a runner; ``ModelRunner`` is the real one."""

    plan: Plan
    num_blocks: int

    def submit(self, schedule: SchedulerOutput, *, masked: bool = False) -> PendingStep: ...


class ClientOutput(NamedTuple):
    client: bytes
    output: TokenOutput


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: PendingStep
    time: float
    schedule_seconds: float
    submit_seconds: float


class EngineCore:
    """Requests in, steps, tokens out. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        runner: Runner,
        grammars: Grammars,
        *,
        vocab_size: int,
        hidden_size: int,
        eos_ids: frozenset[int],
        model_name: str = "",
        startup_seconds: dict[str, float] | None = None,
        prefix_caching: bool = True,
        window: int | None = None,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        plan = runner.plan
        self.runner = runner
        self._swaps = Swaps(runner)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_prefill_rows=plan.ladder.max_prefill_rows,
                step_sizes=plan.step_sizes,
                chunk_tokens=plan.chunk_tokens,
            ),
            KVManager(runner.num_blocks, plan.block_size, prefix_caching=prefix_caching, window=window),
            policy,
            self._swaps.make_space(),
        )
        max_kv_tokens = plan.longest_request(self.scheduler.kv.pool.num_usable, window)
        self.info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=min(plan.max_model_len, max_kv_tokens) if plan.fit_model_len else plan.max_model_len,
            max_kv_tokens=max_kv_tokens,
            max_logprobs=plan.max_logprobs,
            hidden_size=hidden_size,
            version=jaxserve.__version__,
        )
        self.events: deque[StepEvent] = deque(maxlen=EVENTS_KEPT)
        self.metrics = Metrics(
            model_name,
            startup_seconds=startup_seconds or {},
            cache_config=plan.labels
            | {"num_gpu_blocks": str(runner.num_blocks), "enable_prefix_caching": str(prefix_caching)},
            compile_counts=compiles.counts,
        )
        self.grammars = grammars
        self._constraints = Constraints(grammars, vocab_size)
        self._eos_ids = eos_ids
        self._depth = plan.async_depth
        self._pending: deque[_Submitted] = deque()
        self.throughput = Throughput()
        self.traffic = Traffic(time.monotonic())
        self._deadlines = Deadlines()
        self._groups: dict[str, set[str]] = {}
        """Unfinished requests by the call that they belong to."""
        self._stalled = False
        self._compiled = compiles.total()
        self._last_collected = 0.0
        self._arrivals = 0
        self._generated = 0
        """Tokens that metrics do not know of yet: they hear of them once a step."""

    @classmethod
    def load(
        cls, config: EngineConfig, directory: Path, progress: Callable[[str], None], model_name: str = ""
    ) -> EngineCore:
        """Load and compile; raises ``CheckpointError`` or ``ValueError``, one line each, for what the user can mend."""
        tokenizer = config.tokenizer or directory
        grammars = Grammars(lambda: Tokenizer.load(tokenizer), load_model_config(directory).vocab_size)
        runner = ModelRunner(config, directory, progress)
        model = runner.model_config
        return cls(
            runner,
            grammars,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            eos_ids=model.eos_token_ids,
            model_name=model_name or config.model,
            startup_seconds=runner.startup_seconds,
            prefix_caching=config.enable_prefix_caching,
            window=model.widest_window,
            policy=config.scheduling_policy,
        )

    def has_work(self) -> bool:
        """Whether ``step()`` has anything to do."""
        return len(self.scheduler) > 0

    def add_request(self, item: EngineRequest, client: bytes = b"") -> None:
        """Queue a request. Raises ``ValueError`` (``RequestError``) for one that can never be served."""
        max_tokens = admission.check(item.prompt_token_ids, item.sampling, self.info)
        least = 0 if admission.examines_prompt(item) else 1
        if not least <= item.max_tokens <= max_tokens:
            raise RequestError(f"max_tokens must be between {least} and {max_tokens}", param="max_tokens")
        if item.pooling is not None and (item.max_tokens or item.sampling.prompt_logprobs is not None):
            raise RequestError("an embedding is computed alone, without tokens or log-probabilities", param="pooling")
        request = Request.create(item, client=client, eos_ids=self._eos_ids, order=self._arrivals)
        self.scheduler.add(request)
        self._constraints.add(request)
        self._arrivals += 1
        if item.deadline is not None:
            self._deadlines.add(request.request_id, item.deadline)
        self._groups.setdefault(request.group, set()).add(request.request_id)
        self._publish()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; unknown ids are ignored. The ids are those of ``engine_id``."""
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            if request is not None and request.status is not Status.FINISHED:
                self._finish(request, FinishReason.ABORT, request.num_output_tokens)

    def abort_group(self, group: str) -> list[ClientOutput]:
        """End all answers of a call, and give each its last output; an unknown group is ignored."""
        outputs = []
        for request_id in sorted(self._groups.get(group, ())):
            request = self.scheduler.get(request_id)
            assert request is not None
            self._finish(request, FinishReason.ABORT, request.num_output_tokens)
            outputs.append(ClientOutput(request.client, ending(request)))
        return outputs

    def abort_client(self, client: bytes) -> None:
        """End all requests of a client that is gone."""
        scheduler = self.scheduler
        self.abort([r.request_id for r in (*scheduler.running, *scheduler.waiting) if r.client == client])

    def finish(self, request_id: str, kept_tokens: int) -> None:
        """A client saw a stop string end: the answer is the first ``kept_tokens`` generated tokens."""
        request = self.scheduler.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            self._finish(request, FinishReason.STOP, min(kept_tokens, request.num_output_tokens))

    def reset_prefix_cache(self) -> None:
        """Forget what the KV blocks hold, so that later requests compute everything themselves."""
        self.scheduler.kv.reset_cache()

    def step(self) -> list[ClientOutput]:
        """Submit steps up to the asynchronous depth, collect the oldest, and return what it gave."""
        ended = self._expire() + self._release()
        self._swaps.advance()
        while len(self._pending) < self._depth:
            start = time.monotonic()
            schedule = self.scheduler.schedule()
            if schedule is None:
                break
            now = time.monotonic()
            self._mark_admitted(schedule, now)
            self._swaps.run(schedule)
            step = self.runner.submit(schedule, masked=self._constraints.needs_mask(schedule))
            self._pending.append(_Submitted(step, now, now - start, time.monotonic() - now))
            self._sample_first()
        if not self._pending:
            self._wait_for_others()
            return ended
        start = time.monotonic()
        # Waited for before it is taken from the queue: an interrupt while waiting loses nothing.
        results = self._pending[0].step.result().rows
        now = time.monotonic()
        outputs = self._collect(self._pending.popleft(), results, now, now - start)
        self._sample_first()
        self._publish()
        return ended + outputs

    def _sample_first(self) -> None:
        """A masked step is sampled when those before it were collected: their tokens say what may come next. On the
        device its first half runs meanwhile."""
        if self._pending and not self._pending[0].step.is_sampled:
            step = self._pending[0].step
            step.sample(self._constraints.mask(step.schedule.rows))

    def _release(self) -> list[ClientOutput]:
        """Lets requests go whose grammars are there, and ends those that get none."""
        outputs = []
        for request, error in self._constraints.release():
            self._finish(request, FinishReason.ERROR, 0)
            outputs.append(ClientOutput(request.client, ending(request, error=error)))
        return outputs

    @property
    def stalled(self) -> bool:
        """Whether requests wait, and nothing is in flight whose end could change anything: that must not happen."""
        return self._stalled and self.has_work()

    def _wait_for_others(self) -> None:
        """No step can be made: wait a moment for grammars and for blocks from the host, if anybody waits for them."""
        stalled = bool(self.scheduler.waiting) and not (self._constraints.wait() or self._swaps.wait())
        if stalled and not self._stalled:
            logger.error("no request can be admitted, and nothing runs: %s", self.scheduler.why_waiting())
        self._stalled = stalled

    def _expire(self) -> list[ClientOutput]:
        """End the answers whose time is up with what they have."""
        outputs = []
        for request_id in self._deadlines.passed(time.monotonic()):
            request = self.scheduler.get(request_id)
            assert request is not None
            self._finish(request, FinishReason.LENGTH, request.num_output_tokens)
            outputs.append(ClientOutput(request.client, ending(request, stop_reason=DEADLINE)))
        return outputs

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` if a block, slot or request was lost or doubled."""
        self.scheduler.check_integrity()
        if not self.has_work():
            pool = self.scheduler.kv.pool
            assert pool.num_free == pool.num_usable and not self._pending

    def _mark_admitted(self, schedule: SchedulerOutput, now: float) -> None:
        for request_id in schedule.admitted:
            request = self.scheduler.get(request_id)
            assert request is not None
            request.scheduled_time = request.scheduled_time or now

    def _collect(
        self, submitted: _Submitted, results: list[RowOutput], now: float, wait_seconds: float
    ) -> list[ClientOutput]:
        outputs: list[ClientOutput] = []
        finished: list[str] = []
        counted = generated = 0
        for item, row in zip(submitted.step.schedule.rows, results, strict=True):
            request, tokens = self.scheduler.collect(item, row.token_ids, finite=row.finite)
            if row.fault and request.status is not Status.FINISHED:
                self._finish(request, FinishReason.ERROR, request.num_output_tokens)
                outputs.append(ClientOutput(request.client, ending(request, error=row.fault)))
                finished.append(request.request_id)
            if row.prompt is not None:
                request.prompt_results.append(row.prompt)
            if not request.max_tokens and item.seq_len == request.prompt_len and request.status is not Status.FINISHED:
                self.scheduler.finish(request, FinishReason.LENGTH)
            elif not tokens:
                continue
            generated += len(tokens)
            counted += self._count_tokens(request, len(tokens), now)
            if request.status is Status.FINISHED:
                self._forget(request, request.num_output_tokens)
                finished.append(request.request_id)
            outputs.append(ClientOutput(request.client, new_tokens(request, item, row, tokens)))
            if request.sampling.structured and self._constraints.advance(request, tokens):
                self._finish(request, FinishReason.STOP, request.num_output_tokens)
                outputs.append(ClientOutput(request.client, ending(request)))
                finished.append(request.request_id)
        self._stalled = False
        self._record(submitted, now, wait_seconds, finished, counted, generated)
        return outputs

    def _count_tokens(self, request: Request, tokens: int, now: float) -> int:
        """Tokens to count for this step: the new ones, and with the first of them the prompt."""
        counted = tokens
        if not request.first_token_time:
            request.first_token_time = now
            self.metrics.first_token(request)
            counted += request.prompt_len
        else:
            self.metrics.later_token((now - request.last_token_time) / tokens)
        request.last_token_time = now
        if not request.sampling.stop:
            self._generated += tokens
        return counted

    def _finish(self, request: Request, reason: FinishReason, output_tokens: int) -> None:
        self.scheduler.finish(request, reason)
        self._forget(request, output_tokens)
        self._publish()

    def _forget(self, request: Request, output_tokens: int) -> None:
        """Count a request that has ended, and let go of what was kept for it."""
        if request.sampling.stop:
            # A stop string may still cut what was generated: counted at the end. (If the request reaches its own end
            # before the client's word of a stop string comes, the tokens between count as generated.)
            self._generated += output_tokens
        self.metrics.finished(request, output_tokens)
        self.throughput.finished(output_tokens)
        self._swaps.forget(request.request_id)
        self._constraints.forget(request.request_id)
        self._deadlines.forget(request.request_id)
        group = self._groups[request.group]
        group.remove(request.request_id)
        if not group:
            del self._groups[request.group]

    def _record(
        self,
        submitted: _Submitted,
        now: float,
        wait_seconds: float,
        finished: list[str],
        counted: int,
        generated: int,
    ) -> None:
        schedule = submitted.step.schedule
        compiled, self._compiled = compiles.total() - self._compiled, compiles.total()
        event = step_event(
            schedule,
            submitted.step.bucket,
            submitted=submitted.time,
            collected=now,
            schedule_seconds=submitted.schedule_seconds,
            submit_seconds=submitted.submit_seconds,
            wait_seconds=wait_seconds,
            compiled=compiled,
            finished=tuple(finished),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.scheduler.kv.pool.num_free,
        )
        self.events.append(event)
        self.metrics.step(event, counted)
        self.throughput.step(submitted.time, now, schedule.num_tokens)
        self.traffic.step(event, generated)
        self._learn_cost(event)

    def _learn_cost(self, event: StepEvent) -> None:
        """What a prompt token costs, from steps that computed many."""
        swap = self.scheduler.swap
        busy = event.collected - max(event.submitted, self._last_collected)
        self._last_collected = event.collected
        many = self.scheduler.limits.max_num_batched_tokens // 32
        if swap is not None and sum(event.prefill_tokens) >= max(many, len(event.decode_requests)):
            swap.learn(busy / event.num_tokens)

    def _publish(self) -> None:
        """Tell the metrics how things stand."""
        scheduler = self.scheduler
        self.metrics.generated(self._generated)
        self._generated = 0
        self.metrics.gauges(len(scheduler.running), len(scheduler.waiting), scheduler.kv.usage)
