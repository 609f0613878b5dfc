"""Refuses what an answer cannot be held to, before it reaches the engine.

How long a compilation takes, and how much stack and memory, cannot be told from a schema's size, and none can be
stopped once it has begun. So it happens in a process of its own (``grammar_process``), which is killed when it takes
too long, and whose crash is a refusal. The engine compiles only what that process has compiled.
"""

from __future__ import annotations

import asyncio
import logging
import select
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import msgspec

from jaxserve.request import RequestError, StructuredSpec
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
START_SECONDS = 60.0
"""To load a tokenizer."""


class GrammarCheck:
    """The process is started when it is first needed, and again where it has ended. It checks one at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        self._process: subprocess.Popen[bytes] | None = None

    async def check(self, spec: StructuredSpec) -> None:
        """Raises ``RequestError``, naming the field, for what cannot be compiled, or not soon enough."""
        reason = await asyncio.get_running_loop().run_in_executor(self._executor, self._refusal, spec)
        if reason is not None:
            raise RequestError(reason, param=spec.field)

    def close(self) -> None:
        """Ends the process, and with it what it is doing."""
        if self._process is not None:
            self._process.kill()
        self._executor.shutdown(cancel_futures=True)
        self._end()

    def _refusal(self, spec: StructuredSpec) -> str | None:
        process = self._running()
        try:
            return msgspec.json.decode(_ask(process, msgspec.json.encode(spec), COMPILE_SECONDS), type=str | None)
        except TimeoutError:
            self._end()
            return f"{spec.field} takes too long to compile."
        except OSError:
            logger.warning("what %s holds has ended the process that compiled it, code %s", spec.field, self._end())
            return f"{spec.field} is too large to compile."

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        # In a session of its own, so that Ctrl-C does not reach it: it ends with this process, when stdin does.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.server.grammar_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _ask(self._process, self._tokenizer.to_json().encode(), START_SECONDS)
        except OSError as error:
            raise RuntimeError(f"the process that compiles grammars does not start: code {self._end()}") from error
        return self._process

    def _end(self) -> int | None:
        """Its exit code, once it has ended."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.communicate()  # also closes the pipes
        return process.returncode


def _ask(process: subprocess.Popen[bytes], message: bytes, seconds: float) -> bytes:
    """The answer to a message; ``TimeoutError`` if there is none in time, ``OSError`` if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    send(process.stdin, message)
    if not select.select([process.stdout], [], [], seconds)[0]:
        raise TimeoutError
    if (answer := receive(process.stdout)) is None:
        raise BrokenPipeError
    return answer


def send(stream: IO[bytes], message: bytes) -> None:
    """Each message is preceded by its length."""
    stream.write(struct.pack("!I", len(message)) + message)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message, None at the stream's end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    [size] = struct.unpack("!I", head)
    return stream.read(size)
