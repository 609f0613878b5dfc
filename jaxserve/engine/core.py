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
from jaxserve.engine.events import StepEvent
from jaxserve.engine.messages import ModelInfo, Timings, TokenLogprobs, TokenOutput
from jaxserve.metrics import Metrics
from jaxserve.request import EngineRequest, FinishReason, Request, RequestError, Status
from jaxserve.runner import compiles
from jaxserve.runner.plan import Plan
from jaxserve.runner.runner import ModelRunner, PendingStep, RowOutput
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import ScheduledRequest, SchedulerOutput
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits

logger = logging.getLogger(__name__)

EVENTS_KEPT = 1024


class Runner(Protocol):
    """What the engine needs of a runner; ``ModelRunner`` is the real one."""

    plan: Plan
    num_blocks: int

    def submit(self, schedule: SchedulerOutput) -> PendingStep: ...


class ClientOutput(NamedTuple):
    client: bytes
    output: TokenOutput


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: PendingStep
    time: float


class EngineCore:
    """Requests in, steps, tokens out. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        model_name: str = "",
        startup_seconds: dict[str, float] | None = None,
    ) -> None:
        plan = runner.plan
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerLimits(plan.max_num_seqs, plan.max_num_batched_tokens, plan.ladder.max_prefill_rows),
            KVManager(runner.num_blocks, plan.block_size),
        )
        max_kv_tokens = self.scheduler.kv.pool.num_usable * plan.block_size
        self.info = ModelInfo(
            vocab_size=vocab_size,
            max_model_len=min(plan.max_model_len, max_kv_tokens) if plan.fit_model_len else plan.max_model_len,
            max_kv_tokens=max_kv_tokens,
            max_logprobs=plan.max_logprobs,
            version=jaxserve.__version__,
        )
        self.events: deque[StepEvent] = deque(maxlen=EVENTS_KEPT)
        self.metrics = Metrics(
            model_name,
            startup_seconds=startup_seconds or {},
            cache_config={
                "block_size": str(plan.block_size),
                "num_gpu_blocks": str(runner.num_blocks),
                "cache_dtype": str(plan.dtype),
                "attention_backend": plan.attention_backend,
                "prefill_backend": plan.prefill_backend,
            },
            compile_counts=compiles.counts,
        )
        self._eos_ids = eos_ids
        self._depth = plan.async_depth
        self._pending: deque[_Submitted] = deque()
        self._arrivals = 0
        self._generated = 0
        """Tokens that metrics do not know of yet: they hear of them once a step."""

    @classmethod
    def load(
        cls, config: EngineConfig, directory: Path, progress: Callable[[str], None], model_name: str = ""
    ) -> EngineCore:
        """Load and compile; raises ``CheckpointError`` or ``ValueError``, one line each, for what the user can mend."""
        runner = ModelRunner(config, directory, progress)
        model = runner.model_config
        return cls(
            runner,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_token_ids,
            model_name=model_name or config.model,
            startup_seconds=runner.startup_seconds,
        )

    def has_work(self) -> bool:
        """Whether ``step()`` has anything to do."""
        return len(self.scheduler) > 0

    def add_request(self, item: EngineRequest, client: bytes = b"") -> None:
        """Queue a request. Raises ``ValueError`` (``RequestError``) for one that can never be served."""
        max_tokens = admission.check(item.prompt_token_ids, item.sampling, self.info)
        if not 1 <= item.max_tokens <= max_tokens:
            raise RequestError(f"max_tokens must be between 1 and {max_tokens}", param="max_tokens")
        request = Request.create(item, client=client, eos_ids=self._eos_ids, order=self._arrivals)
        self.scheduler.add(request)
        self._arrivals += 1
        self._publish()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; unknown ids are ignored."""
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            if request is not None and request.status is not Status.FINISHED:
                self._finish(request, FinishReason.ABORT, request.num_output_tokens)

    def finish(self, request_id: str, kept_tokens: int) -> None:
        """A client saw a stop string end: the answer is the first ``kept_tokens`` generated tokens."""
        request = self.scheduler.get(request_id)
        if request is not None and request.status is not Status.FINISHED:
            self._finish(request, FinishReason.STOP, min(kept_tokens, request.num_output_tokens))

    def step(self) -> list[ClientOutput]:
        """Submit steps up to the asynchronous depth, collect the oldest, and return what it gave."""
        while len(self._pending) < self._depth:
            schedule = self.scheduler.schedule()
            if schedule is None:
                break
            now = time.monotonic()
            self._mark_admitted(schedule, now)
            self._pending.append(_Submitted(self.runner.submit(schedule), now))
        if not self._pending:
            return []
        # Waited for before it is taken from the queue: an interrupt while waiting loses nothing.
        results = self._pending[0].step.result().rows
        outputs = self._collect(self._pending.popleft(), results)
        self._publish()
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

    def _collect(self, submitted: _Submitted, results: list[RowOutput]) -> list[ClientOutput]:
        now = time.monotonic()
        outputs: list[ClientOutput] = []
        finished: list[str] = []
        counted = 0
        for item, row in zip(submitted.step.schedule.rows, results, strict=True):
            request, tokens = self.scheduler.collect(item, row.token_ids)
            if not row.finite and request.status is not Status.FINISHED:
                self._finish(request, FinishReason.ERROR, request.num_output_tokens)
                outputs.append(ClientOutput(request.client, _error(request, "the model gave non-finite logits")))
                finished.append(request.request_id)
            if not tokens:
                continue
            counted += self._count_tokens(request, len(tokens), now)
            if request.status is Status.FINISHED:
                self._count_finished(request, request.num_output_tokens)
                finished.append(request.request_id)
            outputs.append(ClientOutput(request.client, _output(request, item, row, tokens)))
        self._record(submitted, now, finished, counted)
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
        self._count_finished(request, output_tokens)
        self._publish()

    def _count_finished(self, request: Request, output_tokens: int) -> None:
        if request.sampling.stop:
            # A stop string may still cut what was generated: counted at the end. (If the request reaches its own end
            # before the client's word of a stop string comes, the tokens between count as generated.)
            self._generated += output_tokens
        self.metrics.finished(request, output_tokens)

    def _record(self, submitted: _Submitted, now: float, finished: list[str], counted: int) -> None:
        schedule = submitted.step.schedule
        event = StepEvent(
            submitted=submitted.time,
            collected=now,
            decode_requests=tuple(r.request_id for r in schedule.decode),
            prefill_requests=tuple(r.request_id for r in schedule.prefill),
            num_tokens=schedule.num_tokens,
            padded_tokens=submitted.step.bucket.tokens,
            admitted=schedule.admitted,
            preempted=schedule.preempted,
            finished=tuple(finished),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.scheduler.kv.pool.num_free,
        )
        self.events.append(event)
        self.metrics.step(event, counted)

    def _publish(self) -> None:
        """Tell the metrics how things stand."""
        scheduler = self.scheduler
        self.metrics.generated(self._generated)
        self._generated = 0
        self.metrics.gauges(len(scheduler.running), len(scheduler.waiting), scheduler.kv.usage)


def _output(request: Request, item: ScheduledRequest, row: RowOutput, tokens: list[int]) -> TokenOutput:
    done = request.status is Status.FINISHED
    logprobs = None
    if item.wants_logprobs:
        assert row.logprob is not None and request.sampling.logprobs is not None
        top = request.sampling.logprobs
        logprobs = [TokenLogprobs(row.logprob, list(row.top_ids[:top]), list(row.top_logprobs[:top]))]
    stopped = request.finish_reason is FinishReason.STOP and tokens[-1] in request.sampling.stop_token_ids
    return TokenOutput(
        request_id=request.request_id,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=request.finish_reason.value if done and request.finish_reason else None,
        stop_reason=tokens[-1] if stopped else None,
        timings=_timings(request) if done else None,
    )


def _error(request: Request, message: str) -> TokenOutput:
    return TokenOutput(
        request_id=request.request_id,
        token_ids=[],
        finish_reason="error",
        error=message,
        timings=_timings(request),
    )


def _timings(request: Request) -> Timings:
    return Timings(request.arrival_time, request.scheduled_time, request.first_token_time, request.last_token_time)
