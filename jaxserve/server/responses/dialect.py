"""How a generation looks in ``/v1/responses``: items that grow, told by numbered events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from jaxserve.engine.output import Delta, Token
from jaxserve.request import FinishReason
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Choice, Generation
from jaxserve.server.protocol import Chunk, Dialect, present
from jaxserve.server.reasoning import Thought
from jaxserve.server.reply import Piece, Reply
from jaxserve.server.responses import schemas
from jaxserve.server.responses.schemas import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
)
from jaxserve.server.tool_parsers import CallDelta


class ResponsesDialect(Dialect):
    """One response: the whole of it is what its events add up to."""

    done = b""

    def __init__(
        self, generation: Generation, request: ResponsesRequest, make_reply: Callable[[], Reply] | None
    ) -> None:
        super().__init__(generation)
        self._reply = make_reply() if make_reply else Reply(None, None)
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        """The last item, while it grows."""
        sampling = generation.sampling
        self._response = ResponseObject(
            id=generation.id,
            created_at=generation.created,
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=generation.model,
            output=[],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            temperature=sampling.temperature,
            text={"format": (request.text.format if request.text else None) or {"type": "text"}},
            tool_choice=request.tool_choice or "auto",
            tools=[{"strict": None, "parameters": None, **tool} for tool in request.tools or ()],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
        )

    # ---------------------------------------------------------------- what every dialect has

    def opening(self) -> Iterator[Chunk]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[Chunk]:
        pieces = self._reply.feed(delta.text, final=delta.finish_reason is not None)
        tokens: Sequence[Token] = delta.tokens
        for piece in pieces:
            yield from self._grow(piece, tokens)
            tokens = ()
        if delta.finish_reason is not None:
            if isinstance(self._open, MessageItem):
                self._open.content[0].logprobs += self._logprobs(tokens)
            yield from self._finish(delta.finish_reason)

    def closing(self) -> Iterator[Chunk]:
        return iter(())

    def usage_chunk(self) -> Chunk:
        raise AssertionError("the last event holds the usage")

    def answer(self) -> msgspec.Struct:
        [choice] = self.generation.choices
        for _ in self.chunks(choice, Delta(choice.text, tuple(choice.tokens), choice.finish_reason)):
            pass
        return self._response

    def encode(self, chunk: Chunk) -> bytes:
        assert isinstance(chunk, dict)
        return f"event: {chunk['type']}\n".encode() + super().encode(chunk)

    def fault(self, fault: ApiError) -> bytes:
        return self.encode(self._event("error", code=fault.code, message=fault.message, param=fault.param))

    # ---------------------------------------------------------------- items

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that grows."""
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._items) - 1, **fields)

    def _grow(self, piece: Piece, tokens: Sequence[Token]) -> Iterator[Chunk]:
        if not self._belongs(piece):
            yield from self._close("completed")
            yield from self._begin(piece)
        match piece, self._open:
            case str(text), MessageItem(content=[part]):
                logprobs = self._logprobs(tokens)
                part.text += text
                part.logprobs += logprobs
                kind = "response.output_text.delta"
                yield self._item_event(kind, content_index=0, delta=text, logprobs=logprobs)
            case Thought(text), ReasoningItem(content=[thoughts]):
                thoughts.text += text
                yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)
            case CallDelta(arguments=arguments), FunctionCallItem() as call if arguments:
                call.arguments += arguments
                yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _belongs(self, piece: Piece) -> bool:
        match piece:
            case str():
                return isinstance(self._open, MessageItem)
            case Thought():
                return isinstance(self._open, ReasoningItem)
            case CallDelta(name=name):
                return name is None

    def _begin(self, piece: Piece) -> Iterator[Chunk]:
        match piece:
            case str():
                self._open = MessageItem(id=_id("msg"), content=[])
            case Thought():
                self._open = ReasoningItem(id=_id("rs"), content=[])
            case CallDelta(id=call_id, name=name):
                self._open = FunctionCallItem(id=_id("fc"), call_id=call_id, name=name or "")
        self._items.append(self._open)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=_copy(self._open))
        if isinstance(self._open, MessageItem):
            self._open.content.append(OutputText(logprobs=[]))
        elif isinstance(self._open, ReasoningItem):
            self._open.content.append(ReasoningText())
        if not isinstance(self._open, FunctionCallItem):
            part = _copy(self._open.content[0])
            yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> Iterator[Chunk]:
        if self._open is None:
            return
        match self._open:
            case MessageItem(content=[part]):
                kind = "response.output_text.done"
                yield self._item_event(kind, content_index=0, text=part.text, logprobs=part.logprobs)
                yield self._item_event("response.content_part.done", content_index=0, part=part)
            case ReasoningItem(content=[thoughts]):
                yield self._item_event("response.reasoning_text.done", content_index=0, text=thoughts.text)
                yield self._item_event("response.content_part.done", content_index=0, part=thoughts)
            case FunctionCallItem(name=name, arguments=arguments):
                kind = "response.function_call_arguments.done"
                yield self._item_event(kind, name=name, arguments=arguments)
        self._open.status = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._open)
        self._open = None

    def _finish(self, finish_reason: str) -> Iterator[Chunk]:
        in_call = self._reply.parser is not None and self._reply.parser.in_call
        cut = finish_reason == FinishReason.LENGTH
        yield from self._close("incomplete" if cut or in_call else "completed")
        self._response.status = "incomplete" if cut else "completed"
        if cut:
            self._response.incomplete_details = schemas.IncompleteDetails(reason="max_output_tokens")
        self._response.output = list(self._items)
        self._response.usage = self._usage()
        self._response.metrics = present(self.generation.metrics())
        yield self._event(f"response.{self._response.status}", response=self._response)

    def _usage(self) -> schemas.ResponseUsage:
        usage = self.generation.usage()
        tokenizer = self.generation.tokenizer
        thoughts = (item.content[0].text for item in self._items if isinstance(item, ReasoningItem))
        reasoning = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in thoughts)
        return schemas.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=schemas.InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=schemas.OutputTokensDetails(reasoning_tokens=min(reasoning, usage.completion_tokens)),
            total_tokens=usage.total_tokens,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> list[Any]:
        return self._chat_logprobs(tokens) if self.generation.sampling.logprobs is not None else []


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _copy[T: msgspec.Struct](value: T) -> T:
    """As it is now, whatever is added to it before it is written."""
    return msgspec.convert(msgspec.to_builtins(value), type(value))
