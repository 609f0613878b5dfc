"""Requests and schedulers in one line each."""

from __future__ import annotations

from itertools import count
from typing import Any

from jaxserve.request import EngineRequest, Request, SamplingParams
from jaxserve.scheduling.draft import SchedulerLimits
from jaxserve.scheduling.kv_manager import KVManager
from jaxserve.scheduling.schedule import SchedulerOutput
from jaxserve.scheduling.scheduler import Scheduler, SchedulingPolicy

_order = count()
EOS = 2


def make_request(
    prompt: int | list[int],
    max_tokens: int = 8,
    *,
    request_id: str | None = None,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Request:
    """A request of these prompt tokens, or of so many that nobody else has."""
    order = next(_order)
    item = EngineRequest(
        request_id=request_id or f"r{order}",
        prompt_token_ids=[1000 + order] * prompt if isinstance(prompt, int) else prompt,
        sampling=sampling or SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        seed=0,
        **fields,
    )
    return Request.create(item, client=b"", eos_ids=frozenset({EOS}), order=order)


def make_scheduler(
    *,
    num_blocks: int = 33,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 16,
    prefill_rows: int = 4,
    policy: SchedulingPolicy = "fcfs",
    step_sizes: tuple[int, ...] = (),
    chunk_tokens: tuple[int, int] = (1, 1 << 30),
    **kv: Any,
) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, budget, prefill_rows, step_sizes, chunk_tokens)
    return Scheduler(limits, KVManager(num_blocks, block_size, **kv), policy)


def collect(scheduler: Scheduler, step: SchedulerOutput, token: int = 9) -> list[str]:
    """Give every row that samples ``token``; returns the ids of the requests that finished."""
    finished = []
    for row in step.rows:
        request, _ = scheduler.collect(row, [token] if row.samples else [])
        if request.finish_reason:
            finished.append(request.request_id)
    scheduler.check_integrity()
    return finished


def run_step(scheduler: Scheduler, token: int = 9) -> SchedulerOutput:
    """Schedule and collect one step at once."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    collect(scheduler, step, token)
    return step


def run_all(scheduler: Scheduler, token: int = 9) -> list[SchedulerOutput]:
    """Steps until nothing is left."""
    steps = []
    while len(scheduler):
        steps.append(run_step(scheduler, token))
    return steps
