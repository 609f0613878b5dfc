"""How a generation looks in OpenAI's two dialects, completions and chat: whole answers and chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.engine.client import EngineClient
from jaxserve.engine.output import Delta, Token
from jaxserve.server import schemas
from jaxserve.server.errors import as_api_error
from jaxserve.server.generation import Choice, Generation
from jaxserve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Dialect(ABC):
    """One answer format, for one call."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    @abstractmethod
    def opening(self) -> Iterator[msgspec.Struct]:
        """Chunks that are known before the first token."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta) -> Iterator[msgspec.Struct]:
        """The chunks that carry one delta."""

    @abstractmethod
    def usage_chunk(self) -> msgspec.Struct:
        """The chunk without choices that ends a stream with include_usage."""

    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """The whole answer, once the generation is complete."""

    def _usage_so_far(self) -> schemas.Usage | UnsetType:
        return self.generation.usage() if self.generation.continuous_usage else UNSET

    def _token_ids(self, tokens: Sequence[Token]) -> list[int] | UnsetType:
        return [token.token_id for token in tokens] if self.generation.return_token_ids else UNSET

    def _prompt_token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return choice.prompt.token_ids if self.generation.return_token_ids else UNSET


class CompletionDialect(Dialect):
    def opening(self) -> Iterator[msgspec.Struct]:
        if self.generation.echo:
            for choice in self.generation.choices:
                yield self._chunk(schemas.CompletionChoice(index=choice.index, text=self._prompt_text(choice)))

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[msgspec.Struct]:
        yield self._chunk(
            schemas.CompletionChoice(
                index=choice.index,
                text=delta.text,
                logprobs=self._logprobs(choice, delta.tokens),
                finish_reason=delta.finish_reason,
                stop_reason=_present(delta.stop_reason),
                token_ids=self._token_ids(delta.tokens),
            )
        )

    def usage_chunk(self) -> msgspec.Struct:
        return self._envelope([], self.generation.usage())

    def answer(self) -> msgspec.Struct:
        choices = [
            schemas.CompletionChoice(
                index=choice.index,
                text=self._prompt_text(choice) + choice.text if self.generation.echo else choice.text,
                logprobs=self._logprobs(choice, choice.tokens),
                finish_reason=choice.finish_reason,
                stop_reason=_present(choice.stop_reason),
                token_ids=self._token_ids(choice.tokens),
                prompt_token_ids=self._prompt_token_ids(choice),
            )
            for choice in self.generation.choices
        ]
        return self._envelope(choices, self.generation.usage())

    def _chunk(self, choice: schemas.CompletionChoice) -> schemas.Completion:
        return self._envelope([choice], self._usage_so_far())

    def _envelope(
        self, choices: list[schemas.CompletionChoice], usage: schemas.Usage | UnsetType
    ) -> schemas.Completion:
        generation = self.generation
        return schemas.Completion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=usage,
        )

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        return self.generation.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> schemas.CompletionLogprobs | None:
        if self.generation.sampling.logprobs is None:
            return None
        tokenizer = self.generation.tokenizer
        start = len(self._prompt_text(choice))  # echoed or not
        return schemas.CompletionLogprobs(
            tokens=[tokenizer.token_text(token.token_id) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[_top_logprobs(token, tokenizer) for token in tokens],
            text_offset=[start + token.text_offset for token in tokens],
        )


def _top_logprobs(token: Token, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest texts, and the chosen one; tokens of the same text (�) count as their likeliest."""
    pairs = list(token.top)
    if pairs and token.logprob is not None:
        pairs.append((token.token_id, token.logprob))
    top: dict[str, float] = {}
    for token_id, logprob in pairs:
        top.setdefault(tokenizer.token_text(token_id), logprob)
    return top


class ChatDialect(Dialect):
    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._begun: set[int] = set()

    def opening(self) -> Iterator[msgspec.Struct]:
        return iter(())

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[msgspec.Struct]:
        if choice.index not in self._begun:
            first = schemas.ChatChunkChoice(index=choice.index, delta=schemas.ChatDelta(role="assistant", content=""))
            yield self._chunk(first, UNSET if self._begun else self._prompt_token_ids(choice))
            self._begun.add(choice.index)
        tokens = delta.tokens
        if delta.text:
            yield self._chunk(self._choice(choice, schemas.ChatDelta(content=delta.text), tokens))
            tokens = ()
        if delta.finish_reason is not None:
            last = self._choice(choice, schemas.ChatDelta(), tokens)
            last.finish_reason = delta.finish_reason
            last.stop_reason = _present(delta.stop_reason)
            yield self._chunk(last)

    def usage_chunk(self) -> msgspec.Struct:
        return self._envelope([], self.generation.usage())

    def answer(self) -> msgspec.Struct:
        generation = self.generation
        choices = [
            schemas.ChatChoice(
                index=choice.index,
                message=schemas.ChatMessage(content=choice.text),
                logprobs=self._logprobs(choice.tokens),
                finish_reason=choice.finish_reason,
                stop_reason=_present(choice.stop_reason),
                token_ids=self._token_ids(choice.tokens),
            )
            for choice in generation.choices
        ]
        return schemas.ChatCompletion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=generation.usage(),
            prompt_token_ids=self._prompt_token_ids(generation.choices[0]),
        )

    def _choice(self, choice: Choice, delta: schemas.ChatDelta, tokens: Sequence[Token]) -> schemas.ChatChunkChoice:
        return schemas.ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(tokens) if tokens else None,
            token_ids=self._token_ids(tokens) if tokens else UNSET,
        )

    def _chunk(
        self, choice: schemas.ChatChunkChoice, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> schemas.ChatChunk:
        chunk = self._envelope([choice], self._usage_so_far())
        chunk.prompt_token_ids = prompt_token_ids
        return chunk

    def _envelope(self, choices: list[schemas.ChatChunkChoice], usage: schemas.Usage | UnsetType) -> schemas.ChatChunk:
        generation = self.generation
        return schemas.ChatChunk(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> schemas.ChatLogprobs | None:
        if self.generation.sampling.logprobs is None:
            return None
        tokenizer = self.generation.tokenizer
        return schemas.ChatLogprobs(
            content=[
                schemas.ChatTokenLogprob(
                    **_token_logprob(tokenizer, token.token_id, token.logprob),
                    top_logprobs=[schemas.TopLogprob(**_token_logprob(tokenizer, *pair)) for pair in token.top],
                )
                for token in tokens
            ]
        )


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _present[T](value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def encode_event(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def stream_events(dialect: Dialect, client: EngineClient) -> AsyncGenerator[bytes, None]:
    """The body of a streamed answer: all events that are there at a time, together. After the first byte a fault can
    only be an event."""
    generation = dialect.generation
    events = bytearray()
    try:
        for chunk in dialect.opening():
            events += encode_event(chunk)
        async with aclosing(generation.deltas(client)) as batches:
            async for deltas in batches:
                for choice, delta in deltas:
                    for chunk in dialect.chunks(choice, delta):
                        events += encode_event(chunk)
                if events:
                    yield bytes(events)
                    events.clear()
        if generation.include_usage:
            events += encode_event(dialect.usage_chunk())
    except Exception as error:
        events += b"data: " + as_api_error(error).body() + b"\n\n"
    yield bytes(events + DONE)
