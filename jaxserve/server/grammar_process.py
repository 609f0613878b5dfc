"""Compiles grammars for an API process: ``python -m jaxserve.server.grammar_process``, started by ``GrammarCheck``.

The first message from stdin is the tokenizer, every other a ``StructuredSpec``; each is answered with why it cannot be
compiled, or null. It ends when stdin does, whatever it compiles then.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from concurrent.futures import Future
from typing import Any

import msgspec

from jaxserve.request import StructuredSpec
from jaxserve.server.grammar_check import receive, send
from jaxserve.structured import Grammars
from jaxserve.tokenizer import Tokenizer

MEMORY_BYTES = 8 * 2**30
"""Of address space, much of which is never touched; what needs more is refused by a crash."""
ANYTHING = StructuredSpec(kind="json_object", field="")


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which service managers send to all processes: the parent drains
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    serialized = receive(source)
    if serialized is not None:
        grammars = Grammars(lambda: Tokenizer.from_json(serialized.decode()))

        def answer(compiled: Future[Any]) -> None:
            error = compiled.exception()
            send(answers, msgspec.json.encode(None if error is None else str(error)))

        grammars.compile(ANYTHING).add_done_callback(answer)
        while message := receive(source):
            grammars.compile(msgspec.json.decode(message, type=StructuredSpec)).add_done_callback(answer)
    os._exit(0)  # not waiting for what is compiled for nobody


if __name__ == "__main__":
    main()
