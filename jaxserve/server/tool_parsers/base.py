"""Incremental parsing of tool calls: text in pieces of any size in, content and call deltas out.

A parser is a recursive descent over characters, written as generators that stop wherever the text does. So it cannot
depend on how the text is cut, and an answer given at once is one that came in a single piece.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

type Steps[T] = Generator[None, str, T]
"""A part of a parser: asks for a character at each ``yield``, is sent "" at the end of the text."""

MAX_DEPTH = 64
WHITE = " \t\r\n"


@dataclass(slots=True)
class CallDelta:
    """What a tool call grows by."""

    index: int
    id: str
    name: str | None
    """With the first delta of a call."""
    arguments: str


type Piece = str | CallDelta


class MalformedError(Exception):
    """This is not a tool call after all."""


class EndOfTextError(Exception):
    """The answer has ended."""


class ToolParser(ABC):
    """Feed it text, take the pieces; ``finish`` when there is no more.

    No character is lost or repeated: text that begins like a call and is none becomes content (unless calls are
    ``forced``), a call that breaks off keeps the arguments that it had. White space next to a call is layout, though,
    and dropped. ``names`` are the tools of the request; formats without a mark of their own take nothing else for a
    call.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that mark calls, and so must not be left out of the text."""
    marked: ClassVar[bool] = True
    """Calls stand behind a mark, anywhere; without one they make up the answer from its beginning."""
    forced: ClassVar[bool] = False
    """A grammar holds the answer to calls: what is cut off before it tells of one is no content either."""

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self.in_call = False
        """A call has begun and is not complete."""
        self._names = names
        self._pieces: list[Piece] = []
        self._held = ""
        """What has been read and may turn out to be a call or content."""
        self._white = ""
        """White space that is content if more content follows."""
        self._after_call = False
        self._in_arguments = False
        self._ahead: str | None = None
        self._call_id = ""
        self._steps = self._run()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that have become certain."""
        for char in text:
            self._steps.send(char)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text; nothing may follow."""
        with suppress(StopIteration):
            self._steps.send("")
        if self._white and not self._after_call:
            self._append(self._white)
        return self.feed("")

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Calls, with the content before them; again and again if ``marked``, else once.

        ``MalformedError`` makes content of what is held.
        """

    @staticmethod
    def new_call_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    # ---------------------------------------------------------------- reading

    def _run(self) -> Steps[None]:
        try:
            while True:
                try:
                    yield from self._parse()
                except MalformedError:
                    self._give_back()
                if not self.marked:
                    yield from self._rest()
        except EndOfTextError:
            if not self.forced:
                self._give_back()

    def _peek(self) -> Steps[str]:
        if self._ahead is None:
            char = yield
            if not char:
                raise EndOfTextError
            self._ahead = char
        return self._ahead

    def _take(self, written: str | None = None) -> Steps[str]:
        """The next character, as part of the arguments (there as ``written``) or else held."""
        char = yield from self._peek()
        self._ahead = None
        if self._in_arguments:
            self._argue(written or char)
        else:
            self._held += char
        return char

    def _expect(self, text: str) -> Steps[None]:
        for wanted in text:
            if (yield from self._peek()) != wanted:
                raise MalformedError
            yield from self._take()

    def _space(self) -> Steps[None]:
        while (yield from self._peek()) in WHITE:
            yield from self._take()

    def _content(self, mark: str) -> Steps[None]:
        """Content up to a mark, which is held."""
        while True:
            yield from self._take()
            while not mark.startswith(self._held):
                self._say(self._held[0])
                self._held = self._held[1:]
            if self._held == mark:
                return

    def _rest(self) -> Steps[None]:
        """Content without end."""
        while True:
            yield from self._take()
            self._give_back()

    # ---------------------------------------------------------------- JSON

    def _list_of(self, call: Callable[[], Steps[None]]) -> Steps[None]:
        """Calls between brackets, at least one."""
        yield from self._space()
        yield from self._expect("[")
        while True:
            yield from self._space()
            yield from call()
            yield from self._space()
            if (yield from self._peek()) == "]":
                break
            yield from self._expect(",")
        yield from self._take()

    def _call_object(self) -> Steps[None]:
        """``{"name": …, "arguments": {…}}``; also "parameters", in either order, and further keys passed over."""
        name = arguments = None
        begun = False
        yield from self._expect("{")
        while True:
            yield from self._space()
            key = yield from self._string()
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if key == "name" and name is None:
                name = yield from self._string()
                if not self.marked and name not in self._names:
                    raise MalformedError
            elif key in ("arguments", "parameters") and arguments is None:
                if name is not None:
                    yield from self._arguments(name)
                    begun, arguments = True, ""
                else:
                    arguments = yield from self._object_ahead()
            else:
                yield from self._value()
            yield from self._space()
            if (yield from self._peek()) == "}":
                break
            yield from self._expect(",")
        yield from self._take()
        if not begun:
            if name is None or (arguments is None and not self.marked):
                raise MalformedError
            self._begin(name)
            self._argue(arguments or "{}")
        self._end()

    def _arguments(self, name: str) -> Steps[None]:
        """Begins a call with the object that comes next, which goes out as it comes in."""
        if (yield from self._peek()) != "{":
            raise MalformedError
        self._begin(name)
        self._in_arguments = True
        yield from self._value()
        self._in_arguments = False

    def _object_ahead(self) -> Steps[str]:
        """Arguments that stand before the name, and have to wait for it."""
        if (yield from self._peek()) != "{":
            raise MalformedError
        start = len(self._held)
        yield from self._value()
        return json.dumps(json.loads(self._held[start:], strict=False), ensure_ascii=False)

    def _value(self, depth: int = 0) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise MalformedError
        char = yield from self._peek()
        if char == '"':
            yield from self._string()
        elif char in "{[":
            yield from self._container("}" if char == "{" else "]", depth)
        else:
            yield from self._literal()

    def _container(self, close: str, depth: int) -> Steps[None]:
        yield from self._take()
        yield from self._space()
        while (yield from self._peek()) != close:
            if close == "}":
                yield from self._string()
                yield from self._space()
                yield from self._expect(":")
                yield from self._space()
            yield from self._value(depth + 1)
            yield from self._space()
            if (yield from self._peek()) != close:
                yield from self._expect(",")
                yield from self._space()
                if (yield from self._peek()) == close:
                    raise MalformedError
        yield from self._take()

    def _string(self) -> Steps[str]:
        if (yield from self._peek()) != '"':
            raise MalformedError
        raw = yield from self._take()
        while True:
            char = yield from self._peek()
            # Models write newlines into strings as they are; clients want JSON.
            raw += yield from self._take(json.dumps(char)[1:-1] if char < " " else None)
            if char == "\\":
                raw += yield from self._take()
            elif char == '"':
                break
        return str(_decoded(raw))

    def _literal(self) -> Steps[None]:
        raw = ""
        while (yield from self._peek()) in "+-.0123456789aeEflnrstu":
            raw += yield from self._take()
        _decoded(raw)

    # ---------------------------------------------------------------- telling

    def _append(self, text: str) -> None:
        if self._pieces and isinstance(self._pieces[-1], str):
            self._pieces[-1] += text
        else:
            self._pieces.append(text)

    def _say(self, text: str) -> None:
        """This much is content."""
        if self._after_call:
            text = text.lstrip(WHITE)
        if not text:
            return
        self._after_call = False
        text = self._white + text
        certain = text.rstrip(WHITE)
        self._white = text[len(certain) :]
        if certain:
            self._append(certain)

    def _give_back(self) -> None:
        self._in_arguments = False
        held, self._held = self._held, ""
        self._say(held)

    def _begin(self, name: str) -> None:
        self._white = self._held = ""
        self._call_id = self.new_call_id()
        self._pieces.append(CallDelta(self.num_calls, self._call_id, name, ""))
        self.num_calls += 1
        self.in_call = True

    def _argue(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallDelta) and last.index == self.num_calls - 1:
            last.arguments += text
        else:
            self._pieces.append(CallDelta(self.num_calls - 1, self._call_id, None, text))

    def _end(self) -> None:
        self._held = ""
        self.in_call = False
        self._after_call = True


def _decoded(raw: str) -> object:
    try:
        return json.loads(raw, strict=False)
    except ValueError:
        raise MalformedError from None
