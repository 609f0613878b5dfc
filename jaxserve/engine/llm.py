"""Offline use: the engine in the caller's own process."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve import collector
from jaxserve.config import EngineConfig
from jaxserve.demo import demo_model_directory
from jaxserve.engine.admission import make_requests
from jaxserve.engine.bad_words import with_bad_words
from jaxserve.engine.core import EngineCore
from jaxserve.engine.defaults import check_model, sampling_defaults
from jaxserve.engine.messages import PromptLogprobs, TokenOutput
from jaxserve.engine.output import ChoiceOutput, Token
from jaxserve.request import EngineRequest, Pooling, SamplingParams, seed_source
from jaxserve.runner import backend, compiles
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Message = Mapping[str, Any]


@dataclass
class Completion:
    """One answer."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """With their log-probabilities, if those were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens together, if log-probabilities were asked for."""
        logprobs = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(logprobs) if logprobs else None


@dataclass
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Of all prompt tokens but the first, where ``SamplingParams.prompt_logprobs`` asks for them."""


class LLM:
    """A model, loaded and compiled, without a server.

    ``model`` is a directory in HuggingFace layout, or "demo"; further options are those of ``EngineConfig``, of which
    ``prefill_chunk_tokens`` is "all" by default. Raises ``CheckpointError`` or ``ValueError``, one line each, for what
    the caller can mend. ``engine`` may be stepped by hand; ``generate`` and ``chat`` step it until their answers are
    complete.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | Path | None = None,
        progress: Callable[[str], None] = logger.info,
        **options: Any,
    ) -> None:
        try:
            # Nobody reads along, whom a long step would keep waiting.
            defaults = {"model": str(model), "prefill_chunk_tokens": "all"}
            self.config = msgspec.convert(defaults | options, EngineConfig)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        backend.configure(self.config)
        compiles.thaw()
        directory = demo_model_directory(progress=progress) if self.config.model == "demo" else Path(model)
        check_model(self.config, directory)
        self.tokenizer = Tokenizer.load(self.config.tokenizer or directory, chat_template)
        self.engine = EngineCore.load(self.config, directory, progress)
        self._defaults = sampling_defaults(
            directory, self.config.generation_config, self.config.override_generation_config
        )
        self._draw_seed = seed_source(self.config.seed)
        self._ids = itertools.count()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The model's own defaults (generation_config.json) with ``changes``."""
        return SamplingParams(**{**self._defaults, **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, with the same parameters or each with its own; answers are in the prompts' order, and the
        longest are begun first. Raises ``ValueError`` before anything runs if one of them can never be served."""
        return self._run(self._encoded(prompts), sampling_params or self.default_sampling_params())

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template, which is given
        the ``template_options``."""
        if strange := template_options.keys() & set(SamplingParams.__struct_fields__):
            raise TypeError(f"{', '.join(sorted(strange))}: fields of SamplingParams, not of the chat template")
        several = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        if any(not isinstance(message, Mapping) for messages in several for message in messages):
            raise TypeError('a conversation is a list of messages, such as {"role": "user", "content": "Hello!"}')
        prompts = [(None, self.tokenizer.encode_chat(list(messages), **template_options)) for messages in several]  # type: ignore[arg-type]
        params = sampling_params or self.default_sampling_params(max_tokens=None)
        return self._run(prompts, params)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "last") -> list[np.ndarray]:
        """Embeddings of texts, given as text or as token ids: pooled hidden states of length 1, float32 ``[D]`` each.
        Raises ``ValueError`` before anything runs if one of them can never be served."""
        params = SamplingParams(max_tokens=0)
        requests = [
            make_requests(f"offline-{next(self._ids)}", ids, params, self.engine.info, pooling=pooling)[0]
            for _, ids in self._encoded(prompts)
        ]
        outputs: dict[str, TokenOutput | None] = {request.request_id: None for request in requests}

        def take(output: TokenOutput) -> None:
            if output.request_id in outputs:
                outputs[output.request_id] = output

        self._step_through(requests, take, lambda: None in outputs.values())
        return [_vector(output) for output in outputs.values() if output is not None]

    def _encoded(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[str | None, list[int]]]:
        """Each prompt's text, where it is one, and its ids."""
        several: list[Prompt] = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        return [self._encoded_one(prompt) for prompt in several]

    def _encoded_one(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ValueError(f'a prompt that is a dict has "prompt" or "prompt_token_ids", got {sorted(prompt)}')
            return self._encoded_one(prompt["prompt"])
        return (prompt, self.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        if isinstance(params, SamplingParams):
            of_each = [self._checked(params)] * len(prompts)
        elif len(params) == len(prompts):
            of_each = [self._checked(own) for own in params]
        else:
            raise ValueError(f"{len(prompts)} prompts need as many sampling_params, or one, got {len(params)}")
        results: list[RequestOutput] = []
        growing: dict[str, _Growing] = {}
        requests = []
        for (text, ids), own in zip(prompts, of_each, strict=True):
            name = f"offline-{next(self._ids)}"
            batch = make_requests(name, ids, own, self.engine.info, draw_seed=self._draw_seed)
            answers = [Completion(index) for index in range(len(batch))]
            results.append(RequestOutput(name, text, ids, answers))
            for request, answer in zip(batch, answers, strict=True):
                growing[request.request_id] = _Growing(results[-1], answer, ChoiceOutput(self.tokenizer, own))
            requests += batch
        self._step_through(requests, lambda output: self._grow(growing, output), lambda: bool(growing))
        return results

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """With the ids of its bad words; raises ``RequestError`` for a grammar that cannot be."""
        if params.structured is not None:
            self.engine.grammars.compile(params.structured).result()
        return with_bad_words(params, self.tokenizer)

    def _step_through(
        self, requests: Sequence[EngineRequest], take: Callable[[TokenOutput], None], go_on: Callable[[], bool]
    ) -> None:
        """Step these requests to their end; ``take`` is given every output."""
        for request in longest_first(requests):
            self.engine.add_request(request)
        try:
            with collector.only_young(), _interrupts_between_steps() as check:
                while go_on():
                    for _, output in self.engine.step():
                        take(output)
                    if self.engine.stalled:
                        raise RuntimeError(f"the engine stalls: {self.engine.scheduler.why_waiting()}")
                    check()
        finally:
            # An interrupted call leaves nothing behind; those that have ended are unknown by now.
            self.engine.abort([request.request_id for request in requests])

    def _grow(self, growing: dict[str, _Growing], output: TokenOutput) -> None:
        item = growing.get(output.request_id)
        if item is None:
            return
        item.feed(output)
        if item.choice.stopped:
            self.engine.finish(output.request_id, item.choice.num_tokens)
        if item.choice.finished:
            del growing[output.request_id]


def longest_first(requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    """Those first whose answers may be longest, others in their order: so that few are left alone at the end, where
    nobody cares who is done first."""
    return sorted(requests, key=lambda request: request.max_tokens, reverse=True)


def _vector(output: TokenOutput) -> np.ndarray:
    if output.embedding is None:
        raise RuntimeError(output.error)
    return np.frombuffer(output.embedding, "<f4")


@dataclass
class _Growing:
    result: RequestOutput
    answer: Completion
    choice: ChoiceOutput

    def feed(self, output: TokenOutput) -> None:
        if output.prompt_logprobs is not None:
            self.result.prompt_logprobs = output.prompt_logprobs
        self.result.num_cached_tokens = max(self.result.num_cached_tokens, output.cached_tokens)
        delta = self.choice.feed(output)
        if delta is not None:
            self.answer.text += delta.text
            self.answer.tokens += delta.tokens
            self.answer.finish_reason, self.answer.stop_reason = delta.finish_reason, delta.stop_reason
            self.answer.error = delta.error


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C does not break into a step, whose donated buffers would be lost: the function that this gives
    raises the ``KeyboardInterrupt`` when it is called. (Only a main thread hears of Ctrl-C at all.)"""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: pressed.set())

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
