"""How a generation looks in OpenAI's two dialects, completions and chat: whole answers and chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from litestar.types import Scope
from msgspec import UNSET, UnsetType

from jaxserve.engine.client import EngineClient
from jaxserve.engine.output import Delta, Token
from jaxserve.server import schemas
from jaxserve.server.access import note_fault
from jaxserve.server.errors import ApiError, as_api_error
from jaxserve.server.generation import Choice, Generation
from jaxserve.server.prompt_logprobs import prompt_field, prompt_tokens
from jaxserve.server.reasoning import Thought
from jaxserve.server.reply import Piece, Reply
from jaxserve.server.tool_parsers import CallDelta

DONE = b"data: [DONE]\n\n"

type Chunk = msgspec.Struct | dict[str, Any]
"""The content of one event."""


class Dialect(ABC):
    """One answer format, for one call."""

    done = DONE
    """What a stream ends with."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._begun: set[int] = set()
        """Choices that have had a chunk."""

    @abstractmethod
    def opening(self) -> Iterator[Chunk]:
        """Chunks that are known before the first token."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta) -> Iterator[Chunk]:
        """The chunks that carry one delta."""

    @abstractmethod
    def usage_chunk(self) -> Chunk:
        """The chunk without choices that ends a stream with include_usage."""

    def closing(self) -> Iterator[Chunk]:
        """Chunks that follow the last token."""
        if self.generation.include_usage:
            yield self.usage_chunk()

    def encode(self, chunk: Chunk) -> bytes:
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def fault(self, fault: ApiError) -> bytes:
        """The event that tells of a fault."""
        return b"data: " + fault.body() + b"\n\n"

    @abstractmethod
    def answer(self) -> msgspec.Struct:
        """The whole answer, once the generation is complete."""

    def _usage_so_far(self) -> schemas.Usage | UnsetType:
        return self.generation.usage() if self.generation.continuous_usage else UNSET

    def _token_ids(self, tokens: Sequence[Token]) -> list[int] | UnsetType:
        return [token.token_id for token in tokens] if self.generation.return_token_ids else UNSET

    def _prompt_token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return choice.prompt.token_ids if self.generation.return_token_ids else UNSET

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, schemas.PromptLogprob] | None] | UnsetType:
        top, entries = self.generation.prompt_logprobs, choice.prompt_logprobs
        if top is None or entries is None:
            return UNSET
        return prompt_field(choice.prompt.token_ids, entries, top, self._token_name)

    def _token_name(self, token_id: int) -> str:
        """How log-probabilities call a token."""
        if self.generation.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.generation.tokenizer.token_text(token_id)

    def _chat_logprobs(self, tokens: Sequence[Token]) -> list[schemas.ChatTokenLogprob]:
        return [
            schemas.ChatTokenLogprob(
                **self._token_logprob(token.token_id, token.logprob),
                top_logprobs=[schemas.TopLogprob(**self._token_logprob(*pair)) for pair in token.top],
            )
            for token in tokens
        ]

    def _token_logprob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self.generation.tokenizer.token_bytes(token_id)
        return {"token": self._token_name(token_id), "logprob": logprob, "bytes": list(raw)}


class CompletionDialect(Dialect):
    def opening(self) -> Iterator[Chunk]:
        if self.generation.echo and self.generation.sampling.logprobs is None:
            for choice in self.generation.choices:
                yield self._chunk(self._choice(choice, self._prompt_text(choice)))

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[Chunk]:
        if self.generation.echo and choice.index not in self._begun:
            echo = self._choice(choice, self._prompt_text(choice))
            echo.logprobs = self._logprobs(choice, (), self._echoed(choice))
            yield self._chunk(echo)
        chunk = self._choice(choice, delta.text)
        chunk.logprobs = self._logprobs(choice, delta.tokens)
        chunk.finish_reason, chunk.stop_reason = delta.finish_reason, present(delta.stop_reason)
        chunk.token_ids = self._token_ids(delta.tokens)
        yield self._chunk(chunk)

    def usage_chunk(self) -> Chunk:
        chunk = self._envelope([], self.generation.usage())
        chunk.metrics = present(self.generation.metrics())
        return chunk

    def answer(self) -> msgspec.Struct:
        choices = [
            schemas.CompletionChoice(
                index=choice.index,
                text=self._prompt_text(choice) + choice.text if self.generation.echo else choice.text,
                logprobs=self._logprobs(choice, choice.tokens, self._echoed(choice)),
                finish_reason=choice.finish_reason,
                stop_reason=present(choice.stop_reason),
                token_ids=self._token_ids(choice.tokens),
                prompt_token_ids=self._prompt_token_ids(choice),
                prompt_logprobs=self._prompt_logprobs(choice),
            )
            for choice in self.generation.answers()
        ]
        answer = self._envelope(choices, self.generation.usage())
        answer.metrics = present(self.generation.metrics())
        return answer

    def _choice(self, choice: Choice, text: str) -> schemas.CompletionChoice:
        """A chunk's choice; the first of each index names the prompt's ids, if they are asked for."""
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        prompt_token_ids = self._prompt_token_ids(choice) if first else UNSET
        return schemas.CompletionChoice(index=choice.index, text=text, prompt_token_ids=prompt_token_ids)

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

    def _echoed(self, choice: Choice) -> Sequence[Token]:
        """The prompt's tokens, where they are part of the answer and its log-probabilities."""
        top = self.generation.sampling.logprobs
        if not self.generation.echo or top is None:
            return ()
        text, entries = self._prompt_text(choice), choice.prompt_logprobs
        return prompt_tokens(choice.prompt.token_ids, text, entries, top, self.generation.tokenizer)

    def _logprobs(
        self, choice: Choice, tokens: Sequence[Token], echoed: Sequence[Token] = ()
    ) -> schemas.CompletionLogprobs | None:
        if self.generation.sampling.logprobs is None:
            return None
        start = len(self._prompt_text(choice))  # echoed or not
        shown = [*echoed, *tokens]
        return schemas.CompletionLogprobs(
            tokens=[self._token_name(token.token_id) for token in shown],
            token_logprobs=[token.logprob for token in shown],
            top_logprobs=[None if token.logprob is None else self._top_logprobs(token) for token in shown],
            text_offset=[token.text_offset for token in echoed] + [start + token.text_offset for token in tokens],
        )

    def _top_logprobs(self, token: Token) -> dict[str, float]:
        """The likeliest texts, and the chosen one; tokens of the same text (�) count as their likeliest."""
        pairs = list(token.top)
        if pairs and token.logprob is not None:
            pairs.append((token.token_id, token.logprob))
        top: dict[str, float] = {}
        for token_id, logprob in pairs:
            top.setdefault(self._token_name(token_id), logprob)
        return top


class ChatDialect(Dialect):
    """``make_reply`` takes an answer's text apart; without it the text is the content."""

    def __init__(self, generation: Generation, make_reply: Callable[[], Reply] | None = None) -> None:
        super().__init__(generation)
        self._make_reply = make_reply
        self._replies: dict[int, Reply] = {}
        self._waiting: dict[int, tuple[Token, ...]] = {}
        """Tokens whose text is not certain to be content or a call; they go with the next piece."""

    def opening(self) -> Iterator[Chunk]:
        return iter(())

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[Chunk]:
        if choice.index not in self._begun:
            first = schemas.ChatChunkChoice(index=choice.index, delta=schemas.ChatDelta(role="assistant", content=""))
            yield self._chunk(first, UNSET if self._begun else self._prompt_token_ids(choice))
            self._begun.add(choice.index)
            if echoed := self._echoed(choice):
                yield self._chunk(self._choice(choice, schemas.ChatDelta(content=echoed), ()))
        tokens = self._waiting.pop(choice.index, ()) + delta.tokens
        for piece in self._pieces(choice, delta):
            yield self._chunk(self._choice(choice, _chat_delta(piece), tokens))
            tokens = ()
        if delta.finish_reason is not None:
            last = self._choice(choice, schemas.ChatDelta(), tokens)
            last.finish_reason = self._finish_reason(choice, delta.finish_reason)
            last.stop_reason = present(delta.stop_reason)
            yield self._chunk(last)
        elif tokens:
            self._waiting[choice.index] = tokens

    def _pieces(self, choice: Choice, delta: Delta) -> Sequence[Piece]:
        if self._make_reply is None:
            return [delta.text] if delta.text else []
        reply = self._replies.get(choice.index) or self._replies.setdefault(choice.index, self._make_reply())
        return reply.feed(delta.text, final=delta.finish_reason is not None)

    def _finish_reason(self, choice: Choice, reason: str) -> str:
        reply = self._replies.get(choice.index)
        return reply.finish_reason(reason) if reply else reason

    def usage_chunk(self) -> Chunk:
        chunk = self._envelope([], self.generation.usage())
        chunk.metrics = present(self.generation.metrics())
        return chunk

    def answer(self) -> msgspec.Struct:
        generation = self.generation
        choices = [self._whole_choice(choice) for choice in generation.answers()]
        return schemas.ChatCompletion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=choices,
            usage=generation.usage(),
            metrics=present(generation.metrics()),
            prompt_token_ids=self._prompt_token_ids(generation.choices[0]),
            prompt_logprobs=self._prompt_logprobs(generation.choices[0]),
        )

    def _whole_choice(self, choice: Choice) -> schemas.ChatChoice:
        assert choice.finish_reason is not None
        pieces = self._pieces(choice, Delta(choice.text, (), choice.finish_reason))
        reply = self._replies.get(choice.index)
        return schemas.ChatChoice(
            index=choice.index,
            message=_message(self._echoed(choice), pieces, forced=reply is not None and reply.forced),
            logprobs=self._logprobs(choice.tokens),
            finish_reason=self._finish_reason(choice, choice.finish_reason),
            stop_reason=present(choice.stop_reason),
            token_ids=self._token_ids(choice.tokens),
        )

    def _echoed(self, choice: Choice) -> str:
        return (choice.prompt.text or "") if self.generation.echo else ""

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
        return schemas.ChatLogprobs(content=self._chat_logprobs(tokens))


def _chat_delta(piece: Piece) -> schemas.ChatDelta:
    match piece:
        case str():
            return schemas.ChatDelta(content=piece)
        case Thought(text):
            return schemas.ChatDelta(reasoning=text)
        case CallDelta(index, call_id, None, arguments):
            function = schemas.FunctionCallDelta(arguments=arguments)
            return schemas.ChatDelta(tool_calls=[schemas.ToolCallDelta(index=index, function=function)])
        case CallDelta(index, call_id, name, arguments):
            function = schemas.FunctionCallDelta(name=name or "", arguments=arguments)
            call = schemas.ToolCallDelta(index=index, id=call_id, type="function", function=function)
            return schemas.ChatDelta(tool_calls=[call])


def _message(content: str, pieces: Sequence[Piece], *, forced: bool) -> schemas.ChatMessage:
    """The whole of an answer; its content is null where it holds something else alone, or could hold but calls."""
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    content += "".join(piece for piece in pieces if isinstance(piece, str))
    calls: dict[int, schemas.ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, CallDelta):
            function = schemas.FunctionCall(name=piece.name or "", arguments="")
            call = calls.setdefault(piece.index, schemas.ToolCall(id=piece.id, function=function))
            call.function.arguments += piece.arguments
    return schemas.ChatMessage(
        content=None if not content and (reasoning or calls or forced) else content,
        reasoning=reasoning or UNSET,
        tool_calls=list(calls.values()) or UNSET,
    )


def present[T](value: T | None) -> T | UnsetType:
    """A field that is left out where there is nothing to say."""
    return UNSET if value is None else value


async def stream_events(dialect: Dialect, client: EngineClient, scope: Scope) -> AsyncGenerator[bytes, None]:
    """The body of a streamed answer: all events that are there at a time, together. After the first byte a fault can
    only be an event."""
    generation = dialect.generation
    events = bytearray()
    try:
        for chunk in dialect.opening():
            events += dialect.encode(chunk)
        async with aclosing(generation.deltas(client)) as batches:
            async for deltas in batches:
                for choice, delta in deltas:
                    for chunk in dialect.chunks(choice, delta):
                        events += dialect.encode(chunk)
                if events:
                    yield bytes(events)
                    events.clear()
        for chunk in dialect.closing():
            events += dialect.encode(chunk)
    except Exception as error:
        fault = as_api_error(error)
        note_fault(scope, fault.reason)
        events += dialect.fault(fault)
    yield bytes(events) + dialect.done
