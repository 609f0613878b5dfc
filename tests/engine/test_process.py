"""The engine process's loop between its clients and a real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from jaxserve.engine.client import EngineClient
from jaxserve.engine.core import ClientOutput, EngineCore
from jaxserve.engine.llm import LLM
from jaxserve.engine.messages import Add
from jaxserve.engine.process import EXIT_CRASHED, EngineServer, make_socket, run
from jaxserve.request import EngineRequest, SamplingParams
from tests.conftest import ONE_CHUNK


class Stop(Exception):
    """Ends the loop, which has no end of its own."""


@pytest.fixture
def core(llm: Callable[..., LLM]) -> EngineCore:
    return llm("tiny-llama-bias", **ONE_CHUNK).engine


@asynccontextmanager
async def clients(core: EngineCore, directory: Path, number: int) -> AsyncIterator[list[EngineClient]]:
    """Ready clients of a loop that runs in a thread."""
    stop = threading.Event()
    has_work = core.has_work

    def has_work_or_stop() -> bool:
        if stop.is_set():
            raise Stop
        return has_work()

    with pytest.MonkeyPatch.context() as patch, zmq.Context() as context:
        patch.setattr(core, "has_work", has_work_or_stop)
        address = f"ipc://{directory}/engine"
        with make_socket(context, address) as socket:
            loop = asyncio.create_task(asyncio.to_thread(EngineServer(core, socket).run))
            made = [EngineClient(address) for _ in range(number)]
            try:
                for client in made:
                    await client.start()
                    await asyncio.wait_for(client.ready, 10)
                yield made
            finally:
                for client in made:
                    await client.close()
                stop.set()
                with pytest.raises(Stop):
                    await loop


def request(max_tokens: int, prompt: int, request_id: str = "the same") -> EngineRequest:
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[prompt],
        sampling=sampling,
        max_tokens=max_tokens,
        seed=0,
        group=request_id.rsplit("-", 2)[0],
    )


async def tokens(client: EngineClient, wanted: EngineRequest) -> list[int]:
    outputs = [output async for batch in client.generate([wanted]) for output in batch]
    assert outputs[-1].finish_reason == "length", outputs[-1].error
    return [token for output in outputs for token in output.token_ids]


async def until_idle(core: EngineCore) -> None:
    async with asyncio.timeout(10):
        while len(core.scheduler):
            await asyncio.sleep(0.01)
    core.check_integrity()


def test_a_crash_says_what_the_last_steps_did(
    core: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core.add_request(request(3, 5, "computed before the crash"))
    while core.has_work():
        core.step()

    def fail() -> list[ClientOutput]:
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(core, "has_work", lambda: True)
    monkeypatch.setattr(core, "step", fail)
    with zmq.Context() as context, make_socket(context, f"ipc://{tmp_path}/engine") as socket:
        assert run(core, socket) == EXIT_CRASHED
    [record] = caplog.records
    assert "computed before the crash" in record.message and "free_blocks" in record.message
    assert "the card fell off the bus" in caplog.text


async def test_two_clients_may_use_the_same_id(core: EngineCore, tmp_path: Path) -> None:
    async with clients(core, tmp_path, 2) as (one, other):
        alone = [await tokens(one, request(20, prompt)) for prompt in (5, 6)]
        assert alone[0] != alone[1]
        together = await asyncio.gather(tokens(one, request(20, 5)), tokens(other, request(20, 6)))
        assert together == alone
        leaving = asyncio.create_task(tokens(one, request(100, 5)))
        staying = asyncio.create_task(tokens(other, request(100, 6)))
        while len(core.scheduler) < 2:
            await asyncio.sleep(0)
        leaving.cancel()
        assert len(await staying) == 100
        await until_idle(core)


async def test_a_client_cancels_anothers_response(core: EngineCore, tmp_path: Path) -> None:
    async with clients(core, tmp_path, 2) as (one, other):
        wanted = [request(200, 5, f"cmpl-1-0-{index}") for index in range(2)] + [request(100, 5, "cmpl-12-0-0")]
        batches = one.generate(wanted)
        await anext(batches)
        assert await other.cancel("cmpl-1") == 2
        assert await other.cancel("cmpl-1") == await other.cancel("cmpl") == 0
        ends = {o.request_id: o.finish_reason async for outputs in batches for o in outputs if o.finish_reason}
        assert ends == {"cmpl-1-0-0": "abort", "cmpl-1-0-1": "abort", "cmpl-12-0-0": "length"}
        await until_idle(core)


async def test_the_requests_of_a_client_that_is_gone_end(
    core: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = core.step

    def slow_step() -> list[ClientOutput]:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(core, "step", slow_step)
    async with clients(core, tmp_path, 1) as [other]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as lost:
            lost.linger = 0
            lost.connect(f"ipc://{tmp_path}/engine")
            lost.send(msgspec.msgpack.encode(Add([request(200, 5)])))
            while not len(core.scheduler):
                await asyncio.sleep(0.001)
        assert len(await tokens(other, request(100, 6))) == 100
        assert len(core.scheduler) == 0, "it ended long before its 200 tokens"
        core.check_integrity()
