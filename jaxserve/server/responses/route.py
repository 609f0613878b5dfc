"""The route of ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from jaxserve.request import RequestError
from jaxserve.server import validate
from jaxserve.server.context import context_of
from jaxserve.server.openai import (
    after_thoughts,
    begin,
    check_structured,
    make_replies,
    off_loop,
    read_body,
    respond,
    serving,
)
from jaxserve.server.responses.conversion import chat_request, renamed
from jaxserve.server.responses.dialect import ResponsesDialect
from jaxserve.server.responses.schemas import ResponsesRequest
from jaxserve.server.tools import tool_use


@post("/v1/responses", status_code=200, guards=[serving])
async def responses(request: Request[Any, Any, Any]) -> Response[Any]:
    context = context_of(request)
    body = await read_body(request, ResponsesRequest, context)
    try:
        top, most = body.top_logprobs, context.client.info.max_logprobs
        if top is not None and not 0 <= top <= most:  # also where they are not included
            raise RequestError(f"top_logprobs must be between 0 and {most}, got {top}.", param="top_logprobs")
        chat = chat_request(body)
        tools = tool_use(chat, context.config)
        if chat.logprobs and (tools.make_parser or context.reasoning):
            raise RequestError(
                "log-probabilities cannot be told apart with tools or a reasoning parser.", param="include"
            )
        sampling = validate.chat_sampling(chat, context.config, context.defaults, tools.structured)
        prompt = await off_loop(request, lambda: validate.chat_prompt(chat, context.tokenizer, tools.tools))
        sampling = after_thoughts(context, sampling, prompt)
        await check_structured(context, sampling)
        shown = {*tools.special_tokens, *context.reasoning_tags}
        generation = begin(context, "resp", chat, [prompt], sampling, chat=True, shown=shown)
    except RequestError as error:
        raise renamed(error) from None
    dialect = ResponsesDialect(generation, body, make_replies(context, chat, tools, prompt))
    return await respond(request, context, chat, dialect)
