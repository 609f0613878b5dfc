"""A real server in front of a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.client import EngineClient
from jaxserve.engine.messages import ModelInfo
from jaxserve.server.app import create_app, with_middleware
from jaxserve.server.context import ServerContext
from jaxserve.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.fake_engine import FakeEngine, Script

MODEL = "tiny"
CONTEXT = 256


@dataclass
class Served:
    engine: FakeEngine
    tokenizer: Tokenizer
    client: EngineClient
    context: ServerContext
    url: str
    http: httpx.Client
    openai: openai.OpenAI

    def says(self, text: str, eos: bool = True) -> None:
        """From now on the engine answers with this text and then EOS, or else with the text again and again."""
        ids = encode_answer(self.tokenizer, text)
        if eos:
            self.says_tokens([*ids, self.eos_id])
        else:
            self.engine.script = lambda request: itertools.cycle(ids)

    def says_tokens(self, token_ids: list[int | Exception]) -> None:
        self.engine.script = lambda request: itertools.chain(token_ids, itertools.repeat(token_ids[-1]))

    @property
    def eos_id(self) -> int:
        return next(iter(self.engine.eos_ids))


def encode_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids whose bytes are exactly the text."""
    vocabulary = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    data, ids = text.encode(), []
    while data:
        size = next(size for size in range(len(data), 0, -1) if data[:size] in vocabulary)
        ids.append(vocabulary[data[:size]])
        data = data[size:]
    return ids


@contextmanager
def serve(
    tokenizer: Tokenizer,
    eos_id: int,
    *,
    defaults: dict[str, Any] | None = None,
    context: int = CONTEXT,
    **settings: Any,
) -> Iterator[Served]:
    """A server on a free port, until the end of the block."""
    info = ModelInfo(
        vocab_size=tokenizer.vocab_size,
        max_model_len=context,
        max_kv_tokens=4 * context,
        max_logprobs=20,
        hidden_size=4,
        version="0",
    )
    script: Script = lambda request: itertools.repeat(eos_id)  # noqa: E731
    config = ServerConfig(engine=EngineConfig(model="unused"), served_model_name=(MODEL,), **settings)
    with FakeEngine(script, info, [eos_id]) as engine:
        client = EngineClient(engine.address)
        app = create_app(config, client, tokenizer, defaults or {})
        with (
            running(with_middleware(app, config), root_path=config.root_path) as url,
            httpx.Client(base_url=url, timeout=20) as http,
            openai.OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
            ) as official,
        ):
            wait_until(lambda: http.get("/health").status_code == 200)
            yield Served(engine, tokenizer, client, app.state.context, url, http, official)


@contextmanager
def running(app: Any, **options: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, **options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"not so within {seconds:g} s")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("checkpoints")
    yield {name: make_checkpoint(name, root / name) for name in ("tiny-llama-2", "tiny-llama-3.1")}


@pytest.fixture(scope="session")
def llama_3(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(checkpoints["tiny-llama-3.1"])


@pytest.fixture(scope="session")
def llama_2(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(checkpoints["tiny-llama-2"])


@pytest.fixture(scope="session")
def _served_3(llama_3: Tokenizer) -> Iterator[Served]:
    with serve(llama_3, llama_3.encode("<|eot_id|>", False)[0], max_body_bytes=1_000_000) as served:
        yield served


@pytest.fixture(scope="session")
def _served_2(llama_2: Tokenizer) -> Iterator[Served]:
    with serve(llama_2, llama_2.encode("</s>", False)[0]) as served:
        yield served


@pytest.fixture
def served(_served_3: Served) -> Served:
    """Byte-level tokenizer, Llama 3 template."""
    _served_3.engine.received.clear()
    _served_3.engine.step = 0.0
    _served_3.engine.logprob = lambda request: -0.5
    return _served_3


@pytest.fixture
def served_2(_served_2: Served) -> Served:
    """SentencePiece tokenizer, a template that wants alternating roles."""
    _served_2.engine.received.clear()
    return _served_2
