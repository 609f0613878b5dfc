"""The Litestar application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar
from litestar.datastructures import State
from litestar.types import ASGIApp

from jaxserve.config import ServerConfig
from jaxserve.engine.client import EngineClient
from jaxserve.server import openai, operations
from jaxserve.server.access import AccessLog
from jaxserve.server.auth import ApiKeys
from jaxserve.server.context import ServerContext
from jaxserve.server.cors import Cors
from jaxserve.server.door import Door
from jaxserve.server.embeddings import embeddings, score
from jaxserve.server.errors import answer_error
from jaxserve.server.request_ids import RequestIds
from jaxserve.server.responses.route import responses
from jaxserve.tokenizer import Tokenizer

GREETING_SECONDS = 0.5
"""For an engine that is ready to say so; one that loads does not answer."""


def create_app(config: ServerConfig, client: EngineClient, tokenizer: Tokenizer, defaults: dict[str, Any]) -> Litestar:
    """The HTTP side of a server. The client is started and closed with the application."""
    context = ServerContext(config=config, client=client, tokenizer=tokenizer, defaults=defaults)

    @asynccontextmanager
    async def engine_line(_: Litestar) -> AsyncIterator[None]:
        await client.start()
        # Where the engine serves already, for this process's siblings or its predecessor, so does this one from the
        # first request on.
        await client.wait_ready(GREETING_SECONDS)
        try:
            yield
        finally:
            await client.close()
            context.grammar_check.close()

    return Litestar(
        route_handlers=[
            openai.completions,
            openai.chat_completions,
            responses,
            embeddings,
            score,
            openai.list_models,
            openai.get_model,
            openai.tokenize,
            openai.detokenize,
            operations.health,
            operations.version,
            operations.metrics,
            operations.load,
            operations.reset_prefix_cache,
            operations.debug_steps,
            operations.server_info,
            operations.abort,
            operations.openapi_document,
            operations.docs,
        ],
        exception_handlers={Exception: answer_error},
        lifespan=[engine_line],
        state=State({"context": context}),
        request_max_body_size=config.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


def with_middleware(app: Litestar, config: ServerConfig) -> ASGIApp:
    """The application with all that stands in front of its routing."""
    door = Door(app, app.state.context)
    guarded: ASGIApp = ApiKeys(door, config.api_key) if config.api_key else door
    shared = Cors(guarded, config) if config.allowed_origins else guarded
    return AccessLog(RequestIds(shared, always=config.enable_request_id_headers))
