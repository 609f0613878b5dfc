"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and since tokenizer version 11
``[TOOL_CALLS]name[ARGS]{…}`` for each call, with or without ``[ARGS]``."""

from __future__ import annotations

import secrets
import string

from jaxserve.server.tool_parsers.base import MalformedError, Steps, ToolParser

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ALPHABET = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    special_tokens = (MARK, ARGS, CALL_ID)

    @staticmethod
    def new_call_id() -> str:
        """Mistral's chat templates refuse any other form."""
        return "".join(secrets.choice(ALPHABET) for _ in range(9))

    def _parse(self) -> Steps[None]:
        yield from self._content(MARK)
        yield from self._space()
        if (yield from self._peek()) == "[":
            yield from self._list()
        else:
            yield from self._named()

    def _list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._space()
            yield from self._call_object()
            yield from self._space()
            if (yield from self._peek()) != ",":
                break
            yield from self._take()
        yield from self._expect("]")
        self._end()

    def _named(self) -> Steps[None]:
        name = yield from self._word()
        while (yield from self._peek()) == "[":
            yield from self._expect("[")
            if (yield from self._peek()) == "A":
                yield from self._expect(ARGS[1:])
            else:
                yield from self._expect(CALL_ID[1:])
                yield from self._word()
        yield from self._arguments(name)
        self._end()

    def _word(self) -> Steps[str]:
        word = ""
        while (yield from self._peek()) not in "[{":
            word += yield from self._take()
        if not word.strip():
            raise MalformedError
        return word.strip()
