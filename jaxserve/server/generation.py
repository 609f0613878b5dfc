"""Running one call: its prompts times its choices, from the engine's tokens to deltas of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from litestar import Request

from jaxserve.engine.client import EngineClient
from jaxserve.engine.messages import PromptLogprobs, TokenOutput
from jaxserve.engine.output import ChoiceOutput, Delta, Token
from jaxserve.request import EngineRequest, FinishReason, SamplingParams
from jaxserve.server.errors import ClientDisconnectedError, GenerationAbortedError, GenerationError
from jaxserve.server.schemas import PromptTokensDetails, RequestMetrics, Usage
from jaxserve.server.timing import ChoiceTimes, request_metrics
from jaxserve.server.validate import Prompt
from jaxserve.tokenizer import Tokenizer


@dataclass(slots=True)
class Choice:
    """One answer of a call."""

    index: int
    prompt: Prompt
    request: EngineRequest | None
    """None where nothing is to be computed, with max_tokens 0."""
    output: ChoiceOutput
    is_first_of_prompt: bool
    times: ChoiceTimes | None = None
    """Kept where the answer is to tell of them."""
    text: str = ""
    """The answer as it has grown, where it is to be given whole; likewise what follows."""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[PromptLogprobs] | None = None
    """Where they were asked for, and computed."""
    cached_tokens: int = 0
    """Prompt tokens that the engine did not have to compute for this answer."""

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class Generation:
    """One call, once it has been let in."""

    id: str
    model: str
    tokenizer: Tokenizer
    sampling: SamplingParams
    """As asked for; with best_of more answers are drawn, with log-probabilities to choose by."""
    prompts: Sequence[Prompt]
    choices: Sequence[Choice]
    echo: bool = False
    prompt_logprobs: int | None = None
    """Tell them in a field of their own, with so many alternatives."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> Usage:
        """What has been used so far; a prompt counts once, however many answers it gets."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.output.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens()),
        )

    def _cached_tokens(self) -> int:
        """A prompt's tokens count as cached where no answer to it had to compute them."""
        cached: dict[int, int] = {}
        drawn = len(self.choices) // len(self.prompts)
        for choice in self.choices:
            number = choice.index // drawn
            cached[number] = min(cached.get(number, choice.cached_tokens), choice.cached_tokens)
        return sum(cached.values())

    def metrics(self) -> RequestMetrics | None:
        """Where the time went, if that is to be told and there is something to tell."""
        return request_metrics(choice.times for choice in self.choices if choice.times)

    def answers(self) -> list[Choice]:
        """The complete answers to show: of each prompt the n likeliest, by mean log-probability a token."""
        n, drawn = self.sampling.n, len(self.choices) // len(self.prompts)
        if drawn == n:
            return list(self.choices)
        best: list[Choice] = []
        for start in range(0, len(self.choices), drawn):
            best += sorted(self.choices[start : start + drawn], key=_mean_logprob, reverse=True)[:n]
        return [replace(choice, index=index) for index, choice in enumerate(best)]

    async def deltas(self, client: EngineClient) -> AsyncGenerator[Iterator[tuple[Choice, Delta]], None]:
        """What the answers grow by, all that is there at a time, until all are finished; closing it early aborts the
        rest. Each iterator is to be used up before the next, and raises ``GenerationError`` where a request failed.
        """
        yield ((choice, Delta("", (), FinishReason.LENGTH)) for choice in self.choices if choice.request is None)
        running = {choice.request.request_id: choice for choice in self.choices if choice.request}
        if not running:
            return
        requests = [choice.request for choice in running.values() if choice.request]
        async with aclosing(client.generate(requests)) as batches:
            async for outputs in batches:
                yield self._grow(outputs, running, client)

    def _grow(
        self, outputs: list[TokenOutput], running: Mapping[str, Choice], client: EngineClient
    ) -> Iterator[tuple[Choice, Delta]]:
        for output in outputs:
            choice = running[output.request_id]
            choice.cached_tokens = output.cached_tokens
            if output.prompt_logprobs is not None:
                choice.prompt_logprobs = output.prompt_logprobs
            if choice.times:
                choice.times.note(output)
            delta = choice.output.feed(output)
            if choice.output.stopped:
                client.finish(output.request_id, choice.output.num_tokens)
            if delta is None:
                continue
            if delta.finish_reason == FinishReason.ABORT:
                raise GenerationAbortedError("The request was aborted.")
            if delta.finish_reason == FinishReason.ERROR:
                raise GenerationError(delta.error or "The engine gave no reason.")
            yield choice, delta

    async def complete(self, client: EngineClient) -> None:
        """Runs to the end; then the choices hold their answers."""
        async with aclosing(self.deltas(client)) as batches:
            async for deltas in batches:
                for choice, delta in deltas:
                    choice.add(delta)


def make_choices(
    prompts: Sequence[Prompt],
    requests: Sequence[Sequence[EngineRequest]],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    *,
    shown_ids: frozenset[int] = frozenset(),
    timed: bool = False,
) -> list[Choice]:
    """Choices in the order of their indices: all of the first prompt, then all of the second."""
    return [
        Choice(
            index=number * sampling.n + index,
            prompt=prompt,
            request=requests[number][index] if requests[number] else None,
            output=ChoiceOutput(tokenizer, sampling, shown_ids),
            is_first_of_prompt=index == 0,
            times=ChoiceTimes(requests[number][index].arrival_time) if timed and requests[number] else None,
        )
        for number, prompt in enumerate(prompts)
        for index in range(sampling.n)
    ]


def _mean_logprob(choice: Choice) -> float:
    logprobs = [token.logprob for token in choice.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else -inf


async def unless_disconnected[T](request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work, but cancels it when the client leaves, which otherwise nobody would see."""
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnectedError("the client closed the connection")
        return running.result()
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def _disconnect(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
