"""The engine process: the synchronous engine behind a ZeroMQ socket that its own loop polls.

``python -m jaxserve.engine.process`` reads its task as JSON from standard input. It hears neither SIGINT nor SIGTERM,
dies with its parent, and holds the write end of a pipe, so that whoever reads the other end sees it die.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import zmq

from jaxserve import collector, lifeline, logs
from jaxserve.config import EngineConfig
from jaxserve.engine import events
from jaxserve.engine.core import ClientOutput, EngineCore
from jaxserve.engine.messages import (
    Abort,
    Add,
    Call,
    ClientMessage,
    EngineMessage,
    Finish,
    Hello,
    Load,
    Outputs,
    Ready,
    Refused,
    Reply,
    TokenOutput,
)
from jaxserve.request import EngineRequest, engine_id
from jaxserve.runner import backend

logger = logging.getLogger("jaxserve.engine.process")  # __name__ is __main__

EXIT_STARTUP_FAILED = 1
EXIT_CRASHED = 70
SIGN_OF_LIFE_SECONDS = 1
STALL_PAUSE_SECONDS = 0.1
EVENTS_SHOWN = 256
EVENTS_IN_CRASH_REPORT = 8


class EngineTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent tells the engine process."""

    config: EngineConfig
    directory: str
    model_name: str
    """What metrics call the model."""
    address: str
    """ZeroMQ address to bind."""
    parent_fd: int
    """Read end of a pipe that only the parent can write to: its end of file is the parent's death."""
    log_level: str
    log_json: bool


class EngineServer:
    """Moves messages between clients and an engine, one message a step and client."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], log_stats: bool = True) -> None:
        self._core = core
        self._log_stats = log_stats
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ClientMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_sent: dict[bytes, float] = {}
        """When each client last heard of us."""
        self._received: dict[bytes, int] = defaultdict(int)
        """Requests that each client has sent."""

    def run(self) -> None:
        """Serve for ever; an exception out of here is a crash of the engine."""
        while True:
            if not self._core.has_work():
                start = time.monotonic()
                self._socket.poll(SIGN_OF_LIFE_SECONDS * 1000)
                self._core.metrics.idle(time.monotonic() - start)
            self._receive()
            self._send_outputs(self._core.step())
            self._tell()
            if self._core.stalled:
                time.sleep(STALL_PAUSE_SECONDS)

    def _tell(self) -> None:
        scheduler = self._core.scheduler
        how = len(scheduler.running), len(scheduler.waiting), scheduler.kv.usage
        if self._log_stats and (line := self._core.traffic.line(time.monotonic(), *how)):
            logger.info("%s", line)

    def _receive(self) -> None:
        while self._socket.poll(0):
            client, payload = self._socket.recv_multipart()
            self._handle(client, self._decoder.decode(payload))

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        match message:
            case Add(requests):
                self._add(client, requests)
            case Abort(request_ids):
                self._core.abort([engine_id(client, request_id) for request_id in request_ids])
            case Refused(reason):
                self._core.metrics.refused(reason)
            case Finish(request_id, kept_tokens):
                self._core.finish(engine_id(client, request_id), kept_tokens)
            case Call(call_id, method, argument):
                self._send(client, Reply(call_id, self._call(method, argument)))
            case Hello():
                self._send(client, Ready(self._core.info))

    def _add(self, client: bytes, requests: list[EngineRequest]) -> None:
        self._received[client] += len(requests)
        refused = []
        for item in requests:
            try:
                self._core.add_request(item, client)
            except ValueError as error:
                refused.append(
                    TokenOutput(request_id=item.request_id, token_ids=[], finish_reason="error", error=str(error))
                )
        if refused:
            self._send(client, Outputs(refused, self._load(client)))

    def _call(self, method: str, argument: str) -> bytes:
        match method:
            case "metrics":
                return self._core.metrics.exposition()
            case "load":
                scheduler = self._core.scheduler
                return self._encoder.encode({"running": len(scheduler.running), "waiting": len(scheduler.waiting)})
            case "cancel":
                ended = self._core.abort_group(argument)
                self._send_outputs(ended)
                return self._encoder.encode(len(ended))
            case "debug_steps":
                return events.to_json(list(self._core.events)[-EVENTS_SHOWN:])
            case "reset_prefix_cache":
                self._core.reset_prefix_cache()
                return b""
            case _:
                return b""

    def _send_outputs(self, outputs: list[ClientOutput]) -> None:
        by_client: dict[bytes, list[TokenOutput]] = defaultdict(list)
        for client, output in outputs:
            by_client[client].append(output)
        silent: set[bytes] = set()
        if not self._core.stalled:  # an engine that stalls gives no sign of life, so that its health turns bad
            silent_since = time.monotonic() - SIGN_OF_LIFE_SECONDS
            silent = {client for client, last in self._last_sent.items() if last < silent_since}
        for client in silent | by_client.keys():
            self._send(client, Outputs(by_client[client], self._load(client)))

    def _load(self, client: bytes) -> Load:
        core, scheduler = self._core, self._core.scheduler
        waiting, tokens = len(scheduler.waiting), scheduler.waiting.num_tokens
        return Load(
            waiting=waiting,
            waiting_tokens=tokens,
            wait_seconds=core.throughput.wait_seconds(waiting, tokens),
            free_slots=scheduler.num_free_slots,
            received=self._received[client],
            request_seconds=core.throughput.wait_seconds(1, tokens // max(waiting, 1)),
        )

    def _send(self, client: bytes, message: EngineMessage) -> None:
        """Every client is sent something each second: one that is gone is found out, and its requests end."""
        try:
            self._socket.send_multipart([client, self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._last_sent.pop(client, None)
            self._received.pop(client, None)
            self._core.abort_client(client)
        else:
            self._last_sent[client] = time.monotonic()


def make_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Where clients connect to."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)  # a slow client must not make the engine lose or wait
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone raises
    socket.bind(address)
    return socket


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineTask)
    lifeline.exit_with_parent(task.parent_fd)
    logs.setup(task.log_level, task.log_json)
    context = zmq.Context()
    try:
        socket = make_socket(context, task.address)
        backend.configure(task.config)
        core = EngineCore.load(task.config, Path(task.directory), logger.info, task.model_name)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return EXIT_STARTUP_FAILED
    except Exception as error:
        logger.error("the engine could not start: %s: %s", type(error).__name__, str(error).splitlines()[:1])
        logger.debug("here is where", exc_info=True)
        return EXIT_STARTUP_FAILED
    collector.freeze()
    logger.info("ready: %s", describe(core))
    return run(core, socket, not task.config.disable_log_stats)


def run(core: EngineCore, socket: zmq.Socket[bytes], log_stats: bool = True) -> int:
    """Serves until the engine crashes, and says what it did before; returns the exit code."""
    try:
        EngineServer(core, socket, log_stats).run()
    except Exception:
        last = events.to_json(list(core.events)[-EVENTS_IN_CRASH_REPORT:]).decode()
        logger.critical("the engine crashed; its last steps were\n%s", last, exc_info=True)
    return EXIT_CRASHED


def describe(core: EngineCore) -> str:
    """The engine's size in a line."""
    info, plan = core.info, core.runner.plan
    return (
        f"{plan.dtype}, attention on {plan.decode_backend} (prefill on {plan.prefill_backend}),"
        f" up to {plan.max_num_seqs} sequences at once, {info.max_model_len} tokens each,"
        f" KV cache of {info.max_kv_tokens} tokens"
    )


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    logging.shutdown()
    os._exit(code)  # no interpreter teardown: device libraries' threads may hang in it
