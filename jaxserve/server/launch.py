"""The parent: binds the port, starts the engine process and the API process, and outlives both."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from jaxserve import logs
from jaxserve.config import ServerConfig
from jaxserve.engine.defaults import check_model
from jaxserve.lifeline import DRAIN_SIGNAL, NOT_FOR_CHILDREN

logger = logging.getLogger(__name__)

CRASH_GRACE_SECONDS = 3.0
"""After an engine's death, time for the API process to end its streams and to answer 503."""
INTERRUPT_DRAIN_SECONDS = 5.0
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
        listener = listen(config)
    except (OSError, RuntimeError, ValueError) as error:
        logger.error("%s", error)
        return 1
    with listener, _scratch() as scratch:
        children = _Children(config, directory, listener, scratch)
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
        raise ValueError(f"{directory} is not a model directory: it has no config.json (--model takes one, or demo)")
    return directory.resolve()


def listen(config: ServerConfig) -> socket.socket:
    """The socket that the configuration names, listening; ``OSError`` says in a line why it cannot be."""
    if config.uds is not None:
        return _listen_on_path(Path(config.uds))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # a name that does not resolve has a negative one
        reason = os.strerror(error.errno or 0) if known else error.strerror or str(error)
        raise OSError(f"cannot listen on {config.host}:{config.port}: {reason}") from None
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    logger.info("listening on %s://%s:%d; /health answers 503 until the model is ready", scheme, host, port)
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
        listener.listen(2048)
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
    """The engine process and the API process.

    Two pipes tell of death, whatever the cause: children read one that only this process can write to, and the API
    process reads one that only the engine can write to.
    """

    def __init__(self, config: ServerConfig, directory: Path, listener: socket.socket, scratch: Path) -> None:
        self._config = config
        parent_read, self._parent_write = os.pipe()
        engine_read, engine_write = os.pipe()
        address = f"ipc://{scratch}/engine"
        logging_options = {"log_level": config.log_level, "log_json": config.log_json}
        engine_task = {
            "config": config.engine,
            "directory": str(directory),
            "model_name": config.model_names[0],
            "address": address,
            "parent_fd": parent_read,
            **logging_options,
        }
        api_task = {
            "config": config,
            "listen_fd": listener.fileno(),
            "engine_address": address,
            "engine_fd": engine_read,
            "parent_fd": parent_read,
            "model_directory": str(directory),
        }
        self.engine = _spawn("jaxserve.engine.process", engine_task, (parent_read, engine_write))
        self.api = _spawn("jaxserve.server.process", api_task, (parent_read, engine_read, listener.fileno()))
        for fd in (parent_read, engine_read, engine_write):
            os.close(fd)

    def supervise(self, stop: _StopSignals) -> int:
        """Until a signal or a child's death; returns the exit code."""
        while True:
            if stop.count:
                return self._shut_down(stop)
            if (code := self.engine.poll()) is not None:
                return self._engine_died(code)
            if (code := self.api.poll()) is not None:
                if code != EXIT_STARTUP_FAILED:
                    logger.error("the API process %s", _death(code))
                return 1
            time.sleep(0.05)

    def _engine_died(self, code: int) -> int:
        if code != EXIT_STARTUP_FAILED:
            logger.error("the engine process %s; shutting down", _death(code))
            time.sleep(CRASH_GRACE_SECONDS)
        return 1

    def _shut_down(self, stop: _StopSignals) -> int:
        """Let running requests finish, then end both processes. A second signal cuts the wait short."""
        seconds = self._config.shutdown_timeout
        if stop.interrupted:
            seconds = min(seconds, INTERRUPT_DRAIN_SECONDS)
        logger.info("stopping; running requests have %.0f s to finish", seconds)
        self.api.send_signal(DRAIN_SIGNAL)
        _wait(self.api, seconds, stop)
        if self.api.poll() is None:
            self.api.send_signal(DRAIN_SIGNAL)  # the second time it ends its streams with an error
            _wait(self.api, 3.0, None)
        if (code := self.engine.poll()) is not None:
            logger.error("the engine process %s while the server was stopping", _death(code))
            return 1
        return 0

    def kill(self) -> None:
        """End what still runs; nothing is left behind."""
        os.close(self._parent_write)  # which tells them that there is no parent any more
        for child in (self.api, self.engine):
            _wait(child, 2.0, None)
            if child.poll() is None:
                child.kill()
                child.wait()


def _death(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _wait(child: subprocess.Popen[bytes], seconds: float, stop: _StopSignals | None) -> None:
    """Wait for a child to end, or for another signal."""
    seen = stop.count if stop else 0
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline and not (stop and stop.count > seen):
        time.sleep(0.02)


def _spawn(module: str, task: dict[str, object], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    # Blocked signals stay blocked over exec: they reach the parent alone, from the child's first instruction on; and
    # one that comes meanwhile waits for the parent, where an ignored one would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_CHILDREN)
    try:
        child = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=fds)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_CHILDREN)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(msgspec.json.encode(task))
    return child
