"""The parent: binds the port, starts the engine process and the API processes, and outlives them."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from jaxserve import logs
from jaxserve.config import ServerConfig, not_a_model
from jaxserve.engine.defaults import check_model
from jaxserve.lifeline import CUT_SIGNAL, DRAIN_SIGNAL, NOT_FOR_CHILDREN

logger = logging.getLogger(__name__)

CRASH_GRACE_SECONDS = 3.0
"""After an engine's death, time for the API processes to end their streams and to answer 503."""
RESTART_SECONDS = 10.0
"""Two deaths of API processes within this time end the server: there would be more of them."""
INTERRUPT_DRAIN_SECONDS = 5.0
BACKLOG = 2048
EXIT_STARTUP_FAILED = 1
"""Of a child that has said why."""


def run(config: ServerConfig) -> int:
    """Serve until told to stop; returns the exit code."""
    logs.setup(config.log_level, config.log_json)
    stop = _StopSignals()
    try:
        directory = _model_directory(config)
        check_model(config.engine, directory)
        check_tls(config)
        listeners = listen(config)
    except (OSError, RuntimeError, ValueError) as error:
        logger.error("%s", error)
        return 1
    with _scratch() as scratch:
        children = _Children(config, directory, listeners, scratch)
        try:
            return children.supervise(stop)
        finally:
            children.kill()
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


class _StopSignals:
    """Remembers SIGTERM and SIGINT instead of raising in odd places."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.interrupted |= number == signal.SIGINT


def _model_directory(config: ServerConfig) -> Path:
    if config.engine.model == "demo":
        from jaxserve.demo import demo_model_directory  # not before it is needed: numpy and tokenizers take their time

        return demo_model_directory(progress=logger.info)
    directory = Path(config.engine.model)
    if not (directory / "config.json").is_file():
        raise ValueError(not_a_model(config.engine.model))
    return directory.resolve()


def listen(config: ServerConfig) -> list[socket.socket]:
    """A listening socket for each API process; ``OSError`` says in a line why it cannot be.

    With several on a port, the kernel deals connections out by a hash of their addresses (SO_REUSEPORT): a few long
    ones fall as evenly as dice do. On one inherited socket the process that wakes first takes them, and an idle machine
    wakes the same one again and again: 20 of 32 connections to one of four processes. The parent keeps the sockets, so
    that those of a process that died wait for its successor. A Unix socket is shared by all.
    """
    if config.uds is not None:
        return [_listen_on_path(Path(config.uds))] * config.api_server_count
    try:
        listeners = [_bind(config.host, config.port)]
        if config.api_server_count > 1:
            # Shared from here on only: bound without the option, the first is refused where another server listens.
            listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = listeners[0].getsockname()[1]
            listeners += [_bind(config.host, port, shared=True) for _ in range(config.api_server_count - 1)]
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # a name that does not resolve has a negative one
        reason = os.strerror(error.errno or 0) if known else error.strerror or str(error)
        raise OSError(f"cannot listen on {config.host}:{config.port}: {reason}") from None
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    logger.info("listening on %s://%s:%d; /health answers 503 until the model is ready", scheme, host, port)
    return listeners


def _bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    return listener


def _listen_on_path(path: Path) -> socket.socket:
    """A Unix socket; one that an earlier server left behind is replaced, any other file is not."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            if listener.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
            listener.close()
            listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {path}: {error.strerror or error}") from None
    logger.info("listening on the socket %s; /health answers 503 until the model is ready", path)
    return listener


def check_tls(config: ServerConfig) -> None:
    """Reads the certificate, so that a bad one is one line now: a ``ValueError``."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # also what ssl raises
        raise ValueError(f"--ssl-certfile {config.ssl_certfile} and its companions cannot be used: {error}") from None


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private directory for the engine's socket."""
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Children:
    """The engine process and the API processes.

    Two pipes tell of death, whatever the cause: children read one that only this process can write to, and the API
    processes read one that only the engine can write to.
    """

    def __init__(self, config: ServerConfig, directory: Path, listeners: list[socket.socket], scratch: Path) -> None:
        self._config = config
        self._directory = directory
        self._listeners = listeners
        self._address = f"ipc://{scratch}/engine"
        self._parent_read, self._parent_write = os.pipe()
        self._engine_read, engine_write = os.pipe()
        self.engine = self._start_engine(engine_write)
        os.close(engine_write)
        self.apis = [self._start_api(number) for number in range(len(listeners))]
        self._last_death = -math.inf

    def _start_engine(self, engine_write: int) -> _Child:
        task = {
            "config": self._config.engine,
            "directory": str(self._directory),
            "model_name": self._config.model_names[0],
            "address": self._address,
            "parent_fd": self._parent_read,
            "log_level": self._config.log_level,
            "log_json": self._config.log_json,
        }
        return _Child("jaxserve.engine.process", task, (self._parent_read, engine_write))

    def _start_api(self, number: int) -> _Child:
        listener = self._listeners[number].fileno()
        engine = self._config.engine
        if engine.seed is not None:  # the processes must not draw the same seeds
            engine = msgspec.structs.replace(engine, seed=engine.seed + number)
        task = {
            "config": msgspec.structs.replace(self._config, engine=engine),
            "listen_fd": listener,
            "engine_address": self._address,
            "engine_fd": self._engine_read,
            "parent_fd": self._parent_read,
            "model_directory": str(self._directory),
            "number": number,
        }
        return _Child("jaxserve.server.process", task, (self._parent_read, self._engine_read, listener))

    def supervise(self, stop: _StopSignals) -> int:
        """Until a signal or a child's death; returns the exit code."""
        while True:
            if stop.count:
                return self._shut_down(stop)
            if (code := self.engine.poll()) is not None:
                return self._engine_died(code)
            for number, api in enumerate(self.apis):
                if (code := api.poll()) is not None and not self._replace(number, code):
                    return 1
            time.sleep(0.05)

    def _replace(self, number: int, code: int) -> bool:
        """Starts an API process in the place of a dead one, if others serve meanwhile and it will not die likewise."""
        if code == EXIT_STARTUP_FAILED:
            return False
        now = time.monotonic()
        if len(self.apis) == 1 or now - self._last_death < RESTART_SECONDS:
            logger.error("the API process %s; shutting down", _death(code))
            return False
        self._last_death = now
        logger.error("an API process %s, and its requests with it; starting another", _death(code))
        self.apis[number] = self._start_api(number)
        return True

    def _engine_died(self, code: int) -> int:
        if code != EXIT_STARTUP_FAILED:
            logger.error("the engine process %s; shutting down", _death(code))
            time.sleep(CRASH_GRACE_SECONDS)
        return 1

    def _shut_down(self, stop: _StopSignals) -> int:
        """Let running requests finish, then end all processes. A second signal cuts the wait short."""
        seconds = self._config.shutdown_timeout
        if stop.interrupted:
            seconds = min(seconds, INTERRUPT_DRAIN_SECONDS)
        logger.info("stopping; running requests have %.0f s to finish", seconds)
        self._close_listeners()  # a process that is done earlier than others takes no more connections
        for api in self.apis:
            api.send_signal(DRAIN_SIGNAL)
        _wait(self.apis, seconds, stop)
        for api in self.apis:
            api.send_signal(CUT_SIGNAL)  # it ends its streams with an error
        _wait(self.apis, 3.0, None)
        if (code := self.engine.poll()) is not None:
            logger.error("the engine process %s while the server was stopping", _death(code))
            return 1
        return 0

    def kill(self) -> None:
        """End what still runs; nothing is left behind."""
        self._close_listeners()
        os.close(self._parent_write)  # which tells them that there is no parent any more
        children = [*self.apis, self.engine]
        _wait(children, 2.0, None)
        for child in children:
            child.kill()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()


class _Child:
    """A process of ours, given its task on stdin."""

    def __init__(self, module: str, task: dict[str, object], fds: tuple[int, ...]) -> None:
        # Blocked signals stay blocked over exec: they reach the parent alone, from the child's first instruction on;
        # and one that comes meanwhile waits for the parent, where an ignored one would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_CHILDREN)
        try:
            self._popen = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=fds)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_CHILDREN)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as pipe:
            pipe.write(msgspec.json.encode(task))

    def poll(self) -> int | None:
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        """Nothing happens where the process has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Ends and reaps it."""
        self._popen.kill()
        self._popen.wait()


def _death(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _wait(children: Sequence[_Child], seconds: float, stop: _StopSignals | None) -> None:
    """Wait for all these to end, or for a second signal, which may have come already."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (stop and stop.count > 1):
        if all(child.poll() is not None for child in children):
            return
        time.sleep(0.02)
