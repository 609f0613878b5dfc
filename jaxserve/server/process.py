"""An API process: ``python -m jaxserve.server.process``, started by the parent, which keeps the socket.

It reads a ``Startup`` as JSON from stdin, serves until SIGTERM or its parent's death, and never imports jax.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn

from jaxserve import collector, logs
from jaxserve.config import ServerConfig
from jaxserve.engine.client import EngineClient, EngineUnavailableError
from jaxserve.engine.defaults import sampling_defaults
from jaxserve.lifeline import CUT_SIGNAL, DRAIN_SIGNAL, exit_with_parent
from jaxserve.server.app import create_app, with_middleware
from jaxserve.server.context import ServerContext
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve.server.process")  # __name__ is __main__

LAST_WORDS = 1
"""Seconds that answers cut off at the shutdown timeout get to say so."""


class Startup(msgspec.Struct, kw_only=True):
    """What the parent tells an API process."""

    config: ServerConfig
    listen_fd: int
    """Bound and listening already."""
    engine_address: str
    engine_fd: int
    """Reads end of file when the engine process dies."""
    parent_fd: int
    """Reads end of file when the parent dies."""
    model_directory: str
    number: int = 0
    """Among the API processes: what all of them find, the first says."""


class ApiServer(uvicorn.Server):
    """uvicorn that, told to stop, first lets running requests finish, with the socket still answering."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._drain_task: asyncio.Task[None] | None = None
        self._time_is_up = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In the place of uvicorn's own handlers, which would close the socket first."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(DRAIN_SIGNAL, self.begin_drain)
        loop.add_signal_handler(CUT_SIGNAL, self.cut)
        try:
            yield
        finally:
            for number in (DRAIN_SIGNAL, CUT_SIGNAL):
                loop.remove_signal_handler(number)

    def begin_drain(self) -> None:
        """Let running requests finish; nobody else is let in."""
        if self._drain_task is None:
            self._drain_task = asyncio.create_task(self._drain())

    def cut(self) -> None:
        """The time of the running requests is up."""
        self._time_is_up = True
        self.begin_drain()

    async def _drain(self) -> None:
        self._context.draining = True
        timeout = self._context.config.shutdown_timeout
        logger.info("shutting down: %d requests are running", self._num_running)
        await self._until_idle(timeout)
        if self._num_running:
            logger.warning("shutting down: %d requests are cut off", self._num_running)
            self._context.client.fail_streams(EngineUnavailableError("the server is shutting down"))
            self._time_is_up = False
            await self._until_idle(LAST_WORDS)
        self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._num_running and loop.time() < deadline and not self._time_is_up:
            await asyncio.sleep(0.05)

    @property
    def _num_running(self) -> int:
        return len(self.server_state.tasks)


def build(startup: Startup) -> ApiServer:
    """The server with all its parts, not yet serving; ``ValueError`` names the file that will not do."""
    config = startup.config
    model_directory = Path(startup.model_directory)
    tokenizer = Tokenizer.load(config.engine.tokenizer or model_directory, config.chat_template)
    if config.enable_auto_tool_choice and not tokenizer.shows_tools and startup.number == 0:
        logger.warning(
            "--enable-auto-tool-choice is set, but the chat template shows no tools: requests that may call some are"
            " refused (--chat-template takes another)"
        )
    defaults = sampling_defaults(
        model_directory, config.engine.generation_config, config.engine.override_generation_config
    )
    client = EngineClient(startup.engine_address, engine_fd=startup.engine_fd)
    app = create_app(config, client, tokenizer, defaults)
    settings = uvicorn.Config(
        with_middleware(app, config),
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=LAST_WORDS,
        lifespan="on",
    )
    return ApiServer(settings, app.state.context)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    for number in (DRAIN_SIGNAL, CUT_SIGNAL):
        signal.signal(number, lambda *_: sys.exit(0))  # until there is something to drain
    startup = msgspec.json.decode(sys.stdin.buffer.read(), type=Startup)
    logs.setup(startup.config.log_level, startup.config.log_json)
    exit_with_parent(startup.parent_fd)
    try:
        server = build(startup)
    except ValueError as error:
        logger.error("%s", error)
        return 1
    collector.freeze()
    listener = socket.socket(fileno=startup.listen_fd)
    asyncio.run(server.serve(sockets=[listener]), loop_factory=server.config.get_loop_factory())
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
