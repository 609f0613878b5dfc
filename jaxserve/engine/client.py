"""The engine as an API process sees it: requests out, tokens in, over one ZeroMQ socket."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from jaxserve.engine.admission import Overloaded, QueueLimits
from jaxserve.engine.messages import (
    Abort,
    Add,
    Call,
    ClientMessage,
    EngineMessage,
    Finish,
    Hello,
    Load,
    ModelInfo,
    Outputs,
    Ready,
    Refused,
    Reply,
    TokenOutput,
)
from jaxserve.request import EngineRequest

HELLO_INTERVAL = 0.25
SILENCE_LIMIT = 120.0
"""Seconds without a word from the engine, after which it counts as stuck; longer than any step takes."""


class EngineUnavailableError(RuntimeError):
    """The engine cannot answer: it is dead, or the server is going down."""


class EngineDeadError(EngineUnavailableError):
    """The engine process has ended."""


class _Stream:
    """Where the outputs of one ``generate`` call arrive, and which of its requests are still open."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open = set(request_ids)
        self._outputs: list[TokenOutput] = []
        self._error: EngineUnavailableError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, error: EngineUnavailableError) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[TokenOutput]:
        """All outputs that have come, as soon as there are any; raises the error that came after them."""
        if not self._outputs and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._outputs and self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class EngineClient:
    """One API process's line to the engine. Made anywhere, then started and used in one event loop."""

    def __init__(self, address: str, engine_fd: int | None = None) -> None:
        self._address = address
        self._engine_fd = engine_fd
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count()
        self._load = Load(0, 0, 0.0, free_slots=2**31, received=0)
        """As the engine said last."""
        self._unheard: deque[EngineRequest] = deque()
        """Requests sent that the engine did not know of then."""
        self._death: str | None = None
        self._info: ModelInfo | None = None
        self._last_heard = time.monotonic()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self.ready: asyncio.Future[ModelInfo]

    async def start(self) -> None:
        """Connects and begins to say Hello, until the engine is ready."""
        self.ready = asyncio.get_running_loop().create_future()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(self._address)
        self._tasks = [asyncio.create_task(self._say_hello()), asyncio.create_task(self._listen())]
        if self._engine_fd is not None:
            self.watch_engine(self._engine_fd)

    async def wait_ready(self, seconds: float) -> None:
        """Until the engine is ready or dead, but no longer than this."""
        await asyncio.wait([self.ready], timeout=seconds)

    async def close(self) -> None:
        """Lets go of everything. The engine aborts what this client had not finished."""
        self.abort(list(self._streams))
        if self._engine_fd is not None:
            asyncio.get_running_loop().remove_reader(self._engine_fd)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ready.cancel()
        if self._socket is not None:
            self._socket.close(linger=100)  # long enough for the aborts to leave
            self._socket = None
        self._context.term()

    @property
    def state(self) -> Literal["loading", "ready", "dead"]:
        if self._death is not None:
            return "dead"
        return "loading" if self._info is None else "ready"

    @property
    def info(self) -> ModelInfo:
        """The model's limits; only once the engine is ready."""
        assert self._info is not None, "the engine is not ready yet"
        return self._info

    @property
    def num_open(self) -> int:
        """Requests sent to the engine that have not ended."""
        return len(self._streams)

    def healthy(self) -> bool:
        """The engine is ready and not silent: it gives a sign of life every second, between steps."""
        if self.state != "ready":
            return False
        return time.monotonic() - self._last_heard < SILENCE_LIMIT

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[TokenOutput], None]:
        """The outputs of these requests as they come, all that are there at a time, until all have ended.

        Closing the generator early, or cancelling whoever waits in it, aborts the rest. Raises
        ``EngineUnavailableError`` when the engine can no longer answer.
        """
        stream = _Stream(request.request_id for request in requests)
        self._check_alive()
        for request in requests:
            self._streams[request.request_id] = stream
        try:
            self._send(Add(list(requests)))
            self._unheard.extend(requests)
            while stream.open:
                outputs = await stream.take()
                for output in outputs:
                    if output.finish_reason is not None:
                        self._forget(output.request_id)
                yield outputs
        finally:
            self.abort(list(stream.open))

    def check_queue(self, limits: QueueLimits, deadline: float | None = None) -> None:
        """Raises ``Overloaded`` if one more request would wait too long, by what the engine said last and what was
        sent to it since."""
        try:
            limits.check(self._load, list(self._unheard), deadline)
        except Overloaded as refusal:
            self._send(Refused(refusal.reason))
            raise

    def finish(self, request_id: str, kept_tokens: int) -> None:
        """A stop string has ended this request: the engine is to count this many generated tokens."""
        if self._forget(request_id):
            self._send(Finish(request_id, kept_tokens))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests at once; the message is queued on return, so this works while unwinding."""
        known = [request_id for request_id in request_ids if self._forget(request_id)]
        if known:
            self._send(Abort(known))

    async def cancel(self, response_id: str) -> int:
        """Aborts the requests of a response for somebody else, also those of another API process; whoever waits for
        them is told. Returns how many there were; ``TimeoutError`` if the engine does not answer."""
        return msgspec.msgpack.decode(await self.call("cancel", response_id), type=int)

    async def call(self, method: str, argument: str = "", timeout: float = 5.0) -> bytes:
        """Asks the engine something; ``TimeoutError`` if it does not answer in time."""
        self._check_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(Call(call_id, method, argument))
            async with asyncio.timeout(timeout):
                return await future
        finally:
            del self._calls[call_id]

    def watch_engine(self, fd: int) -> None:
        """Sees the engine die: ``fd`` reads from a pipe whose other end only the engine process holds."""
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if not os.read(fd, 4096):
                loop.remove_reader(fd)
                self.mark_dead("the engine process has ended")

        loop.add_reader(fd, readable)
        self._engine_fd = fd

    def mark_dead(self, reason: str) -> None:
        """From now on everything that needs the engine raises ``EngineDeadError``."""
        if self._death is None:
            self._death = reason
            error = EngineDeadError(reason)
            self.fail_streams(error)
            if not self.ready.done():
                self.ready.set_exception(error)
                self.ready.exception()  # nobody has to wait for it

    def fail_streams(self, error: EngineUnavailableError) -> None:
        """Makes every waiting ``generate`` and ``call`` raise this."""
        for stream in set(self._streams.values()):
            stream.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._info is None:
            raise EngineUnavailableError("the model is still loading")

    def _forget(self, request_id: str) -> bool:
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        stream.open.discard(request_id)
        return True

    def _send(self, message: ClientMessage) -> None:
        if self._socket is not None and self._death is None:
            # Without a high-water mark the message is queued before this returns; nothing is left to await.
            self._socket.send(self._encode(message), flags=zmq.NOBLOCK)

    async def _say_hello(self) -> None:
        while self.state == "loading":
            self._send(Hello())
            await asyncio.sleep(HELLO_INTERVAL)

    async def _listen(self) -> None:
        assert self._socket is not None
        while True:
            try:
                self._handle(self._decoder.decode(await self._socket.recv()))
            except Exception as error:
                self.mark_dead(f"the engine's messages cannot be read: {error}")
                return

    def _handle(self, message: EngineMessage) -> None:
        self._last_heard = time.monotonic()
        match message:
            case Outputs(outputs=outputs, load=load):
                if load is not None:
                    for _ in range(load.received - self._load.received):
                        self._unheard.popleft()
                    self._load = load
                for output in outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.put(output)
            case Reply(call_id=call_id, result=result):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(result)
            case Ready(info=info):
                if self._info is None:
                    self._info = info
                    if not self.ready.done():
                        self.ready.set_result(info)
