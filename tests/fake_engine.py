"""An engine without a model, for tests of everything in front of it: it answers what a script tells it."""

from __future__ import annotations

import math
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

import msgspec
import zmq

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
    PromptLogprobs,
    Ready,
    Reply,
    Timings,
    TokenLogprobs,
    TokenOutput,
)
from jaxserve.request import EngineRequest

Script = Callable[[EngineRequest], Iterable[int | Exception]]
"""The tokens that follow a prompt; an exception among them is a fault of the engine's."""


class FakeEngine:
    """Binds a ROUTER as the engine process does, and serves it from a thread until closed.

    It ends answers at EOS, stop ids and max_tokens. ``received`` holds all messages, Hello apart. Clear
    ``loaded`` to have it load for ever; ``hold`` stops all progress, but not the signs of life.
    """

    def __init__(self, script: Script, info: ModelInfo, eos_ids: Iterable[int] = (), step: float = 0.0) -> None:
        self.script = script
        self.info = info
        self.eos_ids = frozenset(eos_ids)
        self.step = step
        self.logprob: Callable[[EngineRequest], float] = lambda request: -0.5
        """What every token of an answer has."""
        self.received: list[ClientMessage] = []
        self.loaded = threading.Event()
        self.loaded.set()
        self.hold = threading.Event()
        self.queue: tuple[int, int, float] | None = None
        """Requests and tokens that wait, and for how many seconds, as it tells; None: it says nothing of it."""
        self._num_received = 0
        self._directory = tempfile.TemporaryDirectory()
        self.address = f"ipc://{self._directory.name}/engine"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._running: dict[str, _Answer] = {}

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._directory.cleanup()

    def of_kind[T](self, kind: type[T]) -> list[T]:
        return [message for message in self.received if isinstance(message, kind)]

    def wait_for[T](self, kind: type[T], seconds: float = 5.0) -> T:
        """The first message of this kind; fails when none comes."""
        for _ in range(int(seconds / 0.01)):
            if found := self.of_kind(kind):
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__} within {seconds:g} s")

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ClientMessage)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self.address)
            beat = time.monotonic()
            clients: set[bytes] = set()
            while not self._closing.is_set():
                while socket.poll(0 if self._running else 2):
                    client, frame = socket.recv_multipart()
                    clients.add(client)
                    if reply := self._handle(client, decoder.decode(frame)):
                        socket.send_multipart([client, msgspec.msgpack.encode(reply)])
                batches = {} if self.hold.is_set() else self._advance()
                if time.monotonic() - beat > 0.5:
                    beat = time.monotonic()
                    batches = {client: batches.get(client, []) for client in clients}
                for client, outputs in batches.items():
                    socket.send_multipart([client, msgspec.msgpack.encode(Outputs(outputs, self._load()))])
                time.sleep(self.step)

    def _load(self) -> Load | None:
        return None if self.queue is None else Load(*self.queue, free_slots=0, received=self._num_received)

    def _handle(self, client: bytes, message: ClientMessage) -> EngineMessage | None:
        if isinstance(message, Hello):
            return Ready(self.info) if self.loaded.is_set() else None
        self.received.append(message)
        match message:
            case Add(requests=requests):
                self._num_received += len(requests)
                for request in requests:
                    tokens = iter(self.script(request))
                    self._running[request.request_id] = _Answer(
                        client, request, tokens, self.eos_ids, self.logprob(request)
                    )
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._running.pop(request_id, None)
            case Finish(request_id=request_id):
                self._running.pop(request_id, None)
            case Call(call_id=call_id, method="load"):
                return Reply(call_id, msgspec.msgpack.encode({"running": len(self._running), "waiting": 0}))
            case Call(call_id=call_id, method="cancel", argument=group):
                ended = [a for a in self._running.values() if a.group == group and not a.cancelled]
                for answer in ended:
                    answer.cancelled = True
                return Reply(call_id, msgspec.msgpack.encode(len(ended)))
            case Call(call_id=call_id, method=method):
                return Reply(call_id, f"# {method}\n".encode())
        return None

    def _advance(self) -> dict[bytes, list[TokenOutput]]:
        """One token for every running request, by client."""
        batches: dict[bytes, list[TokenOutput]] = {}
        for request_id, answer in list(self._running.items()):
            output = answer.next_output()
            batches.setdefault(answer.client, []).append(output)
            if output.finish_reason:
                self._running.pop(request_id, None)
        return batches


class _Answer:
    def __init__(
        self,
        client: bytes,
        request: EngineRequest,
        tokens: Iterator[int | Exception],
        eos: frozenset[int],
        logprob: float,
    ) -> None:
        self.client = client
        self.group = request.group
        self.cancelled = False
        self._request = request
        self._tokens = tokens
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._eos_ids = frozenset() if request.sampling.ignore_eos else eos
        self._count = 0
        self._logprob = logprob
        self._begin = time.monotonic()

    def next_output(self) -> TokenOutput:
        request_id = self._request.request_id
        if self.cancelled:
            return TokenOutput(request_id, [], finish_reason="abort", timings=self._timings())
        if self._request.max_tokens == 0:
            prompt = {"prompt_logprobs": self._prompt_logprobs(), "embedding": self._embedding()}
            return TokenOutput(request_id, [], finish_reason="length", timings=self._timings(), **prompt)
        token = next(self._tokens)
        if isinstance(token, Exception):
            return TokenOutput(request_id, [], finish_reason="error", error=str(token))
        self._count += 1
        reason = None
        if token in self._stop_ids | self._eos_ids:
            reason = "stop"
        elif self._count == self._request.max_tokens:
            reason = "length"
        return TokenOutput(
            request_id,
            [token],
            logprobs=self._logprobs(token),
            finish_reason=reason,
            stop_reason=token if token in self._stop_ids else None,
            timings=self._timings() if reason or self._count == 1 else None,
            prompt_logprobs=self._prompt_logprobs() if self._count == 1 else None,
        )

    def _timings(self) -> Timings:
        now = time.monotonic()
        if self._count <= 1:
            self._first_token = now
        return Timings(self._request.arrival_time, self._begin, self._first_token, now)

    def _prompt_logprobs(self) -> list[PromptLogprobs] | None:
        """The token of id i has -i / 1000, and rank 3."""
        wanted = self._request.sampling.prompt_logprobs
        if wanted is None:
            return None
        tops = [-0.25 - number for number in range(wanted)]
        return [
            PromptLogprobs(-token / 1000, 3, list(range(wanted)), tops) for token in self._request.prompt_token_ids[1:]
        ]

    def _embedding(self) -> bytes | None:
        """Of length 1, with the prompt's length in it."""
        if self._request.pooling is None:
            return None
        angle = len(self._request.prompt_token_ids) / 10
        return struct.pack("<4f", math.cos(angle), math.sin(angle), 0, 0)

    def _logprobs(self, token: int) -> list[TokenLogprobs] | None:
        wanted = self._request.sampling.logprobs
        if wanted is None:
            return None
        ids = [token, *(other for other in range(wanted) if other != token)][:wanted]
        return [TokenLogprobs(self._logprob, ids, [self._logprob - rank for rank in range(len(ids))])]
