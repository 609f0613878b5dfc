"""The engine client: streams, aborts, silence and death."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from jaxserve.engine import client as client_module
from jaxserve.engine.client import EngineClient, EngineDeadError, EngineUnavailableError
from jaxserve.engine.messages import Abort, Finish, ModelInfo
from jaxserve.request import EngineRequest, SamplingParams
from tests.fake_engine import FakeEngine

INFO = ModelInfo(vocab_size=100, max_model_len=100, max_kv_tokens=100, max_logprobs=20, hidden_size=4, version="0")


def request(name: str, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=max_tokens, seed=0
    )


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeEngine, EngineClient]]:
    with FakeEngine(lambda _: itertools.count(7), INFO) as engine:
        client = EngineClient(engine.address)
        await client.start()
        async with asyncio.timeout(20):
            assert await client.ready == INFO
            yield engine, client
        await client.close()


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_choices_are_merged(pair: tuple[FakeEngine, EngineClient]) -> None:
    _, client = pair
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    async for outputs in client.generate([request("a", 3), request("b", 5)]):
        for output in outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens == {"a": [7, 8, 9], "b": [7, 8, 9, 10, 11]}
    assert client.num_open == 0


async def test_leaving_early_aborts_what_is_open(pair: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = pair
    async with aclosing(client.generate([request("a", 1), request("b", 10**6)])) as batches:
        async for outputs in batches:
            if outputs[0].request_id == "a":
                break
    await eventually(lambda: bool(engine.of_kind(Abort)))
    assert engine.of_kind(Abort) == [Abort(["b"])]
    await eventually(lambda: engine.num_running == 0)


async def test_cancelling_aborts(pair: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = pair
    engine.hold.set()

    async def consume() -> None:
        async for _ in client.generate([request("a")]):
            pass

    task = asyncio.create_task(consume())
    await eventually(lambda: engine.num_running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: engine.of_kind(Abort) == [Abort(["a"])])


async def test_finishing_ends_the_stream(pair: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = pair
    count = 0
    async for outputs in client.generate([request("a", 10**6)]):
        count += sum(len(output.token_ids) for output in outputs)
        if count >= 4:
            client.finish("a", count)
            client.finish("a", count)  # once is enough
    await eventually(lambda: engine.num_running == 0)
    assert engine.of_kind(Finish) == [Finish("a", count)]
    assert not engine.of_kind(Abort)


async def test_what_has_come_meanwhile_comes_together(pair: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = pair
    async with aclosing(client.generate([request("a", 5)])) as batches:
        first = await anext(batches)
        await eventually(lambda: engine.num_running == 0)
        await asyncio.sleep(0.2)
        rest = [batch async for batch in batches]
    assert len(rest) <= 1, "none, where the first was read so late that all had come"
    assert [output.token_ids for output in sum(rest, first)] == [[7], [8], [9], [10], [11]]


async def test_calls(pair: tuple[FakeEngine, EngineClient]) -> None:
    _, client = pair
    assert await client.call("metrics") == b"# metrics\n"


async def test_death_reaches_everyone(pair: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = pair
    engine.hold.set()
    read_end, write_end = os.pipe()
    client.watch_engine(read_end)

    async def consume() -> None:
        async for _ in client.generate([request("a"), request("b")]):
            pass

    task = asyncio.create_task(consume())
    await eventually(lambda: engine.num_running == 2)
    os.close(write_end)
    with pytest.raises(EngineDeadError):
        await task
    assert client.state == "dead" and not client.healthy()
    later: list[Awaitable[object]] = [anext(client.generate([request("c")])), client.call("metrics")]
    for call in later:
        with pytest.raises(EngineDeadError):
            await call
    os.close(read_end)


async def test_silence_with_work_is_not_healthy(
    pair: tuple[FakeEngine, EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = pair
    monkeypatch.setattr(client_module, "SILENCE_LIMIT", 0.9)
    engine.hold.set()
    async with aclosing(client.generate([request("a")])) as batches:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(1.5)
        assert client.healthy()  # no tokens, but signs of life
        client._tasks[1].cancel()  # from now on it hears nothing
        await asyncio.sleep(1.2)
        assert not client.healthy()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_nothing_is_served_while_loading() -> None:
    with FakeEngine(lambda _: itertools.count(7), INFO) as engine:
        engine.loaded.clear()
        client = EngineClient(engine.address)
        await client.start()
        assert client.state == "loading" and not client.healthy()
        with pytest.raises(EngineUnavailableError):
            await client.call("metrics")
        client.mark_dead("it failed to load")
        with pytest.raises(EngineDeadError):
            await client.ready
        await client.close()
