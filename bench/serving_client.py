"""The process that loads a server: ``python -m bench.serving_client``, started by ``bench/serving.py``.

It reads a ``Task`` from stdin, says that it is ready, and starts at the time that it is told. Every answer is a stream
of a kept-alive connection; per event the client takes the time and decodes a little JSON, so that it stays far from the
server's rate. Times are ``time.monotonic()``, one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One request to make."""

    prompt: list[int]
    max_tokens: int
    at: float | None = None
    """Seconds after the start, in an open loop; None: as soon as another one ends."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    """Up to the host and port."""
    model: str
    api_key: str | None
    plans: list[Plan]
    concurrency: int
    """Requests at once where plans have no time."""


class Record(msgspec.Struct, array_like=True):
    """What became of one request."""

    input_tokens: int
    sent: float = 0.0
    times: list[float] = []
    """When each event with a choice came."""
    output_tokens: int = 0
    """As the server counted them; else the number of events."""
    error: str | None = None
    status: int = 0
    """Of HTTP; 0 where no answer came."""
    ended: float = 0.0
    """When the answer was complete."""
    retry_after: str | None = None
    """As the server said it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    records: list[Record]
    cpu_seconds: float
    seconds: float


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


class Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection; answers one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._decode = msgspec.json.Decoder(_Event).decode
        self._transport: asyncio.Transport
        self._done: asyncio.Future[None] | None = None
        self._record: Record
        self._rest = b""
        self._now = 0.0
        self.usable = False

    async def ask(self, request: bytes, record: Record) -> None:
        """Sends a request and fills its record until the answer is complete."""
        self._done = asyncio.get_running_loop().create_future()
        self._record, self._rest = record, b""
        self._transport.write(request)
        await self._done
        if record.error is None and not record.times:
            record.error = "no tokens came"
        record.output_tokens = record.output_tokens or len(record.times)

    def close(self) -> None:
        self._transport.close()

    # ------------------------------------------------------------- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._end("the connection was closed")

    # ------------------------------------------------------------- of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._record.retry_after = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self.usable = self._parser.should_keep_alive()
        self._record.status = status = self._parser.get_status_code()
        self._end(None if status == 200 else f"HTTP {status}: {self._rest[:200].decode('utf-8', 'replace')}")
        self._parser = httptools.HttpResponseParser(self)  # does not take a second answer by itself

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = self._decode(data)
        if event.choices:
            self._record.times.append(self._now)
        if event.usage is not None:
            self._record.output_tokens = event.usage.completion_tokens
        if event.error is not None:
            self._record.error = str(event.error)[:200]

    def _end(self, error: str | None) -> None:
        if self._done is not None and not self._done.done():
            self._record.error = self._record.error or error
            self._record.ended = time.monotonic()
            self._done.set_result(None)


class Client:
    """Makes the requests of a task, over as many connections as are needed at once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._url = urlsplit(task.url)
        self._idle: list[Connection] = []
        self.records = [Record(len(plan.prompt), times=[]) for plan in task.plans]
        self._bodies = [self._request(plan) for plan in task.plans]

    async def run(self, start: float) -> None:
        """Makes all requests; ``start`` is a time of ``time.monotonic()``."""
        await asyncio.sleep(start - time.monotonic())
        timed = any(plan.at is not None for plan in self._task.plans)
        await (self._open_loop(start) if timed else self._closed_loop())
        for connection in self._idle:
            connection.close()

    async def _open_loop(self, start: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, plan in enumerate(self._task.plans):
                await asyncio.sleep(start + (plan.at or 0.0) - time.monotonic())
                tasks.create_task(self._ask(index))

    async def _closed_loop(self) -> None:
        indices = iter(range(len(self._bodies)))

        async def one_after_another() -> None:
            for index in indices:
                await self._ask(index)

        async with asyncio.TaskGroup() as tasks:
            for _ in itertools.repeat(None, self._task.concurrency):
                tasks.create_task(one_after_another())

    async def _ask(self, index: int) -> None:
        record = self.records[index]
        record.sent = time.monotonic()
        try:
            connection = await self._connection()
        except OSError as error:
            record.error = str(error)
            return
        await connection.ask(self._bodies[index], record)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        tls = self._url.scheme == "https"
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, str(self._url.hostname), self._url.port or (443 if tls else 80), ssl=tls or None
        )
        return connection

    def _request(self, plan: Plan) -> bytes:
        body = msgspec.json.encode(
            {
                "model": self._task.model,
                "prompt": plan.prompt,
                "max_tokens": plan.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = [
            f"POST {self._url.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {self._url.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._task.api_key:
            head.append(f"Authorization: Bearer {self._task.api_key}")
        return "\r\n".join([*head, "", ""]).encode() + body


def main() -> None:
    size = int(sys.stdin.buffer.readline())
    client = Client(msgspec.json.decode(sys.stdin.buffer.read(size), type=Task))
    gc.collect()
    gc.disable()  # a collection would show as a gap between tokens
    print("ready", flush=True)
    start = float(sys.stdin.buffer.readline())
    cpu, wall = time.process_time(), time.monotonic()
    uvloop.run(client.run(start))
    report = Report(
        records=client.records, cpu_seconds=time.process_time() - cpu, seconds=time.monotonic() - max(wall, start)
    )
    with open(sys.stdout.fileno(), "wb") as out:  # buffered, where PYTHONUNBUFFERED would have one write be partial
        out.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
