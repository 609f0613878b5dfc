"""Prometheus metrics under vLLM's names, so that its dashboards work; ``jaxserve:`` ones are ours."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.engine.admission import REFUSAL_REASONS
from jaxserve.engine.events import StepEvent
from jaxserve.request import Request

disable_created_metrics()

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_POWERS = tuple(2**e for e in range(15))
_RATIOS = tuple(i / 10 for i in range(10))


class _Compiles(Collector):
    """jaxserve:compiles_total, read when scraped."""

    def __init__(self, model: str, counts: Callable[[], dict[str, int]]) -> None:
        self._model = model
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "jaxserve:compiles",
            "Programs compiled, by phase; none should be while serving.",
            labels=["model_name", "phase"],
        )
        for phase, count in self._counts().items():
            family.add_metric([self._model, phase], count)
        yield family


class _TokenLatency(Collector):
    """vllm:inter_token_latency_seconds. Observed for every token: a bisection and two additions, where the library's
    histogram would cost a third of the engine's host time at batch 256."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, _TOKEN_SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", "Between tokens.", labels=["model_name"])
        family.add_metric([self._model], buckets, self._sum)
        yield family


class Metrics:
    """All metrics of one engine; ``exposition`` is what /metrics answers."""

    def __init__(
        self,
        model_name: str,
        *,
        startup_seconds: dict[str, float],
        cache_config: dict[str, str],
        compile_counts: Callable[[], dict[str, int]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._registry.register(_Compiles(model_name, compile_counts))
        self.running = self._make(Gauge, "vllm:num_requests_running", "Requests that hold a slot.")
        self.waiting = self._make(Gauge, "vllm:num_requests_waiting", "Requests that wait for one.")
        self.kv_usage = self._make(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._preemptions = self._make(Counter, "vllm:num_preemptions", "Preemptions.")
        self._prompt_tokens = self._make(Counter, "vllm:prompt_tokens", "Prompt tokens of requests that gave a token.")
        self._prompt_cached = self._make(
            Counter, "vllm:prompt_tokens_cached", "Of those, how many an earlier request had left computed."
        )
        self._cache_queries = self._make(
            Counter, "vllm:prefix_cache_queries", "Prompt tokens of admitted requests that looked for cached blocks."
        )
        self._cache_hits = self._make(Counter, "vllm:prefix_cache_hits", "Of those, how many they found.")
        self._evicted = self._make(Counter, "jaxserve:evicted_blocks", "Cached KV blocks that gave way to others.")
        self._generated = self._make(Counter, "vllm:generation_tokens", "Tokens generated.")
        self._idle = self._make(Counter, "jaxserve:engine_idle_seconds", "Seconds without any request.")
        self._ttft = self._seconds("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = _TokenLatency(model_name)
        self._registry.register(self._itl)
        self._tpot = self._seconds(
            "vllm:request_time_per_output_token_seconds", "Mean time a token after the first.", _TOKEN_SECONDS
        )
        self._e2e = self._seconds("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = self._seconds("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self._inference = self._seconds("vllm:request_inference_time_seconds", "From the first step to the last token.")
        self._prefill = self._seconds("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = self._seconds("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._answer_length = self._histogram("vllm:request_generation_tokens", "Generated tokens a request.", _TOKENS)
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Prompt tokens completed and tokens generated a step.", _POWERS
        )
        self._params_n = self._histogram("vllm:request_params_n", "Choices a request.", (1, 2, 5, 10, 20))
        self._params_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens.", _TOKENS)
        self._request_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions a request.", (0, 1, 2, 5, 10)
        )
        self._swapped = Counter(
            "jaxserve:swapped_blocks", "KV blocks moved to host memory and back.", ("model_name", "direction"),
            registry=self._registry,
        )  # fmt: skip
        for direction in ("out", "in"):
            self._swapped.labels(model_name, direction)
        self._padding = self._histogram("jaxserve:padding_waste_ratio", "Padding share of a step's tokens.", _RATIOS)
        self._rejections = Counter(
            "vllm:admission_rejections", "Calls refused for want of room or time.", ("model_name", "reason"),
            registry=self._registry,
        )  # fmt: skip
        for reason in REFUSAL_REASONS:
            self._rejections.labels(model_name, reason)
        labels = ("model_name", "finished_reason")
        self._success = Counter("vllm:request_success", "Finished requests.", labels, registry=self._registry)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)
        self._steps = Histogram(
            "jaxserve:step_duration_seconds", "From submitting a step to its result, by kind.", ("model_name", "kind"),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        startup = Gauge(
            "jaxserve:startup_seconds", "Start-up by phase.", ("model_name", "phase"), registry=self._registry
        )
        for phase, seconds in startup_seconds.items():
            startup.labels(model_name, phase).set(seconds)
        info = Gauge(
            "vllm:cache_config_info",
            "Configuration of the KV cache.",
            list(cache_config),
            registry=self._registry,
        )
        info.labels(**cache_config).set(1)

    def _make(self, kind: type[Any], name: str, text: str, **options: Any) -> Any:
        return kind(name, text, ("model_name",), registry=self._registry, **options).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        return self._make(Histogram, name, text, buckets=buckets)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
        return self._histogram(name, text, buckets)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def idle(self, seconds: float) -> None:
        self._idle.inc(seconds)

    def gauges(self, running: int, waiting: int, kv_usage: float) -> None:
        self.running.set(running)
        self.waiting.set(waiting)
        self.kv_usage.set(kv_usage)

    def step(self, event: StepEvent, counted_tokens: int) -> None:
        """``counted_tokens``: prompts that were completed and tokens generated by the step."""
        self._steps.labels(self._model, event.kind).observe(event.collected - event.submitted)
        self._padding.observe(1 - event.num_tokens / event.padded_tokens)
        self._iteration.observe(counted_tokens)
        self._preemptions.inc(len(event.preempted))
        for direction, blocks in zip(("out", "in"), event.swapped_blocks, strict=True):
            if blocks:
                self._swapped.labels(self._model, direction).inc(blocks)
        self._cache_queries.inc(event.queried_tokens)
        self._cache_hits.inc(event.cached_tokens)
        self._evicted.inc(event.num_evicted)

    def first_token(self, request: Request) -> None:
        self._prompt_tokens.inc(request.prompt_len)
        self._prompt_cached.inc(request.num_cached_tokens)
        self._ttft.observe(request.first_token_time - request.arrival_time)

    def later_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def refused(self, reason: str) -> None:
        """``reason`` is one of REFUSAL_REASONS."""
        self._rejections.labels(self._model, reason).inc()

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def finished(self, request: Request, output_tokens: int) -> None:
        assert request.finish_reason is not None
        self._success.labels(self._model, request.finish_reason.value).inc()
        self._prompt_length.observe(request.prompt_len)
        self._answer_length.observe(output_tokens)
        if request.choice_index == 0:
            self._params_n.observe(request.sampling.n)
        self._params_max_tokens.observe(request.max_tokens)
        self._request_preemptions.observe(request.num_preemptions)
        if not request.first_token_time:
            return
        self._e2e.observe(request.last_token_time - request.arrival_time)
        self._queue.observe(request.scheduled_time - request.arrival_time)
        self._inference.observe(request.last_token_time - request.scheduled_time)
        self._prefill.observe(request.first_token_time - request.scheduled_time)
        self._decode.observe(request.last_token_time - request.first_token_time)
        if output_tokens > 1:
            self._tpot.observe((request.last_token_time - request.first_token_time) / (output_tokens - 1))
